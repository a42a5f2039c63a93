"""RocketMQ's jars: a cache, which PySpark's Ivy fills from Maven Central.

The cache is `<cache>/rocketmq-<version>/`; `<cache>` is the argument, else ROCKET_SINK_CACHE, else
the user's cache folder. One process at a time fills it, in a scratch folder that is then renamed.

A lock file `rocketmq-<version>.lock` beside this module pins the jars of a version, one line each:
`group:name:version[:classifier] sha256`. Several Ivy processes fetch the jars in parallel, each
with its own Ivy cache, which cannot be shared. Each use of the cache checks the jars' SHA-256, so
only versions with a lock file run; `tools/rocketmq_lock.py` makes one."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import platformdirs

from rocket_sink.errors import ClusterError
from rocket_sink.java import Java, find_java
from rocket_sink.private_file import FileLock

DEFAULT_VERSION = "5.5.0"

CACHE_ENV = "ROCKET_SINK_CACHE"

Progress = Callable[[str], None]

SETTINGS_ENV = "ROCKET_SINK_IVY_SETTINGS"
"""The environment variable that names a user's ivysettings.xml (a mirror, a proxy, credentials)."""

ROOTS = ("rocketmq-namesrv", "rocketmq-broker", "rocketmq-tools")
"""The modules of org.apache.rocketmq that the cluster runs."""

FLAT = "[artifact]-[revision](-[classifier]).[ext]"
"""Ivy's pattern for the file name of a jar."""

_HINTS = {
    "PKIX": "Java does not trust the certificate that it was shown, maybe a proxy's: set "
    "JAVA_TOOL_OPTIONS=-Djavax.net.ssl.trustStore=FILE to a store that has it. ",
    ": not found": "Not every version's server modules are in the registry: try another. ",
}

_SETTINGS = """<ivysettings>
  <!-- Empty if a lock file has the SHA-256 digests: this saves a request per jar -->
  <property name="ivy.checksums" value="{checksums}"/>
  <settings defaultResolver="central"/>
  <timeout-constraints>
    <timeout-constraint name="bounded" connectionTimeout="20000" readTimeout="60000"/>
  </timeout-constraints>
  <resolvers>
    <ibiblio name="central" m2compatible="true" usepoms="{poms}" timeoutConstraint="bounded"/>
  </resolvers>
</ivysettings>
"""
MODULE = """<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="rocket-sink" module="cluster"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
{dependencies}
  </dependencies>
</ivy-module>
"""
"""The ivy.xml of the cluster's jars; `dependencies` are XML lines."""


def run_ivy(
    java: Java, folder: Path, module: str, pattern: Path, on_jar: Callable[[], None], *,
    poms: bool, label: str = "Apache RocketMQ",
) -> None:  # fmt: skip
    """Fetch the jars of an ivy.xml to paths of Ivy's `pattern`, in the new scratch folder `folder`;
    call `on_jar` after each. With `poms`, fetch dependencies too, and check the registry's SHA-1;
    otherwise check no digest. Raise ClusterError with `label` and Ivy's last lines if Ivy fails."""
    folder.mkdir(parents=True)
    ivy_file = folder / "ivy.xml"
    ivy_file.write_text(module, encoding="utf-8")
    command = [
        *(str(java.executable), "-jar", str(find_ivy())),
        *("-settings", str(_settings_file(folder, poms=poms)), "-cache", str(folder / "cache")),
        *("-ivy", str(ivy_file), "-types", "jar", "bundle", "-retrieve", str(pattern)),
    ]
    last_lines: deque[str] = deque(maxlen=25)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last_lines.append(line.rstrip())
            if "[SUCCESSFUL ]" in line:
                on_jar()
    if process.returncode != 0:
        printed = "\n".join(last_lines)
        hint = "".join(text for sign, text in _HINTS.items() if sign in printed)
        raise ClusterError(
            f"Ivy could not fetch {label} (exit code {process.returncode}). Check the network; "
            f"behind a mirror or proxy set {SETTINGS_ENV} to your ivysettings.xml. "
            f"{hint}Its last lines:\n{printed}"
        )


