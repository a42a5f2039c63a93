"""A cluster that ends with its object or this process; RocketMQ's admin tool (mqadmin)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rocket_sink.cluster import conf
from rocket_sink.cluster.conf import CLUSTER_NAME, Secrets
from rocket_sink.cluster.guard import Guard
from rocket_sink.cluster.jars import DEFAULT_VERSION, Progress, resolve_jars
from rocket_sink.cluster.layout import START_S, Nodes, Runtime, Wanted, launch
from rocket_sink.cluster.node import Broker
from rocket_sink.cluster.tls import TestCertificates
from rocket_sink.errors import ClusterError
from rocket_sink.java import find_java
from rocket_sink.text import counted

_ROUTE_TIMEOUT_S = 90.0
"""Longest wait for a route: three periods of a broker's registration."""


class LocalCluster:
    """A real name server and brokers of Apache RocketMQ on loopback.

    Args:
        home: the data folder; None: a temporary one, removed by `stop`.
        acl: enables authentication, with this user as super user.
        tls: None, "permissive" or "enforcing", with a certificate signed by `tls_ca`.
        queues: queues per broker of topics that brokers create.
        broker_config: lines for every broker.conf; they override all others.
        progress: called with lines of text.
        heap_mb: the heap of each broker.
        tls_client_auth: "none", "optional" or "require": whether clients need `tls_client`.

    The cluster's processes end with this process, even if it is killed (see `guard`). Not
    thread-safe, and not for use in a forked child.
    """

    def __init__(
        self,
        brokers: int = 2,
        home: Path | None = None,
        version: str = DEFAULT_VERSION,
        *,
        acl: Secrets | None = None,
        tls: str | None = None,
        queues: int = 4,
        broker_config: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        heap_mb: int = 512,
        tls_client_auth: str = "none",
    ) -> None:
        self._wanted = Wanted(
            brokers, version, acl, tls, queues, broker_config or {}, heap_mb, tls_client_auth
        )
        self._asked_home = home
        self._progress = progress
        self._guard = Guard()
        self._owner = os.getpid()
        self._nodes: Nodes | None = None
        self._runtime: Runtime | None = None

    def __repr__(self) -> str:
        where = f"at {self.name_server}" if self._nodes else "not started"
        return f"<LocalCluster {self.version}, {counted(self._wanted.brokers, 'broker')}, {where}>"

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def start(self, timeout_s: float = START_S) -> LocalCluster:
        """Start the cluster if it does not run, and wait until every broker has stored a message.
        `timeout_s` excludes fetching RocketMQ. Raise ClusterError with the last log lines."""
        if self._nodes is not None:
            return self
        home = self._make_home()
        try:
            self._runtime = Runtime.make(self._wanted, home, self._progress)
            self._nodes = launch(self._runtime, self._guard.join, timeout_s=timeout_s)
        except BaseException as error:
            self._guard.close()
            # Keep even a temporary home after an error, which names the logs in it. A user who has
            # interrupted the start needs no logs.
            if not isinstance(error, Exception):
                self._remove_home(home)
            raise
        return self

    def stop(self) -> None:
        """Stop the cluster and remove a temporary home. Idempotent."""
        if self._nodes is None or self._owner != os.getpid():
            return
        nodes, self._nodes = self._nodes, None
        # A temporary store needs no clean shutdown, which takes brokers some seconds.
        if self._asked_home is None:
            nodes.kill()
        else:
            nodes.stop()
        self._guard.close()
        self._remove_home(self.home)

    @property
    def version(self) -> str:
        return self._wanted.version

    @property
    def home(self) -> Path:
        """The data folder, with one folder per process (configuration, store, logs)."""
        return self._require_runtime().home

    @property
    def classpath(self) -> str:
        """The jars, for `java -cp`."""
        return self._require_runtime().class_path

    @property
    def java(self) -> Path:
        return self._require_runtime().java.executable

    @property
    def tls_ca(self) -> Path | None:
        """The certificate (PEM) of the authority that signs all others; None without TLS."""
        certificates = self._require_runtime().certificates
        return certificates.ca if certificates else None

    @property
    def tls_client(self) -> tuple[Path, Path] | None:
        """A client's certificate and key (PEM), signed by `tls_ca`; None without TLS."""
        certificates = self._require_runtime().certificates
        return certificates.client if certificates else None

    @property
    def name_server(self) -> str:
        """The host:port of the name server, for the option nameServer."""
        return self._require_nodes().name_server.address

    def client_options(self) -> dict[str, str]:
        """Return a client's options: nameServer, and the cluster's credentials and TLS, if any."""
        options = {"nameServer": self.name_server}
        if keys := self._wanted.acl:
            options |= {"accessKey": keys.access_key, "secretKey": keys.secret_key}
        if self.tls_ca:
            options |= {"tlsMode": "verify-full", "tlsCa": str(self.tls_ca)}
        return options

    @property
    def brokers(self) -> list[Broker]:
        return list(self._require_nodes().brokers)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all brokers."""
        return sum(broker.cpu_s() for broker in self._require_nodes().brokers)

    def admin(self, *arguments: str, timeout_s: float = 240) -> str:
        """Return the output of `mqadmin <arguments>`; raise ClusterError if it fails."""
        return admin(
            self.name_server,
            *arguments,
            version=self.version,
            acl=self._wanted.acl,
            tls=self._require_runtime().certificates,
            timeout_s=timeout_s,
        )

    def create_topic(self, name: str, queues: int = 4) -> None:
        """Create or update a topic on all brokers, and wait for its route. For other settings, use
        `rocket-sink topic create` or `admin`."""
        count = str(queues)
        self.admin("updateTopic", "-c", CLUSTER_NAME, "-t", name, "-r", count, "-w", count)
        self.await_route(name)

    def await_route(self, topic: str) -> None:
        """Wait until the topic's route has all brokers, or raise ClusterError. A broker that was
        killed or frozen may be missing for up to 30 s after its return."""
        for broker in self._require_nodes().brokers:
            broker.wait_routed(topic, _ROUTE_TIMEOUT_S)

    def delete_topic(self, name: str) -> None:
        """Delete a topic from all brokers and from the name server."""
        self.admin("deleteTopic", "-c", CLUSTER_NAME, "-t", name)

    def _make_home(self) -> Path:
        if self._asked_home is None:
            return Path(tempfile.mkdtemp(prefix="rocket-sink-cluster-"))
        home = Path(self._asked_home).expanduser().absolute()
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _remove_home(self, home: Path) -> None:
        if self._asked_home is None:
            shutil.rmtree(home, ignore_errors=True)

    def _require_nodes(self) -> Nodes:
        if self._nodes is None:
            raise ClusterError("The cluster is not started: call start(), or use it in `with`.")
        return self._nodes

    def _require_runtime(self) -> Runtime:
        if self._runtime is None:
            raise ClusterError("The cluster was never started: call start(), or use it in `with`.")
        return self._runtime


_TIMEOUT_S = 120.0
# Look for failures in the tool's output, because its exit code may be 0 even after a stack trace.
_FAILURE = re.compile(
    r"^(Exception in thread|Caused by: |[\w.]+(Exception|Error)(:|$)|The sub command )"
    r"|^\s*ERROR: |create topic to .* failed|\[error\]",
    re.MULTILINE,
)


def admin(
    name_server: str,
    *arguments: str,
    version: str = DEFAULT_VERSION,
    acl: conf.Secrets | None = None,
    tls: TestCertificates | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> str:
    """Return the output of an admin tool's command, as `admin(server, "topicStatus", "-t", "t")`,
    in some seconds. Raise ClusterError with the output if the tool fails, prints an error, or
    exceeds `timeout_s`."""
    java = find_java()
    jars = resolve_jars(version, java=java)
    with tempfile.TemporaryDirectory(prefix="rocket-sink-admin-") as name:
        folder = Path(name)
        conf.write_rocketmq_home(folder, version, acl)
        extra = tls.client_flags(folder / "tls.properties") if tls else []
        command = conf.jvm_command(
            "admin",
            java=java.executable,
            folder=folder,
            version=version,
            memory=("-Xmx192m", "-XX:TieredStopAtLevel=1"),
            extra=extra,
        )
        own_environ = {"CLASSPATH": os.pathsep.join(map(str, jars)), "NAMESRV_ADDR": name_server}
        try:
            done = subprocess.run(
                [*command, *arguments],
                env=os.environ | own_environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"The admin tool was not done after {timeout_s:.0f} s: check that the name server "
                "runs, or give it more time (timeout_s)."
            ) from error
    printed = done.stdout + done.stderr
    if done.returncode != 0 or _FAILURE.search(printed):
        raise ClusterError(
            f"The admin tool failed (exit code {done.returncode}). It printed:\n{printed[-4000:]}"
        )
    return done.stdout
