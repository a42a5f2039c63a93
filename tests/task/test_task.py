"""The task body on a stub engine: its messages, dead letters and accounts."""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rocket_sink import errors
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.routing import sharding
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.encode import parts_of
from rocket_sink.task.pending import SpillState, decode_message
from rocket_sink.task.recorder import LedgerRecorder
from rocket_sink.task.request_factory import HomeQueueSelector
from rocket_sink.task.task import TaskSender
from rocket_sink.task.totals import COUNTS, RowTotals, WriteSummary
from rocket_sink.wire.codes import V5_0_0, V5_4_0, V5_5_0
from rocket_sink.wire.compress import CompressionType, inflate
from rocket_sink.wire.route import BrokerData, QueueData, TopicRoute
from tests.task.one_task import CTX
from tests.task.stub_engine import StubEngine, publish_info

COLUMN_TYPES = {name: LEDGER_SCHEMA.field(name).type for name in (
    "flag", "properties", "delay_level", "delay_ms", "delivery_timestamp", "priority",
    "lite_topic", "queue_id", "broker_name", "sharding_key",
)}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Run:
    """A task over some tables; `letters` are the ledger's dead letters as dicts."""

    def __init__(self, engine, clock=time.monotonic, **options):
        self.clock = clock
        settings = {"nameServer": "n:1", "topic": "t", "ledger": tempfile.mkdtemp(), **options}
        if settings["topic"] is None:
            settings.pop("topic")
        self.options = SinkOptions.parse(settings)
        self.engine = engine
        self.rows: list[pa.RecordBatch] = []
        self.body: TaskSender | None = None

    def feed(self, **columns):
        batch = pa.RecordBatch.from_pydict(columns)
        if self.body is None:
            plan = resolve_columns(batch.schema, self.options)
            recorder = LedgerRecorder(self.options, CTX, self.rows.append)
            self.body = TaskSender(
                self.options, plan, engine=self.engine, recorder=recorder, clock=self.clock,
            )  # fmt: skip
        self.body.feed(batch)
        return self

    def finish(self):
        self.body.finish()
        return self

    @property
    def summary(self):
        return self.body.summary

    def kind(self, kind):
        return [row for batch in self.rows for row in batch.to_pylist() if row["kind"] == kind]

    @property
    def letters(self):
        return self.kind("dead_letter")

    def codes(self):
        return {row["body"]: row["last_error_code"] for row in self.letters}


def home(engine, key, topic="t"):
    return sharding.queue_for_key(engine.publish_info(topic), key)


def key_on(engine, queue, *, but=""):
    return next(
        key
        for key in (f"k{i}" for i in range(1000))
        if key not in but and home(engine, key) == queue
    )


def bodies(count, first=0):
    return [f"{i:05d}".encode() for i in range(first, first + count)]


