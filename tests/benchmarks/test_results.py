"""Results files: written, read, drawn, put into a page."""

import io
import json
import signal
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

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
from benchmarks.run import measure, reason_of
from rocket_sink.errors import ConfigurationError
from tests.benchmarks.test_curves import points

MACHINE = {"cores": 2, "processor": "P", "memory_gb": 1, "python": "3", "java": 17, "pyspark": "4",
           "rocketmq": "5", "at": "2026-01-01T00:00:00"}  # fmt: skip

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
    text = "Ivy could not fetch a:b:1. Its last lines:\nx\n\t\t:: a#c;1: not found\n::"
    assert reason_of(ConfigurationError(text)).endswith("Its last lines: (a#c;1: not found)")
    assert reason_of(ValueError("one line")) == "one line"


def subject(name, error=None, warm_up_error=None):
    """Return a case that is measured without measuring."""
    figures = Figures(name, 10, 0.1, 100.0, 1.0, 1.0, 0.0, 0.0)
    return SimpleNamespace(
        case=Case(name, "Spark lanes"), warm_up=Mock(side_effect=warm_up_error),
        run=Mock(side_effect=error, return_value=figures),
    )  # fmt: skip


NO_ROOM = ValueError("no room for it\nmore")
HIDES_A_SIGNAL = ValueError("its process is gone, too")
HIDES_A_SIGNAL.__context__ = KeyboardInterrupt()


def measured(*subjects, rounds=1):
    """Measure the subjects; return the results, the messages, and how often room was made."""
    results, messages, rooms = Results(MACHINE, {}), [], []
    results.cases = [subject.case for subject in subjects]
    results.on_added = lambda: messages.append(results.progress)
    room = SimpleNamespace(make=lambda: rooms.append(1))
    error = None
    try:
        measure(subjects, rounds, results, messages.append, room)
    except ValueError as caught:
        error = str(caught)
    return results, messages, len(rooms), error


def test_each_run_is_reported_with_the_planned_number():
    _, progress, rooms, _ = measured(subject("one"), subject("two"), rounds=2)
    assert [text for text in progress if " of 4 runs" in text] == [
        f"{number} of 4 runs" for number in (1, 2, 3, 4)
    ]
    assert rooms == 6


@pytest.mark.parametrize("errors", [(NO_ROOM, None), (None, NO_ROOM)], ids=["run", "warm-up"])
def test_a_case_that_fails_is_named_and_the_others_go_on(errors):
    bad = subject("bad", *errors)
    results, messages, *_ = measured(subject("one"), bad, subject("two"), rounds=2)
    assert [run.case for run in results.runs] == ["one", "two"] * 2
    assert results.failed == {"bad": "no room for it"}
    assert bad.run.call_count == bool(errors[0])
    assert not results.is_complete and "bad failed: no room for it" in messages
    assert "bad: failed; no room for it" in shown(results)
    assert "Not measured: bad." in with_figures(MARKS, [results])


@pytest.mark.parametrize(
    ("subjects", "runs", "failed", "error"),
    [
        # If the brokers are gone, for example, each of 172 cases would wait for them.
        ([subject(name, None if name == "x" else NO_ROOM) for name in "abxcdef"], ["x"], "abcde",
         "no room"),
        ([subject("a", HIDES_A_SIGNAL), subject("b")], [], "", "gone"),
    ],
)  # fmt: skip
def test_three_cases_that_fail_in_a_row_or_a_signal_end_the_run(subjects, runs, failed, error):
    results, *_, ended_by = measured(*subjects)
    assert [run.case for run in results.runs] == runs and [*results.failed] == [*failed]
    assert error in ended_by


def stop(made, number=signal.SIGTERM):
    signal.raise_signal(number)


def stop_twice(made):
    try:
        stop(made)
    finally:
        stop(made)


def stop_and_fail(made):
    try:
        stop(made)
    finally:
        raise ValueError("the JVM is gone, too")


def fail(made):
    raise ConfigurationError("no more")


class TestCommand:
    """The command's file, output and exit code, with the measuring left out."""

    @pytest.fixture(autouse=True)
    def out(self, tmp_path, monkeypatch):
        self.path, self.before = tmp_path / "out.json", tmp_path / "before.json"
        results().write(self.before)
        self.now, self.then, self.in_file, self.closed = results(), id, [], False
        monkeypatch.setattr(command, "_measure", self.measure)

    def measure(self, asked, made):
        made.cases, made.faults, made.planned[RUNS] = self.now.cases, self.now.faults, 3
        try:
            for figures in self.now.runs:
                made.add(RUNS, figures)
                self.in_file.append(len(read_results(self.path).runs))
            self.then(made)
        finally:
            self.closed = True

    def run(self, *more):
        return main(["--out", str(self.path), *more])

    @pytest.mark.parametrize(
        ("end", "code", "name"),
        [
            (stop, 143, "SIGTERM"), (partial(stop, number=signal.SIGINT), 130, "SIGINT"),
            (stop_twice, 143, "SIGTERM"), (stop_and_fail, 143, "SIGTERM"),
        ],
    )  # fmt: skip
    def test_a_signal_closes_all_and_keeps_the_file(self, end, code, name, capsys):
        """A stopped run is compared with nothing, but shown."""
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        self.then, self.now = end, results(speed=40.0)
        html = self.path.with_suffix(".html")
        assert self.run("--baseline", str(self.before), "--html", str(html)) == code
        assert self.closed and self.in_file == [1, 2]
        stored = read_results(self.path)
        assert len(stored.runs) == 2 and stored.planned == {RUNS: 3}
        with_figures(MARKS, [stored])
        output = capsys.readouterr()
        assert f"stopped by {name}; done: 2 of 3 runs" in output.err
        for shown_text in (output.out, html.read_text()):
            assert "lane-nothing" in shown_text and "not finished: 2 of 3 runs" in shown_text
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before

    def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(self, capsys):
        self.path = self.path.parent / "nowhere" / "out.json"
        assert self.run() == 1
        assert "nowhere" in capsys.readouterr().err and not self.closed

    @pytest.mark.parametrize(
        ("change", "more", "code", "words"),
        [
            ({}, (), 0, "done: 2 of 3 runs"),
            ({"now": results(speed=40.0)}, (), 1, "REGRESS"),
            ({"now": results(speed=40.0)}, ("--tolerance", "0.5"), 0, ""),
            ({"then": lambda made: made.failed.update(lane="why")}, (), 1, "lane failed: why"),
            ({"then": lambda made: made.faults[0].update(lost=3)}, (), 1,
             "3 acknowledged messages are lost"),
            ({"then": lambda made: made.cases.pop()}, (), 1, ""),
            ({"then": fail}, (), 1, "no more"),
        ],
    )  # fmt: skip
    def test_what_is_worse_than_before_exits_1(self, change, more, code, words, capsys):
        vars(self).update(change)
        assert self.run("--baseline", str(self.before), *more) == code
        output = capsys.readouterr()
        assert words in output.out + output.err
        assert read_results(self.path).runs == self.now.runs

    def test_json_stays_one_document(self, capsys):
        assert self.run("--baseline", str(self.before), "--json") == 0
        printed = json.loads(capsys.readouterr().out)
        assert len(printed["comparison"]["changes"]) == 2


@pytest.mark.parametrize("path", FILES[:3], ids=str)
def test_stored_baselines_can_be_compared_with(path):
    stored = read_results(path)
    assert stored.is_complete and stored.ratios
