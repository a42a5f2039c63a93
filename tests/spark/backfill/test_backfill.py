"""The driver side of a backfill: letters, tables, filters, tries, parking; a scripted cluster."""

import contextlib
import dataclasses
import datetime as dt
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rocket_sink.errors import ColumnError, LedgerError, OptionError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.query.backfill_marks import about_to_send, not_stored
from rocket_sink.ledger.records import RunContext, dead_letter_rows, resolution_rows
from rocket_sink.ledger.schema import ledger_ddl
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.options import SinkOptions
from rocket_sink.producer.producer import Producer
from rocket_sink.spark.backfill import backfill
from rocket_sink.spark.backfill.backfill import Backfill, Plan
from rocket_sink.spark.backfill.parking import park, unpark
from rocket_sink.spark.backfill.resend import Resent
from rocket_sink.spark.backfill.sources import DeadLetters, Selection, Table
from rocket_sink.testing import Answer, FakeCluster
from tests.run_command import run_command
from tests.spark.settings import setting

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TOPIC = "t"
DRIVER = RunContext("q", "r", 0)


@pytest.fixture
def options(cluster: FakeCluster, tmp_path: Path) -> SinkOptions:
    return SinkOptions.parse(
        nameServer=cluster.name_server, ledger=str(tmp_path / "ledger"), sendMsgTimeout="30s",
        connectTimeoutMs="20s", retryTimesWhenSendFailed=0, storedCheckDelay=20,
    )  # fmt: skip


Run = Callable[..., tuple[Plan, Resent]]


@pytest.fixture
def run(spark: Any, options: SinkOptions) -> Run:
    def go(source: Any = None, opts: SinkOptions = options, **selection: Any) -> Any:
        work = Backfill(spark, opts, Selection(**selection), source)
        plan = work.plan(sample=0)
        progress = [0]
        sent = work.run(plan.selected, progress=progress.append)
        assert progress[-1] == plan.selected, "the progress counts letters, down to the last one"
        return plan, sent

    return go


def in_an_hour() -> int:
    return int((time.time() + 3600) * 1e6)


def write_letters(spark: Any, options: SinkOptions, count: int, **columns: Any) -> list[str]:
    """Write dead letters to the driver's ledger; return their ids."""
    values = {
        "body": pa.array([f"body {n}".encode() for n in range(count)]),
        "sharding_key": pa.array([f"k{n % 2}" for n in range(count)]),
        "message_id": pa.array([f"{n:032X}" for n in range(count)]),
        "topic": TOPIC, "reason": "transport", "outcome": "not_sent", **columns,
    }  # fmt: skip
    batches = dead_letter_rows(values, DRIVER)
    Ledger(options.ledger).append(spark, *batches)
    return [number for batch in batches for number in batch["letter_id"].to_pylist()]


def marks(letter: str, number: str, *ends: tuple[str, str]) -> list[pa.RecordBatch]:
    """Return the marks of earlier backfills on a letter: one for each end, or of a killed one."""
    names = {"letter_id": [letter], "topic": [TOPIC], "message_id": [number]}
    rows = []
    for turn, (outcome, code) in enumerate(ends or [("", "")]):
        ctx = RunContext(f"backfill-{turn}", f"backfill-{turn}", 0, 0, lane="backfill")
        rows.append(about_to_send(names, ctx))
        if outcome:
            rows.append(not_stored(names, ctx, outcome=[outcome], error_code=[code]))
    return rows


def bodies(cluster: FakeCluster, topic: str = TOPIC) -> list[str]:
    return sorted(message.body.decode() for message in cluster.messages(topic))