def fetch_parts(
    java: Java, work: Path, artifacts: Sequence[Artifact], into: Path, on_jar: Callable[[], None]
) -> None:
    """Fetch the artifacts as `into/<file name>`, by parallel Ivy processes; as `run_ivy`."""

    def fetch_part(number: int) -> None:
        module = locked_module(artifacts[number::_PROCESSES])
        run_ivy(java, work / f"part-{number}", module, into / FLAT, on_jar, poms=False)

    with ThreadPoolExecutor(_PROCESSES) as pool:
        list(pool.map(fetch_part, range(min(_PROCESSES, len(artifacts)))))


def find_ivy() -> Path:
    """Return PySpark's Ivy jar; raise ClusterError if PySpark has none."""
    spec = find_spec("pyspark")
    home = Path(spec.origin).parent if spec and spec.origin else None
    ivy_jars = sorted(home.glob("jars/ivy-*.jar")) if home else []
    if not ivy_jars:
        raise ClusterError(
            "No Ivy jar in PySpark's jars folder, and RocketMQ is fetched by it. Install PySpark "
            "from its pip package (pip install pyspark), not a variant without jars."
        )
    return ivy_jars[-1]


def locked_module(artifacts: Iterable[Artifact]) -> str:
    """Return the ivy.xml for exactly these jars, without dependencies."""
    lines = []
    ordered = sorted(artifacts)
    for key, group in itertools.groupby(ordered, lambda a: (a.group, a.name, a.version)):
        lines.append(f'    <dependency {_module(*key)} transitive="false" conf="default">')
        for artifact in group:
            extra = f' m:classifier="{artifact.classifier}"' if artifact.classifier else ""
            lines.append(f'      <artifact name="{artifact.name}" type="jar" ext="jar"{extra}/>')
        lines.append("    </dependency>")
    return MODULE.format(dependencies="\n".join(lines))


def _module(group: str, name: str, version: str) -> str:
    return f'org="{group}" name="{name}" rev="{version}"'


def _settings_file(folder: Path, *, poms: bool) -> Path:
    own = os.environ.get(SETTINGS_ENV)
    if own:
        if not Path(own).is_file():
            raise ClusterError(f"{SETTINGS_ENV} names {own}, which is no file: mend or unset it.")
        return Path(own)
    file = folder / "ivysettings.xml"
    settings = _SETTINGS.format(poms=str(poms).lower(), checksums="sha1" if poms else "")
    file.write_text(settings, encoding="utf-8")
    return file


_LINE = re.compile(
    r"(?P<group>[\w.-]+):(?P<name>[\w.-]+):(?P<version>[\w.-]+)(:(?P<classifier>[\w.-]+))?"
    r"\s+(?P<sha256>[0-9a-f]{64})"
)


@dataclass(frozen=True, order=True)
class Artifact:
    """A jar. `classifier` is empty for a module's main jar; `sha256` is lower-case hex."""

    group: str
    name: str
    version: str
    classifier: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The jar's name in the cache and in a Maven repository."""
        tail = f"-{self.classifier}" if self.classifier else ""
        return f"{self.name}-{self.version}{tail}.jar"

    @property
    def line(self) -> str:
        """The lock file's line for this jar."""
        parts = [self.group, self.name, self.version, self.classifier]
        return f"{':'.join(part for part in parts if part)} {self.sha256}"

    def matches(self, path: Path) -> bool:
        """Return whether `path` is a file with this artifact's digest."""
        return path.is_file() and sha256_of(path) == self.sha256


def parse_lock(text: str, source: str) -> tuple[Artifact, ...]:
    """Return the artifacts of a lock file, in its order. Raise ClusterError for a malformed line,
    and for two artifacts with the same file name."""
    artifacts: dict[str, Artifact] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ClusterError(
                f"{source}, line {number}: expected 'group:name:version[:classifier] sha256', "
                f"found {line[:120]!r}. Reinstall rocket-sink, or make the lock file again."
            )
        artifact = Artifact(**match.groupdict(default=""))
        if artifact.file_name in artifacts:
            raise ClusterError(f"{source}, line {number}: {artifact.file_name} is there twice.")
        artifacts[artifact.file_name] = artifact
    return tuple(artifacts.values())


