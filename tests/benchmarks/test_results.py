"""Results files: written, read, drawn, put into a page."""

import io
import json
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks import command
from benchmarks.command import main
from benchmarks.figures import Case, Figures
from benchmarks.html import page
from benchmarks.readme_tables import (
    CHART,
    END_MARK,
    FILES,
    LANES_END,
    LANES_MARK,
    PAGE,
    START_MARK,
    chart,
    lane_figures,
    with_figures,
)
from benchmarks.render import tables
from benchmarks.results import RUNS, Results, read_results
from benchmarks.run import measure
from rocket_sink.errors import ConfigurationError
from tests.benchmarks.test_curves import points

MACHINE = {"cores": 2, "processor": "P", "memory_gb": 1, "python": "3", "java": 17, "pyspark": "4",
           "rocketmq": "5", "at": "2026-01-01T00:00:00"}  # fmt: skip

NO_ROOM: Any = SimpleNamespace(make=lambda: None)
MARKS = "\n".join((LANES_MARK, LANES_END, START_MARK, END_MARK))


def results(speed=50.0):
    cases = [Case("lane-nothing", "Spark lanes"), Case("lane", "Spark lanes", ("lane-nothing",))]
    runs = [
        Figures("lane-nothing", 10, 0.1, 100.0, 1.0, 1.0, 0.0, 0.0, 10.0, 20.0),
        Figures("lane", 10, 0.2, speed, 1.0, 2.0, 0.5, 3.0, 10.0, 30.0),
    ]
    fault = {
        "fault": "frozen 10 s", "kind": "frozen", "ours": True, "sender": "ours sync", "ok": 5,
        "per_s": 1.0, "pause_ms": 1100.0, "failed": 0, "causes": {}, "longest_ms": 900.0,
        "announced": 1, "lost": 0, "doubled": 1, "unannounced": 0,
    }  # fmt: skip
    absent, scaling = {"Kafka": "no network"}, points("rows", [1, 2])
    return Results(MACHINE, {"repeat": 1}, cases, runs, absent, [fault], scaling)


def shown(made):
    console = Console(file=io.StringIO(), width=200)
    for thing in tables(made):
        console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "r.json"
    results().write(path)
    assert read_results(path) == results()


@pytest.mark.parametrize("text", ["", "[]", '{"cases": []}', '{"cases": [{"no": 1}]}'])
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="no results file"):
        read_results(path)


def test_tables_show_what_was_measured_and_what_was_not():
    text = shown(results())
    for words in ("lane-nothing", "0.50", "1.75", "+1.50", "Kafka: absent; no network",
                  "frozen 10 s", "1.10", "Over rows", "NOT FLAT"):  # fmt: skip
        assert words in text, words


def test_the_page_loads_nothing_and_has_the_curves():
    text = page(results())
    assert text.count("<svg") == 1
    assert "lane-nothing" in text
    assert not [word for word in ("src=", "<link", "<script", "@import") if word in text]


def test_the_page_takes_figures_between_its_markers():
    before = PAGE.read_text()
    assert before.count(START_MARK) == before.count(END_MARK) == 1
    once = with_figures(before, [results()])
    assert "| lane | 50 | 1.00 | 2.00 | 0.50 | 3.00 | 30 | lane-nothing: 0.50, 1.75 |" in once
    assert with_figures(once, [results()]) == once
    assert once.partition(LANES_MARK)[0] == before.partition(LANES_MARK)[0]
    assert once.partition(END_MARK)[2] == before.partition(END_MARK)[2]
    with pytest.raises(ConfigurationError):
        with_figures("no markers", [results()])


def test_the_tables_of_the_page_are_those_of_the_stored_runs():
    text, runs = PAGE.read_text(), [*map(read_results, FILES)]
    assert with_figures(text, runs) == text
    assert CHART.read_text() == chart(runs[0])


def test_the_readme_has_the_stored_figures_of_the_lanes():
    source, *others = [*lane_figures(read_results(FILES[0]))][:4]
    for name, between in (("README.md", " and "), ("README.zh.md", "、")):
        text = (PAGE.parents[1] / name).read_text()
        assert f"{source.figures.per_s:,.0f}" in text
        assert all(f"{lane.rate:.2f}{between}{lane.cpu:.2f}" in text for lane in others)


