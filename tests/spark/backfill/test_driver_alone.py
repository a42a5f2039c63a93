"""The driver side of a backfill without a JVM. Stand-ins of frames run their tasks here."""

import contextlib
import datetime as dt
import os
import threading
import uuid
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
from deltalake import DeltaTable
from pyspark.accumulators import INT_ACCUMULATOR_PARAM, Accumulator
from pyspark.sql import Row
from pyspark.sql.types import StructType

from rocket_sink.errors import ColumnError, ConfigurationError, LedgerError, OptionError
from rocket_sink.ledger.query.backfill_marks import BackfillClaim
from rocket_sink.ledger.schema import REASONS
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import CONTRACT
from rocket_sink.spark.backfill import backfill
from rocket_sink.spark.backfill.backfill import Backfill, Plan
from rocket_sink.spark.backfill.resend import Resent
from rocket_sink.spark.backfill.sources import DeadLetters, Selection, Table
from tests.ledger.values import context, resolved, session
from tests.spark.backfill.test_resend import letters

SAME = ("where", "orderBy", "limit", "withColumn", "groupBy", "agg", "select", "selectExpr",
        "repartition", "sortWithinPartitions")  # fmt: skip


def frame_of(*partitions, rows=(), head=None):
    """Return the stand-in of a frame that has all columns, and whose operations keep all rows;
    `asked` has its tasks."""
    frame = MagicMock(columns=MagicMock(**{"__contains__.return_value": True}), asked=[])
    for name in SAME:
        getattr(frame, name).return_value = frame
    frame.collect.return_value, frame.head.side_effect = rows, head

    def map_in_arrow(make, ddl):
        frame.asked.append(make)
        batches = [batch for part in partitions for batch in make(iter([part]))]
        return Mock(collect=lambda: [Row(**row) for b in batches for row in b.to_pylist()])

    frame.mapInArrow = map_in_arrow
    return frame


@pytest.fixture
def work(cluster, tmp_path, monkeypatch):
    """Return a function that makes a backfill of a frame's stand-in, with these options."""
    monkeypatch.setattr(backfill, "F", MagicMock())
    monkeypatch.setattr(backfill, "marked", lambda letters, wanted, selection: letters)
    spark: Any = session()
    spark.sparkContext.defaultParallelism, spark.sparkContext.getConf = 2, dict
    spark.sparkContext.accumulator = lambda start: Accumulator(1, start, INT_ACCUMULATOR_PARAM)
    options = SinkOptions.parse(
        nameServer=cluster.name_server, ledger=str(tmp_path), storedCheckDelay=20,
        maxMessagesPerSecond=1000, connectTimeoutMs="20s", sendMsgTimeout="20s",
    )  # fmt: skip

    def backfill_of(frame=None, *, limit=None, more=None, **changes):
        source: Any = Mock(pins_new=True, noun="rows", **{"pending.return_value": frame})
        changed, selection = options.with_(**changes), Selection(limit=limit)
        return Backfill(spark, changed, selection, source, **(more or {}))

    return backfill_of


@pytest.mark.parametrize(("selected", "tasks"), [(2000, 1), (2001, 2), (10**6, 16)])
def test_a_run_sends_its_rows_by_tasks_and_folds_their_resolutions(
    work, monkeypatch, tmp_path, selected, tasks
):
    monkeypatch.setattr(backfill, "_PROGRESS_S", 0.001)
    rows, counts = letters(["a", None, "b"]), list[int]()
    frame = frame_of(rows.slice(0, 2), rows.slice(2))
    run = work(frame, limit=7, more={"move_keys": True}).run
    assert run(0) == Resent() and not frame.asked
    assert run(selected, progress=counts.append) == Resent(resent=3)
    assert len(counts) > 1 and counts[-1] == 3
    assert frame.repartition.call_args.args[0] == tasks and frame.limit.mock_calls[0] == call(7)
    columns = {column.name for column in CONTRACT} - {"order_by"}
    columns |= {"letter_id", "query_id", "open", "unknown_at", "was_stored"}
    assert {*frame.select.mock_calls[0].args} == columns
    [task] = frame.asked
    assert task.args[0].rate_tasks == min(2, tasks) and task.keywords["move_keys"]
    kinds = DeltaTable(tmp_path).to_pyarrow_table()["kind"].to_pylist()
    assert kinds.count("resolution") == kinds.count("backfill") == 3
    assert os.listdir(tmp_path / "_notes/queues"), "the first backfill of a table pins queues"
    last = work(frame)
    assert last.run(1).settled == 3 and frame.limit.call_count == 1
    BackfillClaim(last.ledger._place).acquire(0)


