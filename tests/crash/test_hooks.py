"""The moments of the crash harness are functions that the product has."""

import subprocess
import sys
from pathlib import Path

HOOKS = Path(__file__).parent / "hooks"


def test_each_moment_finds_its_function() -> None:
    """Run in a process of its own, because functions stay wrapped."""
    ran = subprocess.run(
        [sys.executable, "-c", "import crash_points; crash_points.install()"],
        env={"PYTHONPATH": f"{HOOKS}:{HOOKS.parents[2]}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
