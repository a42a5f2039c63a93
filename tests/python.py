"""Python processes of tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*words, environ=os.environ, cwd=ROOT, timeout_s=600.0, may_fail=False):
    """Run Python with these arguments and this repository on its path, until it ends.

    Raises AssertionError with the end of its standard error if it fails, unless it `may_fail`.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)], env={**environ, "PYTHONPATH": str(ROOT)}, cwd=cwd,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert may_fail or done.returncode == 0, done.stderr[-5000:]
    return done
