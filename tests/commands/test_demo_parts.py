"""The demo's parts: its rows, its verdict, its fault. tests/integration runs the whole demo."""

import datetime as dt
import shlex
from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call

import pyarrow.parquet
import pytest
from pyspark.sql import Row

from rocket_sink.cluster import Broker
from rocket_sink.commands.common.output import show
from rocket_sink.commands.demo import _empty_folder
from rocket_sink.commands.demo import run as demo
from rocket_sink.commands.demo.flights import BODY, Flights, verdict, write_flights
from rocket_sink.commands.demo.run import DemoSummary, FaultInjector
from rocket_sink.errors import ConfigurationError, RocketSinkError
from rocket_sink.ledger.report import Report
from rocket_sink.ledger.report.values import ErrorFigures, IsolationFigures, Totals
from rocket_sink.ledger.sql import Scope
from tests.docs.checks import check_command
from tests.run_command import run_command

ROWS = 3000


@pytest.fixture(scope="module")
def flights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flights")
    write_flights(folder, ROWS)
    return folder


@pytest.fixture(scope="module")
def rows(flights):
    return list(pyarrow.parquet.read_table(flights).sort_by("row").to_pylist())


TOPIC = (
    "body string, sharding_key string, broker_name string, queue_id int, queue_offset int, "
    "store_timestamp int, message_id string"
)


def _of_busiest_key(messages):
    key = Counter(message["sharding_key"] for message in messages).most_common(1)[0][0]
    return [message for message in messages if message["sharding_key"] == key]


def _swap(messages):
    first, second, *_ = _of_busiest_key(messages)
    first["body"], second["body"] = second["body"], first["body"]


def _copies(messages, **changes):
    messages += [
        {**message, "queue_offset": ROWS + number, "store_timestamp": 1, **changes}
        for number, message in enumerate(messages[:5])
    ]


CASES = {
    "everything is there once, in order": (lambda topic: None, {}),
    "two rows are lost": (lambda topic: topic.__delitem__(slice(-2, None)),
                          {"stored": ROWS - 2, "distinct": ROWS - 2, "lost": 2}),
    "second copies are no disorder": (_copies, {"stored": ROWS + 5, "duplicates": 5}),
    "second copies with new ids": (lambda topic: _copies(topic, message_id="another"),
                                   {"stored": ROWS + 5, "duplicates": 5, "new_ids": 5}),
    "two rows of a key are swapped": (_swap, {"disordered_keys": 1}),
    "a key is in two queues":
        (lambda topic: _of_busiest_key(topic)[-1].update(queue_id=1), {"moved_keys": 1}),
    "a body differs": (lambda topic: _of_busiest_key(topic)[-1].update(body="{}"),
                       {"distinct": ROWS - 1, "foreign": 1, "lost": 1}),
    "another sender's message":
        (lambda topic: topic.append({**topic[0], "body": "hello", "queue_offset": ROWS}),
         {"stored": ROWS + 1, "foreign": 1}),
}  # fmt: skip
"""{name: a change of a topic that has each row once, and the fields of the verdict that differ}"""


@pytest.mark.spark
def test_the_verdict_names_each_fault(spark, flights):
    frame = spark.read.parquet(str(flights))
    rows = frame.selectExpr("row", "sharding_key", BODY).sort("row").collect()
    counts = {"stored": ROWS, "distinct": ROWS, "keys": len({row.sharding_key for row in rows})}
    faults = set()
    no_letters = spark.createDataFrame([], "body binary")
    for name, (change, differences) in CASES.items():
        topic = [
            {
                "body": row.body, "sharding_key": row.sharding_key, "broker_name": "broker-a",
                "queue_id": 0, "queue_offset": row.row, "store_timestamp": 0,
                "message_id": f"id-{row.row}",
            }
            for row in rows
        ]  # fmt: skip
        change(topic)
        messages = spark.createDataFrame(topic, TOPIC)
        sums = verdict(frame, messages, no_letters).asDict()
        assert {name: n for name, n in sums.items() if n} == {**counts, **differences}, name
        faults |= differences.keys()
    assert set(sums) == {*counts, *faults}, "each count has a case"
    last = spark.createDataFrame([(rows[-1].body.encode(),)], "body binary")
    short = spark.createDataFrame(topic[:-3], TOPIC)
    assert verdict(frame, short, last).lost == 1, "a dead letter is not lost"


