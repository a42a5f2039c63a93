"""A plugin of pytest that notes which lines each test runs, or runs noted tests only.

`python -m tools.mutants` gives its orders in the environment. `MUTANTS_MAP` is a data file of
`coverage` for one file of tests. It gets one context per test, and an empty one for what runs at
imports and while tests are collected. A JSON file beside it gets the seconds of tests that passed,
and the digests of the files that ran; the folder `sources` gets their texts, named by digest.
`MUTANTS_TESTS` is a JSON file of the tests to run, in that order, and their seconds without a
mistake. A test that takes much longer ends the process by SIGALRM. If a file of tests cannot be
imported, the process ends with `NOT_COLLECTED`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import coverage
import pytest
from hypothesis import Phase, settings

NOT_COLLECTED: Final = 90
_SECONDS: dict[str, float] = {}
_EXPECTED: dict[str, float] = {}
_NOT_COLLECTED: list[str] = []
_FAILED: set[str] = set()
"""Files with tests that failed without a mistake, perhaps on a busy machine."""
_MAP = os.environ.get("MUTANTS_MAP", "")
_UNFINISHED = f"{_MAP}.new" if _MAP else None
"""The data file until all lines are in it: another draw may read the old one meanwhile."""
_MEASURED = coverage.Coverage(data_file=_UNFINISHED, config_file=False, source=["rocket_sink"])
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
        _EXPECTED.update(json.loads(Path(path).read_text()))
        order = {name: place for place, name in enumerate(_EXPECTED)}
        items[:] = sorted(
            (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if _MAP:
        if sys.gettrace() is None:
            # An error inside the tracer, such as a RecursionError of an earlier test, ended it.
            _MEASURED.stop()
            _MEASURED.start()
        _MEASURED.switch_context(item.nodeid)
    if item.nodeid not in _EXPECTED:
        return (yield)
    # A busy machine takes several times as long.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 20 + 5 * _EXPECTED[item.nodeid])
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _FAILED.add(report.nodeid.partition("::")[0])
    if report.when == "call" and report.passed:
        _SECONDS[report.nodeid] = report.duration


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _NOT_COLLECTED.append(f"{report.nodeid}: {report.longreprtext.splitlines()[-1]}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _NOT_COLLECTED:
        session.exitstatus = NOT_COLLECTED
        for text in _NOT_COLLECTED:
            session.config.get_terminal_writer().line(f"NOT COLLECTED {text}")
    elif _MAP:
        _MEASURED.stop()
        _MEASURED.save()
        data = _MEASURED.get_data()
        tests = {name.partition("::")[0] for name in _SECONDS}
        files = {*tests, *filter(data.lines, data.measured_files())}
        # Without its own digest, a file of tests runs again before the next draw.
        digests = {file: digest(Path(file)) for file in files - _FAILED}
        sources = Path(_MAP).with_name("sources")
        sources.mkdir(exist_ok=True)
        for file, name in digests.items():
            (sources / name).write_text(Path(file).read_text())
        assert _UNFINISHED is not None
        Path(_UNFINISHED).replace(_MAP)
        Path(_MAP).with_suffix(".json").write_text(
            json.dumps({"seconds": _SECONDS, "digests": digests})
        )