class TestSends:
    def test_every_row_is_stored_once_and_the_accounts_add_up(self):
        run = Run(StubEngine()).feed(body=bodies(100), tags=["a"] * 100).finish()
        assert sorted(run.engine.bodies()) == bodies(100)
        (request,) = run.engine.requests
        assert request.batch and request.queue is None and request.choose is None
        assert (run.summary.rows_in, run.summary.acked, run.summary.given_up) == (100, 100, 0)
        (epoch,) = run.kind("epoch")
        assert epoch["complete"] and epoch["rows_in"] == 100 and epoch["acked"] == 100
        assert sum(row["message_count"] for row in run.kind("send")) == 100

    @pytest.mark.parametrize("finds_stored", [False, True])
    def test_rows_that_a_look_up_found_are_counted(self, finds_stored):
        engine = StubEngine()
        engine.finds_stored = finds_stored
        summary = Run(engine).feed(body=bodies(5)).finish().summary
        assert (summary.acked, summary.found_stored) == (5, 5 * finds_stored)

    def test_the_bytes_of_all_bodies_are_counted(self):
        batch = pa.RecordBatch.from_pydict({"body": ["before", "kilo", "", None, "ö"]})
        run = Run(StubEngine())
        run.feed(body=batch["body"].slice(1)).feed(body=["x" * 1000]).finish()
        assert run.summary.rows_in == 5 and run.summary.dead == 2
        assert run.kind("epoch")[0]["body_bytes"] == 4 + 2 + 1000

    def test_requests_keep_both_limits(self):
        run = Run(StubEngine(), requestMaxMessages=30, requestMaxBytes=2000)
        run.feed(body=[b"x" * 100] * 100).finish()
        assert all(r.message_count <= 30 for r in run.engine.requests)
        assert all(memoryview(r.body).nbytes <= 2000 for r in run.engine.requests)
        assert run.summary.acked == 100

    def test_a_key_goes_to_the_queue_of_javas_hash(self):
        keys = [f"k{i % 13}" for i in range(100)]
        run = Run(StubEngine()).feed(body=bodies(100), sharding_key=keys).finish()
        for queue, messages in run.engine.stored.items():
            assert {home(run.engine, m.property("__SHARDINGKEY") or "") for m in messages} == {
                queue
            }

    def test_a_row_with_its_own_queue_goes_there_whatever_the_brokers_health(self):
        engine = StubEngine()
        engine.unavailable = {"b"}
        Run(engine).feed(
            body=bodies(3), queue_id=[2, None, 3], broker_name=["b", None, "a"]
        ).finish()
        assert engine.bodies(MessageQueue("t", "b", 2)) == [b"00000"]
        assert b"00002" in engine.bodies(MessageQueue("t", "a", 3))

    def test_topics_come_from_the_column_and_are_never_mixed(self):
        run = Run(StubEngine(), topic=None)
        run.feed(body=bodies(6), topic=["x", "y", "x", "z", "y", "x"]).finish()
        assert {r.topic for r in run.engine.requests} == {"x", "y", "z"}
        stored = {q.topic: m for q, ms in run.engine.stored.items() for m in [len(ms)]}
        assert stored == {"x": 3, "y": 2, "z": 1}

    def test_a_namespace_is_put_before_topics_once(self):
        run = Run(StubEngine(), topic=None, namespace="ns", allowSystemTopics=True)
        run.engine.unknown_topics.add("ns%z")
        run.feed(body=bodies(4), topic=["x", "ns%x", "rmq_sys_y", "z"]).finish()
        assert {q.topic for q in run.engine.stored} == {"ns%x", "rmq_sys_y"}
        assert len(run.engine.bodies()) == 3
        assert [letter["topic"] for letter in run.letters] == ["ns%z"]

    @pytest.mark.parametrize(
        ("column", "values", "least_version"),
        [
            ("priority", [3, None], V5_4_0), ("lite_topic", ["a", None], V5_5_0),
            ("delay_level", [3, 0], 0), ("delay_ms", [60_000, None], V5_0_0),
            ("delivery_timestamp", [4_000_000_000_000, None], V5_0_0),
        ],
    )  # fmt: skip
    def test_kinds_of_rows_that_go_one_by_one(self, column, values, least_version):
        """Old brokers would not honour what is asked of them."""
        run = Run(StubEngine()).feed(body=bodies(4), **{column: values * 2}).finish()
        single = {bytes(r.body): r for r in run.engine.requests if not r.batch}
        assert sorted(single) == [b"00000", b"00002"]
        for request in single.values():
            assert request.timed and request.least_version == least_version
            assert f"\x01{values[0]}\x02" in request.properties

    def test_a_lite_topic_keeps_to_a_queue_and_holds_its_rows_back(self):
        def judge(request, queue):
            is_bad = any(message.body == b"00003" for message in request.token.messages())
            return errors.MessageIllegalError("poison") if is_bad else None

        engine = StubEngine(judge)
        names = ["a", "b", "a", "a", "b", "a"]
        run = Run(engine, ordering="strict").feed(body=bodies(6), lite_topic=names).finish()
        assert run.codes() == {b"00003": "MESSAGE_ILLEGAL", b"00005": "HELD_BACK"}
        assert {letter["lite_topic"] for letter in run.letters} == {"a"}
        for name in "ab":
            own = [b"%05d" % number for number, lite in enumerate(names) if lite == name]
            info = engine.publish_info("t")
            queue = sharding.queue_for_key(info, name, sharding.LITE_TOPIC_HASH)
            stored = engine.bodies(queue)
            assert [body for body in stored if body in own] == own[:2]

    def test_rows_that_do_not_wait_for_the_store_have_their_own_batch(self):
        run = Run(StubEngine()).feed(body=bodies(4), wait_store=[True, False, None, False]).finish()
        assert sorted((r.message_count, r.properties) for r in run.engine.requests) == [
            (2, ""), (2, "WAIT\x01false\x02"),
        ]  # fmt: skip

    def test_ids_differ_and_own_ids_are_kept(self):
        run = Run(StubEngine()).feed(body=bodies(300), message_id=["mine"] + [None] * 299).finish()
        ids = [m.property("UNIQ_KEY") for ms in run.engine.stored.values() for m in ms]
        assert len(set(ids)) == 300 and "mine" in ids
        assert all(i and len(i) == 32 for i in ids if i != "mine")

    def test_a_large_single_message_is_compressed_if_it_shrinks(self):
        noise = random.Random(1).randbytes(9000)
        for body, is_compressed in ((b"a" * 9000, True), (noise, False)):
            run = Run(StubEngine(), requestMaxBytes=4096).feed(body=[body]).finish()
            (request,) = run.engine.requests
            assert not request.batch and bool(request.sys_flag) is is_compressed
            assert (bytes(request.body) == body) is not is_compressed

    @pytest.mark.parametrize("ordering", ["none", "strict"])
    def test_bodies_of_batches_are_compressed_if_they_shrink(self, ordering):
        noise = random.Random(1).randbytes(9000)
        data = [b"a" * 9000, b"short", noise, b"b" * 9000, b"c" * 9000]
        options = {"compressType": "zlib-all", "ordering": ordering}
        run = Run(StubEngine(), **options).feed(body=data, sharding_key=["k"] * 5).finish()
        requests = run.engine.requests
        stored = [
            inflate(message.body, CompressionType.ZLIB) if request.sys_flag & 1 else message.body
            for request in requests
            for message in (decode_message(p, n) for p in request.token.pieces
                            for n in range(p.message_count))
        ]  # fmt: skip
        counts = [(request.message_count, request.sys_flag & 1) for request in requests]
        if ordering == "strict":
            assert stored == data and counts == [(1, 1), (2, 0), (2, 1)]
        else:
            assert sorted(stored) == sorted(data) and sorted(counts) == [(2, 0), (3, 1)]

    @pytest.mark.parametrize(("retention", "body"), [("body=0", None), ("body=1d", b"a")])
    def test_a_ledger_without_bodies_has_digests(self, retention, body):
        engine = StubEngine(lambda request, queue: errors.MessageIllegalError("no"))
        (letter,) = Run(engine, ledgerRetention=retention).feed(body=[b"a"]).finish().letters
        assert letter["body"] == body and (letter["body_sha256"] is None) == (body is not None)

    def test_dead_letters_of_compressed_batches_have_their_bodies(self):
        data = [b"a" * 9000, b"b" * 9000]
        engine = StubEngine(lambda request, queue: errors.MessageIllegalError("no"))
        run = Run(engine, compressType="zlib-all").feed(body=data).finish()
        assert sorted(letter["body"] for letter in run.letters) == data
        # Each was tried by itself, as a single message, after the batch.
        assert [(r.message_count, r.sys_flag & 1) for r in engine.requests] == [
            (2, 1), (1, 1), (1, 1),
        ]  # fmt: skip
        assert inflate(bytes(engine.requests[1].body), CompressionType.ZLIB) in data

    @pytest.mark.parametrize("ordering", ["none", "best_effort", "strict"])
    def test_batches_to_a_proxy_are_small(self, ordering):
        engine = StubEngine()
        masters = {"a": "proxy:8080", "b": "proxy:8080"}
        engine.routes["t"] = replace(publish_info("t", engine.spans), masters=masters)
        run = Run(engine, ordering=ordering)
        for start in (0, 2000, 4000):
            data = [b"%d" % n for n in range(start, start + 2000)]
            run.feed(body=data, sharding_key=["k"] * 2000)
        run.finish()
        assert max(request.message_count for request in engine.requests) == 500
        assert sorted(map(int, engine.bodies())) == list(range(6000))

    @pytest.mark.parametrize("ordering", ["none", "strict"])
    @pytest.mark.parametrize("rows", [50, 1])
    def test_a_proxys_fifo_topic_gets_no_second_batch(self, ordering, rows):
        remark = "validate failed, the expected type is FIFO, but actual type is NORMAL"

        def judge(request, queue):
            return errors.MessageIllegalError(remark) if request.batch else None

        run = Run(StubEngine(judge), ordering=ordering)
        for start in (0, rows):
            data = [b"%d" % n for n in range(start, start + rows)]
            run.feed(body=data, sharding_key=["k"] * rows)
            run.body._sender.poll(1.0)
        run.finish()
        assert [r.message_count for r in run.engine.requests if r.batch] == [rows]
        assert run.engine.bodies() == [b"%d" % n for n in range(2 * rows)]


