"""A plugin of pytest that notes which lines each test runs, or runs noted tests only.

`python -m tools.mutants` gives its orders in the environment. `MUTANTS_MAP` is a data file of
`coverage` for one file of tests. It gets one context per test, and an empty one for what runs at
imports and while tests are collected. A JSON file beside it gets the seconds of tests that passed,
and the digests of the files that were read. `MUTANTS_TESTS` is a file with the tests to run, one a
line, in that order."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest
from hypothesis import Phase, settings

_SECONDS: dict[str, float] = {}
_MAP = os.environ.get("MUTANTS_MAP", "")
_MEASURED = coverage.Coverage(data_file=_MAP or None, config_file=False, source=["rocket_sink"])
if _MAP:
    _MEASURED.set_option("run:relative_files", True)
    _MEASURED.erase()
    _MEASURED.start()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Let no failed test of hypothesis look for a smaller example, which takes minutes."""
    settings.register_profile("mutants", settings.default, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if path := os.environ.get("MUTANTS_TESTS"):
        order = {name: place for place, name in enumerate(Path(path).read_text().splitlines())}
        items[:] = sorted(
            (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if _MAP:
        _MEASURED.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _SECONDS[report.nodeid] = report.duration


def pytest_sessionfinish() -> None:
    if _MAP:
        _MEASURED.stop()
        _MEASURED.save()
        tests = {name.partition("::")[0] for name in _SECONDS}
        files = {*tests, *_MEASURED.get_data().measured_files()}
        note = {"seconds": _SECONDS, "digests": {file: digest(Path(file)) for file in files}}
        Path(_MAP).with_suffix(".json").write_text(json.dumps(note))
