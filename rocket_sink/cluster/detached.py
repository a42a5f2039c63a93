"""A detached cluster: `rocket-sink cluster up|status|down`.

`cluster.json` in the home folder lists the processes, and has a random mark that each start puts
into their command lines. A process without the mark does not belong to the cluster, so a reused pid
is never signalled. A file lock allows one command per home at a time."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from rocket_sink.cluster.conf import Ports
from rocket_sink.cluster.jars import DEFAULT_VERSION, Progress
from rocket_sink.cluster.layout import MARK_PROPERTY, START_S, Nodes, Runtime, Wanted, launch
from rocket_sink.errors import ClusterError
from rocket_sink.private_file import FileLock
from rocket_sink.text import counted

_STATE_FILE = "cluster.json"
_GRACE_S = 25.0
_KILL_S = 10.0


@dataclass(frozen=True)
class NodeState:
    """A process that `up` started. `started_s` is its start in seconds since 1970."""

    name: str
    address: str
    pid: int
    started_s: float
    mark: str

    @property
    def alive(self) -> bool:
        return self.process() is not None

    def process(self) -> psutil.Process | None:
        """Return the process; None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            has_mark = f"-D{MARK_PROPERTY}={self.mark}" in process.cmdline()
        except psutil.Error:
            return None
        return process if has_mark else None


