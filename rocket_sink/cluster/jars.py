"""RocketMQ's jars: from the cache, else fetched once, checked, and put there whole.

The cache is `<cache>/rocketmq-<version>/`; `<cache>` is the argument, else ROCKET_SINK_CACHE, else
the user's cache folder. It is filled in a scratch folder and renamed, under a file lock, so that
it is there whole or not at all. A filled cache needs no network.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from rocket_sink.cluster.ivy import IvyRun
from rocket_sink.cluster.lock import Artifact, load_lock, sha256_of
from rocket_sink.errors import ClusterError
from rocket_sink.java import Java, find_java
from rocket_sink.private_file import FileLock

DEFAULT_VERSION = "5.3.3"
"""The RocketMQ version that is started unless another is asked for."""

CACHE_ENV = "ROCKET_SINK_CACHE"

Progress = Callable[[str], None]

_PROCESSES = 6
_ROUNDS = 2
_LISTING = "jars.lock"


def resolve_jars(
    version: str = DEFAULT_VERSION,
    *,
    cache: Path | None = None,
    java: Java | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """The jars of name server, broker and admin tool, in class path order.

    `progress` gets a line of text now and then while something is fetched. Raises ClusterError
    when they cannot be fetched, or when one's digest is not the lock's.
    """
    base = cache_folder(cache)
    folder = base / f"rocketmq-{version}"
    cached = _cached(folder)
    if cached is not None:
        return cached
    tell = progress or _silent
    with only_one(base / f"rocketmq-{version}.lock", tell):
        cached = _cached(folder)
        if cached is None:
            _fill(folder, version, java or find_java(), tell)
            cached = _cached(folder)
    if cached is None:
        raise ClusterError(f"{folder} is still incomplete: delete it and try again.")
    return cached


def cache_folder(cache: Path | None = None) -> Path:
    """The folder that holds the caches of all versions (see the module's text)."""
    chosen = cache or os.environ.get(CACHE_ENV) or platformdirs.user_cache_dir("rocket-sink")
    return Path(chosen).expanduser().absolute()


def _cached(folder: Path) -> list[Path] | None:
    listing = folder / _LISTING
    if not listing.is_file():
        return None
    jars = [folder / name for name in listing.read_text(encoding="utf-8").split()]
    return jars if all(jar.is_file() for jar in jars) else None


def _fill(folder: Path, version: str, java: Java, tell: Progress) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        locked = load_lock(version)
        if locked is None:
            tell(f"RocketMQ {version} has no lock file: resolving it whole, which takes minutes")
            artifacts: Sequence[Artifact] = _resolve_all(scratch, version, java, tell)
        else:
            artifacts = locked
            tell(f"fetching RocketMQ {version}: {len(locked)} jars, once")
            _fetch_locked(scratch, version, locked, java, tell)
        jars = scratch / "jars"
        names = "\n".join(artifact.file_name for artifact in artifacts)
        (jars / _LISTING).write_text(names + "\n", encoding="utf-8")
        jars.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        jars.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fetch_locked(
    scratch: Path, version: str, artifacts: Sequence[Artifact], java: Java, tell: Progress
) -> None:
    jars = scratch / "jars"
    jars.mkdir()
    missing = list(artifacts)
    for attempt in range(_ROUNDS):
        count = _counter(f"fetching RocketMQ {version}", len(missing), tell)
        run = IvyRun(java, scratch / f"round-{attempt}", count)
        failure: ClusterError | None = None
        try:
            run.fetch(missing, jars, _PROCESSES)
        except ClusterError as error:
            failure = error
        missing = [each for each in missing if not each.matches(jars / each.file_name)]
        if not missing:
            return
        for each in missing:
            (jars / each.file_name).unlink(missing_ok=True)
    if failure is not None:
        raise failure
    raise ClusterError(
        f"The digests of {len(missing)} jars are not those of the lock file, twice: "
        f"{', '.join(each.file_name for each in missing[:5])}. Check what stands between this "
        "machine and the registry (a proxy, a mirror); nothing was kept."
    )


def _resolve_all(scratch: Path, version: str, java: Java, tell: Progress) -> list[Artifact]:
    nested, jars = scratch / "nested", scratch / "jars"
    count = _counter(f"fetching RocketMQ {version}", None, tell)
    IvyRun(java, scratch / "ivy", count).resolve(version, nested)
    jars.mkdir()
    artifacts = []
    for path in sorted(nested.glob("*/*/*/*.jar")):
        group, name, revision = path.relative_to(nested).parts[:3]
        classifier = path.stem.removeprefix(f"{name}-{revision}").removeprefix("-")
        artifact = Artifact(group, name, revision, classifier, sha256_of(path))
        path.rename(jars / artifact.file_name)
        artifacts.append(artifact)
    return artifacts


def _counter(what: str, total: int | None, tell: Progress) -> Callable[[], None]:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        tell(f"{what}: {done} of {total} jars" if total else f"{what}: {done} jars")

    return count


@contextmanager
def only_one(lock: Path, tell: Progress) -> Iterator[None]:
    """Hold a file lock, so that one process at a time fills a cache.

    Raises ClusterError when the cache cannot be written.
    """
    held = FileLock(lock)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held.acquire(on_wait=lambda by: tell(f"{by} is filling {lock.parent}: waiting for it"))
    except OSError as error:
        raise ClusterError(
            f"The cache {lock.parent} cannot be written ({error}): set {CACHE_ENV} to a "
            "folder that can."
        ) from error
    try:
        yield
    finally:
        held.release()


def _silent(_text: str) -> None:
    return None