def test_what_is_absent_is_named_with_the_module_that_is_missing():
    from benchmarks.run import reason_of

    text = "Ivy could not fetch a:b:1. Its last lines:\nx\n\t\t:: a#c;1: not found\n::"
    assert reason_of(ConfigurationError(text)).endswith("Its last lines: (a#c;1: not found)")
    assert reason_of(ValueError("one line")) == "one line"


class Twice:
    """A subject that is measured without measuring."""

    def __init__(self, name):
        self.case = Case(name, "Spark lanes")

    def warm_up(self): ...

    def run(self):
        return Figures(self.case.name, 10, 0.1, 100.0, 1.0, 1.0, 0.0, 0.0)


def test_each_run_is_reported_with_the_planned_number():
    results, progress = Results(MACHINE, {}), list[str]()
    results.on_added = lambda: progress.append(results.progress)
    made_room: list[int] = []
    room: Any = SimpleNamespace(make=lambda: made_room.append(1))
    measure([Twice("one"), Twice("two")], 2, results, lambda text: None, room)
    assert len(made_room) == 6
    assert progress == [f"{number} of 4 runs" for number in (1, 2, 3, 4)]


class Failing(Twice):
    """A subject that ends in an error, in its first run or when it is warmed up."""

    def __init__(self, name, *, warm):
        super().__init__(name)
        self.warm, self.runs = warm, 0

    def warm_up(self):
        if not self.warm:
            raise ValueError("no room for it\nmore")

    def run(self):
        self.runs += 1
        raise ValueError("no room for it\nmore")


@pytest.mark.parametrize("warm", [False, True])
def test_a_case_that_fails_is_named_and_the_others_go_on(warm):
    results, messages = Results(MACHINE, {}), list[str]()
    bad = Failing("bad", warm=warm)
    subjects = [Twice("one"), bad, Twice("two")]
    results.cases = [subject.case for subject in subjects]
    measure(subjects, 2, results, messages.append, NO_ROOM)
    assert [run.case for run in results.runs] == ["one", "two"] * 2
    assert results.failed == {"bad": "no room for it"}
    assert bad.runs == int(warm)
    assert not results.is_complete
    assert "bad failed: no room for it" in messages
    assert "bad: failed; no room for it" in shown(results)
    assert "Not measured: bad." in with_figures(MARKS, [results])


def test_three_cases_that_fail_in_a_row_end_the_run():
    """If the brokers are gone, for example, each of 172 cases would wait for them."""
    results = Results(MACHINE, {})
    bad = [Failing(name, warm=True) for name in "abcdef"]
    with pytest.raises(ValueError, match="no room"):
        measure([*bad[:2], Twice("one"), *bad[2:]], 1, results, lambda text: None, NO_ROOM)
    assert [run.case for run in results.runs] == ["one"]
    assert list(results.failed) == list("abcde")


def test_a_signal_that_an_error_hides_is_no_failure_of_a_case():
    class Interrupted(Twice):
        def run(self):
            try:
                raise KeyboardInterrupt
            finally:
                raise ValueError("its process is gone, too")

    results = Results(MACHINE, {})
    with pytest.raises(ValueError, match="gone"):
        measure([Interrupted("a"), Twice("b")], 1, results, lambda text: None, NO_ROOM)
    assert not results.failed


