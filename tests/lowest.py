"""Runs the tests without Java with the lowest versions that setup.cfg allows.

    python -m tests.lowest                 with the oldest Python of this machine
    python -m tests.lowest tests/wire -x   pytest's own arguments instead of all tests

uv resolves each direct requirement of the extra `test` to its lowest version. An extra may ask for
more than the core does, so pyarrow is then put down to the core's own bound. The command `uv` has
to be on the path.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import platformdirs

from tests.versions.__main__ import PYTHON_TESTS, ROOT, our_range, pythons


def main(arguments):
    folder = platformdirs.user_cache_path("rocket-sink") / "versions" / "lowest"
    python = folder / "bin" / "python"
    oldest = next(iter(pythons().values()))
    subprocess.run(["uv", "venv", "--seed", "--clear", "--python", oldest, folder], check=True)
    install = ["uv", "pip", "install", "--python", str(python)]
    lowest = ["--resolution", "lowest-direct", "-e", ".[test]"]
    subprocess.run([*install, *lowest], cwd=ROOT, check=True)
    subprocess.run([*install, "--no-deps", f"pyarrow=={lower_bound('pyarrow')}"], check=True)
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    environ = {**os.environ, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    return subprocess.call([*command, *(arguments or PYTHON_TESTS)], cwd=ROOT, env=environ)


def lower_bound(package):
    """Return the lowest version of a package that setup.cfg allows."""
    match = re.search(r">=([\d.]+)", str(our_range(package)))
    assert match, package
    return match[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