class TestRefusedRows:
    def test_bad_rows_become_dead_letters_and_the_rest_goes_on(self):
        run = Run(StubEngine(), maxMessageSize=1024)
        run.feed(
            body=[b"ok", None, b"", b"x" * 1025, b"reserved", b"control", b"big", b"ok2"],
            keys=[f"k{i}" for i in range(8)],
            properties=pa.array(
                [None, None, None, None, {"KEYS": "x"}, {"a": "x\x02TAGS\x01y"},
                 {"a": "y" * 33_000}, {"fine": "yes"}],
                pa.map_(pa.string(), pa.string()),
            ),
        ).finish()  # fmt: skip
        assert sorted(run.engine.bodies()) == [b"ok", b"ok2"]
        codes = {row["keys"][0]: row["last_error_code"] for row in run.letters}
        assert codes == {
            "k1": "NULL_BODY", "k2": "EMPTY_BODY", "k3": "BODY_TOO_LARGE",
            "k4": "RESERVED_PROPERTY", "k5": "INVALID_PROPERTY", "k6": "PROPERTIES_TOO_LARGE",
        }  # fmt: skip
        assert all(row["reason"] == "data" and row["attempts"] == 0 for row in run.letters)
        assert (run.summary.dead, run.summary.invalid, run.summary.acked) == (6, 6, 2)

    def test_illegal_topics_of_rows(self):
        run = Run(StubEngine(), topic=None)
        run.feed(body=bodies(4), topic=["ok", None, "no good", "x" * 128]).finish()
        assert [row["last_error_code"] for row in run.letters] == ["INVALID_TOPIC"] * 3
        assert run.summary.acked == 1

    @pytest.mark.parametrize("name", ["a", "cluster-1"])
    def test_topics_of_brokers_and_clusters(self, name):
        broker = BrokerData("cluster-1", "a", {0: "127.0.0.1:1"})
        route = TopicRoute((QueueData("a", 4, 4),), (broker,))

        def run(topic, **options):
            engine = StubEngine()
            engine.routes[name] = TopicPublishInfo.of(name, route)
            columns = {"body": bodies(2), "topic": [name, name]}
            return Run(engine, topic=topic, **options).feed(**columns).finish()

        refused = run(None)
        assert set(refused.codes().values()) == {"INVALID_TOPIC"}
        assert refused.letters[0]["reason"] == "data" and not refused.engine.requests
        assert run(name).summary.acked == run(None, allowSystemTopics=True).summary.acked == 2

    def test_a_queue_that_is_not_there(self):
        run = Run(StubEngine()).feed(
            body=bodies(3), queue_id=[9, 0, 1], broker_name=["a", "a", "z"]
        )
        run.finish()
        assert run.codes() == {b"00000": "INVALID_QUEUE", b"00002": "INVALID_QUEUE"}
        assert run.summary.acked == 1
        run.feed(body=bodies(1), queue_id=[9], broker_name=["a"]).finish()
        assert (run.summary.acked, run.summary.invalid) == (1, 3)

    @pytest.mark.parametrize(("option", "value"), [("onInvalid", "fail"), ("ledger", "")])
    def test_a_refused_row_may_fail_the_task(self, option, value):
        with pytest.raises(errors.DeliveryError, match=option):
            Run(StubEngine(), **{option: value}).feed(body=[b"a", None])

    def test_an_unknown_topic_of_a_row_is_that_rows_trouble(self):
        engine = StubEngine()
        engine.unknown_topics = {"gone"}
        run = Run(engine, topic=None).feed(body=bodies(3), topic=["t", "gone", "t"]).finish()
        assert run.codes() == {b"00001": "NO_ROUTE"} and run.summary.acked == 2
        alone = Run(engine, topic=None).feed(body=[b"x"], topic=["gone"]).finish()
        assert alone.codes() == {b"x": "NO_ROUTE"}

    def test_an_unknown_topic_of_the_option_is_everybodys(self):
        engine = StubEngine()
        engine.unknown_topics = {"t"}
        run = Run(engine).feed(body=[b""])  # No row needs a route.
        with pytest.raises(errors.NoRouteError):
            run.feed(body=bodies(3))
        run.body.abort()
        assert [row["error_code"] for row in run.kind("send")] == ["NO_ROUTE"]


