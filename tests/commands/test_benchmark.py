"""`rocket-sink benchmark` against scripted brokers: it sends, counts, prints and compares."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rocket_sink.cli import main
from rocket_sink.commands import benchmark as command
from rocket_sink.commands.benchmark import Calls, Figures, median
from rocket_sink.testing import Answer, FakeCluster

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as made:
        made.create_topic("t")
        yield made


@pytest.fixture
def arguments(cluster: FakeCluster) -> list[str]:
    small = ["--messages", "60", "--repeat", "1", "--batch", "25"]
    return ["benchmark", "-n", cluster.name_server, "-t", "t", *small]


def figures(case: str, per_s: float = 100.0, cpu: float = 10.0, **more: Any) -> Figures:
    values = {"failed": 0, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0, "max_ms": 4.0} | more
    return Figures(
        case=case, messages=60, seconds=1.0, messages_per_s=per_s, mb_per_s=1.0,
        cpu_s_per_million=cpu, **values,
    )  # fmt: skip


def write_baseline(path: Path, *cases: Figures, **settings: Any) -> Path:
    baseline_settings = {
        "messages": 60,
        "body_bytes": 256,
        "keys": 0,
        "batch": 25,
        "ordering": "none",
    }
    results = {"settings": baseline_settings | settings, "cases": [asdict(case) for case in cases]}
    path.write_text(json.dumps(results))
    return path


def test_each_mode_sends_all_messages_and_a_warm_up(
    cluster: FakeCluster, arguments: list[str], capsys: Capture
) -> None:
    assert main([*arguments, "--body-bytes", "300", "--keys", "7", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [case["case"] for case in document["cases"]] == ["sync", "async", "batch"]
    for case in document["cases"]:
        assert (case["messages"], case["failed"], case["errors"]) == (60, 0, {})
        assert 0 < case["p50_ms"] <= case["p95_ms"] <= case["p99_ms"] <= case["max_ms"]
        assert case["cpu_s_per_million"] > 0
        assert case["messages_per_s"] == pytest.approx(60 / case["seconds"])
        assert case["mb_per_s"] == pytest.approx(case["messages_per_s"] * 300 / 1e6)
    stored = cluster.messages("t")
    assert {len(message.body) for message in stored} == {300}
    keys = Counter(message.properties.get("__SHARDINGKEY") for message in stored)
    assert keys.keys() == {None, *(f"k{number}" for number in range(7))}
    assert (keys[None], sum(keys.values())) == (66, 3 * 66), "batches have no sharding keys"


def test_the_table_and_the_progress_go_to_different_places(
    arguments: list[str], capsys: Capture
) -> None:
    assert main([*arguments, "--mode", "batch", "--ordering", "strict"]) == 0
    output = capsys.readouterr()
    for words in ("messages/s", "MB/s", "CPU s/M", "p99 ms", "1,000 sharding keys", "strict"):
        assert words in output.out, words
    assert "sync" not in output.out, "only what was asked for"
    assert "batch 1/1: 60 in" in output.err


@pytest.mark.parametrize("mode", command.MODES)
def test_failed_messages_are_counted_by_cause_and_exit_1(
    mode: str, cluster: FakeCluster, arguments: list[str], capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Count the failed messages of a batch call: a refused request is sent again in halves."""
    counted = command._counted

    def refuse(*arguments: Any) -> Any:
        for broker in cluster.brokers:
            broker.on_send(Answer(13, "illegal"), times=7)
        return counted(*arguments)

    monkeypatch.setattr(command, "_counted", refuse)
    code = main([*arguments, "--mode", mode, "--batch", "5", "--json"])
    (one,) = json.loads(capsys.readouterr().out)["cases"]
    assert code == 1
    assert one["errors"] == {"MESSAGE_ILLEGAL": one["failed"]}
    assert 0 < one["failed"] < 60
    assert one["messages"] == 60 - one["failed"]
    assert len(cluster.messages("t")) == 6 + one["messages"], "six are of the warm-up"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("lane", command.LANES)
