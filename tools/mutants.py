"""Plants small mistakes that nobody chose, one at a time, and shows which of them no test sees.

    python -m tools.mutants --draw 30 --seed 1 --room wire     30 places of a room
    python -m tools.mutants --draw 30 --seed 1 --change main   only lines that differ from main

`tools.mutant_places` says what is planted. Tests that run the changed line decide, the nearest and
quickest first, for at most `BUDGET_S`; a mistake is caught when one of them fails, or takes much
longer than without the mistake. Tests that start Java decide with `--java` only. All runs in a copy
of the tree. The command ends with an error if a file of tests cannot be imported, because such a
file would catch everything.

A map in ~/.cache/rocket-sink/mutants says which test runs which line. Files of tests without a map,
files that have changed, and those that run a line in or beside a change, run first (`--draw 0`:
nothing else). `tools/equivalent_mutants.txt` names changes that change nothing: they count neither
as caught nor as missed.

Needs `pip install mutmut coverage`. Exit code 1: less than 85 % were caught."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, NoReturn

import pytest
from coverage import CoverageData

from rocket_sink.commands.common.output import Bar, line
from tools.covered_lines import NOT_COLLECTED, digest
from tools.mutant_places import Place, Source, difference
from tools.scratch_tree import copy_tree, write_source

ROOT: Final = Path(__file__).resolve().parent.parent
MAP: Final = Path.home() / ".cache" / "rocket-sink" / "mutants"
EQUIVALENT: Final = ROOT / "tools" / "equivalent_mutants.txt"
FEWEST: Final = 0.85
BUDGET_S: Final = 30.0
"""Seconds of tests per mistake, by their duration without one."""
_LARGE: Final = (
    "pyarrow.compute", "pyarrow.parquet", "pyspark.sql", "hypothesis", "deltalake", "duckdb",
    "cryptography.x509", "opentelemetry.sdk",
)  # fmt: skip
"""Packages that tests import, and that cost more than most tests."""
_NO_JAVA: Final = "not spark and not cluster and not slow"


class NotCollectedError(Exception):
    """A file of tests cannot be imported, although no mistake is planted."""

    def __init__(self, output: str) -> None:
        super().__init__("\n".join(re.findall(r"NOT COLLECTED .*", output)))


class Mutant(NamedTuple):
    """A changed source: its file, its place, the new text and the diff."""

    path: str
    place: Place
    text: str
    diff: Sequence[str]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--draw", type=int, required=True, metavar="N", help="number of mistakes")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--room", metavar="R", help="a folder of rocket_sink, or `top`")
    parser.add_argument("--change", metavar="REV", help="only lines that differ from this commit")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH",
                        help="only tests in these files and folders decide")  # fmt: skip
    parser.add_argument("--java", action="store_true", help="tests that start Java decide, too")
    args = parser.parse_args(arguments)
    lines = changed_lines(args.change) if args.change else None
    paths = [path for path in sources(args.room) if lines is None or path in lines]
    tests = sorted({
        str(path.relative_to(ROOT)) for name in args.tests
        for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("test_*.py"))
    })  # fmt: skip
    for package in _LARGE:
        importlib.import_module(package)
    with tempfile.TemporaryDirectory(prefix="rocket-sink-mutants-") as folder:
        suite = Suite(Path(folder), MAP / ("java" if args.java else "no-java"), args.java)
        # Draw at once: the working tree may change while tests run in its copy.
        mutants = [*islice(draw(paths, lines, Random(args.seed)), args.draw)]
        try:
            suite.note_lines_of(tests)
            return judge(suite, mutants, tests) if args.draw else 0
        except NotCollectedError as e:
            line(f"tests cannot be imported: {e}")
            return 2


def sources(room: str | None) -> list[str]:
    """Return the files of a room, or of all rooms."""
    folder = ROOT / "rocket_sink" / ("" if room in (None, "top") else str(room))
    files = folder.glob("*.py") if room == "top" else folder.rglob("*.py")
    return sorted(str(path.relative_to(ROOT)) for path in files)


def changed_lines(revision: str) -> dict[str, set[int]]:
    """Return {file: lines} of the package that differ from a commit, or are new."""
    diff = _git("diff", "-U0", "--no-prefix", revision, "--", "rocket_sink")
    lines: dict[str, set[int]] = {}
    path = ""
    for text in diff.splitlines():
        if text.startswith("+++ "):
            path = text[4:]
        elif hunk := re.match(r"@@ \S+ \+(\d+),?(\d*)", text):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(path, set()).update(range(first, first + count))
    return lines


def draw(paths: Iterable[str], lines: dict[str, set[int]] | None, rng: Random) -> Iterator[Mutant]:
    """Draw mistakes: each place, for each operator, has the same chance."""
    known = {text.partition("  # ")[0] for text in EQUIVALENT.read_text().splitlines()}
    parsed = {path: Source((ROOT / path).read_text()) for path in paths}
    places = [
        (path, place) for path, source in parsed.items() for place in source.places
        if lines is None or place.line in lines[path]
    ]  # fmt: skip
    for path, place in rng.sample(places, len(places)):
        source = parsed[path]
        text = source.changed(place, rng.choice(place.others))
        diff = difference(path, source.text, text)
        plus = " ".join(each[1:].strip() for each in diff if each.startswith("+"))
        if not diff or f"{path}: {plus}" in known or not _is_python(text):
            continue
        yield Mutant(path, place, text, diff)


def judge(suite: Suite, mutants: Sequence[Mutant], tests: Sequence[str]) -> int:
    """Plant each mistake, print those that survive and the share by room; return the exit code."""
    caught: dict[str, list[bool]] = {}
    with Bar("mutants", len(mutants)) as bar:
        for number, mutant in enumerate(mutants):
            where = f"{mutant.path}:{mutant.place.line}"
            bar.advance_to(number, where)
            reason = suite.survival(mutant, tests)
            caught.setdefault(_room(mutant.path), []).append(reason is None)
            if reason is not None:
                bar.say(f"{where} {mutant.place.operator}: {reason}")
                for text in mutant.diff:
                    bar.say(text)
        bar.advance_to(len(mutants))
    for room, verdicts in sorted(caught.items()):
        line(f"{room}: {sum(verdicts)} of {len(verdicts)} caught")
    total = [verdict for verdicts in caught.values() for verdict in verdicts]
    line(
        f"{sum(total) / max(1, len(total)):.0%} of {len(total)} caught, "
        f"{suite.overdue} of them by tests that did not end"
    )
    return 0 if sum(total) >= FEWEST * len(total) else 1


class Suite:
    """A copy of the tree in `tree`, and the map of the lines that its tests run in `folder`.

    Attributes:
        overdue: number of mistakes that were caught because a test did not end.
    """

    def __init__(self, tree: Path, folder: Path, java: bool) -> None:
        self._tree = tree
        self._map = folder
        self._marks = "not slow" if java else _NO_JAVA
        self.overdue = 0
        folder.mkdir(parents=True, exist_ok=True)
        copy_tree(ROOT, tree)

    def note_lines_of(self, tests: Sequence[str]) -> None:
        """Run the files of tests whose lines are unknown.

        Raises:
            NotCollectedError: a file of tests cannot be imported.
        """
        stale = [test for test in tests if self._is_stale(test)]
        with Bar("map of lines", len(stale)) as bar:
            for number, test in enumerate(stale):
                bar.advance_to(number, test)
                lines = self._lines(test)
                code, output = self._run(["-m", self._marks, test], 1800, MUTANTS_MAP=lines)
                if code == pytest.ExitCode.NO_TESTS_COLLECTED:  # All its tests need Java.
                    note = {"digests": {test: digest(self._tree / test)}}
                    lines.with_suffix(".json").write_text(json.dumps(note))
                elif code == NOT_COLLECTED:
                    raise NotCollectedError(output)
                for failed in re.findall(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE):
                    bar.say(f"fails without a mistake, so it is not asked: {failed}")
            bar.advance_to(len(stale))
        self._contexts.cache_clear()

    def survival(self, mutant: Mutant, tests: Sequence[str]) -> str | None:
        """Plant a mistake; return why no test sees it, or None if one does.

        Raises:
            NotCollectedError: a chosen file of tests cannot be imported, mistake or not.
        """
        chosen = self._tests_of(mutant, tests)
        if not chosen:
            return "no test runs the line"
        path, listed = self._tree / mutant.path, self._tree / "mutants-tests.txt"
        before = path.read_text()
        listed.write_text(json.dumps(chosen))
        files = [*dict.fromkeys(name.partition("::")[0] for name in chosen)]
        write_source(path, mutant.text)
        try:
            code, _ = self._run(["-x", *files], 600, MUTANTS_TESTS=listed)
        finally:
            write_source(path, before)
        if code == NOT_COLLECTED:
            without_mistake, output = self._run(["--collect-only", *files], 600)
            if without_mistake == NOT_COLLECTED:
                raise NotCollectedError(output)
        self.overdue += code in (None, -signal.SIGALRM)
        reasons = {0: "pass", pytest.ExitCode.NO_TESTS_COLLECTED: "are not there"}
        return f"{len(chosen)} tests {reasons[code]}" if code in reasons else None

    def _tests_of(self, mutant: Mutant, tests: Sequence[str]) -> dict[str, float]:
        """Return the tests that run the changed line, and their seconds. If it runs at an import,
        all tests of files that import it; first those that name its module."""
        place, near = mutant.place, f"tests/{_room(mutant.path)}/"
        module = mutant.path.removesuffix(".py").replace("/", ".")
        parent, _, own_name = module.rpartition(".")
        imports = rf"{module}|from {parent} import (\([^)]*|.*)\b{own_name}\b"
        by_file: list[tuple[tuple[bool, bool, float], dict[str, float]]] = []
        for test in tests:
            contexts = self._contexts(test, mutant.path)
            # Python reports no event for some lines of a statement.
            names = contexts.get(place.line) or contexts.get(place.statement_line, ())
            own: dict[str, float] = self._note(test).get("seconds", {})
            if "" not in names:
                own = {name: cost for name, cost in own.items() if name in names}
            if own:
                is_far = re.search(imports, (self._tree / test).read_text()) is None
                by_file.append(((is_far, not test.startswith(near), sum(own.values())), own))
        chosen: dict[str, float] = {}
        for _, own in sorted(by_file, key=lambda file: file[0]):
            for name, cost in sorted(own.items(), key=lambda test: test[1]):
                if sum(chosen.values()) + cost <= BUDGET_S or not chosen:
                    chosen[name] = cost
        return chosen

    def _is_stale(self, test: str) -> bool:
        """Return whether the file of tests has changed, or runs a line in or beside a change."""
        digests = self._note(test).get("digests", {})
        if digests.get(test) != digest(self._tree / test):
            return True
        for path, old in digests.items():
            if not (self._tree / path).exists():
                return True
            if digest(self._tree / path) != old:
                _, changed = self._carried_lines(path, old)
                contexts = self._data(test).contexts_by_lineno(path)
                if any(name for old_line in changed for name in contexts.get(old_line, ())):
                    return True
        return False

    @functools.cache  # noqa: B019  The suite lives as long as the process.
    def _contexts(self, test: str, path: str) -> Mapping[int, Collection[str]]:
        """Return {line of `path`: the tests that run it}."""
        old = self._note(test).get("digests", {}).get(path)
        if old is None:
            return {}
        contexts = self._data(test).contexts_by_lineno(path)
        if digest(self._tree / path) == old:
            return contexts
        carried, _ = self._carried_lines(path, old)
        return {
            new_line: {name for old_line in old_lines for name in contexts.get(old_line, ())}
            for new_line, old_lines in carried.items()
        }

    def _carried_lines(self, path: str, old: str) -> tuple[dict[int, Collection[int]], set[int]]:
        source = self._map / "sources" / old
        return _carried_lines(source.read_text(), (self._tree / path).read_text())

    def _data(self, test: str) -> CoverageData:
        data = CoverageData(str(self._lines(test)))
        data.read()
        return data

    def _lines(self, test: str) -> Path:
        return self._map / f"{test.replace('/', '~')}.sqlite"

    def _note(self, test: str) -> dict[str, dict[str, Any]]:
        path = self._lines(test).with_suffix(".json")
        note: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        return note

    def _run(self, more: Sequence[str], longest_s: float, **orders: Path) -> tuple[int | None, str]:
        """Run pytest in a fork of this process, which has imported the large packages. Return its
        exit code (None if it did not end in time) and its output."""
        with tempfile.TemporaryFile() as output:
            process = os.fork()
            if not process:
                os.setsid()
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                self._become_pytest(more, {name: str(path) for name, path in orders.items()})
            until_s = time.monotonic() + longest_s
            status, code = 0, None
            try:
                while code is None and time.monotonic() < until_s:
                    time.sleep(0.02)
                    ended, status = os.waitpid(process, os.WNOHANG)
                    code = os.waitstatus_to_exitcode(status) if ended else None
            finally:
                # Kill the whole process group: a test may have started processes.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
            if code is None:
                os.waitpid(process, 0)
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def _become_pytest(self, more: Sequence[str], orders: dict[str, str]) -> NoReturn:
        try:
            os.chdir(self._tree)
            os.environ.update(PYTHONPATH=str(self._tree), **orders)
            sys.path.insert(0, str(self._tree))
            for name in [*sys.modules]:
                if name.partition(".")[0] in ("rocket_sink", "pyspark_rocketmq", "tests", "tools"):
                    del sys.modules[name]
            code = pytest.main([
                "-q", "-rf", "--tb=no", "--hypothesis-seed=0", "-p", "no:cacheprovider",
                "-p", "tools.covered_lines", "-o", "timeout=0", *more,
            ])  # fmt: skip
        except BaseException:
            traceback.print_exc()
            os._exit(99)
        # Do not wait for threads: a mistake may keep one.
        os._exit(code)


@functools.cache
def _carried_lines(old: str, new: str) -> tuple[dict[int, Collection[int]], set[int]]:
    """Compare a source with the text that it had when its lines were noted. Return {its lines:
    the old lines in their place}, and the old lines in or beside a change."""
    before, after = old.splitlines(), new.splitlines()
    carried: dict[int, Collection[int]] = {}
    changed: set[int] = set()
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(
        None, before, after, autojunk=False
    ).get_opcodes():
        if tag == "equal":
            carried.update({j + n + 1: (i + n + 1,) for n in range(i_end - i)})
        else:
            old_lines = range(i + 1, i_end + 1) or (i, i + 1)
            carried.update(dict.fromkeys(range(j + 1, j_end + 1), old_lines))
            changed.update(old_lines)
    return carried, changed


def _room(path: str) -> str:
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 else "top"


def _is_python(text: str) -> bool:
    try:
        compile(text, "", "exec")
    except SyntaxError:
        return False
    return True


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
