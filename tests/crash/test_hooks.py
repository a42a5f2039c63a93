"""The moments of the crash harness are functions that the product has."""

from pathlib import Path

from tests.python import run_python

INSTALL = """
import sys
sys.path.insert(0, sys.argv[1])
import crash_points
crash_points.install()
"""


def test_each_moment_finds_its_function():
    """Run in a process of its own, because functions stay wrapped."""
    run_python("-c", INSTALL, Path(__file__).parent / "hooks")