def load_lock(version: str) -> tuple[Artifact, ...]:
    """Return the pinned jars of a RocketMQ version. Raise ClusterError if it has no lock file."""
    name = f"rocketmq-{version}.lock"
    files = {file.name: file for file in resources.files(__package__).iterdir()}
    if name not in files:
        locks = (file.removeprefix("rocketmq-") for file in files if file.endswith(".lock"))
        raise ClusterError(
            f"There is no RocketMQ {version!r} here, only "
            f"{', '.join(sorted(file.removesuffix('.lock') for file in locks))}, whose jars have "
            "known digests: name one of these."
        )
    return parse_lock(files[name].read_text(encoding="utf-8"), name)


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


_PROCESSES = 6
"""The number of parallel Ivy processes."""
_ROUNDS = 2


def resolve_jars(
    version: str = DEFAULT_VERSION,
    *,
    cache: Path | None = None,
    java: Java | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Return the jars of name server, broker and admin tool, in class path order. `progress` gets
    texts during a fetch. Raise ClusterError if the version has no lock file, or if a jar cannot be
    fetched or has a wrong digest."""
    artifacts = load_lock(version)
    base = cache_folder(cache)
    folder = base / f"rocketmq-{version}"
    if cached := _cached(folder, artifacts):
        return cached
    tell = progress or (lambda text: None)
    with only_one(base / f"rocketmq-{version}.lock", tell):
        # Another process may have filled the cache during the wait.
        return _cached(folder, artifacts) or _fill(
            folder, version, artifacts, java or find_java(), tell
        )


def cache_folder(cache: Path | None = None) -> Path:
    """Return the folder with the caches of all versions."""
    chosen = cache or os.environ.get(CACHE_ENV) or platformdirs.user_cache_dir("rocket-sink")
    return Path(chosen).expanduser().absolute()


def _cached(folder: Path, artifacts: Sequence[Artifact]) -> list[Path] | None:
    """Return the cached jars; None if a jar is missing or has a wrong digest."""
    paths = [folder / artifact.file_name for artifact in artifacts]
    are_right = all(map(Artifact.matches, artifacts, paths))
    return paths if are_right else None


def _fill(
    folder: Path, version: str, artifacts: Sequence[Artifact], java: Java, tell: Progress
) -> list[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    jars = scratch / "jars"
    jars.mkdir()
    try:
        tell(f"fetching RocketMQ {version}: {len(artifacts)} jars, once")
        _fetch_locked(scratch, jars, version, artifacts, java, tell)
        jars.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        jars.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [folder / artifact.file_name for artifact in artifacts]


def _fetch_locked(
    scratch: Path, jars: Path, version: str, artifacts: Sequence[Artifact], java: Java,
    tell: Progress,
) -> None:  # fmt: skip
    missing = list(artifacts)
    for attempt in range(_ROUNDS):
        count = _counter(f"fetching RocketMQ {version}", len(missing), tell)
        failure: ClusterError | None = None
        try:
            fetch_parts(java, scratch / f"round-{attempt}", missing, jars, count)
        except ClusterError as error:
            failure = error
        missing = [each for each in missing if not each.matches(jars / each.file_name)]
        if not missing:
            return
        for each in missing:
            (jars / each.file_name).unlink(missing_ok=True)
    raise failure or ClusterError(
        f"The digests of {len(missing)} jars are not those of the lock file, twice: "
        f"{', '.join(each.file_name for each in missing[:5])}. Check what stands between this "
        "machine and the registry (a proxy, a mirror); nothing was kept."
    )


def _counter(what: str, total: int, tell: Progress) -> Callable[[], None]:
    numbers = itertools.count(1)
    return lambda: tell(f"{what}: {next(numbers)} of {total} jars")


@contextmanager
def only_one(lock: Path, tell: Progress) -> Iterator[None]:
    """Hold the file lock of a cache; raise ClusterError if the cache cannot be written."""
    cache_lock = FileLock(lock)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        cache_lock.acquire(
            on_wait=lambda by: tell(f"{by} is filling {lock.parent}: waiting for it")
        )
    except OSError as error:
        raise ClusterError(
            f"The cache {lock.parent} cannot be written ({error}): set {CACHE_ENV} to a "
            "folder that can."
        ) from error
    try:
        yield
    finally:
        cache_lock.release()
