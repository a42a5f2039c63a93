"""Lock files: the exact jars of a RocketMQ version, with the digest of each.

One line per jar, `group:name:version[:classifier] sha256`; empty lines and lines that begin with
`#` are skipped. The files lie beside this module as `rocketmq-<version>.lock`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rocket_sink.errors import ClusterError

_LINE = re.compile(
    r"(?P<group>[\w.-]+):(?P<name>[\w.-]+):(?P<version>[\w.-]+)(:(?P<classifier>[\w.-]+))?"
    r"\s+(?P<sha256>[0-9a-f]{64})"
)
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, order=True)
class Artifact:
    """One jar. `classifier` is empty for a module's main jar; `sha256` is lower-case hex."""

    group: str
    name: str
    version: str
    classifier: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The jar's name in a cache folder, which is its name in a Maven repository."""
        tail = f"-{self.classifier}" if self.classifier else ""
        return f"{self.name}-{self.version}{tail}.jar"

    @property
    def line(self) -> str:
        """The lock file's line for this jar."""
        parts = [self.group, self.name, self.version, self.classifier]
        return f"{':'.join(part for part in parts if part)} {self.sha256}"

    def matches(self, path: Path) -> bool:
        """True when `path` is a file with this artifact's digest."""
        return path.is_file() and sha256_of(path) == self.sha256


def parse_lock(text: str, source: str) -> tuple[Artifact, ...]:
    """The artifacts of a lock file in its order.

    Raises ClusterError naming `source` and the line for a line that is none, and for two
    artifacts that would have the same file name.
    """
    artifacts: dict[str, Artifact] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ClusterError(
                f"{source}, line {number}: expected 'group:name:version[:classifier] sha256', "
                f"found {line[:120]!r}. Reinstall rocket-sink, or make the lock file again."
            )
        artifact = Artifact(
            found["group"], found["name"], found["version"], found["classifier"] or "",
            found["sha256"],
        )  # fmt: skip
        if artifact.file_name in artifacts:
            raise ClusterError(f"{source}, line {number}: {artifact.file_name} is there twice.")
        artifacts[artifact.file_name] = artifact
    return tuple(artifacts.values())


def load_lock(version: str) -> tuple[Artifact, ...] | None:
    """The pinned jars of a RocketMQ version, or None when this package has no lock for it."""
    name = f"rocketmq-{version}.lock"
    file = resources.files(__package__).joinpath(name)
    return parse_lock(file.read_text(encoding="utf-8"), name) if file.is_file() else None


def sha256_of(path: Path) -> str:
    """The file's SHA-256 as lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
