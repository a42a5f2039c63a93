"""Name servers and brokers on hosts, by the classes of `rocket_sink.cluster`."""

import os

from rocket_sink.cluster import DEFAULT_VERSION, Broker, NameServer, resolve_jars
from rocket_sink.cluster import conf as settings_of
from rocket_sink.cluster.node import NodeSpec
from rocket_sink.cluster.probe import Probe
from rocket_sink.java import find_java
from tests.jvms import BROKER, calm, java_options

NAME_SERVER_PORT = 9876
BROKER_PORT = 10911
_READY_S = 240

_SMALL = {
    "mappedFileSizeCommitLog": str(16 << 20),
    "timerWheelEnable": "false",
    "maxIndexNum": "200000",
    # The witness reads thousands of messages.
    "maxTransferCountOnMessageInMemory": "1024",
    "maxTransferBytesOnMessageInMemory": str(1 << 20),
}


def name_server(host, *, port=NAME_SERVER_PORT, version=DEFAULT_VERSION, **settings):
    """Start a name server on this host. `settings` are further lines of its configuration."""
    lines = {"listenPort": str(port), "bindAddress": "0.0.0.0", **settings}
    spec = _spec("name-server", "name-server", host, host.address, port, version, lines, 128)
    server = NameServer(spec, dict)
    server.spawn()
    return server


def broker(
    host, name, name_servers, *, port=BROKER_PORT, known_as="", folder="", version=DEFAULT_VERSION,
    heap_mb=256, start=True, secrets=None, **settings,
):  # fmt: skip
    """Return a broker of this host, started if `start` is true, without waiting for it.

    Args:
        name_servers: as "host:port"; `wait_ready` asks the first one.
        known_as: name under which clients reach the broker; its address by default.
        folder: folder of the broker's files on the host's disk; its name by default.
        secrets: credentials that the broker asks of clients; none by default.
        settings: further lines of the broker's configuration.
    """
    address = known_as or host.address
    folder = folder or name
    lines = {
        **settings_of.broker_conf(name, port, ";".join(name_servers), host.disk / folder, _SMALL),
        "bindAddress": "0.0.0.0", "brokerIP1": address, "brokerIP2": host.address,
        **({} if secrets is None else settings_of.acl_conf(version, secrets)), **settings,
    }  # fmt: skip
    spec = _spec("broker", folder, host, address, port, version, lines, heap_mb, name)
    new_broker = Broker(spec, dict, name_servers[0], Probe(secrets))
    if start:
        new_broker.spawn()
    return new_broker


class TwoBrokers:
    """A running name server and two brokers, on hosts of their own.

    Attributes:
        hosts: those of the brokers.
        addresses: of the brokers, by name.
    """

    def __init__(self, bed, secrets=None):
        server = name_server(bed.host("names"))
        server.wait_ready(_READY_S)
        self.name_server = server.address
        self.hosts = [bed.host(name) for name in ("broker-a", "broker-b")]
        self.brokers = [
            broker(host, host.name, [server.address], secrets=secrets) for host in self.hosts
        ]
        for started in self.brokers:
            started.wait_ready(_READY_S)
        self.addresses = {started.name: started.address for started in self.brokers}
        self._servers = (server, *self.brokers)

    def close(self):
        """Kill the servers, which would outlive their hosts."""
        for server in self._servers:
            server.kill()


def _spec(role, folder_name, host, address, port, version, lines, heap_mb, name=""):
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
        # The process is the world's own child, so that tests can kill and freeze it by its pid.
        (*host.prefix(own_pids=False), *calm(command)),
        jars, lines, address,
    )  # fmt: skip