def test_a_lane_is_measured_by_its_ledger(
    lane: str, cluster: FakeCluster, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    figures = run_lane(lane, 0, arguments, capfd)
    assert (figures["case"], figures["messages"], figures["failed"]) == (lane, 500, 0)
    assert figures["cpu_s_per_million"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert figures["messages_per_s"] == pytest.approx(500 / figures["seconds"])
    stored = cluster.messages("t")
    assert len(stored) == 550, "and a warm-up"
    assert {message.properties["__SHARDINGKEY"] for message in stored} == {"k0", "k1", "k2"}


@pytest.mark.spark
@pytest.mark.slow
def test_rows_that_a_lane_gives_up_are_counted(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    small = [*arguments, "-O", "maxMessageSize=200"]
    figures = run_lane("foreach", 1, small, capfd)
    assert (figures["messages"], figures["failed"], figures["max_ms"]) == (0, 500, None)
    assert figures["errors"] == {"BODY_TOO_LARGE": 500}


def run_lane(lane: str, code: int, arguments: list[str], capfd: Any) -> dict[str, Any]:
    lane_arguments = ["--lane", lane, "--messages", "500", "--keys", "3", "--master", "local[1]"]
    assert main([*arguments, *lane_arguments, "--json"]) == code
    (case,) = json.loads(capfd.readouterr().out)["cases"]
    assert isinstance(case, dict)
    return case


def test_where_nothing_is_stored_the_error_is_raised(
    cluster: FakeCluster, arguments: list[str], capsys: Capture
) -> None:
    for broker in cluster.brokers:
        broker.on_send(Answer(13, "illegal"), times=None)
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert "illegal" in output.err
    assert not output.out


def test_a_topic_and_a_name_server_are_asked_for(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocket_sink.commands.common.sink_input._local_name_server", lambda: None)
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    assert main(["benchmark", "-t", "t"]) == 2
    assert "rocket-sink cluster up" in capsys.readouterr().err
    assert main(["benchmark", "-n", "127.0.0.1:1"]) == 2
    assert "--topic" in capsys.readouterr().err


def test_a_signal_keeps_what_is_measured(
    arguments: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setitem(command.MODES, "async", stop)
    out = tmp_path / "out.json"
    assert main([*arguments, "--out", str(out)]) == 143
    assert [case["case"] for case in json.loads(out.read_text())["cases"]] == ["sync"]
    assert "sync" in capsys.readouterr().out


class TestBaseline:
    """Comparisons with a baseline; the measured figures are given by the tests."""

    NOW: ClassVar = {"sync": figures("sync"), "async": figures("async", 300.0, 3.0),
                     "batch": figures("batch", 900.0, 1.0)}  # fmt: skip

    @pytest.fixture(autouse=True)
    def measured(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(
            command, "measure_producer", lambda _, work, case, advance: TestBaseline.NOW[case]
        )
        self.path = tmp_path / "before.json"

    def run(self, arguments: list[str], *more: str) -> int:
        return main([*arguments, "--baseline", str(self.path), *more])

    def test_what_out_wrote_is_not_worse_than_itself(
        self, arguments: list[str], capsys: Capture
    ) -> None:
        assert main([*arguments, "--out", str(self.path)]) == 0
        assert self.run(arguments) == 0
        assert "WORSE" not in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("was", "worse"),
        [
            (figures("sync", 130.0), "messages_per_s"),
            (figures("sync", 100.0, 7.0), "cpu_s_per_million"),
        ],
        ids=["slower", "more CPU"],
    )
    def test_a_case_that_is_worse_beside_the_others_exits_1(
        self, was: Figures, worse: str, arguments: list[str], capsys: Capture
    ) -> None:
        write_baseline(self.path, was, *list(self.NOW.values())[1:])
        assert self.run(arguments, "--json") == 1
        comparison = json.loads(capsys.readouterr().out)["comparison"]
        assert [(change["case"], change["figure"]) for change in comparison if change["worse"]] == [
            ("sync", worse)
        ]
        assert self.run(arguments) == 1
        assert capsys.readouterr().out.count("WORSE") == 1
        assert self.run(arguments, "--tolerance", "0.5") == 0

    def test_a_machine_that_is_slower_as_a_whole_is_no_loss(self, arguments: list[str]) -> None:
        faster = [
            figures(case.case, case.messages_per_s * 3, case.cpu_s_per_million / 3)
            for case in self.NOW.values()
        ]
        write_baseline(self.path, *faster)
        assert self.run(arguments) == 0

    def test_one_case_that_is_better_makes_no_other_one_worse(self, arguments: list[str]) -> None:
        slow = figures("batch", 90.0, 10.0)
        write_baseline(self.path, self.NOW["sync"], self.NOW["async"], slow)
        assert self.run(arguments) == 0

    def test_failures_are_worse_than_any_baseline(
        self, arguments: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_baseline(self.path, *self.NOW.values())
        failing = self.NOW | {"sync": figures("sync", failed=1, errors={"TIMEOUT": 1})}
        monkeypatch.setattr(TestBaseline, "NOW", failing)
        assert self.run(arguments) == 1

    @pytest.mark.parametrize(
        ("cases", "settings", "words"),
        [
            (["sync", "async"], {"body_bytes": 1024}, "measured with body_bytes 1024"),
            (["sync", "foreach"], {}, "two of them or more"),
        ],
    )
    def test_a_baseline_of_something_else_is_refused_before_anything_is_measured(
        self, cases: list[str], settings: dict[str, Any], words: str, arguments: list[str],
        capsys: Capture,
    ) -> None:  # fmt: skip
        write_baseline(self.path, *map(figures, cases), **settings)
        assert self.run(arguments) == 1
        output = capsys.readouterr()
        assert words in output.err
        assert "1/1" not in output.err

    @pytest.mark.parametrize(
        "text",
        ["", "[]", '{"cases": []}', '{"settings": {}, "cases": [{}]}',
         '{"settings": ["x"], "cases": []}'],
    )  # fmt: skip
    def test_another_file_is_refused(
        self, text: str, arguments: list[str], capsys: Capture
    ) -> None:
        self.path.write_text(text)
        assert self.run(arguments) == 1
        assert "no file of rocket-sink benchmark --out" in capsys.readouterr().err


def test_an_unwritable_out_is_an_early_error(
    arguments: list[str], tmp_path: Path, capsys: Capture
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "nowhere" / "out.json")]) == 2
    error_text = capsys.readouterr().err
    assert "nowhere" in error_text
    assert "1/1" not in error_text


def test_percentiles_are_latencies_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    assert calls.percentiles_ms() == [None] * 4
    monkeypatch.setattr(command.time, "perf_counter", lambda: 0.0)
    for number in range(100, 0, -1):
        calls.stored(-number / 1000)
    assert calls.percentiles_ms() == pytest.approx([50.0, 95.0, 99.0, 100.0])


def test_medians_of_runs_and_sums_of_their_failures() -> None:
    runs = [
        figures("sync", 10.0, failed=1, p50_ms=None, errors={"A": 1}),
        figures("sync", 30.0, p50_ms=None),
        figures("sync", 20.0, failed=2, p50_ms=None, errors={"A": 1, "B": 1}),
    ]
    medians = median(runs)
    assert (medians.messages_per_s, medians.failed, medians.p50_ms) == (20.0, 3, None)
    assert medians.errors == {"A": 2, "B": 1}