NOON = dt.datetime(2026, 1, 1, 12)
group = Row("reason", "topic", "pending", "selected", "bytes", "asked", "bodiless", "tired",
            "behind")  # fmt: skip
GROUPS = [
    group("transport", "t", 9, 4, 40, 3, 1, 2, 1), group(None, "t", 2, 1, 9, 0, 0, 0, 0),
    group("transport", None, 5, 3, 30, 1, 2, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "topic", "chosen"),
    [(None, "", (8, 79, 4)), (8, "x", (8, 79, 4)), (7, "", (7, 70, 1)), (0, "x", (0, 0, 0))],
)
def test_a_plan_adds_up_its_groups(work, limit, topic, chosen):
    sums = Row(selected=chosen[0], bytes=chosen[1], asked=chosen[2])
    samples = [Row(at=NOON.astimezone(dt.timezone.utc).astimezone()), Row(at=None)]
    frame = frame_of(letters(["a"]), rows=GROUPS, head=lambda *n: samples if n else sums)
    plan = work(frame, limit=limit, topic=topic).plan()
    assert [str(row["at"].tzinfo) for row in plan.sample if row["at"]] == ["UTC"] * (limit != 0)
    assert (call(10) in frame.head.mock_calls) is (limit != 0)
    assert len(frame.select.call_args.args) == (12 if limit != 0 else 2)
    plan.sample, counts = [], (3, 0 if topic else 5, 3, 2, chosen[2])
    assert plan == Plan(16, *chosen[:2], *counts, {"transport": 14}, {"t": 11, "": 5})
    assert work(frame).plan(sample=0).sample == []


def test_what_waits_is_added_up_over_tasks_and_settings_are_checked(work):
    own = {"queue_id": [0, 0], "broker_name": ["gone", "broker-a"]}
    frame = frame_of(letters(["a", "b"], **own), letters(["c", "d"], **own))
    assert work(frame).waiting() == {"gone": 2} and work().waiting() == {}
    assert len(frame.select.call_args.args) == 5
    assert work(frame, nameServer="127.0.0.1:1", sendMsgTimeout=500).waiting() is None
    with pytest.raises(OptionError, match="nameServer"):
        work(nameServer="").waiting()
    assert work().noun == "rows"
    with pytest.raises(OptionError, match="ledger is missing"):
        work(ledger="")
    work().spark.conf.set("spark.speculation", "true")
    with pytest.raises(ConfigurationError, match="speculation"):
        work()


def test_two_at_once_are_refused(work, monkeypatch, tmp_path):
    """A backfill of any process counts, and so does a worker that outlives its driver."""
    waited: list[str] = []
    with work():
        with pytest.raises(LedgerError, match=rf"another backfill.*process {os.getpid()}"):
            work(more={"wait_s": 0.3, "on_wait": waited.append}).__enter__()
        assert waited and str(os.getpid()) in waited[0]
        assert work().plan() == Plan(), "a plan alone sends nothing"
    other = SpoolWriter(tmp_path, context(query_id=f"backfill-{uuid.uuid4()}"))
    of_user = SpoolWriter(tmp_path, context(query_id="backfill-x"))
    for spool in (other, of_user):
        spool.append(resolved({"letter_id": ["l"]}, "resent"))
    with monkeypatch.context() as patch, pytest.raises(LedgerError, match=r"backfill.*at work"):
        patch.setattr(backfill, "_OTHERS_WAIT_S", 0.0)
        work().__enter__()
    threading.Timer(0.3, other.seal).start()
    with work():
        assert len(list(tmp_path.rglob("*.open"))) == 1, "an appId may be called backfill-x"
    of_user.abort()


