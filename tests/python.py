"""Python processes of tests."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(
    *words: object, environ: Mapping[str, str] = os.environ, cwd: Path = ROOT,
    timeout_s: float = 600.0, may_fail: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run Python with these arguments and this repository on its path, until it ends.

    Raises AssertionError with the end of its standard error if it fails, unless it `may_fail`.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)], env={**environ, "PYTHONPATH": str(ROOT)}, cwd=cwd,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert may_fail or done.returncode == 0, done.stderr[-5000:]
    return done
