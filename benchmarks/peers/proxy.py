"""RocketMQ's proxy beside a local cluster, a process to freeze and kill: in front of the brokers
(cluster mode), or with a broker of its own in the same process (local mode)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.peers.jars import resolve_modules
from benchmarks.ports import free_port
from rocket_sink.cluster import conf
from rocket_sink.cluster.guard import Guard
from rocket_sink.cluster.local import LocalCluster
from rocket_sink.errors import ClusterError

_READY_S: Final = 120.0
_WITHOUT_TLS: Final = ("-Dtls.server.mode=disabled",)
"""In its default mode, permissive, the proxy makes a test certificate for OpenSSL only
(MultiProtocolTlsHelper), whose native library (netty-tcnative with a classifier) no pom names."""


class RocketmqProxy:
    """A proxy of the cluster's version; a context manager, which starts and kills the process.

    Args:
        folder: for its settings and logs.
        say: gets lines of text while the jars are fetched.
        broker: settings of the broker in the process (`mqbroker --enable-proxy`); None: no broker.

    Attributes:
        address: the remoting port, for the option nameServer.
        endpoints: the gRPC port.

    Raises:
        ClusterError: the jars cannot be fetched, or the process does not start.
    """

    def __init__(
        self, cluster: LocalCluster, folder: Path, say: Callable[[str], None],
        broker: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._guard = folder, Guard()
        self._process: subprocess.Popen[bytes] | None = None
        module = f"org.apache.rocketmq:rocketmq-proxy:{cluster.version}"
        jars = resolve_modules(f"rocketmq-proxy-{cluster.version}", [module], tell=say)
        conf.write_rocketmq_home(folder, cluster.version, None)
        remoting, grpc = free_port(), free_port()
        self.address, self.endpoints = (f"{conf.LOOPBACK}:{port}" for port in (remoting, grpc))
        settings = {
            "rocketMQClusterName": conf.CLUSTER_NAME,
            "proxyMode": "CLUSTER" if broker is None else "LOCAL",
            "namesrvAddr": cluster.name_server,
            "grpcServerPort": grpc,
            "remotingListenPort": remoting,
            # The proxy's routes name this address.
            "remotingAccessAddr": conf.LOOPBACK,
        }
        file = folder / "rmq-proxy.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        command = conf.jvm_command(
            "proxy", java=cluster.java, folder=folder, version=cluster.version,
            memory=("-Xms512m", "-Xmx512m"), extra=_WITHOUT_TLS,
        )  # fmt: skip
        self._command = [*command, "-pm", str(settings["proxyMode"]).lower(), "-pc", str(file)]
        if broker is not None:
            values = {**conf.BROKER_DEFAULTS, "storePathRootDir": str(folder / "store"), **broker}
            lines = [f"{name}={value}\n" for name, value in values.items()]
            (folder / "broker.conf").write_text("".join(lines), encoding="utf-8")
            self._command += ["-bc", str(folder / "broker.conf")]
        self._environ = {
            **os.environ,
            "CLASSPATH": os.pathsep.join(map(str, jars)),
            "NAMESRV_ADDR": cluster.name_server,
        }

    def __enter__(self) -> RocketmqProxy:
        try:
            with (self._folder / "console.log").open("wb") as console:
                self._process = subprocess.Popen(
                    self._command, env=self._environ, stdout=console, stdin=subprocess.DEVNULL,
                    stderr=subprocess.STDOUT, cwd=self._folder, **self._guard.join(),
                )  # fmt: skip
            self._await_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._guard.close()

    def freeze(self) -> None:
        """SIGSTOP: sockets stay open, nothing is answered."""
        self._running.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._running.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; no effect on a process that has ended, or never began."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + _READY_S
        addresses = [self.address, self.endpoints]
        while self._running.poll() is None and time.monotonic() < deadline_s:
            addresses = [address for address in addresses if not _accepts(address)]
            if not addresses:
                return
            time.sleep(0.2)
        log = (self._folder / "console.log").read_text(errors="replace").strip().splitlines()
        causes = [line.strip() for line in log if "Exception" in line or "Error:" in line]
        text = "; ".join(causes or log[-1:])[:600]
        raise ClusterError(f"RocketMQ's proxy did not start: {text}")


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
