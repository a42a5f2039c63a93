"""Feed every decoder with inputs of a coverage-guided fuzzer (atheris, libFuzzer).

    python -m tests.fuzz                        half a million inputs each, eleven million in all
    python -m tests.fuzz --only route stored    only these targets
    python -m tests.fuzz --runs 5000000         more inputs per target

    python -m tests.fuzz --record               record the traffic of real brokers anew

Samples of correct peers and recorded traffic (`recorded.json`) are the seeds. Inputs that reach new
code are kept in --corpus for the next run. If a target raises anything but its own error, the input
is kept and named, and the exit code is 1. Needs the extra `fuzz` (Linux, CPython 3.11 to 3.13).
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

import platformdirs

from rocket_sink.commands.common.output import line, note_lines, show, table
from tests.fuzz.recorded import recorded
from tests.fuzz.targets import TARGETS

ROOT: Final = Path(__file__).parents[2]
RUNS: Final = 500_000
_PROGRESS: Final = re.compile(r"^#(\d+)\s+(?:.*cov: (\d+))?", re.MULTILINE)
_LONGEST: Final = 4096
_SLOW_S: Final = 20
"""An input that takes this long is a finding: a peer could hold up a client with it."""
_MEMORY_MB: Final = 2048


class Fuzzed(NamedTuple):
    """The result of a target's run. `finding` is the end of its output; empty if all was well."""

    name: str
    inputs: int
    coverage: int
    seconds: float
    finding: str


def fuzz(name, runs, corpus):
    """Run a target in a process of its own."""
    folder = corpus / re.sub(r"\W", "-", name)
    folder.mkdir(parents=True, exist_ok=True)
    named = TARGETS if name == "all" else {name: TARGETS[name]}
    for number, (target_name, target) in enumerate(named.items()):
        samples = [*target.samples, *recorded(target_name)]
        for which, sample in enumerate(samples):
            seed = bytes([number]) + sample if name == "all" else sample
            (folder / f"sample-{number}-{which}").write_bytes(seed)
    command = [
        sys.executable, "-m", "tests.fuzz.one", name, f"-runs={runs}", f"-max_len={_LONGEST}",
        f"-timeout={_SLOW_S}", f"-rss_limit_mb={_MEMORY_MB}", f"-artifact_prefix={folder}/find-",
        str(folder),
    ]  # fmt: skip
    started_s = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", check=False,
    )  # fmt: skip
    seconds = time.monotonic() - started_s
    steps = _PROGRESS.findall(done.stdout) or [("0", "0")]
    inputs, coverage = (
        max(int(number or 0) for number in numbers) for numbers in zip(*steps, strict=True)
    )
    finding = done.stdout[-5000:] if done.returncode else ""
    return Fuzzed(name, inputs, coverage, seconds, finding)


def main(arguments):
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*TARGETS, "all"], metavar="TARGET")
    parser.add_argument("--runs", type=int, default=RUNS, help="inputs of each target")
    parser.add_argument(
        "--corpus", type=Path, default=Path(platformdirs.user_cache_dir("rocket-sink")) / "fuzz"
    )

    parser.add_argument("--record", action="store_true", help="record real traffic, as seeds")
    options = parser.parse_args(arguments)
    if options.record:
        from tests.fuzz.record import record_all

        record_all()
        return 0
    done = []
    for name in options.only or TARGETS:
        line(f"{name} ...")
        done.append(fuzz(name, options.runs, options.corpus))
        if done[-1].finding:
            note_lines(done[-1].finding)
    total = sum(run.inputs for run in done)
    show(table(
        f"{total:,} inputs, {sum(bool(run.finding) for run in done)} finds",
        ("target", "inputs", "branches", "seconds", "found"),
        [(run.name, run.inputs, run.coverage, run.seconds, "YES" if run.finding else "nothing")
         for run in done],
    ))  # fmt: skip
    return int(any(run.finding for run in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
