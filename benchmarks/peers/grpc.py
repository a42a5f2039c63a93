"""The official Python client (gRPC), through RocketMQ's proxy.

Both are fetched once into the cache, the client into its own folder: its dependencies must not
change the measured environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.proxy import RocketmqProxy
from benchmarks.processes import TIMEOUT_S, Ended, Launcher
from rocket_sink.cluster.jars import cache_folder
from rocket_sink.cluster.local import LocalCluster
from rocket_sink.errors import ClusterError

CLIENT: Final = "rocketmq-python-client==5.1.2"
_SENDER: Final = "benchmarks.peers.grpc_sender"
_INSTALL_S: Final = 300
_ROOT: Final = Path(__file__).parents[2]


class GrpcLauncher:
    """Starts the client, each time with its own proxy, which must not take CPU from other runs.

    Raises:
        ClusterError: the client or the proxy cannot be fetched, or the proxy does not start.
    """

    def __init__(self, cluster: LocalCluster, folder: Path, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._folder, self._say = folder, say
        packages = _client(say)
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
        with self._proxy() as proxy:
            client = Launcher(
                (sys.executable, "-m", _SENDER, f"endpoints={proxy.endpoints}"), self._env
            )
            return client.run(arguments, brokers_s, when_ready=when_ready, timeout_s=timeout_s)

    def _proxy(self) -> RocketmqProxy:
        return RocketmqProxy(self._cluster, self._folder, self._say)


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