def test_rows_are_numbered_in_time_order_and_have_keys(rows):
    """A row without a tail number takes carrier and flight."""
    assert [row["row"] for row in rows] == list(range(ROWS))
    times = [(row["time_hour"], row["sched_dep_time"]) for row in rows]
    assert times == sorted(times)
    without = [row for row in rows if row["tailnum"] is None]
    assert without
    assert all(row["sharding_key"] == f"{row['carrier']}-{row['flight']}" for row in without)


def test_files_are_older_the_earlier_their_rows(tmp_path):
    flights = write_flights(tmp_path, 12_000)
    times = [path.stat().st_mtime for path in sorted(tmp_path.glob("*.parquet"))]
    assert flights.files == len(times) > 1 and times == sorted(set(times))


@pytest.mark.parametrize(("fault", "repair"), [("freeze", "thaw"), ("kill", "restart")])
def test_a_broker_is_broken_once_and_repaired_after_its_time(fault, repair):
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


FAULTS = ("lost", "foreign", "new_ids", "duplicates", "disordered_keys", "moved_keys")
GOOD = dict.fromkeys(FAULTS, 0)


@pytest.mark.parametrize(
    ("totals", "changes", "failure"),
    [
        ({}, {}, None),
        ({"unknown": 3000}, {"duplicates": 3000}, None),
        ({"superseded_rows": 1, "duplicates_possible": 1}, {"duplicates": 2}, None),
        ({"unknown": 2999}, {"duplicates": 3000},
         "3,000 duplicates, but only 2,999 were announced"),
        ({"not_adding_up": 1}, {}, "1 epochs of the ledger do not add up"),
        ({"rows_in": 11_999}, {}, "the ledger has 11,999 rows, the input 12,000"),
        ({}, {"lost": 1000}, "1,000 rows are lost"),
        ({}, {"foreign": 1}, "1 messages are no rows of the demo, or differ"),
        ({}, {"new_ids": 2}, "2 duplicates have a message id of their own"),
        ({}, {"disordered_keys": 4}, "4 keys are out of order"),
        ({}, {"moved_keys": 5}, "5 keys are in several queues"),
    ],
)  # fmt: skip
def test_the_end_says_what_went_wrong(totals, changes, failure, tmp_path, capsys):
    at = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)
    isolated = [
        IsolationFigures(f"broker-{number}", "t", "X", 1.0, at, 1.0, True, 1) for number in range(9)
    ]
    report = Report(
        "/l", Scope(), Totals(**{"rows_in": 12_000, **totals}), isolations=isolated,
        errors=[ErrorFigures("CONNECTION_LOST", None, 1, 1200, 1, at, at, "")],
    )  # fmt: skip
    place = tmp_path / "my demo" / "ledger"
    messages = {"stored": 12_000, "distinct": 12_000, "keys": 2000, **GOOD, **changes}
    flights = Flights(rows=12_000, files=3, keys=2000, keyless=1)
    summary = DemoSummary(place, flights, 1.0, report, Row(**messages), ["an event"])
    assert summary.failures == ([failure] if failure else [])
    show(*summary.tables())
    out = capsys.readouterr().out
    assert ("PASSED" if not failure else f"FAILED:\n  - {failure}\n") in out
    text = " ".join(out.split())
    in_order = 2000 - changes.get("disordered_keys", 0)
    table = [
        "messages stored 12,000 read back from every queue",
        "distinct rows 12,000 compared with the input",
        f"duplicates {changes.get('duplicates', 0):,} announced as possible: {summary.announced:,}",
        f"lost {changes.get('lost', 0):,}",
        f"keys in order {in_order:,} of 2,000 {changes.get('moved_keys', 0)} moved",
    ]
    assert " ".join(table) in text
    assert "an event Requests that failed (1,200 CONNECTION_LOST) are not acked" in text
    assert "broker-0" not in text and "broker-1" in text and "broker-8" in text
    (line,) = [line for line in out.splitlines() if line.startswith("  rocket-sink ")]
    assert shlex.split(line) == ["rocket-sink", "report", "--ledger", str(place)]
    check_command(shlex.split(line)[1:])


