"""Feeds every decoder with what a coverage-guided fuzzer (atheris, libFuzzer) thinks of.

    python -m tests.fuzz                        half a million inputs each, eleven million in all
    python -m tests.fuzz --only route stored    these
    python -m tests.fuzz --runs 5000000         more of each
    python -m tests.fuzz --list                 their names
    python -m tests.fuzz --record               record the traffic of real brokers anew

Samples of correct peers and recorded traffic (`recorded.json`) are the seeds, and what was found to
lead further is kept in --corpus for the next time. An input after which a target raises anything
but its own error is kept, too, and named; exit code 1. Needs the extra `fuzz` (Linux, CPython 3.11
to 3.13).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import platformdirs

from rocket_sink.commands.common.output import Bar, line, note_lines, show, table
from tests.fuzz.recorded import recorded
from tests.fuzz.targets import TARGETS

ROOT: Final = Path(__file__).parents[2]
RUNS: Final = 500_000
_PROGRESS: Final = re.compile(r"#(\d+)\s+(?:.*cov: (\d+))?")
_LONGEST: Final = 4096
_SLOW_S: Final = 20
"""An input that takes so long is a find: a peer could hold up a client with it."""
_MEMORY_MB: Final = 2048


class Fuzzed(NamedTuple):
    """What one target's run gave. `finding`: the end of its output; empty: nothing was found."""

    name: str
    inputs: int
    coverage: int
    seconds: float
    finding: str


def fuzz(name: str, runs: int, corpus: Path, bar: Bar | None = None) -> Fuzzed:
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
    started_s, inputs, coverage, tail = time.monotonic(), 0, 0, list[str]()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for text in process.stdout:
            tail = [*tail[-60:], text]
            if found := _PROGRESS.match(text):
                inputs, coverage = int(found[1]), int(found[2] or coverage)
                if bar is not None:
                    bar.advance_to(min(inputs, runs), name)
    failed = process.returncode != 0
    return Fuzzed(
        name, inputs, coverage, time.monotonic() - started_s, "".join(tail) if failed else ""
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*TARGETS, "all"], metavar="TARGET")
    parser.add_argument("--runs", type=int, default=RUNS, help="inputs of each target")
    parser.add_argument(
        "--corpus", type=Path, default=Path(platformdirs.user_cache_dir("rocket-sink")) / "fuzz"
    )
    parser.add_argument("--list", action="store_true", help="the targets' names")
    parser.add_argument("--record", action="store_true", help="record real traffic, as seeds")
    given = parser.parse_args(arguments)
    if given.record:
        from tests.fuzz.record import record_all

        record_all()
        return 0
    if given.list:
        for name in TARGETS:
            line(name)
        return 0
    done = []
    for name in given.only or TARGETS:
        with Bar(name, given.runs) as bar:
            done.append(fuzz(name, given.runs, given.corpus, bar))
        if done[-1].finding:
            note_lines(done[-1].finding)
    total = sum(one.inputs for one in done)
    show(table(
        f"{total:,} inputs, {sum(bool(one.finding) for one in done)} finds",
        ("target", "inputs", "branches", "seconds", "found"),
        [(one.name, one.inputs, one.coverage, one.seconds, "YES" if one.finding else "nothing")
         for one in done],
    ))  # fmt: skip
    return int(any(one.finding for one in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
