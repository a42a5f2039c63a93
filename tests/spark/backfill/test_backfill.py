"""The driver side of a backfill: letters, tables, filters, tries, parking; a scripted cluster."""

import datetime as dt
import shutil
import time
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from rocket_sink.errors import ColumnError, LedgerError, OptionError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.query.backfill_marks import about_to_send, not_stored
from rocket_sink.ledger.records import RunContext, dead_letter_rows, resolution_rows
from rocket_sink.ledger.schema import ledger_ddl
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.producer import Producer
from rocket_sink.spark.backfill.backfill import Backfill
from rocket_sink.spark.backfill.parking import park, unpark
from rocket_sink.spark.backfill.sources import DeadLetters, Selection, Table
from rocket_sink.testing import Answer, FakeCluster
from tests.clusters import are_in_order
from tests.spark.settings import setting

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TOPIC = "t"
ZONE = "spark.sql.session.timeZone"
DRIVER = RunContext("q", "r", 0)


class Desk(NamedTuple):
    """A topic, and the options of a backfill to it."""

    spark: Any
    cluster: FakeCluster
    options: SinkOptions

    @property
    def ledger(self):
        return Ledger(self.options.ledger)

    def backfill(self, source=None, **selection):
        options = self.options if source is None else source.options
        return Backfill(self.spark, options, Selection(**selection), source)

    def run(self, source=None, **selection):
        work = self.backfill(source, **selection)
        plan = work.plan(sample=0)
        progress = [0]
        sent = work.run(plan.selected, progress=progress.append)
        assert progress[-1] == plan.selected, "the progress counts letters, down to the last one"
        return plan, sent

    def with_(self, **changes):
        """Return the same desk with other options."""
        return self._replace(options=self.options.with_(**changes))

    def write_letters(self, count, **columns):
        """Write dead letters to the driver's ledger; return their ids."""
        values = {
            "body": pa.array([f"body {n}".encode() for n in range(count)]),
            "sharding_key": pa.array([f"k{n % 2}" for n in range(count)]),
            "message_id": pa.array([f"{n:032X}" for n in range(count)]),
            "topic": TOPIC, "reason": "transport", "outcome": "not_sent", **columns,
        }  # fmt: skip
        batches = dead_letter_rows(values, DRIVER)
        self.ledger.append(self.spark, *batches)
        return [number for batch in batches for number in batch["letter_id"].to_pylist()]

    def send(self, *messages):
        """Send messages (body, id, key) to the topic, as an earlier process did."""
        with Producer(self.options) as producer:
            for body, number, key in messages:
                producer.send(Message(TOPIC, body.encode(), sharding_key=key, message_id=number))

    def bodies(self):
        return sorted(message.body.decode() for message in self.cluster.messages(TOPIC))

    def source(self, frame, name="in", **more):
        """Return a frame as the rows of a table, which go to the topic."""
        return Table(frame, name, self.options.with_(topic=TOPIC), **more)

    def table(self, rows, name="rows"):
        frame = self.spark.createDataFrame(rows, "payload string, who string, n int")
        mapped = self.with_(columns="body=payload, sharding_key=who", orderBy="n")
        return mapped.source(frame.repartition(3), name)

    def pending(self, source):
        """Return the frame of the table's rows that are not sent yet."""
        return source.pending(self.spark, self.ledger, Selection())

    def kill_after_mark(self, source):
        """Mark the table's first row, as a backfill did that was killed then; return the row."""
        row = self.pending(source).orderBy("_place").head()
        self.ledger.create(self.spark)
        self.ledger.append(self.spark, *marks(row.letter_id, row.message_id))
        return row


@pytest.fixture
def desk(spark, cluster, tmp_path):
    options = SinkOptions.parse(
        nameServer=cluster.name_server, ledger=str(tmp_path / "ledger"), sendMsgTimeout="30s",
        connectTimeoutMs="20s", retryTimesWhenSendFailed=0, storedCheckDelay=20,
    )  # fmt: skip
    return Desk(spark, cluster, options)


def marks(letter, number, *ends):
    """Return the marks of earlier backfills on a letter: one for each end, or of a killed one."""
    names = {"letter_id": [letter], "topic": [TOPIC], "message_id": [number]}
    rows = []
    for turn, (outcome, code) in enumerate(ends or [("", "")]):
        ctx = RunContext(f"backfill-{turn}", f"backfill-{turn}", 0, 0, lane="backfill")
        rows.append(about_to_send(names, ctx))
        if outcome:
            rows.append(not_stored(names, ctx, outcome=[outcome], error_code=[code]))
    return rows