class TestCommand:
    """The command's file, output and exit code, with the measuring left out."""

    @pytest.fixture(autouse=True)
    def out(self, tmp_path, monkeypatch):
        self.path, self.before = tmp_path / "out.json", tmp_path / "before.json"
        results().write(self.before)
        self.now, self.planned = results(), 2
        self.then: Callable[[Results], Any] = lambda made: None
        self.in_file: list[int] = []
        self.closed = False
        monkeypatch.setattr(command, "_measure", self.measure)

    def measure(self, asked, made):
        assert made.is_empty
        made.cases, made.faults, made.planned[RUNS] = self.now.cases, self.now.faults, self.planned
        try:
            for figures in self.now.runs:
                made.add(RUNS, figures)
                self.in_file.append(len(read_results(self.path).runs))
            self.then(made)
        finally:
            self.closed = True

    def run(self, *more):
        return main(["--out", str(self.path), *more])

    def compared(self, *more):
        return self.run("--baseline", str(self.before), *more)

    def stop(self, made):
        signal.raise_signal(signal.SIGTERM)

    def test_the_file_is_written_after_each_case(self, capsys):
        assert self.run() == 0
        assert self.in_file == [1, 2]
        assert "done: 1 of 2 runs" in capsys.readouterr().err
        assert read_results(self.path).planned == {RUNS: 2}

    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
    )
    def test_a_signal_closes_all_and_keeps_the_file(self, number, code, capsys):
        before = signal.getsignal(number)
        self.then, self.planned = lambda made: signal.raise_signal(number), 3
        assert self.run() == code
        assert self.closed
        assert len(read_results(self.path).runs) == 2
        output = capsys.readouterr()
        assert f"stopped by {number.name}; done: 2 of 3 runs" in output.err
        assert "lane-nothing" in output.out
        assert signal.getsignal(number) == before

    def test_what_is_there_is_shown_although_cases_are_missing(self, capsys):
        self.now.runs, self.then = self.now.runs[:1], self.stop
        html = self.path.with_suffix(".html")
        assert self.run("--html", str(html)) == 143
        assert "not finished: 1 of 2 runs" in capsys.readouterr().out
        assert "not finished: 1 of 2 runs" in html.read_text()
        with_figures(MARKS, [read_results(self.path)])

    def test_a_second_sigterm_does_not_disturb_the_closing(self):
        went_on = []

        def twice(made):
            try:
                self.stop(made)
            finally:
                self.stop(made)
                went_on.append(True)

        self.then = twice
        assert self.run() == 143
        assert went_on

    def test_what_fails_while_closing_does_not_hide_the_signal(self):
        def stop(made):
            try:
                self.stop(made)
            finally:
                raise ValueError("the JVM is gone, too")

        self.then = stop
        assert self.run() == 143

    def test_a_stopped_run_is_compared_with_nothing(self):
        self.then, self.now = self.stop, results(speed=40.0)
        assert self.compared() == 143

    def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
        self, tmp_path, capsys
    ):
        self.path = tmp_path / "nowhere" / "out.json"
        assert self.run() == 1
        assert "nowhere" in capsys.readouterr().err
        assert not self.closed

    def test_no_change_is_well(self):
        assert self.compared() == 0

    def test_a_case_that_failed_exits_1(self, capsys):
        self.then = lambda made: made.failed.update(lane="it does not add up")
        assert self.compared() == 1
        assert "lane failed: it does not add up" in capsys.readouterr().err

    def test_a_slower_ratio_exits_1_unless_tolerated(self, capsys):
        self.now = results(speed=40.0)
        assert self.compared() == 1
        assert "REGRESS" in capsys.readouterr().out
        assert self.compared("--tolerance", "0.5") == 0

    def test_nothing_in_common_is_no_success(self):
        self.now.cases = self.now.cases[:1]
        assert self.compared() == 1

    def test_json_stays_one_document(self, capsys):
        assert self.compared("--json") == 0
        printed: Any = json.loads(capsys.readouterr().out)
        assert len(printed["comparison"]["changes"]) == 2

    def test_a_run_that_fails_keeps_what_it_has(self):
        def fail(made):
            raise ConfigurationError("no more")

        self.then = fail
        assert self.compared() == 1
        assert read_results(self.path).runs == self.now.runs

    def test_a_broken_promise_exits_1(self, capsys):
        self.now.faults[0]["lost"] = 3
        assert self.compared() == 1
        assert "3 acknowledged messages are lost" in capsys.readouterr().err


@pytest.mark.parametrize("path", FILES[:3], ids=str)
def test_stored_baselines_can_be_compared_with(path):
    stored = read_results(path)
    assert stored.is_complete
    assert stored.ratios