class TestFailures:
    def test_a_request_given_up_becomes_dead_letters_of_exactly_its_rows(self):
        engine = StubEngine()
        bad = home(engine, "k1")
        engine.judge = lambda request, queue: (
            errors.ConnectError("refused", broker_name="x") if request.token.queue == bad else None
        )
        keys = [f"k{i % 40}" for i in range(200)]
        run = Run(engine).feed(body=bodies(200), sharding_key=keys, tags=["T"] * 200).finish()
        lost = [b for b, k in zip(bodies(200), keys, strict=True) if home(engine, k) == bad]
        assert [row["body"] for row in run.letters] == lost
        assert sorted(engine.bodies() + lost) == bodies(200)
        letter = run.letters[0]
        assert letter["reason"] == "transport" and letter["last_error_code"] == "CONNECT"
        assert (letter["attempts"], letter["last_broker_name"]) == (1, "x")
        assert run.summary.dead == len(lost) and run.summary.acked == 200 - len(lost)

    @pytest.mark.parametrize(
        "special",
        [{"delay_level": 3}, {"delay_ms": 60_000}, {"delivery_timestamp": 4_000_000_000_000},
         {"priority": 3}, {"lite_topic": "l"}, {"sharding_key": "s", "wait_store": False},
         {"queue_id": 2, "broker_name": "b", "wait_store": True}],
    )  # fmt: skip
    def test_a_letter_has_all_columns_of_its_row(self, special):
        row = {"body": b"x", "tags": "T", "keys": ["k1", "k2"], "message_id": "mine", "flag": 7}
        row |= {"properties": [("colour", "red")], **special}
        columns = {name: pa.array([value], COLUMN_TYPES.get(name)) for name, value in row.items()}
        engine = StubEngine(lambda request, queue: errors.MessageIllegalError("no"))
        (letter,) = Run(engine).feed(**columns).finish().letters
        expected = {"wait_store": True, "last_broker_name": row.get("broker_name"), **row}
        names = {*expected, *COLUMN_TYPES}
        assert {n: letter[n] for n in names} == {n: expected.get(n) for n in names}

    @pytest.mark.parametrize(
        ("first", "requests"),
        [
            (errors.RequestTimeoutError("late"), 1),
            # This batch is split, and its messages then find no broker.
            (errors.BrokerError("java.io.IOException"), 6),
        ],
    )
    def test_what_may_be_stored_stays_unknown_when_it_is_refused_later(self, first, requests):
        def judge(request, queue):
            is_batch = request.token.message_count > 1
            return first if is_batch else errors.ConnectError("refused")

        run = Run(StubEngine(judge)).feed(body=bodies(5)).finish()
        assert len(run.engine.requests) == requests
        assert (run.summary.unknown, run.summary.dead, run.summary.acked) == (5, 0, 0)
        assert {(row["reason"], row["outcome"]) for row in run.letters} == {("unknown", "unknown")}
        assert all(row["maybe_duplicate"] for row in run.letters)

    def test_a_poison_row_does_not_take_its_batch_along(self):
        def judge(request, queue):
            is_poison = any(m.body == b"00007" for m in request.token.messages())
            return errors.MessageIllegalError("too big for this broker") if is_poison else None

        run = Run(StubEngine(judge)).feed(body=bodies(20)).finish()
        assert run.codes() == {b"00007": "MESSAGE_ILLEGAL"}
        assert run.letters[0]["reason"] == "data" and run.letters[0]["attempts"] == 2
        assert len(run.engine.bodies()) == 19 and run.summary.acked == 19
        assert len(run.engine.requests) == 21

    def test_wrong_credentials_end_the_task_at_once(self):
        run = Run(StubEngine(lambda r, q: errors.AuthenticationError("no such user")))
        with pytest.raises(errors.AuthenticationError):
            run.feed(body=bodies(5)).finish()
        assert not run.letters

    def test_a_secret_is_masked_wherever_it_came_from(self, tmp_path, monkeypatch):
        monkeypatch.setenv("THE_KEY", "canary-access")
        (tmp_path / "secret").write_text("canary-secret\n")
        (tmp_path / "password").write_text("canary-password\n")
        echo = "refused canary-access with canary-secret and canary-password"
        run = Run(
            StubEngine(lambda r, q: errors.MessageIllegalError(echo)),
            accessKey="env:THE_KEY",
            secretKey=f"file:{tmp_path / 'secret'}",
            tlsKeyPassword=f"file:{tmp_path / 'password'}",
        )
        run.feed(body=bodies(1)).finish()
        assert run.letters[0]["last_error"] == "refused *** with *** and ***"

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"maxFailures": 0}, "rows .* maxFailures=0"),
            ({"ledger": ""}, "no ledger"),
            ({"maxFailures": 4}, "maxFailures=4"),
            ({"maxFailures": "20%"}, "5 of 5 rows .* maxFailures=20% .*busy"),
        ],
    )
    def test_error_budgets(self, options, text):
        run = Run(StubEngine(lambda r, q: errors.BrokerBusyError("busy")), **options)
        with pytest.raises(errors.DeliveryError, match=text) as caught:
            run.feed(body=bodies(5)).finish()
        zeros = dict.fromkeys(("acked", "degraded", "unknown", "filtered"), 0)
        counts = {"rows_in": 5, "dead": 5, **zeros}
        assert caught.value.facts == {"counts": counts, "first_error": "busy"}

    @pytest.mark.parametrize("budget", [29, "29%"])
    def test_a_budget_that_is_just_kept(self, budget):
        """0.29 * 100 is 28.999999999999996."""
        run = Run(StubEngine(), maxFailures=budget)
        run.feed(body=[None] * 9 + [b"a"]).feed(body=[None] * 20 + [b"a"] * 70).finish()
        assert run.summary.dead == 29

    def test_degraded_is_counted_and_can_fail(self):
        engine = StubEngine(lambda r, q: errors.Outcome.ACKED_DEGRADED)
        run = Run(engine).feed(body=bodies(5)).finish()
        assert (run.summary.degraded, run.summary.acked) == (5, 0)
        with pytest.raises(errors.DeliveryError, match="onDegraded"):
            Run(engine, onDegraded="fail").feed(body=bodies(5)).finish()

    def test_a_row_that_is_lost_on_the_way_fails_the_task(self):
        """The planted defect: an engine that completes nothing for a request it took."""
        engine = StubEngine()
        run = Run(engine).feed(body=bodies(5))
        run.summary.acked -= 1
        with pytest.raises(errors.DeliveryError, match="accounted for"):
            run.finish()

    def test_abort_records_what_was_sent_and_judges_nothing(self):
        engine = StubEngine()
        run = Run(engine, ordering="strict").feed(body=bodies(50), sharding_key=["k"] * 50)
        run.feed(body=bodies(50, 50), sharding_key=["k"] * 50)
        run.body.abort()
        (epoch,) = run.kind("epoch")
        assert epoch["complete"] is False and engine.pending == 0
        assert sum(row["message_count"] for row in run.kind("send")) == len(engine.bodies())


