"""`python -m tests.soak`: see the package."""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from tests.hosts import world
from tests.java_client import fetch_generations
from tests.jvms import fetch_packages
from tests.soak import page
from tests.soak.run import Soak

_INSIDE = "--inside"


def main():
    """Return the exit code: 1 if a promise was broken."""
    parser = argparse.ArgumentParser("tests.soak")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--rate", type=int, default=240, help="rows/s of all lanes together")
    parser.add_argument("--out", type=Path, default=page.RESULTS, help="file of the results (JSON)")
    parser.add_argument("--page", action="store_true", help="write docs/clusters.md, and no more")
    parser.add_argument("--samples", type=Path, help="keep all samples, as lines of JSON")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.page:
        page.write_page()
        return 0
    if not args.inside:
        fetch_generations()
        fetch_packages()
        if lacks := world.missing():
            parser.error(f"no hosts can be made here: {lacks}")
        for path in (args.out, args.samples):
            if path and path.resolve().parts[1] in ("tmp", "run"):
                parser.error(
                    f"{path}: hosts have a /tmp and a /run of their own, which end with them"
                )
        return _in_session(["--seed", str(args.seed)])
    args.seconds = args.minutes * 60
    with tempfile.TemporaryDirectory(prefix="rocket-sink-soak-") as folder:
        soak = Soak(Path(folder), args)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: soak.stop())
        return int(bool(soak.play()["broken"]))


def _in_session(more):
    """Run the soak in a session of its own: Ctrl-C reaches this process alone, which passes it on.

    Brokers and drivers go on running, so that the soak can end them in order.
    """
    inner = [sys.executable, "-m", "tests.soak", *sys.argv[1:], *more, _INSIDE]
    process = subprocess.Popen(
        world.command(inner), start_new_session=True, stdin=subprocess.DEVNULL
    )

    def hand_on(number, frame):
        with contextlib.suppress(psutil.Error):
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
            for member in family:
                # The first process with this command line is the soak itself.
                if member.cmdline()[: len(inner)] == inner:
                    os.kill(member.pid, signal.SIGINT)
                    return

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hand_on)
    return process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
