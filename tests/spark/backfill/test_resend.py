"""The task side of a backfill, on the scripted cluster: no Spark, no Java."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.backfill_marks import BackfillClaim
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.schema import BACKFILL, ISOLATION, RESOLUTION, SEND
from rocket_sink.ledger.transport.files import sealed_files
from rocket_sink.ledger.transport.stream import read_batches
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin import stored_messages
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.stored_check import look_up
from rocket_sink.spark.backfill import resend
from rocket_sink.spark.backfill.backfill import backfill_options
from rocket_sink.spark.backfill.resend import Resender, Resent, send_partition
from rocket_sink.spark.backfill.sources import SENT_COLUMNS
from rocket_sink.testing import Answer, CloseConnection, FakeCluster
from rocket_sink.wire.codes import RequestCode

TOPIC = "t"
CTX = RunContext("q", "r", 0, 0, lane="backfill")
TYPES = {
    "body": pa.binary(), "keys": pa.list_(pa.string()),
    "properties": pa.map_(pa.string(), pa.string()), "delay_level": pa.int32(),
    "priority": pa.int32(),
    "delay_ms": pa.int64(), "delivery_timestamp": pa.int64(), "queue_id": pa.int32(),
    "flag": pa.int32(), "wait_store": pa.bool_(), "open": pa.bool_(), "was_stored": pa.bool_(),
    "event_time": pa.timestamp("us", tz="UTC"),
}  # fmt: skip


class Spool:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.durable: list[dict[str, int]] = []
        self._fresh: list[dict[str, Any]] = []

    def append(self, *batches: pa.RecordBatch) -> None:
        for batch in batches:
            self.rows += batch.to_pylist()
            self._fresh += batch.to_pylist()

    def sync(self) -> None:
        fresh, self._fresh = self._fresh, []
        kinds = Counter(row["kind"] for row in fresh if row["kind"] in (BACKFILL, RESOLUTION))
        self.durable.append(dict(kinds))

    def marks(self) -> dict[str, list[tuple[str, str | None]]]:
        found: dict[str, list[tuple[str, str | None]]] = {}
        for row in self.rows:
            if row["kind"] == BACKFILL:
                found.setdefault(row["letter_id"], []).append((row["outcome"], row["error_code"]))
        return found

    def resolved(self) -> set[str]:
        return {row["letter_id"] for row in self.rows if row["kind"] == RESOLUTION}

    def kinds(self) -> set[str]:
        """Return the kinds of rows except isolations, which a busy machine may cause."""
        return {row["kind"] for row in self.rows} - {ISOLATION}


@pytest.fixture
def options(cluster: FakeCluster, tmp_path: Path) -> SinkOptions:
    return backfill_options(
        SinkOptions.parse(
            nameServer=cluster.name_server, ledger=str(tmp_path), sendMsgTimeout="2s",
            retryTimesWhenSendFailed=1, orderWaitMs="2s", connectTimeoutMs="20s",
            storedCheckDelay=20,
        )
    )  # fmt: skip


def letters(keys: list[str | None], **columns: list[Any]) -> pa.RecordBatch:
    count = len(keys)
    values: dict[str, Any] = {
        "letter_id": [f"letter-{n}" for n in range(count)],
        "topic": [TOPIC] * count,
        "body": [f"body {n}".encode() for n in range(count)],
        "sharding_key": keys,
        "message_id": [f"{n:032X}" for n in range(count)],
        "open": [False] * count,
        "was_stored": [False] * count,
        "query_id": ["q-1"] * count,
        **columns,
    }
    names = ("letter_id", "query_id", "open", "was_stored", *SENT_COLUMNS)
    arrays = [
        pa.array(values.get(name, [None] * count), TYPES.get(name, pa.string())) for name in names
    ]
    return pa.RecordBatch.from_arrays(arrays, names)


class Bed(NamedTuple):
    """A cluster, and an engine with the options of a backfill to it."""

    cluster: FakeCluster
    options: SinkOptions
    engine: SendEngine

    def send(self, batch: pa.RecordBatch, **more: Any) -> tuple[Resender, Spool]:
        resender, spool = make(self.options, self.engine, **more)
        resender.send(batch)
        return resender, spool

    def store(self, batch: pa.RecordBatch, which: list[int]) -> None:
        """Send these letters, as an earlier task did."""
        self.send(batch.take(which))


@pytest.fixture
def bed(cluster: FakeCluster, options: SinkOptions) -> Iterator[Bed]:
    engine = SendEngine(options, shared=None)
    yield Bed(cluster, options, engine)
    engine.close()


def make(options: SinkOptions, engine: SendEngine, **more: Any) -> tuple[Resender, Spool]:
    spool: Any = Spool()
    return Resender(options, engine=engine, spool=spool, ctx=CTX, **more), spool


def test_all_are_stored_under_their_ids_and_resolved(bed: Bed) -> None:
    batch = letters([f"k{n % 5}" for n in range(50)])
    resender, spool = bed.send(batch)
    assert resender.total.resent == 50
    assert spool.resolved() == set(batch["letter_id"].to_pylist())
    assert spool.kinds() == {SEND, RESOLUTION, BACKFILL}
    ids = [message.message_id for message in bed.cluster.messages(TOPIC)]
    assert sorted(ids) == sorted(batch["message_id"].to_pylist())


def test_of_two_letters_with_one_id_that_which_was_never_sent_is_sent(bed: Bed) -> None:
    """The letters are two versions of an order, of unknown outcome; the first is stored."""
    resender, _ = bed.send(letters([None], message_id=["order-17"], body=[b"price 1"]))
    again = letters(
        ["A", "A"], letter_id=["one", "two"], message_id=["order-17"] * 2,
        body=[b"price 1", b"price 2"], open=[True, True],
    )  # fmt: skip
    resender, spool = bed.send(again)
    assert (resender.total.found, resender.total.resent) == (1, 1)
    assert spool.resolved() == {"one", "two"}
    # The first letter had no key, so it may go to any queue.
    assert sorted(message.body for message in bed.cluster.messages(TOPIC)) == [
        b"price 1",
        b"price 2",
    ]


def test_a_keys_letters_are_stored_in_order(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resend, "CHUNK", 7)
    bed.send(letters([f"k{n % 3}" for n in range(60)]))
    seen: dict[str, list[int]] = {}
    for message in bed.cluster.messages(TOPIC):
        number = int(message.body.split()[1])
        seen.setdefault(message.properties["__SHARDINGKEY"], []).append(number)
    assert sum(map(len, seen.values())) == 60
    assert all(numbers == sorted(numbers) for numbers in seen.values())


def test_letters_without_a_key_are_sent_too(bed: Bed) -> None:
    resender, spool = bed.send(letters([None, "k", None]))
    assert resender.total.resent == 3
    assert len(spool.resolved()) == len(bed.cluster.messages(TOPIC)) == 3


def test_letters_without_a_topic_go_to_the_one_of_the_option(bed: Bed) -> None:
    resender, _ = make(bed.options.with_(topic=TOPIC), bed.engine)
    own = {"queue_id": [None, None, 0], "broker_name": [None, None, "gone"]}
    resender.send(letters([None, "k", None], topic=[None] * 3, **own))
    assert resender.total.resent == len(bed.cluster.messages(TOPIC)) == 2
    assert resender.total.waiting == {"gone": 1}


def test_a_refused_letter_stays_pending_and_stops_its_key(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resend, "CHUNK", 2)
    keys: list[str | None] = ["bad", "good", "bad", "good", "bad", "good"]
    bodies = [b"", b"1", b"2", b"3", b"4", b"5"]
    resender, spool = bed.send(letters(keys, body=bodies, message_id=["order-17"] * 6))
    assert spool.resolved() == {"letter-1", "letter-3", "letter-5"}
    assert (resender.total.failed, resender.total.held_back) == (1, 2)
    assert resender.total.codes == {"EMPTY_BODY": 1}
    assert spool.kinds() == {SEND, RESOLUTION, BACKFILL}, "a failed letter is no second letter"


def test_what_a_broker_refuses_stays_pending(bed: Bed) -> None:
    bed.cluster.on_send(Answer(13, "no"), times=None)
    resender, spool = bed.send(letters(["a", "b"]))
    assert spool.resolved() == set()
    assert resender.total.failed == 2
    assert set(resender.total.codes) == {"MESSAGE_ILLEGAL"}
    assert "no" in resender.total.first_error


def test_what_failed_is_named_and_degraded_is_told_from_stored(bed: Bed) -> None:
    """The first letter is refused, the second stored with less durability, the third stored."""
    resender, _ = make(bed.options, bed.engine)
    outcomes = {"refused": Answer(13, "no such message"), "less": Answer(10), "stored": None}
    for number, answer in enumerate(outcomes.values()):
        for broker in bed.cluster.brokers:
            broker.behave()
            if answer is not None:
                broker.on_send(answer, times=None)
        resender.send(letters([None] * 3).slice(number, 1))
    total = resent_of(resender)
    assert (total.failed, total.resent, total.degraded) == (1, 2, 1)
    (failure,) = total.as_dict()["failures"]
    error = failure.pop("error")
    assert "no such message" in error
    assert failure == {"message_id": f"{0:032X}", "topic": "t", "code": "MESSAGE_ILLEGAL"}


def resent_of(resender: Resender) -> resend.Resent:
    """Return the totals that the driver makes of the task's row."""
    total = resend.Resent()
    (row,) = resender.total.as_batch().to_pylist()
    total.add(row)
    return total


