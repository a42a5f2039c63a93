"""A plugin of pytest that notes which lines each test runs, or runs noted tests only.

`python -m tools.mutants` gives its orders in the environment: `MUTANTS_MAP` is a folder that gets a
data file of `coverage` per file of tests, with one context per test, and beside it a JSON file with
the tests that passed and the digests of the files that were read. `MUTANTS_TESTS` is a file with
the tests to run, one a line, in that order."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

_TESTS: dict[str, dict[str, float]] = {}
"""{file of tests: {test that passed: its seconds}}."""
_CURRENT: dict[str, coverage.Coverage] = {}
"""The measurement of the present file of tests."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def data_file(folder: Path, tests: str) -> Path:
    """Return where the lines of a file of tests are noted."""
    return folder / f"{tests.replace('/', '~')}.sqlite"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if path := os.environ.get("MUTANTS_TESTS"):
        order = {name: place for place, name in enumerate(Path(path).read_text().splitlines())}
        items[:] = sorted(
            (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if folder := os.environ.get("MUTANTS_MAP"):
        tests = item.nodeid.partition("::")[0]
        if tests not in _CURRENT:
            _end(Path(folder))
            measured = coverage.Coverage(
                data_file=str(data_file(Path(folder), tests)), config_file=False,
                source=["rocket_sink"],
            )  # fmt: skip
            measured.set_option("run:relative_files", True)
            measured.erase()
            measured.start()
            _CURRENT[tests] = measured
        _CURRENT[tests].switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        tests = _TESTS.setdefault(report.nodeid.partition("::")[0], {})
        tests[report.nodeid] = report.duration


def pytest_sessionfinish() -> None:
    if folder := os.environ.get("MUTANTS_MAP"):
        _end(Path(folder))


def _end(folder: Path) -> None:
    for tests, measured in _CURRENT.items():
        measured.stop()
        measured.save()
        files = [tests, *measured.get_data().measured_files()]
        note = {"seconds": _TESTS.get(tests, {}), "digests": {f: digest(Path(f)) for f in files}}
        data_file(folder, tests).with_suffix(".json").write_text(json.dumps(note))
    _CURRENT.clear()
