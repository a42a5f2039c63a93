"""Plants defects in a copy of the tree, one at a time, and shows that the suite catches each.

    python -m tests.mutation                    all of them (some start Spark)
    python -m tests.mutation --only NAME...     these
    python -m tests.mutation --short COUNT      some of each room, with the short form's tests only
    python -m tests.mutation --list             their names, and what a user would lose

A defect is caught when a test fails: tests that cannot be collected, or that do not end, catch
nothing. Exit code 1: a defect survived, or the tests fail without any.
"""

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

from rocket_sink.commands.common.output import Bar, line, note_lines, show, table
from tests.mutation.defects import DEFECTS
from tests.test_short import is_seen, room
from tools.scratch_tree import copy_tree, write_source

ROOT = Path(__file__).parents[2]
LONGEST_S = 600.0
"""The longest time for the tests of one defect; the run without a defect gets a multiple."""
_SHORT = ("-m", "not long and not slow")
"""Options of pytest that leave the long tests out of named files, too."""
_FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)


class Verdict(NamedTuple):
    """The outcome of one defect's tests: the test that failed, or the reason why no test did."""

    caught: bool
    text: str
    duration_s: float


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="plant these only")
    parser.add_argument(
        "--short", type=int, metavar="COUNT", help="plant some that the short form must catch"
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    args = parser.parse_args(arguments)
    defects = {defect.name: defect for defect in DEFECTS}
    if unknown := sorted(set(args.only or ()) - defects.keys()):
        parser.error(f"unknown defects: {', '.join(unknown)} (--list shows them)")
    chosen = [defects[name] for name in dict.fromkeys(args.only or defects)]
    if args.short is not None:
        chosen = _seen_by_the_short_form(chosen, args.short)
    if args.list:
        for defect in chosen:
            line(f"{defect.name}  {defect.path}: {defect.why}")
        return 0
    with tempfile.TemporaryDirectory(prefix="rocket-sink-mutation-") as folder:
        return _run(chosen, Path(folder), () if args.short is None else _SHORT)


def _seen_by_the_short_form(defects, count):
    """Choose defects that tests of the short form see, from one room after the other."""
    rooms = {}
    for defect in Random(count).sample(defects, len(defects)):
        if is_seen(defect):
            rooms.setdefault(room(defect), []).append(defect)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*rooms.values()))
    return [defect for defect in turns if defect is not None][:count]


def _run(chosen, tree, selection):
    copy_tree(ROOT, tree)
    tests = dict.fromkeys(test for defect in chosen for test in defect.tests)
    with Bar("tests without a defect", len(tests)) as bar:
        code, output = _run_tests(tree, [*selection, *tests], LONGEST_S + 20 * len(tests))
        bar.advance_to(len(tests))
    if code != 0:
        note_lines(output[-4000:])
        note_lines(f"the tests do not pass without a defect (exit code {code})")
        return 1
    verdicts = []
    with Bar("defects", len(chosen)) as bar:
        for number, defect in enumerate(chosen):
            bar.advance_to(number, defect.name)
            verdicts.append(_verdict(defect, tree, selection))
            if not verdicts[-1].caught:
                bar.say(f"{defect.name}: {verdicts[-1].text}")
        bar.advance_to(len(chosen))
    rows = [(d.name, v.text, v.duration_s) for d, v in zip(chosen, verdicts, strict=True)]
    survived = sum(not verdict.caught for verdict in verdicts)
    title = f"{len(chosen) - survived} of {len(chosen)} defects caught"
    show(table(title, ("defect", "caught by", "seconds"), rows, numbers="seconds"))
    return 1 if survived else 0


def _verdict(defect, tree, selection):
    path, started_s = tree / defect.path, time.monotonic()
    text = path.read_text()
    if text.count(defect.before) != 1:
        return Verdict(False, f"survived: its text is {text.count(defect.before)} times there", 0.0)
    write_source(path, text.replace(defect.before, defect.after))
    try:
        code, output = _run_tests(tree, [*selection, *defect.tests], LONGEST_S)
    finally:
        write_source(path, text)
    duration_s = time.monotonic() - started_s
    failed = _FAILED.search(output)
    if code == 1 and failed:
        return Verdict(True, failed[1].removeprefix("tests/"), duration_s)
    why = {None: "its tests did not end", 0: "its tests passed"}.get(code, "no test failed")
    return Verdict(False, f"survived: {why}" + (f" (exit code {code})" if code else ""), duration_s)


def _run_tests(tree, tests, longest_s):
    """Return pytest's exit code (None if it did not end in time) and its output."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-rf", "--tb=short", "--hypothesis-seed=0",
        "-p", "no:cacheprovider", "-o", "timeout=0", *tests,
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=tree, env=environment, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as running:  # fmt: skip
        try:
            output, _ = running.communicate(timeout=longest_s)
        except BaseException as error:
            # Kill the whole process group: a JVM that a test started would keep the pipe open.
            os.killpg(running.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None, running.communicate()[0]
    return running.returncode, output


if __name__ == "__main__":
    sys.exit(main())