def test_each_request_of_a_task_has_a_number_of_its_own(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report counts messages by this number, not attempts."""
    monkeypatch.setattr(resend, "CHUNK", 2)
    bed.cluster.on_send(Answer(13, "no"), times=None)
    _, spool = bed.send(letters([None, "a", None, "b", "c"]))
    numbers = [row["request"] for row in spool.rows if row["kind"] == SEND and row["attempt"] == 1]
    assert sorted(numbers) == [1, 2, 3, 4, 5]


def test_no_way_to_any_broker_ends_the_trying(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resend, "CHUNK", 2)
    bed.engine.publish_info(TOPIC)
    bed.cluster.kill()
    resender, spool = bed.send(letters(["a", "b", "c", "d", "e", "f"]))
    assert spool.resolved() == set()
    assert resender.total.not_tried == 4
    assert resender.total.failed + resender.total.held_back == 2


def test_resolutions_are_durable_chunk_by_chunk(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resend, "CHUNK", 10)
    _, spool = bed.send(letters(["k"] * 35))
    chunks = [10, 10, 10, 5]
    assert spool.durable == [{kind: n} for n in chunks for kind in (BACKFILL, RESOLUTION)]


class TestWhatMayBeStored:
    """`open` letters may be stored: a backfill was killed, or a send got no answer."""

    @staticmethod
    def questions(cluster: FakeCluster) -> set[str]:
        """Return the ids that brokers were asked for, without the look-up that only wakes them."""
        ids = {
            (request.ext or {})["key"] for request in cluster.requests(RequestCode.QUERY_MESSAGE)
        }
        return ids - {"-"}

    def test_only_these_are_asked_for_and_what_is_stored_is_not_sent(self, bed: Bed) -> None:
        bed.store(letters(["k"] * 6), [0, 3, 5])
        resender, spool = bed.send(letters(["k"] * 6, open=[True, False, True, True, False, True]))
        assert self.questions(bed.cluster) == {f"{n:032X}" for n in (0, 2, 3, 5)}
        assert (resender.total.found, resender.total.resent) == (3, 3)
        assert resender.total.settled == len(spool.resolved()) == 6
        sent = Counter(message.body for message in bed.cluster.messages(TOPIC))
        assert sent == {f"body {n}".encode(): 1 for n in range(6)}
        notes = {row["letter_id"]: row["note"] for row in spool.rows if row["kind"] == RESOLUTION}
        assert notes["letter-0"] == resend.FOUND
        assert notes["letter-1"] is None

    def test_nothing_is_asked_for_the_others(self, bed: Bed) -> None:
        bed.send(letters(["k", None]))
        assert self.questions(bed.cluster) == set()

    def test_look_ups_are_pipelined(self, bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
        """If each took its own round trip, the 2,000 letters of a chunk would take seconds."""
        asked, answered, most = [0], [0], [0]

        def counted(pump: Any, address: str, topic: str, one: str, done: Any, **more: Any) -> None:
            def ended(*result: Any) -> None:
                answered[0] += 1
                done(*result)

            asked[0] += 1
            most[0] = max(most[0], asked[0] - answered[0])
            look_up(pump, address, topic, one, ended, **more)

        monkeypatch.setattr(stored_messages, "look_up", counted)
        bed.send(letters(["k"] * 40, open=[True] * 40))
        assert most[0] == 2 * 40, "both brokers, all letters"

    def test_a_task_that_runs_again_asks_for_all(self, bed: Bed) -> None:
        bed.store(letters(["k", None, "k"]), [0, 1, 2])
        resender, spool = bed.send(letters(["k", None, "k"]), ask_all=True)
        assert resender.total.found == 3
        assert len(bed.cluster.messages(TOPIC)) == len(spool.resolved()) == 3

    def test_the_topic_that_is_sent_to_is_asked(self, bed: Bed) -> None:
        bed.cluster.create_topic("elsewhere", 4)
        bed.store(letters(["k"]), [0])
        resender, _ = make(bed.options.with_(topic="elsewhere"), bed.engine)
        resender.send(letters(["k"], open=[True]))
        assert resender.total.resent == len(bed.cluster.messages("elsewhere")) == 1

    def test_a_timed_letter_is_found_where_it_waits(self, bed: Bed) -> None:
        bed.send(letters(["k"], delay_level=[3], open=[True]))
        bed.send(letters([None], delay_level=[3], open=[True]))
        topics = {
            (request.ext or {})["topic"]
            for request in bed.cluster.requests(RequestCode.QUERY_MESSAGE)
            if (request.ext or {})["key"] != "-"
        }
        assert topics == {TOPIC, "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"}

    def test_a_tables_rows_need_not_have_all_columns(self, bed: Bed) -> None:
        names = [
            "letter_id", "query_id", "open", "was_stored", "topic", "body", "sharding_key",
            "message_id",
        ]  # fmt: skip
        batch = letters(["k", None], open=[True, False]).select(names)
        resender, _ = bed.send(batch)
        assert resender.total.resent == 2

    def test_a_topic_that_nobody_knows_holds_nothing(self, options: SinkOptions) -> None:
        with FakeCluster(brokers=1, queues=0) as bare:  # Without TBW102 the broker makes no topic.
            options = options.with_(nameServer=bare.name_server)
            engine = SendEngine(options, shared=None)
            resender, spool = make(options, engine)
            resender.send(letters(["k"], topic=["nosuch"], open=[True]))
            engine.close()
        assert (resender.total.failed, dict(resender.total.codes)) == (1, {"NO_ROUTE": 1})
        assert spool.marks()["letter-0"][-1] == ("not_sent", "NO_ROUTE")

    def test_nothing_is_sent_while_a_broker_cannot_be_asked(
        self, cluster: FakeCluster, options: SinkOptions
    ) -> None:
        cluster.brokers[1].on(RequestCode.QUERY_MESSAGE, Answer(1, "broken"), times=None)
        engine = SendEngine(options.with_(storedCheckTimeout=200), shared=None)
        resender, spool = make(options, engine)
        resender.send(letters(["k"] * 4, open=[True, True, False, False]))
        engine.close()
        assert cluster.messages(TOPIC) == []
        assert (resender.total.found, resender.total.not_tried) == (0, 4)
        assert spool.resolved() == set()
        assert "does not say which messages" in resender.total.first_error


class TestWhatAConsumerGaveUp:
    """The consumer's message is in the topic, under the id of its letter."""

    @staticmethod
    def exported(count: int, **columns: list[Any]) -> pa.RecordBatch:
        return letters([None] * count, was_stored=[True] * count, **columns)

    def test_is_sent_by_a_task_that_runs_again(self, bed: Bed) -> None:
        bed.store(letters([None] * 4), [0, 1, 3])
        resender, spool = make(bed.options, bed.engine, ask_all=True)
        others = letters([None] * 4).slice(2)
        batches = [self.exported(2), others]
        resender.send(pa.Table.from_batches(batches).combine_chunks().to_batches()[0])
        assert (resender.total.resent, resender.total.found) == (3, 1), "another letter is found"
        assert len(spool.resolved()) == 4
        assert len(bed.cluster.messages(TOPIC)) == 6

    def test_is_sent_again_after_a_lost_answer(self, bed: Bed) -> None:
        """A look-up would find the consumer's message."""
        for broker in bed.cluster.brokers:
            bed.store(letters([None], queue_id=[0], broker_name=[broker.name]), [0])
            broker.on_send(CloseConnection(stores=False))
        once = bed.options.with_(delivery="effectively_once", retryTimesWhenSendFailed=3)
        sender = SendEngine(once, shared=None)
        resender, _ = make(once, sender)
        resender.send(self.exported(1))
        sender.close()
        assert resender.total.resent == 1
        assert len(bed.cluster.messages(TOPIC)) == 3


class TestTheBrokerThatDidNotAnswer:
    """The broker may have letters of unknown outcome; a killed one is in no route for a while."""

    def letters(self, **columns: list[Any]) -> pa.RecordBatch:
        batch = letters([None] * 4, open=[True] * 4, **columns)
        return batch.append_column("unknown_at", pa.array(["broker-b"] * 4))

    @pytest.fixture
    def late(self, cluster: FakeCluster, options: SinkOptions) -> Any:
        """Return a broker that has the letters and is missing from the route."""
        late = cluster.brokers[1]
        cluster.brokers[0].is_master = False
        sender = SendEngine(options, shared=None)
        Bed(cluster, options, sender).send(letters([None] * 4))
        sender.close()
        assert len(late.store.messages(TOPIC)) == 4
        cluster.brokers[0].is_master, late.is_master = True, False
        return late

    @pytest.fixture
    def once(self, options: SinkOptions) -> SinkOptions:
        return options.with_(delivery="effectively_once", pollNameServerInterval=10)

    def test_is_asked_when_it_is_back(self, late: Any, once: SinkOptions) -> None:
        engine = SendEngine(once.with_(storedCheckTimeout="20s"), shared=None)
        back = threading.Timer(0.5, lambda: setattr(late, "is_master", True))
        back.start()
        resender, _ = make(once, engine)
        resender.send(self.letters())
        back.join()
        engine.close()
        assert (resender.total.found, resender.total.resent) == (4, 0)

    def test_holds_its_letters_while_it_is_away(
        self, cluster: FakeCluster, late: Any, once: SinkOptions
    ) -> None:
        engine = SendEngine(once.with_(storedCheckTimeout=200), shared=None)
        resender, spool = make(once, engine)
        resender.send(self.letters())
        engine.close()
        assert (resender.total.not_tried, spool.resolved()) == (4, set())
        assert len(cluster.messages(TOPIC)) == 4
        for word in (late.name, "not in the route", "at_least_once"):
            assert word in resender.total.first_error

    def test_is_asked_for_no_other_topic_and_not_at_least_once(
        self, cluster: FakeCluster, late: Any, options: SinkOptions, once: SinkOptions
    ) -> None:
        cluster.create_topic("other", 2)
        for given, topic in ((options, TOPIC), (once.with_(topic="other"), "other")):
            engine = SendEngine(given, shared=None)
            resender, _ = make(given, engine)
            resender.send(self.letters())
            engine.close()
            assert resender.total.resent == 4
            assert len(cluster.brokers[0].store.messages(topic)) == 4


def test_every_letter_of_a_chunk_is_marked_and_its_end_noted(bed: Bed) -> None:
    bed.cluster.on_send(Answer(13, "no"), times=None)
    _, spool = bed.send(letters(["a", "a", None], body=[b"0", b"1", b""]))
    assert spool.marks() == {
        "letter-0": [("in_flight", None), ("rejected", "MESSAGE_ILLEGAL")],
        "letter-1": [("in_flight", None), ("not_sent", "HELD_BACK")],
        "letter-2": [("in_flight", None), ("not_sent", "EMPTY_BODY")],
    }
    bed.cluster.behave()
    _, spool = bed.send(letters(["a"]))
    assert spool.marks() == {"letter-0": [("in_flight", None)]}
    assert spool.resolved() == {"letter-0"}


def test_a_rate_makes_chunks_of_a_second() -> None:
    batch = letters(["k"] * 100)
    assert resend._chunk_rows(batch, SinkOptions()) == resend.CHUNK
    per_task = SinkOptions.parse(maxMessagesPerSecond=100, rateTasks=4)
    assert resend._chunk_rows(batch, per_task) == 25
    mean = batch.nbytes / 100
    by_bytes = SinkOptions.parse(maxBytesPerSecond=int(mean * 10))
    assert resend._chunk_rows(batch, by_bytes) in (9, 10)
    assert resend._chunk_rows(batch, SinkOptions.parse(maxMessagesPerSecond=1, rateTasks=9)) == 1


def test_results_of_tasks_add_up() -> None:
    report = resend.Resent(resent=1, codes=resend.Counter({"A": 2}), first_error="x")
    (row,) = report.as_batch().to_pylist()
    total = resend.Resent(codes=resend.Counter({"A": 1, "B": 1}))
    total.add(row)
    total.add(row)
    assert total == resend.Resent(resent=2, codes=resend.Counter({"A": 5, "B": 1}), first_error="x")


class TestBackfillOptions:
    def test_failures_are_told_and_not_raised(self) -> None:
        settings = SinkOptions.parse(
            ledger="l", nameServer="a:1", onInvalid="fail", maxFailures=3,
            columns="body=payload", bodyFormat="json", orderBy="x",
        )  # fmt: skip
        reduced = backfill_options(settings)
        assert (reduced.max_failures, reduced.on_invalid) == ("", "dead_letter")
        assert (reduced.columns, reduced.body_format, reduced.order_by) == ((), "column", "")
        assert reduced.name_servers == ("a:1",)

    def test_the_users_wait_is_kept(self) -> None:
        assert backfill_options(SinkOptions.parse(orderWaitMs="90s")).order_wait_ms == 90_000
        assert backfill_options(SinkOptions.parse()).order_wait_ms == 10_000

    def test_every_option_survives(self) -> None:
        settings = SinkOptions.parse(
            accessKey="a", secretKey="s", tlsMode="insecure", sendMsgTimeout="7s",
            faultTable="1:3,2:4",
        )  # fmt: skip
        reduced = backfill_options(settings)
        assert reduced.secret_key == settings.secret_key
        assert reduced.fault_table == "1:3,2:4"


def test_what_was_done_is_plain_json() -> None:
    done = Resent(failed=2)
    done.codes.update({"EMPTY_BODY": 2})
    assert json.loads(json.dumps(done.as_dict()))["codes"] == {"EMPTY_BODY": 2}


def test_what_was_settled_since_the_plan_is_left_out(bed: Bed) -> None:
    resender, spool = bed.send(letters(["a", "a", "b"]), settled={"letter-1", "letter-7"})
    assert (resender.total.resent, resender.total.left_out) == (2, 1)
    assert spool.resolved() == {"letter-0", "letter-2"}
    assert len(bed.cluster.messages(TOPIC)) == 2


def test_a_task_whose_backfill_was_taken_over_sends_nothing_more(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resend, "CHUNK", 2)
    looks = iter([None, LedgerError("taken over")])

    def check() -> None:
        if error := next(looks):
            raise error

    resender, spool = make(bed.options, bed.engine, check=check)
    with pytest.raises(LedgerError, match="taken over"):
        resender.send(letters(["a", "b", "c", "d"]))
    assert len(bed.cluster.messages(TOPIC)) == len(spool.resolved()) == 2
    assert set(spool.marks()) == {"letter-0", "letter-1"}


def test_a_task_that_ends_by_any_error_leaves_its_notes_to_the_fold(
    cluster: FakeCluster, options: SinkOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notes go to the fold even while the worker lives on for the next task."""
    monkeypatch.setattr(resend, "settled_since", lambda place, version: set())
    place = resolve_path(options.ledger)
    claim = BackfillClaim(place)
    claim.acquire(0)

    def batches() -> Iterator[pa.RecordBatch]:
        yield letters(["k"])
        raise ValueError("of what Spark runs before it")

    with pytest.raises(ValueError, match="Spark"):
        list(send_partition(options, "backfill-1", batches(), claim=claim.token, version=0))
    claim.release()
    files = sealed_files(place, place.filesystem())
    batches_read = [b for info in files for b in read_batches(info.path, place.filesystem())]
    assert {row["kind"] for batch in batches_read for row in batch.to_pylist()} >= {
        BACKFILL,
        RESOLUTION,
    }


def test_a_task_asks_about_all_that_an_earlier_attempt_may_have_sent(
    cluster: FakeCluster, options: SinkOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a later attempt of its stage, too, where Spark counts its attempts from 0 again."""
    monkeypatch.setattr(resend, "settled_since", lambda place, version: set())
    claim = BackfillClaim(resolve_path(options.ledger))
    claim.acquire(0)
    total = Resent()
    for _ in range(2):
        batches = iter([letters(["k"])])
        for rows in send_partition(options, "backfill-1", batches, claim=claim.token, version=0):
            total.add(rows.to_pylist()[0])
    claim.release()
    assert (total.resent, total.found, len(cluster.messages(TOPIC))) == (1, 1, 1)