@pytest.mark.parametrize("ordering", ["strict", "best_effort"])
class TestOrder:
    def test_one_request_in_flight_per_queue_and_order_per_key(self, ordering):
        engine = StubEngine()
        run = Run(engine, ordering=ordering, requestMaxMessages=7)
        rng = np.random.default_rng(5)
        sent: dict[str, list[bytes]] = {}
        for batch in range(20):
            keys = [f"k{i}" for i in rng.integers(0, 30, 50)]
            for key, body in zip(keys, bodies(50, batch * 50), strict=True):
                sent.setdefault(key, []).append(body)
            run.feed(body=bodies(50, batch * 50), sharding_key=keys)
        run.finish()
        assert set(engine.most_in_flight.values()) == {1}
        stored: dict[str, list[bytes]] = {}
        for messages in engine.stored.values():
            for message in messages:
                stored.setdefault(message.property("__SHARDINGKEY") or "", []).append(message.body)
        assert stored == sent

    def test_waiting_requests_grow_together(self, ordering):
        engine = StubEngine()
        run = Run(engine, ordering=ordering)
        for batch in range(30):
            keys = [f"k{i}" for i in range(10)]
            run.feed(body=bodies(10, batch * 10), sharding_key=keys)
        run.finish()
        assert run.summary.acked == 300 and len(engine.requests) < 150

    def test_later_rows_of_a_key_given_up_are_held_back_in_order(self, ordering):
        engine = StubEngine()
        queue = home(engine, "k1")
        other = key_on(engine, queue, but="k1")

        def judge(request, queue):
            is_poison = any(m.body == b"00002" for m in request.token.messages())
            return errors.MessageIllegalError("poison") if is_poison else None

        engine.judge = judge
        run = Run(engine, ordering=ordering)
        keys = ["k1", other, "k1", other, "k1", other]
        run.feed(body=bodies(6), sharding_key=keys)
        run.feed(body=bodies(6, 6), sharding_key=keys)
        while engine.pending:  # Later rows are held back by their key, not by the waiting rows.
            run.body.drive()
        run.feed(body=bodies(6, 12), sharding_key=keys).finish()
        rows_of_key = [b for b, k in zip(bodies(18), keys * 3, strict=True) if k == "k1"]
        assert [row["body"] for row in run.letters] == rows_of_key[1:]
        assert [row["last_error_code"] for row in run.letters] == [
            "MESSAGE_ILLEGAL", *["HELD_BACK"] * 7
        ]  # fmt: skip
        assert [row["ordinal"] for row in run.letters] == list(range(8))
        assert {row["reason"] for row in run.letters[1:]} == {"held_back"}
        assert engine.bodies(queue) == [b for b in bodies(18) if b not in rows_of_key[1:]]
        assert run.summary.held_back == 7

    @pytest.mark.parametrize("kind", ["lite_topic", "queue_id", "wait_store"])
    def test_rows_of_two_kinds_share_a_queue_and_no_request(self, ordering, kind):
        engine, keys = StubEngine(), ["k1", "k1" if kind == "wait_store" else None]
        queue, info = home(engine, "k1"), engine.publish_info("t")
        columns: dict[str, Any] = {"wait_store": [True, False]}
        names = (f"name{number}" for number in range(99))
        if kind == "lite_topic":
            hashed = {sharding.queue_for_key(info, n, sharding.LITE_TOPIC_HASH): n for n in names}
            columns = {kind: [None, hashed[queue]]}
        elif kind == "queue_id":
            columns = {kind: [None, queue.queue_id], "broker_name": [None, queue.broker_name]}
        run = Run(engine, ordering=ordering)
        for first in range(0, 8, 2):
            run.feed(body=bodies(2, first), sharding_key=keys, **columns)
        assert run.finish().engine.bodies(queue) == bodies(8)
        assert [request.batch for request in engine.requests] == [True, kind != "lite_topic"] * 4

    def test_new_rows_do_not_join_the_rest_of_a_refused_batch(self, ordering):
        """The rest of the batch waits again while a poison row's key is held."""
        answers = iter(
            [errors.BatchTooLargeError("big"), *[errors.MessageIllegalError("poison")] * 2, None]
        )
        engine = StubEngine(lambda request, queue: next(answers, errors.ConnectError("down")))
        other = key_on(engine, home(engine, "k1"), but="k1")
        run = Run(engine, lambda: 5.0, ordering=ordering)
        run.feed(body=bodies(4), sharding_key=["k1", *[other] * 3])
        while not run.letters:
            run.body.drive()
        run.feed(body=bodies(2, 4), sharding_key=[other] * 2).finish()
        ends_of_rows = [(row["first_error_code"], row["attempts"]) for row in run.letters]
        parts = [("BATCH_TOO_LARGE", attempts) for attempts in (3, 2, 2)]
        assert ends_of_rows == [*parts, *[("HELD_BACK", 0)] * 2]
        waits_ms = {row["queue_wait_ms"] for row in run.kind("send")}
        assert waits_ms == {0.1}, "the clock stands still"


@pytest.mark.parametrize("ordering", ["none", "best_effort"])
def test_rows_wait_longer_than_a_producers_message(ordering):
    engine = StubEngine()
    run = Run(engine, ordering=ordering, sendMsgTimeout=1000, deliveryTimeoutMs=7000)
    run.feed(body=bodies(2), sharding_key=["k1", None]).finish()
    waits = {request.ordered: request.timeout_s for request in engine.requests}
    assert waits == ({False: 7.0} if ordering == "none" else {True: None, False: 7.0})
    assert all(request.retry_while_busy for request in engine.requests)


class Stuck(StubEngine):
    """An engine that answers nothing while it is stuck; waiting advances the clock."""

    def __init__(self):
        super().__init__()
        self.stuck = True
        self.now_s = 0.0

    def clock(self):
        return self.now_s

    def poll(self, timeout_s=0.0):
        self.now_s += timeout_s
        return [] if self.stuck else super().poll(timeout_s)


