"""The demo's parts: its rows, its verdict, its fault. tests/integration runs the whole demo."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pyarrow.parquet
import pytest

from rocket_sink.cluster import Broker
from rocket_sink.commands.demo import _empty_folder
from rocket_sink.commands.demo.flights import BODY, verdict, write_flights
from rocket_sink.commands.demo.run import FaultInjector
from rocket_sink.errors import ConfigurationError

ROWS = 3000


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flights")
    write_flights(folder, ROWS)
    return folder


@pytest.fixture(scope="module")
def rows(flights: Path) -> list[dict[str, Any]]:
    return list(pyarrow.parquet.read_table(flights).sort_by("row").to_pylist())


TOPIC = (
    "body string, sharding_key string, broker_name string, queue_id int, queue_offset int, "
    "store_timestamp int, message_id string"
)


class Case(NamedTuple):
    """Changes of a topic that has each row once, and the fields of the verdict that differ."""

    change: Callable[[list[dict[str, Any]]], object]
    verdict: dict[str, int]


def _of_busiest_key(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    key = Counter(message["sharding_key"] for message in messages).most_common(1)[0][0]
    return [message for message in messages if message["sharding_key"] == key]


def _swap(messages: list[dict[str, Any]]) -> None:
    first, second, *_ = _of_busiest_key(messages)
    first["body"], second["body"] = second["body"], first["body"]


def _copies(messages: list[dict[str, Any]], **changes: Any) -> None:
    messages += [
        {**message, "queue_offset": ROWS + number, "store_timestamp": 1, **changes}
        for number, message in enumerate(messages[:5])
    ]


CASES = {
    "everything is there once, in order": Case(lambda topic: None, {}),
    "two rows are lost": Case(
        lambda topic: topic.__delitem__(slice(-2, None)),
        {"stored": ROWS - 2, "distinct": ROWS - 2, "lost": 2},
    ),
    "second copies are no disorder": Case(_copies, {"stored": ROWS + 5, "duplicates": 5}),
    "second copies with new ids": Case(
        lambda topic: _copies(topic, message_id="another"),
        {"stored": ROWS + 5, "duplicates": 5, "new_ids": 5},
    ),
    "two rows of a key are swapped": Case(_swap, {"disordered_keys": 1}),
    "a key is in two queues": Case(
        lambda topic: _of_busiest_key(topic)[-1].update(queue_id=1), {"moved_keys": 1}
    ),
    "a body differs": Case(
        lambda topic: _of_busiest_key(topic)[-1].update(body="{}"),
        {"distinct": ROWS - 1, "foreign": 1, "lost": 1},
    ),
    "another sender's message": Case(
        lambda topic: topic.append({**topic[0], "body": "hello", "queue_offset": ROWS}),
        {"stored": ROWS + 1, "foreign": 1},
    ),
}


@pytest.mark.spark
def test_the_verdict_names_each_fault(spark: Any, flights: Path) -> None:
    frame = spark.read.parquet(str(flights))
    rows = frame.selectExpr("row", "sharding_key", BODY).sort("row").collect()
    counts = {"stored": ROWS, "distinct": ROWS, "keys": len({row.sharding_key for row in rows})}
    faults: set[str] = set()
    no_letters = spark.createDataFrame([], "body binary")
    for name, case in CASES.items():
        topic = [
            {
                "body": row.body, "sharding_key": row.sharding_key, "broker_name": "broker-a",
                "queue_id": 0, "queue_offset": row.row, "store_timestamp": 0,
                "message_id": f"id-{row.row}",
            }
            for row in rows
        ]  # fmt: skip
        case.change(topic)
        messages = spark.createDataFrame(topic, TOPIC)
        sums = verdict(frame, messages, no_letters).asDict()
        assert {name: n for name, n in sums.items() if n} == {**counts, **case.verdict}, name
        faults |= case.verdict.keys()
    assert set(sums) == {*counts, *faults}, "each count has a case"
    last = spark.createDataFrame([(rows[-1].body.encode(),)], "body binary")
    short = spark.createDataFrame(topic[:-3], TOPIC)
    assert verdict(frame, short, last).lost == 1, "a dead letter is not lost"


class TestFlights:
    def test_rows_are_numbered_in_time_order(self, rows: list[dict[str, Any]]) -> None:
        assert [row["row"] for row in rows] == list(range(ROWS))
        times = [(row["time_hour"], row["sched_dep_time"]) for row in rows]
        assert times == sorted(times)

    def test_a_row_without_tail_number_takes_carrier_and_flight(
        self, rows: list[dict[str, Any]]
    ) -> None:
        without = [row for row in rows if row["tailnum"] is None]
        assert without
        assert all(row["sharding_key"] == f"{row['carrier']}-{row['flight']}" for row in without)

    def test_files_are_older_the_earlier_their_rows(self, tmp_path: Path) -> None:
        flights = write_flights(tmp_path, 12_000)
        files = sorted(tmp_path.glob("*.parquet"))
        times = [path.stat().st_mtime for path in files]
        assert flights.files == len(files) > 1
        assert times == sorted(set(times))


@pytest.mark.parametrize(("fault", "repair"), [("freeze", "thaw"), ("kill", "restart")])
def test_a_broker_is_broken_once_and_repaired_after_its_time(fault: str, repair: str) -> None:
    broker, now_s, lines = Mock(spec=Broker), [0.0], list[str]()
    injector = FaultInjector(broker, fault, lines.append, clock=lambda: now_s[0])
    injector.step(due=False)
    assert not broker.method_calls
    for moment_s, calls in ((0.0, [fault]), (5.9, [fault]), (6.0, [fault, repair])):
        now_s[0] = moment_s
        injector.step(due=True)
        assert [name for name, *_ in broker.method_calls] == calls
    now_s[0] = 20.0
    injector.step(due=True)
    assert len(broker.method_calls) == len(lines) == 2


def test_a_stream_that_ends_early_ends_the_fault() -> None:
    broker = Mock(spec=Broker)
    injector = FaultInjector(broker, "freeze", lambda text: None)
    injector.step(due=True)
    injector.repair()
    broker.thaw.assert_called_once()


@pytest.mark.parametrize(
    ("out", "text"), [("", r"thesis\.tex"), ("thesis.tex/out", "name a folder that may be made")]
)
def test_a_folder_that_is_not_empty_or_not_there_is_refused(
    out: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigurationError, match=text):
        _empty_folder(tmp_path / out)
    assert (tmp_path / "thesis.tex").exists()