class TestDeadLetters:
    def test_bodies_of_a_query_are_read_by_several_tasks(
        self, spark: Any, options: SinkOptions
    ) -> None:
        """If the plan partitioned by the query, one task would read all bodies and spill: with
        300,000 of 10 KB it took eight minutes."""
        write_letters(spark, options, 2)
        letters = DeadLetters().pending(spark, Ledger(options.ledger), Selection())
        assert letters is not None and letters.count() == 2
        plan = letters._jdf.queryExecution().optimizedPlan().toString()
        windows = [text for text in plan.splitlines() if "windowspecdefinition(query_id" in text]
        assert [text for text in windows if "epoch" not in text] == []

    def test_tries_killed_backfills_and_parked_letters(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        """Rows are sent, asked for or left alone; one test, because a Delta table takes seconds."""
        stuck = pa.array(["stuck", "k1", "stuck", "k1", "k0", "k1", "k0", "k1"])
        reasons = pa.array(["transport"] * 5 + ["unknown", "transport", "unknown"])
        ids = write_letters(spark, options, 8, sharding_key=stuck, reason=reasons)
        numbers = [f"{n:032X}" for n in range(8)]
        poison = ("rejected", "MESSAGE_ILLEGAL")
        done = [
            *marks(ids[0], numbers[0], poison, poison, poison),
            *marks(ids[1], numbers[1], poison, poison),
            *marks(ids[2], numbers[2], *[("not_sent", "CONNECT")] * 5),
            *marks(ids[3], numbers[3]),
            *marks(ids[4], numbers[4]),
        ]
        Ledger(options.ledger).append(spark, *done)
        with Producer(options) as producer:
            # The backfill that died stored letter 4; the send without an answer stored letter 5.
            for n in (4, 5):
                message = f"body {n}".encode()
                producer.send(_message(message, numbers[n], f"k{n % 2}"))
        ledger = Ledger(options.ledger)
        parked = park(spark, ledger, letters=[ids[6], "nosuch"], note="by hand")
        assert (parked.count, parked.left_out) == (1, ("nosuch",))
        # A clock that is an hour ahead parked letter 7: once unparked, it is pending nevertheless.
        ahead = {"letter_id": [ids[7]], "resolution": "parked", "at": in_an_hour()}
        ledger.append(spark, resolution_rows(ahead, DRIVER))
        back = unpark(spark, ledger, where="sharding_key = 'k1'", letters=[ids[0]], note="mended")
        assert (back.count, back.left_out) == (1, (ids[0],)), "letter 0 was never parked"
        assert unpark(spark, ledger, letters=[ids[7]], note="again").left_out == (ids[7],)

        plan, sent = run()
        assert (plan.pending, plan.selected, plan.asked) == (7, 5, 4)
        assert (plan.left_alone, plan.behind) == (1, 1), "letter 2 waits behind letter 0"
        assert (sent.resent, sent.found, sent.failed) == (3, 2, 0)
        assert bodies(cluster) == [f"body {n}" for n in (1, 3, 4, 5, 7)]
        plan, sent = run(again=True)
        assert (plan.selected, sent.resent, plan.behind) == (2, 2, 0)
        assert bodies(cluster) == [f"body {n}" for n in (0, 1, 2, 3, 4, 5, 7)]
        in_order = [
            m.body for m in cluster.messages(TOPIC) if m.properties.get("__SHARDINGKEY") == "stuck"
        ]
        assert in_order == [b"body 0", b"body 2"]
        rows = Ledger(options.ledger).resolutions(spark).collect()
        assert {(r.letter_id, r.resolution, r.note) for r in rows if r.resolution != "resent"} == {
            (ids[6], "parked", "by hand"), (ids[7], "parked", None), (ids[7], "unparked", "mended"),
        }  # fmt: skip

    def test_a_letter_that_fails_often_is_left_alone(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        """A row of reason `data` is never sent as it is: later letters of its key do not wait."""
        write_letters(
            spark, options, 3, sharding_key=pa.array(["a", "a", "b"]),
            reason=pa.array(["data", "transport", "transport"]),
        )  # fmt: skip
        cluster.on_send(Answer(13, "no"), times=None)
        plan, sent = run(max_tries=1, reasons=("data", "transport"))
        assert (plan.selected, sent.failed, sent.held_back) == (3, 2, 1)
        assert dict(sent.codes) == {"MESSAGE_ILLEGAL": 2}
        plan, sent = run(max_tries=1, reasons=("data", "transport"))
        assert (plan.pending, plan.selected, plan.left_alone, plan.behind) == (3, 1, 2, 0)

    def test_the_broker_that_did_not_answer_is_asked_although_no_route_names_it(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        """For letters of a known outcome that broker only refused them, so it is not asked."""
        reasons = pa.array(["unknown", "transport"])
        write_letters(spark, options, 2, reason=reasons, last_broker_name="broker-gone")
        once = options.with_(delivery="effectively_once", storedCheckTimeout=300)
        plan, sent = run(opts=once, reasons=("unknown",))
        assert (plan.asked, sent.not_tried) == (1, 1)
        assert "broker-gone does not say" in sent.first_error
        plan, sent = run(opts=once, reasons=("transport",))
        assert (sent.resent, bodies(cluster)) == (1, ["body 1"])

    def test_what_a_consumer_gave_up_is_sent_although_its_topic_has_its_id(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        [letter] = write_letters(spark, options, 1, reason="consumer", outcome="acked")
        Ledger(options.ledger).append(spark, *marks(letter, f"{0:032X}"))
        with Producer(options) as producer:
            producer.send(_message(b"body 0", f"{0:032X}", "k0"))
        plan, sent = run()
        assert (plan.asked, sent.resent, sent.found) == (0, 1, 0)
        assert bodies(cluster) == ["body 0"] * 2

    def test_letters_without_a_topic_are_left_until_an_option_names_one(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        write_letters(spark, options, 2, topic=pa.array([None, TOPIC]))
        plan, sent = run()
        assert (plan.pending, plan.selected, plan.without_topic, sent.resent) == (2, 1, 1, 1)
        plan, sent = run(opts=options.with_(topic=TOPIC))
        assert (plan.selected, plan.without_topic, sent.resent) == (1, 0, 1)
        assert bodies(cluster) == ["body 0", "body 1"]

    def test_filters_times_and_limit(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        seconds = [dt.datetime(2026, 1, 1, 0, 0, n, tzinfo=dt.timezone.utc) for n in range(6)]
        write_letters(
            spark, options, 6, at=pa.array(seconds, pa.timestamp("us", tz="UTC")),
            reason=pa.array(["transport"] * 5 + ["data"]),
        )  # fmt: skip
        work = Backfill(spark, options, Selection(where="body_bytes >> 1"))
        with pytest.raises(OptionError, match=r"body_bytes >> 1.*WHERE.*last_error"):
            work.plan()
        with pytest.raises(OptionError, match="nosuch"):
            Backfill(spark, options, Selection(where="nosuch = 1")).plan()
        with pytest.raises(OptionError, match="nosuch"):
            park(spark, work.ledger, where="nosuch = 1", note="x")
        assert bodies(cluster) == []
        plan = Backfill(spark, options, Selection(since=seconds[1], until=seconds[3])).plan()
        assert [row["message_id"] for row in plan.sample] == [f"{n:032X}" for n in (1, 2)]
        assert [row["at"].isoformat() for row in plan.sample] == [
            f"2026-01-01T00:00:0{n}+00:00" for n in (1, 2)
        ]
        assert (plan.pending, plan.selected, plan.by_reason["data"]) == (6, 2, 1)
        assert plan.selected_bytes == len(b"body 1body 2")
        plan, sent = run(where="sharding_key = 'k0'", limit=2)
        assert (plan.selected, sent.resent) == (2, 2)
        assert bodies(cluster) == ["body 0", "body 2"]

    @pytest.mark.parametrize(
        "where",
        [
            "reflect('java.lang.System', 'setProperty', 'rocket.sink.where', 'ran') IS NULL",
            "`java_method`('java.lang.System', 'setProperty', 'rocket.sink.where', 'ran') = ''",
            "coalesce(try_reflect('java.lang.System', 'getenv', 'HOME'), '') <> 'x'",
            "body_bytes > 0 OR reflect/**/('java.lang.System', 'getenv', 'HOME') = ''",
            "IDENTIFIER('ref' || 'lect')('java.lang.System', 'getenv', 'HOME') <> 'x'",
            "EXISTS (SELECT * FROM text.`/etc/hostname`)",
            "letter_id IN (SELECT value FROM text.`/etc/hostname`)",
            "(SELECT max(value) FROM text.`/etc/hostname`) <> ''",
        ],
    )
    def test_a_filter_calls_no_java_and_asks_no_other_table(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, where: str
    ) -> None:
        """The user may pass on somebody else's text as a filter, which must not run code."""
        write_letters(spark, options, 1)
        with pytest.raises(OptionError, match="is refused"):
            Backfill(spark, options, Selection(where=where)).plan()
        with pytest.raises(OptionError, match="is refused"):
            park(spark, Ledger(options.ledger), where=where, note="x")
        assert spark._jvm.java.lang.System.getProperty("rocket.sink.where") is None
        assert bodies(cluster) == []

    def test_nothing_is_pending_where_no_ledger_is(
        self, spark: Any, options: SinkOptions, run: Run
    ) -> None:
        plan, sent = run()
        assert (plan, sent) == (Plan(), Resent())

    def test_a_ledger_of_another_version_is_refused(
        self, spark: Any, options: SinkOptions, cluster: FakeCluster, run: Run
    ) -> None:
        spark.sql(
            f"CREATE TABLE delta.`{options.ledger}` ({ledger_ddl()}) USING delta "
            "TBLPROPERTIES ('rocketSink.schemaVersion' = '99')"
        )
        with pytest.raises(LedgerError, match=r"schema version 99.*install"):
            run()
        with pytest.raises(LedgerError, match="schema version 99"):
            run(table(spark, options, [("a", "k", 1)]))
        assert cluster.messages(TOPIC) == []

    def test_two_at_once_are_refused(
        self, spark: Any, options: SinkOptions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A backfill of any process counts, and so does a worker that outlives its driver."""
        monkeypatch.setattr(backfill, "_OTHERS_WAIT_S", 0.0)
        waited: list[str] = []
        with Backfill(spark, options):
            second = Backfill(spark, options, wait_s=0.3, on_wait=waited.append)
            with pytest.raises(LedgerError, match=rf"another backfill.*process {os.getpid()}"):
                second.__enter__()
            assert waited and str(os.getpid()) in waited[0]
            assert Backfill(spark, options).plan() == Plan(), "a plan alone sends nothing"
        other = SpoolWriter(options.ledger, RunContext("backfill-x", "backfill-x", 0, 0))
        names = {"letter_id": ["l"], "topic": ["t"], "message_id": ["m"]}
        other.append(about_to_send(names, DRIVER))
        with pytest.raises(LedgerError, match=r"another backfill.*at work"):
            Backfill(spark, options).__enter__()
        other.seal()
        with Backfill(spark, options) as work:
            work.plan()

    def test_a_command_beside_another_gives_up_or_waits(
        self, spark: Any, options: SinkOptions, cluster: FakeCluster
    ) -> None:
        write_letters(spark, options, 1)
        command = ("backfill", "-l", options.ledger, "-n", cluster.name_server)
        output, over = io.StringIO(), threading.Event()

        def leave_once_waited_for() -> None:
            while "waits for another backfill" not in output.getvalue() and not over.wait(0.01):
                pass
            first.__exit__(None, None, None)

        with contextlib.ExitStack() as stack:
            first = Backfill(spark, options)
            first.__enter__()
            refused = run_command(*command, "--no-wait", spark=spark)
            leaver = threading.Thread(target=leave_once_waited_for)
            leaver.start()
            stack.callback(leaver.join)
            stack.callback(over.set)
            done = run_command(*command, spark=spark, err=output)
        assert refused.code == 1
        assert "at work" in refused.err and f"process {os.getpid()}" in refused.err
        assert done.code == 0, output.getvalue()
        assert output.getvalue().count("waits for another backfill") == 1


def table(
    spark: Any, options: SinkOptions, rows: list[tuple[Any, ...]], name: str = "rows", **more: Any
) -> Table:
    frame = spark.createDataFrame(rows, "payload string, who string, n int").repartition(3)
    mapped = options.with_(
        columns="body=payload, sharding_key=who", orderBy="n", topic=TOPIC, **more
    )  # fmt: skip
    return Table(frame, name, mapped)


class TestTables:
    def test_a_table_is_sent_once_in_order_equal_rows_and_all(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        rows: list[tuple[Any, ...]] = [(f"{n:03}", f"k{n % 3}", n) for n in range(60)]
        rows += [("equal", "k0", 100)] * 3 + [("no key", None, 5)]
        source = table(spark, options, rows)
        plan, sent = run(source, source.options)
        assert (plan.pending, plan.selected, sent.resent) == (64, 64, 64)
        assert bodies(cluster) == sorted(row[0] for row in rows)
        seen: dict[str | None, list[str]] = {}
        for message in cluster.messages(TOPIC):
            seen.setdefault(message.properties.get("__SHARDINGKEY"), []).append(
                message.body.decode()
            )
        assert all(got == sorted(got) for got in seen.values())
        assert len({m.message_id for m in cluster.messages(TOPIC)}) == 64
        again = table(spark, options, [*rows, ("equal", "k0", 100), ("new", "k1", 7)])
        plan, sent = run(again, again.options)
        assert (plan.pending, sent.resent) == (2, 2)
        assert len(bodies(cluster)) == 66
        elsewhere = dataclasses.replace(again, options=again.options.with_(namespace="n"))
        work = Backfill(spark, elsewhere.options, Selection(), elsewhere)
        assert work.plan().pending == 66, "the topic of another namespace is another topic"

    def test_what_a_killed_backfill_sent_is_found(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        source = table(spark, options, [(f"{n}", "k", n) for n in range(5)])
        work = Backfill(spark, source.options, Selection(), source)
        letters = source.pending(spark, work.ledger, Selection())
        assert letters is not None
        first = letters.orderBy("_place").head()
        assert first is not None and first.body == "0"
        work.ledger.create(spark)
        work.ledger.append(spark, *marks(first.letter_id, first.message_id))
        with Producer(options) as producer:
            producer.send(_message(b"0", first.message_id, "k"))
        _, sent = run(source, source.options)
        assert (sent.resent, sent.found) == (4, 1)
        assert bodies(cluster) == ["0", "1", "2", "3", "4"]

    def test_rows_read_from_a_topic_are_sent_although_it_has_their_ids(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        """The rows are from `dlq export`; a backfill was killed after its mark, before it sent."""
        with Producer(options) as producer:
            producer.send(_message(b"0", "ID0", "k"))
        frame = spark.sql("SELECT '0' AS body, 'ID0' AS message_id, 'x' AS offset_message_id")
        source = Table(frame, "dead.parquet", options.with_(topic=TOPIC))
        work = Backfill(spark, source.options, Selection(), source)
        letters = source.pending(spark, work.ledger, Selection())
        assert letters is not None
        [row] = letters.collect()
        work.ledger.create(spark)
        work.ledger.append(spark, *marks(row.letter_id, row.message_id))
        _, sent = run(source, source.options)
        assert (sent.resent, sent.found) == (1, 0)
        assert bodies(cluster) == ["0", "0"]

    def test_its_ids_are_the_same_in_each_time_zone_and_with_each_java(
        self, spark: Any, options: SinkOptions
    ) -> None:
        """Java 17 prints 1.0E23 as 9.999999999999999E22, later ones print 1.0E23. The id below
        was made with Java 17, and is the same with Java 25."""
        frame = spark.sql(
            "SELECT 'b' AS body, timestamp'2026-01-01 12:00:00.123456Z' AS made, 1.0E23D AS large,"
            " map(1.1F, array(date'1500-02-28')) AS nested, "
            " timestamp_ntz'1800-01-01 00:00:00.5' AS written, 1E-9BD AS number, x'00ff' AS raw, "
            " named_struct('a b', CAST(NULL AS DOUBLE), 'c', true) AS leg"
        )
        source = Table(frame, "rows", options.with_(topic=TOPIC))
        ids = set()
        for zone in ("UTC", "America/New_York"):
            with setting(spark, "spark.sql.session.timeZone", zone):
                letters = source.pending(spark, Ledger(options.ledger), Selection())
                assert letters is not None
                ids.add(letters.select("letter_id").collect()[0][0])
        assert ids == {"row-e658aba224e98f0bb8beaf515c5d348f-1"}

    @pytest.mark.parametrize(
        "values",
        [
            "timestamp'2026-01-01 00:00:00.000001Z', timestamp'2026-01-01 00:00:00.000002Z'",
            "timestamp_ntz'2026-01-01 00:00:00.000001', timestamp_ntz'2026-01-01 00:00:00.000002'",
            "-0.0D, 0.0D, CAST('NaN' AS DOUBLE), NULL",
            "CAST('-0' AS FLOAT), CAST('0' AS FLOAT)",
            "CAST(x'fe' AS STRING), CAST(x'ff' AS STRING), 'null', NULL",
            "array(CAST(x'fe' AS STRING)), array(CAST(x'ff' AS STRING)), array(NULL), array()",
            "named_struct('a b', 0.0D, 'c', NULL), named_struct('a b', -0.0D, 'c', NULL), NULL",
            "map(timestamp'2026-01-01 00:00:00.000001Z', 1D), map()",
        ],
    )
    def test_values_that_differ_are_different_rows(
        self, spark: Any, options: SinkOptions, values: str
    ) -> None:
        frame = spark.sql(f"SELECT 'b' AS body, explode(array({values})) AS value")
        source = Table(frame, "rows", options.with_(topic=TOPIC))
        letters = source.pending(spark, Ledger(options.ledger), Selection())
        assert letters is not None
        ids = {row.letter_id for row in letters.select("letter_id").collect()}
        assert len({name.rpartition("-")[0] for name in ids}) == len(ids) == frame.count() > 1

    def test_rows_sent_under_another_digest_or_setting_are_not_sent_again(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        frame = spark.sql("SELECT 'a' AS body, timestamp'2026-01-01 12:00:00Z' AS at")
        source = Table(frame, "in", options.with_(topic=TOPIC))
        run(source, source.options)
        with (
            setting(spark, "spark.sql.parquet.int96TimestampConversion", "true"),
            pytest.raises(ColumnError, match=r"int96TimestampConversion was false, is true"),
        ):
            run(source, source.options)
        [note] = (Path(options.ledger) / "_notes" / "sources").glob("*.json")
        noted = json.loads(note.read_text())
        note.write_text(json.dumps({**noted, "digest": "text"}))
        with pytest.raises(LedgerError, match=r"another digest.*name another ledger"):
            run(source, source.options)
        assert bodies(cluster) == ["a"]

    def test_rows_that_spark_reads_with_other_types_are_not_sent_again(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run, tmp_path: Path
    ) -> None:
        """A new folder turns all partition values into texts; a new first file reorders columns."""
        settings = options.with_(topic=TOPIC)

        def source(schema: str | None = None, **more: Any) -> Table:
            reader = spark.read.format("json")
            frame = (reader.schema(schema) if schema else reader).load(str(tmp_path / "in"))
            return Table(frame, "in", settings, **more)

        def put(folder: str, text: str) -> None:
            file = tmp_path / "in" / folder / "part.json"
            file.parent.mkdir(parents=True)
            file.write_text(text)

        put("p=0", '{"body": "a", "n": 1}\n{"body": "b", "n": 2}\n')
        put("p=1", '{"body": "c", "n": 3}\n')
        _, sent = run(source(), settings)
        assert (sent.resent, bodies(cluster)) == (3, ["a", "b", "c"])
        put("p=x", '{"body": "d", "n": 4.5}\n')
        with pytest.raises(
            ColumnError, match=r"n was bigint, is double.*p was int, is string"
        ) as no:
            run(source(), settings)
        assert "basePath" in str(no.value) and "`n` bigint" in str(no.value)
        assert bodies(cluster) == ["a", "b", "c"]
        shutil.rmtree(tmp_path / "in" / "p=x")
        put("p=2", '{"body": "d", "n": 4}\n')
        _, sent = run(source("n BIGINT, body STRING, p INT"), settings)
        assert (sent.resent, bodies(cluster)) == (1, ["a", "b", "c", "d"])

    def test_texts_are_other_times_in_another_zone(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run, tmp_path: Path
    ) -> None:
        with_topic, zone = options.with_(topic=TOPIC), "spark.sql.session.timeZone"
        (tmp_path / "in.json").write_text('{"body": "a", "at": "2026-01-01 12:00:00"}\n')

        def source() -> Table:
            frame = spark.read.schema("body STRING, at TIMESTAMP").json(str(tmp_path / "in.json"))
            return Table(frame, "in", with_topic, is_text=True)

        with setting(spark, zone, "UTC"):
            run(source(), with_topic)
        with (
            setting(spark, zone, "America/New_York"),
            pytest.raises(ColumnError, match=r"--spark-conf spark\.sql\.session\.timeZone=UTC"),
        ):
            run(source(), with_topic)
        assert bodies(cluster) == ["a"]

    def test_a_filter_is_on_the_tables_own_columns_and_changes_no_id(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        source = table(spark, options, [(f"{n}", "k", n) for n in range(6)])
        _, sent = run(source, source.options, where="n % 2 = 0", limit=2)
        assert sent.resent == 2
        assert bodies(cluster) == ["0", "2"]
        _, sent = run(source, source.options)
        assert sent.resent == 4
        assert bodies(cluster) == ["0", "1", "2", "3", "4", "5"]
        elsewhere = table(spark, options, [("0", "k", 0)], name="another table")
        _, sent = run(elsewhere, elsewhere.options)
        assert sent.resent == 1, "the same row of another table is another row"

    def test_what_cannot_be_sent_is_refused_before_anything_is(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        rows: list[tuple[Any, ...]] = [("a", "k", 1)]
        wrong = table(spark, options, rows)
        no_body = Table(wrong.frame, "x", options.with_(topic=TOPIC))
        with pytest.raises(ColumnError, match=r"no column 'payload'.*columns='body=payload'"):
            run(no_body, no_body.options)
        no_topic = Table(wrong.frame, "x", options.with_(columns="body=payload"))
        with pytest.raises(ColumnError, match="no column 'topic'"):
            run(no_topic, no_topic.options)
        with pytest.raises(OptionError, match=r"who ==> 1.*payload, who, n"):
            run(wrong, wrong.options, where="who ==> 1")
        with pytest.raises(ColumnError, match="event_time"):
            run(wrong, wrong.options, since=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc))
        assert cluster.messages(TOPIC) == []

    def test_an_empty_table_is_no_error(self, spark: Any, options: SinkOptions, run: Run) -> None:
        source = table(spark, options, [])
        plan, sent = run(source, source.options)
        assert (plan.pending, plan.selected, sent) == (0, 0, Resent())

    def test_whole_rows_as_json_times_and_ids_of_their_own(
        self, spark: Any, cluster: FakeCluster, options: SinkOptions, run: Run
    ) -> None:
        frame = spark.sql(
            "SELECT 'id-' || id AS message_id, timestamp_millis(id * 1000) AS event_time, id "
            "FROM range(5)"
        )
        packed = options.with_(bodyFormat="json", topic=TOPIC)
        until = dt.datetime(1970, 1, 1, 0, 0, 3, tzinfo=dt.timezone.utc)
        _, sent = run(Table(frame, "x", packed), packed, until=until)
        assert sent.resent == 3
        assert bodies(cluster) == ['{"id":0}', '{"id":1}', '{"id":2}']
        assert {m.message_id for m in cluster.messages(TOPIC)} == {"id-0", "id-1", "id-2"}


def _message(body: bytes, number: str, key: str) -> Any:
    from rocket_sink.message import Message

    return Message(TOPIC, body, sharding_key=key, message_id=number)