class TestStrict:
    def test_a_key_never_moves_and_its_queue_is_closed_after_one_wait(self):
        engine = StubEngine()
        queue = home(engine, "k1")
        engine.judge = lambda r, q: errors.ConnectError("down") if q == queue else None
        run = Run(engine, ordering="strict", requestMaxMessages=2)
        other = key_on(engine, queue, but="k1")
        for batch in range(3):
            run.feed(body=bodies(4, 4 * batch), sharding_key=["k1", other, "k1", "zz"])
        while engine.pending:
            run.body.drive()
        late = key_on(engine, queue, but=("k1", other))
        run.feed(body=[b"late"], sharding_key=[late]).finish()
        assert home(engine, "zz") != queue
        tries = [r for r in engine.requests if r.token.queue == queue]
        assert len(tries) == 1 and tries[0].queue == queue
        assert run.summary.acked == 3 and run.summary.dead == 10 and run.summary.held_back == 8
        # A report can say which broker the keys wait for: two of them have no attempt.
        of_broker = [row for row in run.letters if row["last_broker_name"] == queue.broker_name]
        assert {row["sharding_key"] for row in of_broker} == {"k1", other, late}

    def test_the_wait_for_a_turn_is_part_of_the_recorded_wait(self):
        now = iter(range(1, 100_000))
        run = Run(StubEngine(), lambda: next(now), ordering="strict", requestMaxMessages=2)
        run.feed(body=bodies(12), sharding_key=["k1"] * 12).finish()
        waits = [row["queue_wait_ms"] for row in run.kind("send")]
        assert len(waits) == 6
        # The clock moves by a second at each look, so the last request has waited longest.
        assert waits[0] < 1000 <= waits[1] and waits[1:] == sorted(waits[1:])

    def test_what_waits_for_a_stuck_queue_stays_within_memory(self):
        engine = Stuck()
        run = Run(engine, engine.clock, ordering="strict", maxInFlightBytes=200_000)
        for batch in range(40):
            run.feed(body=[b + b"x" * 1000 for b in bodies(100, batch * 100)],
                     sharding_key=["k1"] * 100)  # fmt: skip
        overflow = run.body._sender.ordered._overflow
        assert overflow._in_memory <= 200_000 and overflow._file is not None
        engine.stuck = False
        run.finish()
        assert [b[:5] for b in engine.bodies(home(engine, "k1"))] == bodies(4000)
        assert overflow._in_memory == 0 and overflow._file is None
        assert {request.token.parked for request in engine.requests} == {SpillState.NOT}

    def test_input_waits_for_queues_that_answer(self):
        engine = StubEngine()
        run = Run(engine, ordering="strict", maxInFlightBytes=200_000)
        for batch in range(40):
            run.feed(body=[b + b"x" * 1000 for b in bodies(100, batch * 100)],
                     sharding_key=[f"k{row}" for row in range(100)])  # fmt: skip
            assert engine.pending and run.body._sender.ordered._overflow._file is None
        run.finish()
        assert sorted(b[:5] for b in engine.bodies()) == bodies(4000)

    def test_a_dead_brokers_keys_do_not_move_when_the_route_forgets_it(self, tmp_path):
        engine = StubEngine()
        keys = [f"k{i}" for i in range(40)]
        homes = {key: home(engine, key) for key in keys}
        run = Run(engine, ordering="strict", ledger=str(tmp_path))
        run.feed(body=bodies(40), sharding_key=keys)
        engine.spans = [("a", 4)]
        engine.judge = lambda r, q: errors.ConnectError("gone") if q.broker_name == "b" else None
        run.feed(body=bodies(40, 40), sharding_key=keys).finish()
        later = Run(engine, ordering="strict", ledger=str(tmp_path))
        later.feed(body=bodies(40, 80), sharding_key=keys).finish()
        for queue, messages in engine.stored.items():
            assert {homes[m.property("__SHARDINGKEY") or ""] for m in messages} == {queue}
        dead = sum(queue.broker_name == "b" for queue in homes.values())
        assert later.summary.dead == dead and later.summary.acked == 40 - dead

    @pytest.mark.parametrize("spans", [[("a", 4), ("b", 5)], [("a", 4), ("b", 4), ("c", 4)]])
    def test_a_changed_route_is_refused(self, tmp_path, spans):
        engine = StubEngine()
        run = Run(engine, ordering="strict", ledger=str(tmp_path))
        run.feed(body=bodies(5), sharding_key=["k"] * 5)
        engine.spans = spans
        with pytest.raises(errors.DeliveryError, match="onRouteChange"):
            run.feed(body=bodies(5), sharding_key=["k"] * 5)
        with pytest.raises(errors.DeliveryError, match="onRouteChange"):
            Run(engine, ordering="strict", ledger=str(tmp_path)).feed(
                body=bodies(5), sharding_key=["k"] * 5
            )
        Run(engine, ledger=str(tmp_path)).feed(body=bodies(5), sharding_key=["k"] * 5).finish()

    def test_rows_without_a_key_are_refused(self):
        run = Run(StubEngine(), ordering="strict")
        run.feed(body=bodies(2), sharding_key=["k", None]).finish()
        assert run.codes() == {b"00001": "MISSING_SHARDING_KEY"}