class TestDeadLetters:
    def test_bodies_of_a_query_are_read_by_several_tasks(self, desk):
        """If the plan partitioned by the query, one task would read all bodies and spill: with
        300,000 of 10 KB it took eight minutes."""
        desk.write_letters(2)
        letters = DeadLetters().pending(desk.spark, desk.ledger, Selection())
        assert letters is not None and letters.count() == 2
        plan = letters._jdf.queryExecution().optimizedPlan().toString()
        windows = [text for text in plan.splitlines() if "windowspecdefinition(query_id" in text]
        assert [text for text in windows if "epoch" not in text] == []

    def test_tries_killed_backfills_and_parked_letters(self, desk):
        """Rows are sent, asked for or left alone; one test, because a Delta table takes seconds."""
        keys = pa.array(["stuck", "k1", "stuck", "k1", "k0", "k1", "k0", "k1"])
        reasons = pa.array(["transport"] * 5 + ["unknown", "transport", "unknown"])
        ids = desk.write_letters(8, sharding_key=keys, reason=reasons)
        numbers = [f"{n:032X}" for n in range(8)]
        poison = ("rejected", "MESSAGE_ILLEGAL")
        ends = ([poison] * 3, [poison] * 2, [("not_sent", "CONNECT")] * 5, [], [])
        spark, ledger = desk.spark, desk.ledger
        done = (
            marks(id_, number, *of) for id_, number, of in zip(ids, numbers, ends, strict=False)
        )
        ledger.append(spark, *(row for rows in done for row in rows))
        # The backfill that died stored letter 4; the send without an answer stored letter 5.
        desk.send(*((f"body {n}", numbers[n], f"k{n % 2}") for n in (4, 5)))
        parked = park(spark, ledger, letters=[ids[6], "nosuch"], note="by hand")
        assert (parked.count, parked.left_out) == (1, ("nosuch",))
        # A clock that is an hour ahead parked letter 7: once unparked, it is pending nevertheless.
        in_an_hour_us = int((time.time() + 3600) * 1e6)
        ahead = {"letter_id": [ids[7]], "resolution": "parked", "at": in_an_hour_us}
        ledger.append(spark, resolution_rows(ahead, DRIVER))
        back = unpark(spark, ledger, where="sharding_key = 'k1'", letters=[ids[0]], note="mended")
        assert (back.count, back.left_out) == (1, (ids[0],)), "letter 0 was never parked"
        assert unpark(spark, ledger, letters=[ids[7]], note="again").left_out == (ids[7],)

        plan, sent = desk.run()
        assert (plan.pending, plan.selected, plan.asked) == (7, 5, 4)
        assert (plan.left_alone, plan.behind) == (1, 1), "letter 2 waits behind letter 0"
        assert (sent.resent, sent.found, sent.failed) == (3, 2, 0)
        assert desk.bodies() == [f"body {n}" for n in (1, 3, 4, 5, 7)]
        plan, sent = desk.run(again=True)
        assert (plan.selected, sent.resent, plan.behind) == (2, 2, 0)
        assert desk.bodies() == [f"body {n}" for n in (0, 1, 2, 3, 4, 5, 7)]
        stuck = [
            m for m in desk.cluster.messages(TOPIC) if m.properties["__SHARDINGKEY"] == "stuck"
        ]
        assert [message.body for message in stuck] == [b"body 0", b"body 2"]
        rows = ledger.resolutions(spark).collect()
        assert {(r.letter_id, r.resolution, r.note) for r in rows if r.resolution != "resent"} == {
            (ids[6], "parked", "by hand"),
            (ids[7], "parked", None),
            (ids[7], "unparked", "mended"),
        }

    def test_a_letter_that_fails_often_is_left_alone(self, desk):
        """A row of reason `data` is never sent as it is: later letters of its key do not wait."""
        reasons = ("data", "transport", "transport")
        keys = pa.array(["a", "a", "b"])
        desk.write_letters(3, sharding_key=keys, reason=pa.array(reasons))
        desk.cluster.on_send(Answer(13, "no"), times=None)
        plan, sent = desk.run(max_tries=1, reasons=reasons)
        assert (plan.selected, sent.failed, sent.held_back) == (3, 2, 1)
        assert dict(sent.codes) == {"MESSAGE_ILLEGAL": 2}
        plan, sent = desk.run(max_tries=1, reasons=reasons)
        assert (plan.pending, plan.selected, plan.left_alone, plan.behind) == (3, 1, 2, 0)

    def test_the_broker_that_did_not_answer_is_asked_although_no_route_names_it(self, desk):
        """For letters of a known outcome that broker only refused them, so it is not asked."""
        reasons = pa.array(["unknown", "transport"])
        desk.write_letters(2, reason=reasons, last_broker_name="broker-gone")
        once = desk.with_(delivery="effectively_once", storedCheckTimeout=300)
        plan, sent = once.run(reasons=("unknown",))
        assert (plan.asked, sent.not_tried) == (1, 1)
        assert "broker-gone does not say" in sent.first_error
        plan, sent = once.run(reasons=("transport",))
        assert (sent.resent, desk.bodies()) == (1, ["body 1"])

    def test_what_a_consumer_gave_up_is_sent_although_its_topic_has_its_id(self, desk):
        [letter] = desk.write_letters(1, reason="consumer", outcome="acked")
        desk.ledger.append(desk.spark, *marks(letter, f"{0:032X}"))
        desk.send(("body 0", f"{0:032X}", "k0"))
        plan, sent = desk.run()
        assert (plan.asked, sent.resent, sent.found) == (0, 1, 0)
        assert desk.bodies() == ["body 0"] * 2

    def test_letters_without_a_topic_are_left_until_an_option_names_one(self, desk):
        topics, keys = pa.array([None, TOPIC, TOPIC]), pa.array(["a", "b", "c"])
        desk.write_letters(3, topic=topics, sharding_key=keys)
        plan, sent = desk.run()
        assert (plan.pending, plan.selected, plan.without_topic, sent.resent) == (3, 2, 1, 2)
        plan, sent = desk.with_(topic=TOPIC).run()
        assert (plan.selected, plan.without_topic, sent.resent) == (1, 0, 1)
        assert desk.bodies() == ["body 0", "body 1", "body 2"]

    def test_filters_times_and_limit(self, desk):
        seconds = [dt.datetime(2026, 1, 1, 0, 0, n, tzinfo=dt.timezone.utc) for n in range(6)]
        at = pa.array(seconds, pa.timestamp("us", tz="UTC"))
        desk.write_letters(6, at=at, reason=pa.array(["transport"] * 5 + ["data"]))
        with pytest.raises(OptionError, match=r"body_bytes >> 1.*WHERE.*last_error"):
            desk.backfill(where="body_bytes >> 1").plan()
        with pytest.raises(OptionError, match="nosuch"):
            desk.backfill(where="nosuch = 1").plan()
        with pytest.raises(OptionError, match="nosuch"):
            park(desk.spark, desk.ledger, where="nosuch = 1", note="x")
        assert desk.bodies() == []
        plan = desk.backfill(since=seconds[1], until=seconds[3]).plan()
        assert [(row["message_id"], row["at"].isoformat()) for row in plan.sample] == [
            (f"{n:032X}", f"2026-01-01T00:00:0{n}+00:00") for n in (1, 2)
        ]
        assert (plan.pending, plan.selected, plan.by_reason["data"]) == (6, 2, 1)
        assert desk.backfill(topic="another").plan().selected == 0
        assert plan.selected_bytes == len(b"body 1body 2")
        plan, sent = desk.run(where="sharding_key = 'k0'", limit=2)
        assert (plan.selected, sent.resent) == (2, 2)
        assert desk.bodies() == ["body 0", "body 2"]

    @pytest.mark.parametrize(
        "where",
        [
            "reflect('java.lang.System', 'setProperty', 'rocket.sink.where', 'ran') IS NULL",
            "coalesce(try_reflect('java.lang.System', 'getenv', 'HOME'), '') <> 'x'",
            "IDENTIFIER('ref' || 'lect')('java.lang.System', 'getenv', 'HOME') <> 'x'",
            "EXISTS (SELECT * FROM text.`/etc/hostname`)",
            "letter_id IN (SELECT value FROM text.`/etc/hostname`)",
            "(SELECT max(value) FROM text.`/etc/hostname`) <> ''",
        ],
    )
    def test_a_filter_calls_no_java_and_asks_no_other_table(self, desk, where):
        """The user may pass on somebody else's text as a filter, which must not run code."""
        desk.write_letters(1)
        with pytest.raises(OptionError, match="is refused"):
            desk.backfill(where=where).plan()
        with pytest.raises(OptionError, match="is refused"):
            park(desk.spark, desk.ledger, where=where, note="x")
        assert desk.spark._jvm.java.lang.System.getProperty("rocket.sink.where") is None
        assert desk.bodies() == []

    def test_a_ledger_of_another_version_is_refused(self, desk):
        desk.spark.sql(
            f"CREATE TABLE delta.`{desk.options.ledger}` ({ledger_ddl()}) USING delta "
            "TBLPROPERTIES ('rocketSink.schemaVersion' = '99')"
        )
        for source in (None, desk.table([("a", "k", 1)])):
            with pytest.raises(LedgerError, match=r"schema version 99.*install"):
                desk.run(source)
        assert desk.cluster.messages(TOPIC) == []


