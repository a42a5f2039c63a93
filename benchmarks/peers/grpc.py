"""The official Python client (gRPC), through RocketMQ's proxy.

Both are fetched once into the cache, the client into its own folder: its dependencies must not
change the measured environment.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.jars import resolve_modules
from benchmarks.ports import free_port
from benchmarks.processes import TIMEOUT_S, Ended, Launcher
from rocket_sink.cluster import conf
from rocket_sink.cluster.guard import Guard
from rocket_sink.cluster.jars import cache_folder
from rocket_sink.cluster.local import LocalCluster
from rocket_sink.errors import ClusterError

CLIENT: Final = "rocketmq-python-client==5.1.2"
_SENDER: Final = "benchmarks.peers.grpc_sender"
_READY_S: Final = 60.0
_INSTALL_S: Final = 300
_ROOT: Final = Path(__file__).parents[2]
_WITHOUT_TLS: Final = ("-Dtls.server.mode=disabled",)
"""In its default mode, permissive, the proxy makes a test certificate for OpenSSL only
(MultiProtocolTlsHelper), whose native library (netty-tcnative with a classifier) no pom names."""


class GrpcLauncher:
    """Starts the client, each time with its own proxy, which must not take CPU from other runs.

    Raises:
        ClusterError: the client or the proxy cannot be fetched, or the proxy does not start.
    """

    def __init__(self, cluster: LocalCluster, folder: Path, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._folder = folder
        packages = _client(say)
        self._jars = resolve_modules(
            f"rocketmq-proxy-{cluster.version}",
            [f"org.apache.rocketmq:rocketmq-proxy:{cluster.version}"],
            tell=say,
        )
        conf.write_rocketmq_home(folder, cluster.version, None)
        path = os.pathsep.join([str(packages), str(_ROOT)])
        self._env = {**os.environ, "PYTHONPATH": path, "HOME": str(folder)}
        with self._proxy():
            pass  # fail before anything is measured

    def run(
        self,
        arguments: Mapping[str, Any],
        brokers_s: Callable[[], float],
        *,
        when_ready: Callable[[], None] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Ended:
        """Run the sender against a proxy; parameters and errors are those of `Launcher.run`."""
        with self._proxy() as address:
            client = Launcher((sys.executable, "-m", _SENDER, f"endpoints={address}"), self._env)
            return client.run(arguments, brokers_s, when_ready=when_ready, timeout_s=timeout_s)

    @contextmanager
    def _proxy(self) -> Iterator[str]:
        folder, cluster = self._folder, self._cluster
        port, remoting = free_port(), free_port()
        settings = folder / "rmq-proxy.json"
        settings.write_text(
            f'{{"rocketMQClusterName": "{conf.CLUSTER_NAME}", "proxyMode": "CLUSTER", '
            f'"namesrvAddr": "{cluster.name_server}", "grpcServerPort": {port}, '
            f'"remotingListenPort": {remoting}}}',
            encoding="utf-8",
        )
        command = conf.jvm_command(
            "proxy", java=cluster.java, folder=folder, version=cluster.version,
            memory=("-Xms512m", "-Xmx512m"), extra=_WITHOUT_TLS,
        )  # fmt: skip
        environ = {
            **os.environ,
            "CLASSPATH": os.pathsep.join(map(str, self._jars)),
            "NAMESRV_ADDR": cluster.name_server,
        }
        with _running([*command, "-pm", "cluster", "-pc", str(settings)], environ, folder) as it:
            _wait(it, port, folder)
            yield f"127.0.0.1:{port}"


def _client(say: Callable[[str], None]) -> Path:
    folder = cache_folder() / f"{CLIENT.replace('==', '-')}-py{sys.version_info[1]}"
    if folder.is_dir():
        return folder
    say(f"fetching {CLIENT}, once")
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--target", str(scratch / "it"), CLIENT],
            capture_output=True, text=True, timeout=_INSTALL_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            raise ClusterError(f"pip cannot fetch {CLIENT}: {lines[-1] if lines else 'no reason'}")
        (scratch / "it").rename(folder)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"pip has not fetched {CLIENT} within {_INSTALL_S} s") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


@contextmanager
def _running(
    command: Sequence[str], environ: Mapping[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    guard = Guard()
    try:
        with (folder / "console.log").open("wb") as console:
            process = subprocess.Popen(
                command, env=environ, stdout=console, stdin=subprocess.DEVNULL,
                stderr=subprocess.STDOUT, cwd=folder, **guard.join(),
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()
    finally:
        guard.close()


def _wait(process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    deadline_s = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    log = (folder / "console.log").read_text(errors="replace").strip().splitlines()
    causes = [line.strip() for line in log if "Exception" in line or "Error:" in line] or log[-1:]
    raise ClusterError(f"RocketMQ's proxy did not start: {'; '.join(causes)[:600]}")