class TestAllBrokersDown:
    """A query must not turn its whole source into dead letters."""

    @pytest.mark.parametrize("ordering", ["none", "best_effort", "strict"])
    def test_the_task_fails(self, ordering):
        engine = StubEngine()
        engine.judge = lambda r, q: errors.ConnectError("refused")
        keys = [f"k{i}" for i in range(40)] * 2
        run = Run(engine, ordering=ordering).feed(body=bodies(80), sharding_key=keys)
        with pytest.raises(
            errors.DeliveryError, match=r"no broker took any of 80 rows.*\(a, b\).*refused"
        ):
            run.finish()

    @pytest.mark.parametrize(
        ("ordering", "columns"),
        [
            ("strict", {"sharding_key": ["k1"] * 2}),
            ("none", {"queue_id": [1] * 2, "broker_name": ["a"] * 2}),
        ],
    )
    def test_rows_that_are_bound_to_one_broker_say_nothing_of_the_other(self, ordering, columns):
        engine = StubEngine()
        engine.judge = lambda r, q: errors.ConnectError("refused")
        run = Run(engine, ordering=ordering).feed(body=bodies(2), **columns).finish()
        assert run.summary.dead == 2

    @pytest.mark.parametrize(
        ("other", "dead"),
        [
            (None, 8),
            (errors.Outcome.ACKED_DEGRADED, 8),
            (errors.MessageIllegalError("poison", response_code=13, remark=""), 9),
            (errors.PermissionDeniedError("closed", response_code=16, remark=""), 9),
            (errors.RequestTimeoutError("late"), 9),
        ],
    )
    def test_beside_a_row_of_another_fate_the_rows_are_dead_letters(self, other, dead):
        # A time-out says only that one broker is slow, so here all rows have it.
        common = (
            other
            if isinstance(other, errors.RequestTimeoutError)
            else errors.ConnectError("refused")
        )
        engine = StubEngine(lambda r, q: other if r.token.number == 2 else common)
        run = Run(engine, requestMaxMessages=1).feed(body=bodies(9)).finish()
        assert run.summary.given_up == dead


class TestMoves:
    @pytest.mark.parametrize("ordering", ["none", "best_effort"])
    def test_keys_of_an_isolated_broker_move_together_and_are_counted(self, ordering):
        engine = StubEngine()
        engine.unavailable = {"a"}
        keys = [f"k{i}" for i in range(40)]
        run = Run(engine, ordering=ordering).feed(body=bodies(40), sharding_key=keys).finish()
        assert {q.broker_name for q in engine.stored} == {"b"}
        assert run.summary.moved_keys == sum(home(engine, k).broker_name == "a" for k in keys)

    def test_attempts_alternate_while_no_broker_is_available(self):
        info = publish_info("t", [("a", 4), ("b", 4)])
        choose = HomeQueueSelector(MessageQueue("t", "a", 1))
        tried = [choose(info, lambda name: False) for _ in range(4)]
        assert [queue and queue.broker_name for queue in tried] == ["a", "b", "a", "b"]
        assert choose(info, lambda name: True) == MessageQueue("t", "a", 1)

    def test_keys_stay_where_they_are_when_their_topic_grows(self, tmp_path, caplog):
        """Over 12 queues, the hash would give most keys another queue, in which nobody counts them
        as moved.
        """
        engine, keys = StubEngine(), [f"k{i}" for i in range(40)]
        settings = {"ordering": "best_effort", "ledger": str(tmp_path)}
        homes = {key: home(engine, key) for key in keys}
        Run(engine, **settings).feed(body=bodies(40), sharding_key=keys).finish()
        engine.spans = [("a", 8), ("b", 4)]
        later = Run(engine, **settings).feed(body=bodies(40), sharding_key=keys)
        later.feed(body=bodies(40), sharding_key=keys).finish()
        for queue, messages in engine.stored.items():
            assert {homes[m.property("__SHARDINGKEY") or ""] for m in messages} == {queue}
        assert later.summary.moved_keys == 0
        (warning,) = [record.getMessage() for record in caplog.records]
        assert "a has 8 queues, not 4" in warning and "onRouteChange=allow" in warning
        with pytest.raises(errors.DeliveryError, match="shardingHash is rendezvous, not java"):
            Run(engine, **settings, shardingHash="rendezvous").feed(body=[b"x"], sharding_key=["k"])

    def test_and_move_where_the_user_allows_it(self, tmp_path):
        engine, keys = StubEngine(), [f"k{i}" for i in range(40)]
        settings = {"ordering": "best_effort", "ledger": str(tmp_path), "onRouteChange": "allow"}
        Run(engine, **settings).feed(body=bodies(40), sharding_key=keys).finish()
        engine.spans = [("a", 8), ("b", 4)]
        Run(engine, **settings).feed(body=bodies(40), sharding_key=keys).finish()
        assert any(queue.queue_id > 3 for queue in engine.stored)
        settings["onRouteChange"] = "fail"  # The query has the new queues now.
        Run(engine, **{**settings, "ordering": "strict"}).feed(body=[b"x"], sharding_key=["k"])


class TestAbsentBrokers:
    """Epochs do not wait for `orderWaitMs` again and again while a broker stays away."""

    def _epoch(self, engine, now_s, **options):
        """Send a row of broker a and a row of broker b; return the waits of a's requests."""
        first = len(engine.requests)
        keys = [key_on(engine, MessageQueue("t", broker, 0)) for broker in "ab"]
        run = Run(engine, lambda: now_s, ordering="strict", requestMaxMessages=1, **options)
        run.feed(body=bodies(2), sharding_key=keys).finish()
        assert (run.summary.acked, run.summary.dead) == ((2, 0) if self.is_up else (1, 1))
        sent = {request.token.queue.broker_name: request for request in engine.requests[first:]}
        assert sent["b"].timeout_s == run.options.order_wait_ms / 1000
        return [request.timeout_s for request in engine.requests[first:] if request is sent["a"]]

    def test_the_wait_is_shared(self):
        engine = StubEngine()
        engine.judge = self._judge
        self.is_up = False
        assert self._epoch(engine, 1000.0) == [60.0], "it is away since 940"
        assert self._epoch(engine, 1010.0) == [3.0], "a try that finds it back"
        assert self._epoch(engine, 1020.0, orderWaitMs=100_000) == [20.0], "what is left"
        self.is_up = True
        assert self._epoch(engine, 1030.0) == [3.0]
        assert self._epoch(engine, 1031.0) == [60.0]
        self.is_up = False
        assert self._epoch(engine, 1040.0) == [60.0]
        assert self._epoch(engine, 1101.0) == [60.0], "without a try it may have been back"
        assert self._epoch(engine, 1102.0, orderWaitMs=2000) == [2.0]

    def test_a_silent_broker_may_be_frozen_so_it_keeps_its_time(self):
        engine = StubEngine()
        engine.judge = lambda r, q: errors.RequestTimeoutError("late")
        for _ in range(2):
            run = Run(engine, ordering="strict").feed(body=bodies(1), sharding_key=["k"])
            assert run.finish().summary.unknown == 1
        assert [request.timeout_s for request in engine.requests] == [60.0] * 2

    def _judge(self, request, queue):
        return None if self.is_up or queue.broker_name == "b" else errors.ConnectError("refused")