@dataclass(frozen=True)
class ClusterState:
    """A cluster that `up` started; its first node is the name server. The cluster is `ready` when
    each broker has stored a message."""

    home: Path
    version: str
    nodes: tuple[NodeState, ...]
    queues: int = 4
    tls: str | None = None
    ready: bool = True

    @property
    def name_server(self) -> str:
        """host:port of the name server, the value of the option nameServer."""
        return self.nodes[0].address

    @property
    def brokers(self) -> list[NodeState]:
        return list(self.nodes[1:])

    @property
    def running(self) -> bool:
        """Whether the start was completed and all processes exist, running or frozen (SIGSTOP)."""
        return self.ready and all(node.alive for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `--json`, with the current `alive` and `running`."""
        return {
            "home": str(self.home),
            "version": self.version,
            "name_server": self.name_server,
            "running": self.running,
            "nodes": [
                {k: v for k, v in asdict(node).items() if k != "mark"} | {"alive": node.alive}
                for node in self.nodes
            ],
        }


def default_home() -> Path:
    return Path(platformdirs.user_data_dir("rocket-sink")) / "cluster"


def up(
    home: Path | None = None,
    brokers: int = 2,
    *,
    version: str = DEFAULT_VERSION,
    tls: str | None = None,
    queues: int = 4,
    progress: Progress | None = None,
) -> ClusterState:
    """Start a detached cluster in `home`. If one runs there, return it, even if its settings
    differ; `progress` then gets a line about them.

    If only brokers are dead, and the settings are the same, start these brokers again. In all other
    cases stop the processes that are left, and start all with the same data and, if they are free,
    the same ports. Arguments and errors are those of LocalCluster."""
    wanted = Wanted(brokers, version, tls=tls, queues=queues)
    with _lock_home(home, progress) as folder:
        alive: list[NodeState] = []
        ports = None
        if (running := status(folder)) is not None:
            count = len(running.brokers)
            settings = running.version, count, running.queues, running.tls
            is_same = settings == (version, brokers, queues, tls)
            if running.running:
                if progress and not is_same:
                    progress(
                        f"a cluster of version {running.version} with {counted(count, 'broker')}, "
                        f"{counted(running.queues, 'queue')} each and TLS "
                        f"{running.tls or 'disabled'} runs in {folder} already; take it down first "
                        "to change that"
                    )
                return running
            if is_same and running.ready and running.nodes[0].alive:
                alive = [node for node in running.nodes if node.alive]
                server, *others = (int(n.address.rpartition(":")[2]) for n in running.nodes)
                ports = Ports(server, tuple(others))
            else:
                _end(running)
        runtime = Runtime.make(wanted, folder, progress)
        try:
            nodes = launch(
                runtime,
                lambda: {"start_new_session": True},
                timeout_s=START_S,
                # Save each process at once: if this process is killed, `down` finds the others.
                spawned=lambda nodes: _save(runtime, nodes, alive, ready=False),
                ports=ports,
                alive={node.name for node in alive},
            )
            state = _save(runtime, nodes, alive, ready=True)
        except BaseException:
            if not alive:
                (folder / _STATE_FILE).unlink(missing_ok=True)
            raise
        for node in nodes:
            node.release()
        return state


def status(home: Path | None = None) -> ClusterState | None:
    """Return the cluster that `up` started in `home`; None if none of its processes is alive."""
    state = _load(_folder(home))
    return state if state and any(node.alive for node in state.nodes) else None


def down(home: Path | None = None, *, progress: Progress | None = None) -> bool:
    """Stop the cluster in `home`; its data stays. Idempotent. Return whether a process was stopped.
    Brokers take some 15 s. `progress` gets a line if another command has the lock."""
    if not (_folder(home) / _STATE_FILE).exists():
        return False
    with _lock_home(home, progress) as folder:
        state = _load(folder)
        was_running = _end(state) if state else False
        (folder / _STATE_FILE).unlink(missing_ok=True)
        return was_running


def _save(
    runtime: Runtime, nodes: Nodes, kept: Sequence[NodeState], *, ready: bool
) -> ClusterState:
    wanted = runtime.wanted
    states = {node.name: node for node in kept}
    for node in nodes:
        if node.alive:
            started_s = psutil.Process(node.pid).create_time()
            states[node.name] = NodeState(
                node.name, node.address, node.pid, started_s, runtime.mark
            )
    ordered = tuple(states[node.name] for node in nodes if node.name in states)
    state = ClusterState(runtime.home, wanted.version, ordered, wanted.queues, wanted.tls, ready)
    plain = asdict(state)
    del plain["home"]
    file = runtime.home / _STATE_FILE
    scratch = file.with_suffix(f".{runtime.mark}.new")
    with scratch.open("x", encoding="utf-8") as out:
        json.dump(plain, out, indent=1)
    scratch.replace(file)
    return state


def _load(folder: Path) -> ClusterState | None:
    file = folder / _STATE_FILE
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        nodes = tuple(NodeState(**node) for node in plain.pop("nodes"))
        return ClusterState(folder, nodes=nodes, **plain)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ClusterError(
            f"{file} cannot be read: {error.strerror}. The cluster may belong to another user: name"
            " another home."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterError(
            f"{file} cannot be read ({error}): end the cluster's Java processes by hand if there "
            "are any, and delete the file."
        ) from error


def _end(state: ClusterState) -> bool:
    processes = [process for node in state.nodes if (process := node.process())]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
            process.resume()
    _, remaining = psutil.wait_procs(processes, timeout=_GRACE_S)
    for process in remaining:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(remaining, timeout=_KILL_S)
    return bool(processes)


def _folder(home: Path | None) -> Path:
    return Path(home or default_home()).expanduser().absolute()


@contextmanager
def _lock_home(home: Path | None, progress: Progress | None) -> Iterator[Path]:
    folder = _folder(home)
    lock = FileLock(folder / ".lock")

    def on_wait(holder: str) -> None:
        if progress:
            progress(f"{holder} is at work on the cluster in {folder}: waiting for its end")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_mode & stat.S_IWOTH:
            # Brokers follow links: others could put a link where a broker will write a file.
            raise ClusterError(
                f"Everybody may write to the cluster's folder {folder}: choose another one, or "
                f"`chmod o-w {folder}` if its files are yours."
            )
        lock.acquire(on_wait=on_wait)
    except OSError as error:
        raise ClusterError(
            f"the cluster's folder {folder} cannot be used: {error.strerror or error}; name another"
        ) from error
    try:
        yield folder
    finally:
        lock.release()