@pytest.mark.parametrize("failure", [None, ValueError("no such column")])
def test_the_demo_without_its_cluster(failure, tmp_path, monkeypatch, capsys):
    """Break the last broker in mid-run, and repair it, even if the stream ends before."""
    broker, cluster, spark, sink = Mock(spec=Broker), MagicMock(), MagicMock(), MagicMock()
    broker.name = "broker-b"
    first = SimpleNamespace(name="broker-a")
    cluster.return_value.__enter__.return_value = SimpleNamespace(
        name_server="n:1", brokers=[first, broker], create_topic=Mock()
    )
    query = MagicMock(recentProgress=[])
    looks = iter([0, 1000, 1049, 1050, 3000])

    def is_active(_):
        rows = next(looks, None)
        query.recentProgress[:] = [{"numInputRows": 3000 if rows is None else rows}]
        if rows is not None:
            assert broker.method_calls == ([call.freeze()] if rows > 1050 else [])
        return rows is not None

    type(query).isActive = property(is_active)
    query.exception.return_value = failure
    writer = sink.return_value.stream.return_value.option.return_value
    writer.trigger.return_value.start.return_value = query
    report = Report("/l", Scope(), Totals(rows_in=ROWS))
    counts = {"stored": ROWS, "distinct": ROWS, "keys": 9, **GOOD}
    made = {
        "LocalCluster": cluster, "RocketSink": sink, "Admin": MagicMock(), "register": Mock(),
        "Ledger": MagicMock(**{"return_value.report.return_value": report}),
        "verdict": Mock(return_value=Row(**counts)), "Source": MagicMock(), "_POLL_S": 0,
        "spark_session": MagicMock(**{"return_value.__enter__.return_value": spark}),
    }  # fmt: skip
    for name, each in made.items():
        monkeypatch.setattr(demo, name, each)
    try:
        assert demo.run(tmp_path, ROWS, "freeze")
    except RocketSinkError as error:
        assert failure and str(error) == "the stream failed: ValueError: no such column"
    assert broker.method_calls == ([call.freeze()] if failure else [call.freeze(), call.thaw()])
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert lines[0].startswith("rocket-sink demo: 3,000 flights, 2 brokers, one frozen in mid-run")
    assert lines[1].startswith("flights: 3,000 rows in 1 files, ")
    assert lines[2].startswith("cluster: starting RocketMQ")
    assert lines[3] == "cluster: name server n:1, broker-a, broker-b"
    assert "stream: 3,000 in " in shown.err
    assert "UTC: broker-b is frozen for 6 s (SIGSTOP)" in shown.err
    wanted = {"nameServer": "n:1", "topic": "flights", "ordering": "strict"}
    assert sink.call_args.kwargs == {**wanted, "ledger": str(tmp_path / "ledger")}
    assert made["Source"].call_args.args[:2] == ("parquet", str(tmp_path / "flights"))
    assert made["spark_session"].call_args.kwargs["spark_conf"] == {
        "spark.sql.warehouse.dir": str(tmp_path / "checkpoint/warehouse")
    }
    if not failure:
        assert made["Ledger"].return_value.sync_fully.call_args == call(spark)
        assert "PASSED" in shown.out and lines[-1].endswith(" s in all")
        assert made["Admin"].return_value.__enter__.return_value.await_dispatched.called


@pytest.mark.parametrize("passed", [True, False])
def test_only_the_ledger_stays(passed, tmp_path, monkeypatch):
    def run(folder, rows, fault):
        assert (rows, fault, folder) == (50_000, "kill", tmp_path / "new" / "demo")
        for name in ("flights", "checkpoint", "ledger"):
            (folder / name).mkdir(exist_ok=True)
        return passed

    monkeypatch.setattr("rocket_sink.commands.demo.run.run", run)
    words = ("--rows", "50000", "--fault", "kill", "--out", str(tmp_path / "new" / "demo"))
    assert run_command("demo", *words).code == (not passed)
    assert [path.name for path in (tmp_path / "new" / "demo").iterdir()] == ["ledger"]
    assert "holds other files (ledger ...)" in run_command("demo", *words).err


@pytest.mark.parametrize(
    ("out", "text"), [("", r"thesis\.tex"), ("thesis.tex/out", "name a folder that may be made")]
)
def test_a_folder_that_is_not_empty_or_not_there_is_refused(out, text, tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigurationError, match=text):
        _empty_folder(tmp_path / out)
    assert (tmp_path / "thesis.tex").exists()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert _empty_folder(None).name.startswith("rocket-sink-demo-")
    assert run_command("demo", "--rows", "336777").code == 2