class TestDelaysInOrder:
    """A broker keeps a delayed message until its time, so no order per key holds for it."""

    @pytest.mark.parametrize("ordering", ["strict", "best_effort"])
    @pytest.mark.parametrize("delay", [{"delay_level": 3}, {"delay_ms": 1000}])
    def test_delayed_rows_do_not_cut_the_lines_of_the_others(self, ordering, delay):
        engine, count = StubEngine(), 2000
        keys = [f"k{i % 40}" for i in range(count)]
        ((column, value),) = delay.items()
        values = pa.array([value if i % 20 == 7 else None for i in range(count)], pa.int64())
        run = Run(engine, ordering=ordering)
        run.feed(body=bodies(count), sharding_key=keys, **{column: values}).finish()
        assert run.summary.acked == count
        batches = [request for request in engine.requests if request.batch]
        assert len(batches) == 8, "one per home queue"
        groups = {request.token.number for request in engine.requests if not request.batch}
        assert len(groups) == count // 20
        assert not any(request.ordered for request in engine.requests if not request.batch)
        for queue, messages in engine.stored.items():
            assert {home(engine, m.property("__SHARDINGKEY") or "") for m in messages} == {queue}
            at_once = [m.body for m in messages if int(m.body) % 20 != 7]
            assert at_once == sorted(at_once)

    def test_they_hold_nobody_and_nobody_holds_them(self):
        engine = StubEngine()
        delays = pa.array([3, None, None, 3], pa.int64())
        engine.judge = lambda r, q: errors.ConnectError("down") if r.token.delayed else None
        run = Run(engine, ordering="strict")
        run.feed(body=bodies(4), sharding_key=["k"] * 4, delay_level=delays).finish()
        assert (run.summary.acked, run.summary.dead, run.summary.held_back) == (2, 2, 0)
        assert run.body is not None and not run.body.letter_keys
        engine.judge = lambda r, q: None if r.token.delayed else errors.ConnectError("down")
        run = Run(engine, ordering="strict", requestMaxMessages=1)
        run.feed(body=bodies(4), sharding_key=["k"] * 4, delay_level=delays).finish()
        run.feed(body=bodies(1), sharding_key=["k"], delay_level=[3]).finish()
        assert (run.summary.acked, run.summary.dead, run.summary.held_back) == (3, 2, 1)


class TestOrderBy:
    # With 4,000 bytes, four parts go to files, and two are still in memory at the end.
    @pytest.mark.parametrize("memory_bytes", [1 << 25, 1000, 4000])
    def test_rows_of_a_key_are_sorted_over_the_whole_task(self, memory_bytes):
        from rocket_sink.rows.sort import RowSorter

        engine = StubEngine()
        run = Run(engine, ordering="strict", orderBy="n")
        numbers = np.random.default_rng(1).permutation(300)
        for part in np.array_split(numbers, 6):
            if run.body is not None:
                run.body._sorter._limit = memory_bytes
            run.feed(
                body=[f"{n:05d}".encode() for n in part], sharding_key=[f"k{n % 7}" for n in part],
                n=part,
            )  # fmt: skip
        assert isinstance(run.body._sorter, RowSorter)
        run.finish()
        for messages in engine.stored.values():
            for key in {m.property("__SHARDINGKEY") for m in messages}:
                ordered = [m.body for m in messages if m.property("__SHARDINGKEY") == key]
                assert ordered == sorted(ordered)
        assert run.summary.acked == 300


@pytest.mark.parametrize("kind", ["string_view", "dictionary"])
def test_a_slice_is_measured_by_its_own_rows(kind):
    """`nbytes` of such a slice counts the views and values of the whole array."""
    texts = pa.array([f"{number:0400}" for number in range(60_000)])
    values = texts.dictionary_encode() if kind == "dictionary" else texts.cast(pa.string_view())
    batch = pa.record_batch({"body": values})
    assert batch.get_total_buffer_size() > 20 << 20
    assert [part.num_rows for part in parts_of(batch.slice(10, 2000))] == [2000]
    assert len(list(parts_of(batch))) == 3


def test_a_summary_shows_no_rate_below_a_row_per_second():
    facts = {"query_id": "q", "ledger": "", "rows_in": 1, "acked": 1}
    times = [
        dict(WriteSummary(**facts, duration_s=seconds).lines())["time"]
        for seconds in (71.9, 1.0, 0.5, 0.0)
    ]
    assert times == ["71.9 s", "1.0 s  1 rows/s", "0.5 s  2 rows/s", "0.0 s"]


def test_requests_in_flight_at_an_error_are_counted_by_their_outcomes():
    totals = RowTotals(SinkOptions(), is_source=True)
    for outcome in errors.Outcome:
        totals.add_cut_off(outcome, 3, maybe_duplicate=True)
        totals.add_cut_off(outcome, 2, maybe_duplicate=False)
    counts = {name: value for name, value in vars(totals.summary).items() if value}
    assert counts == {"acked": 5, "degraded": 5, "unknown": 5, "duplicates_possible": 6}


def test_a_summary_names_what_happened():
    counts = {**dict.fromkeys(COUNTS, 0), "rows_in": 2000, "acked": 1500, "dead": 400}
    counts |= {"unknown": 100, "first_error": "no\x1bway"}
    summary = WriteSummary.of(counts, query_id="q", ledger="/l", duration_s=4.0, is_repeated=True)
    assert summary.adds_up and not summary.all_delivered
    assert str(summary).splitlines() == [
        "500 of 2,000 rows not delivered", "  rows in                        2,000",
        "  acknowledged                   1,500", "  dead letters                   400",
        "  dead letters, outcome unknown  100",
        "  time                           4.0 s  500 rows/s",
        "  first error                    no\\x1bway", "  ledger                         /l",
        "  repeated                       nothing was sent again: an earlier write was complete",
    ]  # fmt: skip
