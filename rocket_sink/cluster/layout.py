"""The start of a cluster: settings, files, command lines, processes. The home folder has one folder
per process (configuration, store, logs), `tls/` and `ports.json`."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rocket_sink.cluster import conf
from rocket_sink.cluster.conf import LOOPBACK, Ports, choose_ports, load_ports
from rocket_sink.cluster.jars import DEFAULT_VERSION, Progress, resolve_jars
from rocket_sink.cluster.loopback import write_loopback_jar
from rocket_sink.cluster.node import Broker, NameServer, Node, NodeSpec, PortTakenError
from rocket_sink.cluster.probe import Probe
from rocket_sink.cluster.tls import TestCertificates, make_certificates
from rocket_sink.errors import ClusterError
from rocket_sink.java import Java, find_java
from rocket_sink.text import counted

NAME_SERVER = "name-server"
MARK_PROPERTY = "rocket.sink.cluster"
"""A JVM property with a random value; a later process with the same pid does not have it."""

START_S = 240.0
"""Longest wait for a start, without the time to fetch RocketMQ."""
_PORT_TRIES = 3
_MOST_BROKERS = 64


@dataclass(frozen=True)
class Wanted:
    """The settings of a cluster; see LocalCluster."""

    brokers: int = 2
    version: str = DEFAULT_VERSION
    acl: conf.Secrets | None = field(default=None, repr=False)
    tls: str | None = None
    queues: int = 4
    broker_config: Mapping[str, str] = field(default_factory=dict)
    heap_mb: int = 512
    tls_client_auth: str = "none"

    def __post_init__(self) -> None:
        if not 1 <= self.brokers <= _MOST_BROKERS:
            raise ClusterError(f"brokers={self.brokers}: must be 1 to {_MOST_BROKERS}.")
        if self.tls not in (None, "permissive", "enforcing"):
            raise ClusterError(f"tls={self.tls!r}: must be None, 'permissive' or 'enforcing'.")
        if self.tls_client_auth not in ("none", "optional", "require"):
            raise ClusterError(
                f"tls_client_auth={self.tls_client_auth!r}: must be none, optional or require."
            )
        if self.queues < 1:
            raise ClusterError(f"queues={self.queues}: a topic needs at least one queue.")


@dataclass(frozen=True)
class Runtime:
    """Values shared by the processes of one start. `tell` gets lines of text."""

    wanted: Wanted
    home: Path
    java: Java
    class_path: str
    mark: str
    tell: Progress
    certificates: TestCertificates | None = None
    tls_flags: Sequence[str] = ("-Dtls.server.mode=disabled",)
    """A cluster without TLS disables it: each server would make a certificate (a second of CPU)."""

    @classmethod
    def make(cls, wanted: Wanted, home: Path, progress: Progress | None) -> Runtime:
        """Find Java and the jars, and make certificates; raise ClusterError if one fails."""
        if "," in str(home):
            # Brokers take a comma (MixAll.MULTI_PATH_SPLITTER) for the end of the store's path.
            raise ClusterError(
                f"The folder {home} has a comma in its name, which brokers take for the end of a "
                "path: choose another home (or TMPDIR)."
            )
        java = find_java()
        jars = resolve_jars(wanted.version, java=java, progress=progress)
        loopback = write_loopback_jar(jars, home)
        class_path = os.pathsep.join(map(str, (loopback, *jars)))
        tell = progress or (lambda text: None)
        runtime = cls(wanted, home, java, class_path, uuid.uuid4().hex, tell)
        if not wanted.tls:
            return runtime
        certificates = make_certificates(home / "tls")
        settings = home / "tls" / "tls.properties"
        flags = certificates.jvm_flags(wanted.tls, settings, wanted.tls_client_auth)
        return replace(runtime, certificates=certificates, tls_flags=flags)

    def spec(
        self, role: str, name: str, port: int, memory: Sequence[str], settings: Mapping[str, str]
    ) -> NodeSpec:
        """Write the files that process `name` needs; return its command line and settings."""
        folder, wanted = self.home / name, self.wanted
        conf.write_rocketmq_home(folder, wanted.version, wanted.acl)
        command = conf.jvm_command(
            role,
            java=self.java.executable,
            folder=folder,
            version=wanted.version,
            memory=memory,
            extra=[f"-D{MARK_PROPERTY}={self.mark}", *self.tls_flags],
        )
        return NodeSpec(name, port, folder, tuple(command), self.class_path, settings)


@dataclass(frozen=True)
class Nodes:
    """The processes of a cluster."""

    name_server: NameServer
    brokers: list[Broker]

    def __iter__(self) -> Iterator[Node]:
        return iter((self.name_server, *self.brokers))

    def stop(self) -> None:
        """Stop all processes in parallel (SIGTERM). Brokers take some 15 s. Idempotent."""
        with ThreadPoolExecutor(1 + len(self.brokers)) as pool:
            list(pool.map(lambda node: node.stop(), self))

    def kill(self) -> None:
        for node in self:
            node.kill()


def launch(
    runtime: Runtime,
    popen_options: Callable[[], dict[str, Any]],
    *,
    timeout_s: float,
    spawned: Callable[[Nodes], object] = lambda nodes: None,
    ports: Ports | None = None,
    alive: Collection[str] = (),
) -> Nodes:
    """Start a cluster in `runtime.home` and return when every broker has stored a message.
    `spawned` is called after each process start. The processes named in `alive` run already, on
    `ports`; their nodes in the result are not started. If a port was taken meanwhile, try other
    ports. On any other error, kill the started processes and raise the error."""
    wanted_ports = load_ports(runtime.home / "ports.json")
    failures = 0
    while True:
        chosen = ports or choose_ports(runtime.wanted.brokers, wanted=wanted_ports)
        nodes = build(runtime, chosen, popen_options)
        try:
            _start(nodes, alive, timeout_s, runtime.tell, spawned)
        except BaseException as error:
            nodes.kill()
            failures += 1
            if failures == _PORT_TRIES or not isinstance(error, PortTakenError):
                raise
            wanted_ports = None
        else:
            chosen.save(runtime.home / "ports.json")
            return nodes


def build(runtime: Runtime, ports: Ports, popen_options: Callable[[], dict[str, Any]]) -> Nodes:
    """Write all configuration files; return the processes. The caller has to start them."""
    free_mb = shutil.disk_usage(runtime.home).free >> 20
    if free_mb < conf.LEAST_FREE_MB:
        raise ClusterError(
            f"The disk of {runtime.home} has {free_mb} MiB left and a cluster needs "
            f"{conf.LEAST_FREE_MB}: free some, or choose a home (or TMPDIR) on another disk."
        )
    acl, tls = runtime.wanted.acl, runtime.certificates
    probe = Probe(acl, tls.ca, tls.client) if tls else Probe(acl)
    # A name server does little work: optimising its code costs more CPU than it saves.
    memory = ("-Xms32m", "-Xmx128m", "-XX:TieredStopAtLevel=1")
    settings = {"listenPort": str(ports.name_server), "bindAddress": LOOPBACK}
    spec = runtime.spec(NAME_SERVER, NAME_SERVER, ports.name_server, memory, settings)
    server = NameServer(spec, popen_options)
    specs = [
        _broker_spec(runtime, conf.broker_name(index), listen, server.address)
        for index, listen in enumerate(ports.brokers)
    ]
    return Nodes(server, [Broker(spec, popen_options, server.address, probe) for spec in specs])


def _start(
    nodes: Nodes, alive: Collection[str], timeout_s: float, tell: Progress,
    spawned: Callable[[Nodes], object],
) -> None:  # fmt: skip
    began = time.monotonic()
    if nodes.name_server.name not in alive:
        tell("starting the name server")
        nodes.name_server.spawn()
        spawned(nodes)
        nodes.name_server.wait_ready(timeout_s)
    # Start brokers after the name server: a broker that does not find it waits ten seconds.
    dead = [broker for broker in nodes.brokers if broker.name not in alive]
    tell(f"starting {counted(len(dead), 'broker')}")
    for broker in dead:
        broker.spawn()
        spawned(nodes)
    for broker in dead:
        broker.wait_ready(max(1.0, timeout_s - (time.monotonic() - began)))
        tell(f"{broker.name} is ready at {broker.address}")


def _broker_spec(runtime: Runtime, name: str, listen: int, name_server: str) -> NodeSpec:
    wanted, home = runtime.wanted, runtime.home
    memory = (
        f"-Xms{min(256, wanted.heap_mb)}m",
        f"-Xmx{wanted.heap_mb}m",
        f"-XX:MaxDirectMemorySize={wanted.heap_mb}m",
    )
    extra = {"defaultTopicQueueNums": str(wanted.queues)}
    usage = shutil.disk_usage(home)
    # Brokers use the same formula (UtilAll.getDiskPartitionSpaceUsedPercent).
    if usage.used / (usage.used + usage.free) > conf.DISK_NEARLY_FULL_RATIO:
        extra.update(conf.NEARLY_FULL_DISK)
    if wanted.acl is not None:
        extra.update(conf.acl_conf(wanted.version, wanted.acl))
    extra.update(wanted.broker_config)
    settings = conf.broker_conf(name, listen, name_server, home / name / "store", extra)
    return runtime.spec("broker", name, listen, memory, settings)
