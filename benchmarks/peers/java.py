"""The official Java client, with the cluster's jars: JavaPeer sends, and JavaPull reads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from benchmarks.processes import Launcher
from rocket_sink.errors import RocketSinkError

_COMPILER: Final = "jdk.compiler/com.sun.tools.javac.Main"
_TIMEOUT_S: Final = 120


def java_launcher(java: Path, class_path: str, folder: Path, program: str = "JavaPeer") -> Launcher:
    """Compile the program into `folder`; returns how to start it.

    Raises:
        RocketSinkError: this Java has no compiler (a JRE), or compilation fails.
    """
    source = Path(__file__).with_name(f"{program}.java")
    classes = folder / program
    classes.mkdir(parents=True, exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if name not in _MEDDLERS}
    environ["CLASSPATH"] = os.pathsep.join([str(classes), class_path])
    done = subprocess.run(
        [str(java), "-m", _COMPILER, "-nowarn", "-proc:none", "-d", str(classes), str(source)],
        env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RocketSinkError(
            f"the Java client cannot be measured: {java} does not compile {source.name} "
            f"({lines[0] if lines else done.returncode}); a JDK is needed, not a JRE"
        )
    return Launcher((str(java), "-Xmx1g", f"-Duser.home={folder}", program), environ)


_MEDDLERS: Final = frozenset({"JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS"})
"""The user's options for Java programs must not change the measurement."""
