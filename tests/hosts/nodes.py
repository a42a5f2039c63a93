"""Name servers and brokers on hosts, by the classes of `rocket_sink.cluster`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rocket_sink.cluster import DEFAULT_VERSION, Broker, NameServer, resolve_jars
from rocket_sink.cluster import conf as settings_of
from rocket_sink.cluster.node import NodeSpec
from rocket_sink.cluster.probe import Probe
from rocket_sink.java import find_java
from tests.hosts.bed import Host
from tests.jvms import BROKER, calm, java_options

NAME_SERVER_PORT = 9876
BROKER_PORT = 10911

_SMALL = {
    "mappedFileSizeCommitLog": str(16 << 20),
    "timerWheelEnable": "false",
    "maxIndexNum": "200000",
    # A witness reads thousands of messages.
    "maxTransferCountOnMessageInMemory": "1024",
    "maxTransferBytesOnMessageInMemory": str(1 << 20),
}


def name_server(
    host: Host, *, port: int = NAME_SERVER_PORT, version: str = DEFAULT_VERSION, **settings: str
) -> NameServer:
    """A name server of this host, started; `settings` are further lines of its configuration."""
    lines = {"listenPort": str(port), "bindAddress": "0.0.0.0", **settings}
    spec = _spec("name-server", "name-server", host, host.address, port, version, lines, 128)
    made = NameServer(spec, dict)
    made.spawn()
    return made


def broker(
    host: Host,
    name: str,
    name_servers: Sequence[str],
    *,
    port: int = BROKER_PORT,
    known_as: str = "",
    folder: str = "",
    version: str = DEFAULT_VERSION,
    heap_mb: int = 256,
    start: bool = True,
    secrets: settings_of.Secrets | None = None,
    **settings: str,
) -> Broker:
    """A broker of this host, started unless told otherwise; not awaited.

    Args:
        name_servers: "host:port"; the first one is the one that `wait_ready` asks.
        known_as: name by which clients are told to reach it; its address by default.
        folder: of its files on the host's disk; by default its name.
        secrets: what it asks of clients; by default nothing.
        settings: further lines of its configuration.
    """
    address = known_as or host.address
    folder = folder or name
    lines = {
        **settings_of.broker_conf(name, port, ";".join(name_servers), host.disk / folder, _SMALL),
        "bindAddress": "0.0.0.0",
        "brokerIP1": address,
        "brokerIP2": host.address,
        **({} if secrets is None else settings_of.acl_conf(version, secrets)),
        **settings,
    }
    spec = _spec("broker", folder, host, address, port, version, lines, heap_mb, name)
    made = Broker(spec, dict, name_servers[0], Probe.of(secrets, None))
    if start:
        made.spawn()
    return made


def _spec(
    role: str, folder_name: str, host: Host, address: str, port: int, version: str,
    lines: dict[str, str], heap_mb: int, name: str = "",
) -> NodeSpec:  # fmt: skip
    java, folder = find_java(), host.disk / folder_name
    settings_of.write_rocketmq_home(folder, version, None)
    memory = (f"-Xms{heap_mb // 4}m", f"-Xmx{heap_mb}m", f"-XX:MaxDirectMemorySize={heap_mb}m")
    command = settings_of.jvm_command(
        role, java=java.executable, folder=folder, version=version,
        memory=(*memory, *java_options(BROKER)), extra=["-Dtls.server.mode=disabled"],
    )  # fmt: skip
    jars = os.pathsep.join(map(str, resolve_jars(version, java=java)))
    return NodeSpec(
        name or folder_name, port, folder,
        # The world's own child: it is killed and frozen by its pid.
        (*host.prefix(own_pids=False), *calm(command)),
        jars, lines, address,
    )  # fmt: skip