class TestTables:
    def test_a_table_is_sent_once_in_order_equal_rows_and_all(self, desk):
        rows: list[tuple[Any, ...]] = [(f"{n:03}", f"k{n % 3}", n) for n in range(60)]
        rows += [("equal", "k0", 100)] * 3 + [("no key", None, 5)]
        plan, sent = desk.run(desk.table(rows))
        assert (plan.pending, plan.selected, plan.asked, sent.resent) == (64, 64, 0, 64)
        assert desk.bodies() == sorted(row[0] for row in rows)
        assert are_in_order(desk.cluster.messages(TOPIC))
        assert len({m.message_id for m in desk.cluster.messages(TOPIC)}) == 64
        again = desk.table([*rows, ("equal", "k0", 100), ("new", "k1", 7)])
        plan, sent = desk.run(again)
        assert (plan.pending, sent.resent) == (2, 2)
        assert len(desk.bodies()) == 66
        for kind in ("namespace", "namespaceV2"):
            elsewhere = replace(again, options=again.options.with_(**{kind: "n"}))
            work = Backfill(desk.spark, elsewhere.options, Selection(), elsewhere)
            assert work.plan().pending == 66, "the topic of another namespace is another topic"

    def test_what_a_killed_backfill_sent_is_found(self, desk):
        source = desk.table([(f"{n}", "k", n) for n in range(5)])
        first = desk.kill_after_mark(source)
        assert first.body == "0"
        desk.send(("0", first.message_id, "k"))
        _, sent = desk.run(source)
        assert (sent.resent, sent.found) == (4, 1)
        assert desk.bodies() == ["0", "1", "2", "3", "4"]

    def test_rows_read_from_a_topic_are_sent_although_it_has_their_ids(self, desk):
        """The rows are from `dlq export`; a backfill was killed after its mark, before it sent."""
        desk.send(("0", "ID0", "k"))
        trace = f"00-{'1' * 32}-{'2' * 16}-01"
        frame = desk.spark.sql(
            "SELECT '0' AS body, 'ID0' AS message_id, 'x' AS offset_message_id, "
            f"'{trace}' AS traceparent, 'a=1' AS tracestate"
        )
        source = desk.source(frame, "dead.parquet")
        desk.kill_after_mark(source)
        _, sent = desk.run(source)
        assert (sent.resent, sent.found) == (1, 0)
        assert desk.bodies() == ["0", "0"]
        properties = desk.cluster.messages(TOPIC)[1].properties
        assert (properties["traceparent"], properties["tracestate"]) == (trace, "a=1")

    def test_its_ids_are_the_same_in_each_time_zone_and_with_each_java(self, desk):
        """Java 17 prints 1.0E23 as 9.999999999999999E22, later ones print 1.0E23. The id below
        was made with Java 17, and is the same with Java 25."""
        frame = desk.spark.sql(
            "SELECT 'b' AS body, timestamp'2026-01-01 12:00:00.123456Z' AS made, 1.0E23D AS large,"
            " map(1.1F, array(date'1500-02-28')) AS nested, "
            " timestamp_ntz'1800-01-01 00:00:00.5' AS written, 1E-9BD AS number, x'00ff' AS raw, "
            " named_struct('a b', CAST(NULL AS DOUBLE), 'c', true) AS leg"
        )
        ids = set()
        for zone in ("UTC", "America/New_York"):
            with setting(desk.spark, ZONE, zone):
                ids.add(desk.pending(desk.source(frame, "rows")).head().letter_id)
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
    def test_values_that_differ_are_different_rows(self, desk, values):
        frame = desk.spark.sql(f"SELECT 'b' AS body, explode(array({values})) AS value")
        ids = {row.letter_id for row in desk.pending(desk.source(frame)).collect()}
        assert len({name.rpartition("-")[0] for name in ids}) == len(ids) == frame.count() > 1

    def test_rows_that_spark_reads_with_other_types_are_not_sent_again(self, desk, tmp_path):
        """A new folder turns all partition values into texts; a new first file reorders columns."""

        def source(**schema):
            return desk.source(desk.spark.read.json(str(tmp_path / "in"), **schema))

        def put(folder, text):
            file = tmp_path / "in" / folder / "part.json"
            file.parent.mkdir(parents=True)
            file.write_text(text)

        put("p=0", '{"body": "a", "n": 1}\n{"body": "b", "n": 2}\n')
        put("p=1", '{"body": "c", "n": 3}\n')
        _, sent = desk.run(source())
        assert (sent.resent, desk.bodies()) == (3, ["a", "b", "c"])
        put("p=x", '{"body": "d", "n": 4.5}\n')
        changes = r"n was bigint, is double.*p was int, is string"
        with pytest.raises(ColumnError, match=changes) as caught:
            desk.run(source())
        assert "basePath" in str(caught.value) and "`n` bigint" in str(caught.value)
        assert desk.bodies() == ["a", "b", "c"]
        shutil.rmtree(tmp_path / "in" / "p=x")
        put("p=2", '{"body": "d", "n": 4}\n')
        _, sent = desk.run(source(schema="n BIGINT, body STRING, p INT"))
        assert (sent.resent, desk.bodies()) == (1, ["a", "b", "c", "d"])

    def test_a_filter_is_on_the_tables_own_columns_and_changes_no_id(self, desk):
        source = desk.table([(f"{n}", "k", n) for n in range(6)])
        _, sent = desk.run(source, where="n % 2 = 0", limit=2)
        assert (sent.resent, desk.bodies()) == (2, ["0", "2"])
        _, sent = desk.run(source)
        assert (sent.resent, desk.bodies()) == (4, ["0", "1", "2", "3", "4", "5"])
        _, sent = desk.run(desk.table([("0", "k", 0)], name="another table"))
        assert sent.resent == 1, "the same row of another table is another row"

    def test_what_cannot_be_sent_is_refused_before_anything_is(self, desk):
        wrong = desk.table([("a", "k", 1)])
        with pytest.raises(ColumnError, match=r"no column 'payload'.*columns='body=payload'"):
            desk.run(desk.source(wrong.frame))
        with pytest.raises(ColumnError, match="no column 'topic'"):
            desk.run(Table(wrong.frame, "x", desk.options.with_(columns="body=payload")))
        with pytest.raises(OptionError, match=r"who ==> 1.*payload, who, n"):
            desk.run(wrong, where="who ==> 1")
        assert desk.cluster.messages(TOPIC) == []

    def test_whole_rows_as_json_times_and_ids_of_their_own(self, desk):
        """Rows are sorted by their time, then as they are read; a row without a time is first."""
        frame = desk.spark.sql(
            "SELECT 'id-' || id AS message_id, id, "
            "timestamp_millis(nullif(2 - id DIV 2, 0) * 1000) AS event_time FROM range(5)"
        )
        source = desk.with_(bodyFormat="json").source(frame)
        sample = desk.backfill(source).plan().sample
        in_order = [(f"id-{number}", 0) for number in (4, 2, 3, 0, 1)]
        assert [(row["message_id"], row["tries"]) for row in sample] == in_order
        until = dt.datetime(1970, 1, 1, 0, 0, 2, tzinfo=dt.timezone.utc)
        _, sent = desk.run(source, until=until)
        assert sent.resent == 2
        assert desk.bodies() == ['{"id":2}', '{"id":3}']
        assert {m.message_id for m in desk.cluster.messages(TOPIC)} == {"id-2", "id-3"}