def table(kinds="a date", file="", name="in", is_text=(), **options):
    """Return a table with columns of these types, of a frame's stand-in."""
    schema = StructType()
    for pair in kinds.split(", "):
        schema.add(*pair.split())
    frame: Any = Mock(schema=schema, **{"inputFiles.return_value": [file]})
    return Table(frame, name, SinkOptions.parse(topic="t").with_(**options), *is_text)


AT, ZONE, OLD, *OTHERS = (
    "at timestamp, b string", "spark.sql.session.timeZone",
    "spark.sql.parquet.int96TimestampConversion", "spark.sql.parquet.int96RebaseModeInRead",
    "spark.sql.parquet.datetimeRebaseModeInRead", "spark.sql.legacy.timeParserPolicy",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "more", "settings", "later", "change"),
    [
        ("a date, b date", {}, {ZONE: "x", OLD: "true"}, "b date, a date", ""),
        ("at timestamp_ntz", {}, {ZONE: "x", OLD: "true"}, "", ""), (AT, {}, {ZONE: "x"}, "", ""),
        (AT, {"is_text": [True]}, {ZONE: "x"}, "", ZONE), (AT, {}, {OTHERS[0]: "x"}, "", OTHERS[0]),
        (AT, {"file": "/in/at=1/f"}, {ZONE: "x"}, "", ZONE), (AT, {}, {OLD: "x"}, "", OLD),
        (AT, {"file": "/in/b=1/f"}, {ZONE: "x"}, "", ""), (AT, {}, {OTHERS[1]: "x"}, "", OTHERS[1]),
        (AT, {}, {OTHERS[2]: "x"}, "", OTHERS[2]), ("a date", {}, {}, "a date, b date", "b"),
        (AT, {"name": "converts"}, {ZONE: "x"}, "", ZONE), ("a date", {}, {}, "a string", "a"),
        ("a date, c date", {}, {}, "a date", "c"),
    ],
)  # fmt: skip
def test_a_table_that_is_read_otherwise_is_refused(work, kinds, more, settings, later, change):
    ledger, spark, source = work().ledger, work().spark, table(later or kinds, **more)
    for name in (ZONE, OLD, *OTHERS):
        spark.conf.set(name, "true" if source.name == "converts" else "before")
    table(kinds, **more).begin(spark, ledger)
    for name, value in settings.items():
        spark.conf.set(name, value)
    with pytest.raises(ColumnError) if change else contextlib.nullcontext() as caught:
        source._check_reading(spark, ledger)
    schema = ", ".join(f"`{pair}".replace(" ", "` ") for pair in kinds.split(", "))
    if caught:
        assert caught.value.column == change and f"--schema '{schema}'" in str(caught.value)
        assert (f"--spark-conf {change}=" in str(caught.value)) is bool(settings)


def test_each_table_and_topic_has_its_note_of_how_it_is_read(work, tmp_path):
    spark, ledger = work().spark, work().ledger
    assert DeadLetters().pending(spark, ledger, Selection()) is None
    assert (table().pins_new, DeadLetters().pins_new) == (True, False)
    others: list[dict[str, Any]] = [{}, {"name": "x"}, {"topic": "x"}, {"namespace": "x"}]
    others += [{"topic": "", "namespace": "x"}, {"topic": "", "namespaceV2": "y"}, {"topic": ""}]
    for more in others:
        table(**more)._check_reading(spark, ledger)
        table(**more).begin(spark, ledger)
    notes = [*(tmp_path / "_notes/sources").iterdir()]
    assert len(notes) == len(others)
    for text, words in (("{}", "another digest"), ("torn", "the note .* cannot be read")):
        for note in notes:
            note.write_text(text)
        with pytest.raises(LedgerError, match=words):
            table().pending(spark, ledger, Selection())


def test_a_selection_leaves_out_what_brokers_refuse_and_times_need_a_column():
    assert {*Selection().classes} == {*REASONS} - {"data"}
    for times in (Selection(("data",), since=NOON), Selection(("data",), until=NOON)):
        with pytest.raises(ColumnError, match="event_time"):
            table().wanted(Mock(columns=["a"]), times)
        assert (times.classes, times.again, times.max_tries) == (("data",), False, 3)
