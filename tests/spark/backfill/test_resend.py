"""The task side of a backfill, on the scripted cluster: no Spark, no Java."""

import json
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pyarrow as pa
import pytest
from pyspark import TaskContext

from rocket_sink.errors import LedgerError
from rocket_sink.ledger import token as tokens
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query import backfill_marks
from rocket_sink.ledger.query.backfill_marks import BackfillClaim
from rocket_sink.ledger.records import RunContext, resolution_rows
from rocket_sink.ledger.schema import BACKFILL, ISOLATION, RESOLUTION, SEND
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.ledger.transport.files import sealed_files
from rocket_sink.option_spec import Secret
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin import stored_messages
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.stored_check import look_up
from rocket_sink.spark.backfill import resend
from rocket_sink.spark.backfill.backfill import backfill_options
from rocket_sink.spark.backfill.resend import Resender, Resent, send_partition
from rocket_sink.spark.backfill.sources import SENT_COLUMNS
from rocket_sink.task.transaction_marker import TRANSACTION_PROPERTY
from rocket_sink.testing import Answer, CloseConnection, FakeCluster
from rocket_sink.wire.codes import RequestCode
from tests.ledger.values import session, spool_rows
from tests.spark.test_alone import task_of

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
HEADERS = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))


class Spool:
    def __init__(self):
        self.rows: list[dict[str, Any]] = []
        self.durable: list[dict[str, int]] = []
        self._fresh: list[dict[str, Any]] = []

    def append(self, *batches):
        for batch in batches:
            self.rows += batch.to_pylist()
            self._fresh += batch.to_pylist()

    def sync(self):
        fresh, self._fresh = self._fresh, []
        kinds = Counter(row["kind"] for row in fresh if row["kind"] in (BACKFILL, RESOLUTION))
        self.durable.append(dict(kinds))

    def marks(self):
        found: dict[str, list[tuple[str, str | None]]] = {}
        for row in self.rows:
            if row["kind"] == BACKFILL:
                found.setdefault(row["letter_id"], []).append((row["outcome"], row["error_code"]))
        return found

    def resolved(self):
        return {row["letter_id"] for row in self.rows if row["kind"] == RESOLUTION}

    def kinds(self):
        """Return the kinds of rows except isolations, which a busy machine may cause."""
        return {row["kind"] for row in self.rows} - {ISOLATION}


def letters(sharding_keys, **columns):
    count = len(sharding_keys)
    values: dict[str, Any] = {
        "letter_id": [f"letter-{n}" for n in range(count)],
        "topic": [TOPIC] * count,
        "body": [f"body {n}".encode() for n in range(count)],
        "sharding_key": sharding_keys,
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
    """A cluster, and the options of a backfill to it."""

    cluster: FakeCluster
    options: SinkOptions

    def with_(self, **changes):
        """Return the same cluster, with other options of the backfill."""
        return self._replace(options=self.options.with_(**changes))

    def send(self, *batches, spool=None, chunk=resend.CHUNK, **more):
        """Send the letters in a task, chunk by chunk; return its totals and its spool."""
        kept, engine = spool or Spool(), SendEngine(self.options, shared=None)
        with patch.object(resend, "CHUNK", chunk), closing(engine):
            resender = Resender(self.options, engine=engine, spool=kept, ctx=CTX, **more)
            for batch in batches:
                resender.send(batch)
        return resender.total, kept

    def stored(self, topic=TOPIC):
        return self.cluster.messages(topic)

    def asked(self, field):
        """Return this field of all look-ups, without those that only wake a broker."""
        asked = [frame.ext or {} for frame in self.cluster.requests(RequestCode.QUERY_MESSAGE)]
        return {fields[field] for fields in asked if fields["key"] != "-"}


@pytest.fixture
def bed(cluster, tmp_path):
    options = SinkOptions.parse(
        nameServer=cluster.name_server, ledger=str(tmp_path), sendMsgTimeout="2s",
        retryTimesWhenSendFailed=1, orderWaitMs="2s", connectTimeoutMs="20s", storedCheckDelay=20,
    )  # fmt: skip
    return Bed(cluster, backfill_options(options))


def test_all_are_stored_under_their_ids_and_resolved(bed):
    batch, chunks = letters([f"k{n % 5}" for n in range(50)]), list[int]()
    total, spool = bed.send(batch, chunk=20, on_dead_letters=chunks.append)
    assert (total, chunks) == (Resent(resent=50), [20, 20, 10])
    assert spool.resolved() == set(batch["letter_id"].to_pylist())
    assert spool.kinds() == {SEND, RESOLUTION, BACKFILL}
    ids = [str(message.message_id) for message in bed.stored()]
    assert sorted(ids) == sorted(batch["message_id"].to_pylist())


@pytest.mark.parametrize(
    "columns",
    [{"body": [b"1", b"2"]}, {"tags": ["on", "off"]}, {"sharding_key": ["A", "B"]}, {},
     {"topic": [TOPIC, "of others"]}, {"properties": [[("event", "paid")], [("event", "shipped")]]},
     {"properties": [None, [("event", "shipped")]]}, {"keys": [["1"], None]}, {"flag": [None, 1]},
     {"traceparent": [f"00-{n * 16}-{n * 8}-01" for n in ("0a", "0b")]}, {"event_time": [1, None]}],
)  # fmt: skip
@pytest.mark.parametrize("stored", [0, 1])
def test_a_stored_message_settles_one_letter_of_its_content(bed, columns, stored):
    """Two letters of unknown outcome have one id, as two versions of an order have; or they are of
    two topics, and the backfill sends both to one."""
    bed = bed.with_(topic=TOPIC)
    same = {"body": [b"state"] * 2, "message_id": ["order-17"] * 2, "open": [True] * 2}
    both = letters(["A", "A"], **{**same, **columns})
    bed.send(both[stored : stored + 1])
    total, spool = bed.send(both)
    assert (total.found, total.resent, len(spool.resolved())) == (1, 1, 2)
    contents = {(m.body, m.flag, *sorted(m.properties.items())) for m in bed.stored()}
    assert len(contents) == (2 if columns.keys() - {"topic"} else 1)


def test_a_stored_row_is_found_in_any_form(bed):
    """Kafka's headers are lists; a committed half message has a property of its task, too."""
    batch = letters([None], open=[True])
    headers = pa.array([[{"key": "event", "value": b"paid"}]], HEADERS)
    batch = batch.set_column(batch.schema.get_field_index("properties"), "properties", headers)
    assert bed.send(batch)[0].resent == 1
    bed.stored()[0].properties[TRANSACTION_PROPERTY] = "[]"
    assert bed.send(batch)[0].found == len(bed.stored()) == 1


def test_a_keys_letters_are_stored_in_order(bed):
    bed.send(letters([f"k{n % 3}" for n in range(60)]), chunk=7)
    seen: dict[str, list[int]] = {}
    for message in bed.stored():
        number = int(message.body.split()[1])
        seen.setdefault(message.properties["__SHARDINGKEY"], []).append(number)
    assert sum(map(len, seen.values())) == 60
    assert all(numbers == sorted(numbers) for numbers in seen.values())


@pytest.mark.parametrize("ordering", ["none", "strict"])
def test_letters_without_a_key_are_sent_too(bed, ordering):
    total, spool = bed.with_(ordering=ordering).send(letters([None, "k", None]))
    assert total.resent == len(spool.resolved()) == len(bed.stored()) == 3
    assert bed.asked("key") == set(), "nothing tells that they may be stored"


def test_letters_without_a_topic_go_to_the_one_of_the_option(bed):
    own = {"queue_id": [None, None, 0], "broker_name": [None, None, "gone"], "query_id": [None] * 3}
    total, _ = bed.with_(topic=TOPIC).send(letters([None, "k", None], topic=[None] * 3, **own))
    assert total.resent == len(bed.stored()) == 2
    assert total.waiting == {"gone": 1}


def test_a_refused_letter_stays_pending_and_stops_its_key(bed):
    bodies = [b"", b"1", b"2", b"3", b"4", b"5"]
    batch = letters(["bad", "good"] * 3, body=bodies, message_id=["order-17"] * 6)
    total, spool = bed.send(batch, chunk=2)
    assert spool.resolved() == {"letter-1", "letter-3", "letter-5"}
    assert (total.failed, total.held_back, total.codes) == (1, 2, {"EMPTY_BODY": 1})
    assert spool.kinds() == {SEND, RESOLUTION, BACKFILL}, "a failed letter is no second letter"


def test_what_failed_is_named_and_degraded_is_told_from_stored(bed):
    """The first letter is refused, the second stored with less durability, the third stored."""
    total = Resent()
    for number, answer in enumerate((Answer(13, "no such message"), Answer(10), None)):
        bed.cluster.behave()
        if answer is not None:
            bed.cluster.on_send(answer, times=None)
        of_task, spool = bed.send(letters([None] * 3).slice(number, 1))
        assert (of_task.settled, of_task.unsettled) == ((1, 0) if number else (0, 1))
        # The driver adds up the rows of its tasks.
        total.add(*of_task.as_batch().to_pylist())
        assert len(spool.resolved()) == (number > 0)
    assert (total.failed, total.resent, total.degraded) == (1, 2, 1)
    assert "no such message" in total.first_error
    (failure,) = total.as_dict()["failures"]
    assert "no such message" in failure.pop("error")
    assert failure == {"message_id": f"{0:032X}", "topic": "t", "code": "MESSAGE_ILLEGAL"}


def test_each_request_of_a_task_has_a_number_of_its_own(bed):
    """The report counts messages by this number, not attempts."""
    bed.cluster.on_send(Answer(13, "no"), times=None)
    _, spool = bed.send(letters([None, "a", None, "b", "c"]), chunk=2)
    numbers = [row["request"] for row in spool.rows if row["kind"] == SEND and row["attempt"] == 1]
    assert sorted(numbers) == [1, 2, 3, 4, 5]


def test_no_way_to_any_broker_ends_the_trying(bed):
    bed.cluster.kill()
    total, spool = bed.send(letters(["a", "b", "c", "d", "e", "f"]), chunk=2)
    assert spool.resolved() == set()
    assert (total.not_tried, total.failed + total.held_back, total.unsettled) == (4, 2, 6)


def test_a_broker_out_of_reach_does_not_end_the_trying_at_others(bed):
    bed.cluster.brokers[0].on_send(CloseConnection(stores=False), times=None)
    own = {"queue_id": [0] * 6, "broker_name": ["broker-a", "broker-b"] * 3}
    total, _ = bed.send(letters([None] * 6, **own), chunk=2)
    assert (total.failed, total.resent, total.not_tried) == (3, 3, 0)


def test_an_error_of_a_send_ends_the_task_and_is_not_taken_for_success(bed):
    full = patch.object(Spool, "append", side_effect=[None, OSError("no space left"), None])
    with full, pytest.raises(OSError, match="no space"):
        bed.send(letters(["k"]))


def test_resolutions_are_durable_chunk_by_chunk(bed):
    _, spool = bed.send(letters(["k"] * 35), chunk=10)
    chunks = [10, 10, 10, 5]
    assert spool.durable == [{kind: n} for n in chunks for kind in (BACKFILL, RESOLUTION)]


class TestWhatMayBeStored:
    """`open` letters may be stored: a backfill was killed, or a send got no answer."""

    def test_only_these_are_asked_for_and_what_is_stored_is_not_sent(self, bed):
        bed.send(letters(["k"] * 6).take([0, 3, 5]))
        batch = letters(["k"] * 6, open=[True, False, True, True, False, True])
        total, spool = bed.send(batch, chunk=3)
        for broker in bed.cluster.brokers:
            keys = [r.ext["key"] for r in broker.requests if r.code == RequestCode.QUERY_MESSAGE]
            assert keys[0] == "-", "it was awake for `storedCheckDelay` before the first question"
        assert bed.asked("topic") == {TOPIC}, "a message without a delay is nowhere else"
        assert bed.asked("key") == {f"{n:032X}" for n in (0, 2, 3, 5)}
        assert (total.found, total.resent) == (3, 3)
        assert total.settled == len(spool.resolved()) == 6
        sent = Counter(message.body for message in bed.stored())
        assert sent == {f"body {n}".encode(): 1 for n in range(6)}
        notes = {row["letter_id"]: row["note"] for row in spool.rows if row["kind"] == RESOLUTION}
        assert (notes["letter-0"], notes["letter-1"]) == (resend.FOUND, None)

    def test_a_copy_is_known_although_a_send_changes_tags_and_properties(self, bed):
        kept = [("a", "1"), ("b", None)]
        batch = letters(["k"], tags=[" on\t"], properties=[kept], open=[True])
        for counts in ((1, 0), (0, 1)):
            total, _ = bed.send(batch)
            assert (total.resent, total.found) == counts

    def test_look_ups_are_pipelined(self, bed, monkeypatch):
        """If each took its own round trip, the 2,000 letters of a chunk would take seconds."""
        asked, answered, most = [0], [0], [0]

        def counted(pump, address, topic, one, done, **more):
            def ended(*result):
                answered[0] += 1
                done(*result)

            asked[0] += 1
            most[0] = max(most[0], asked[0] - answered[0])
            look_up(pump, address, topic, one, ended, **more)

        monkeypatch.setattr(stored_messages, "look_up", counted)
        bed.send(letters(["k"] * 40, open=[True] * 40))
        assert most[0] == 2 * 40, "both brokers, all letters"

    def test_a_task_that_runs_again_asks_for_all(self, bed):
        bed.send(letters(["k", None, "k"]))
        total, spool = bed.send(letters(["k", None, "k"]), ask_all=True)
        assert total.found == len(bed.stored()) == len(spool.resolved()) == 3

    def test_the_topic_that_is_sent_to_is_asked(self, bed):
        bed.cluster.create_topic("elsewhere", 4)
        bed.send(letters(["k"]))
        total, _ = bed.with_(topic="elsewhere").send(letters(["k"], open=[True]))
        assert total.resent == len(bed.stored("elsewhere")) == 1

    def test_a_timed_letter_is_found_where_it_waits(self, bed):
        bed.send(letters(["k"], delay_level=[3], open=[True]))
        bed.send(letters([None], delay_level=[3], open=[True]))
        assert bed.asked("topic") == {TOPIC, "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"}

    def test_a_tables_rows_need_not_have_all_columns(self, bed):
        names = ["letter_id", "query_id", "open", "was_stored"]
        names += ["topic", "body", "sharding_key", "message_id"]
        total, _ = bed.send(letters(["k", None], open=[True, False]).select(names))
        assert total.resent == 2

    def test_a_topic_that_nobody_knows_holds_nothing(self, bed):
        with FakeCluster(brokers=1, queues=0) as bare:  # Without TBW102 the broker makes no topic.
            batch = letters(["k"], topic=["nosuch"], open=[True])
            total, spool = bed.with_(nameServer=bare.name_server).send(batch)
        assert (total.failed, total.codes) == (1, {"NO_ROUTE": 1})
        assert spool.marks()["letter-0"][-1] == ("not_sent", "NO_ROUTE")

    def test_nothing_is_sent_while_a_broker_cannot_be_asked(self, bed):
        bed.cluster.brokers[1].on(RequestCode.QUERY_MESSAGE, Answer(1, "broken"), times=None)
        batch = letters(["k"] * 4, open=[True, True, False, False])
        total, spool = bed.with_(storedCheckTimeout=200).send(batch)
        assert (bed.stored(), total.found, total.not_tried) == ([], 0, 4)
        assert spool.resolved() == set() and total.codes == {"DELIVERY": 1}
        assert "does not say which messages" in total.first_error
        batch = letters([None] * 2, open=[True, True], body=[b"", b"1"])
        total, _ = bed.with_(storedCheckTimeout=200).send(batch, chunk=1)
        assert (total.failed, total.not_tried) == (1, 1) and "length is zero" in total.first_error


class TestWhatAConsumerGaveUp:
    """The consumer's message is in the topic, under the id of its letter."""

    def test_is_sent_by_a_task_that_runs_again(self, bed):
        bed.send(letters([None] * 4).take([0, 1, 3]))
        exported = [True, True, False, False]
        total, spool = bed.send(letters([None] * 4, was_stored=exported), ask_all=True)
        assert (total.resent, total.found) == (3, 1), "another letter is found"
        assert (len(spool.resolved()), len(bed.stored())) == (4, 6)

    def test_is_sent_again_after_a_lost_answer(self, bed):
        """A look-up would find the consumer's message."""
        own = {"queue_id": [0, 0], "broker_name": ["broker-a", "broker-b"]}
        batch = letters([None] * 2, was_stored=[True, False], **own)
        bed.send(batch.slice(0, 1))
        bed.cluster.brokers[0].on_send(CloseConnection(stores=False))
        once = bed.with_(delivery="effectively_once", retryTimesWhenSendFailed=3)
        total, _ = once.send(batch.take(pa.array([1, 0])))
        assert (total.resent, len(bed.stored())) == (2, 3)


class TestTheBrokerThatDidNotAnswer:
    """The broker may have letters of unknown outcome; a killed one is in no route for a while."""

    def letters(self, **columns):
        batch = letters([None] * 4, open=[True] * 4, **columns)
        return batch.append_column("unknown_at", pa.array(["broker-b"] * 4))

    @pytest.fixture
    def late(self, bed):
        """Return a broker that has the letters and is missing from the route."""
        other, late = bed.cluster.brokers
        other.is_master = False
        bed.send(letters([None] * 4))
        assert len(late.store.messages(TOPIC)) == 4
        other.is_master, late.is_master = True, False
        return late

    @pytest.fixture
    def once(self, bed):
        return bed.with_(delivery="effectively_once", pollNameServerInterval=10)

    def test_is_asked_when_it_is_back(self, late, once):
        back = threading.Timer(0.5, lambda: setattr(late, "is_master", True))
        back.start()
        total, _ = once.with_(storedCheckTimeout="20s").send(self.letters())
        back.join()
        assert (total.found, total.resent) == (4, 0)

    def test_holds_its_letters_while_it_is_away(self, late, once):
        total, spool = once.with_(storedCheckTimeout=200).send(self.letters())
        assert (total.not_tried, spool.resolved(), len(once.stored())) == (4, set(), 4)
        for word in (late.name, "not in the route", "at_least_once"):
            assert word in total.first_error

    @pytest.mark.usefixtures("late")
    def test_is_asked_for_no_other_topic_and_not_at_least_once(self, bed, once):
        bed.cluster.create_topic("other", 2)
        for each, topic in ((bed, TOPIC), (once.with_(topic="other"), "other")):
            total, _ = each.send(self.letters())
            assert total.resent == len(bed.cluster.brokers[0].store.messages(topic)) == 4


def test_every_letter_of_a_chunk_is_marked_and_its_end_noted(bed):
    bed.cluster.on_send(Answer(13, "no such"), times=None)
    total, spool = bed.send(letters(["a", "a", None], body=[b"0", b"1", b""]))
    assert (total.failed, total.held_back) == (2, 1) and "no such" in total.first_error
    assert total.codes == {"MESSAGE_ILLEGAL": 1, "EMPTY_BODY": 1}
    assert spool.marks() == {
        "letter-0": [("in_flight", None), ("rejected", "MESSAGE_ILLEGAL")],
        "letter-1": [("in_flight", None), ("not_sent", "HELD_BACK")],
        "letter-2": [("in_flight", None), ("not_sent", "EMPTY_BODY")],
    }
    bed.cluster.behave()
    _, spool = bed.send(letters(["a"]))
    assert spool.marks() == {"letter-0": [("in_flight", None)]}
    assert spool.resolved() == {"letter-0"}


def test_a_rate_makes_chunks_of_a_second():
    batch = letters(["k"] * 100)
    assert resend._chunk_rows(batch, SinkOptions()) == 2000
    per_task = SinkOptions.parse(maxMessagesPerSecond=100, rateTasks=4)
    assert resend._chunk_rows(batch, per_task) == 25
    mean = batch.nbytes / 100
    by_bytes = SinkOptions.parse(maxBytesPerSecond=int(mean * 10))
    assert resend._chunk_rows(batch, by_bytes) in (9, 10)
    assert resend._chunk_rows(batch.slice(0, 0), by_bytes) == 2000
    assert resend._chunk_rows(batch, SinkOptions.parse(maxMessagesPerSecond=1, rateTasks=9)) == 1


def test_results_of_tasks_add_up_and_are_plain_json():
    total = Resent(codes=Counter({"A": 1, "B": 1}))
    for error in ("x", "y"):
        report = Resent(1, codes=Counter({"A": 2}), waiting=Counter({"b": 3}), first_error=error)
        report.failures = [{"error": error}] * 700
        total.add(*report.as_batch().to_pylist())
    assert Counter(failure["error"] for failure in total.failures) == {"x": 700, "y": 300}
    total.failures, waiting = [], Counter({"b": 6})
    codes = Counter({"A": 5, "B": 1})
    assert total == Resent(resent=2, waiting=waiting, codes=codes, first_error="x")
    assert json.loads(json.dumps(total.as_dict()))["codes"] == {"A": 5, "B": 1}


def test_a_task_lists_its_first_failures_with_the_topic_to_send_to(bed, monkeypatch):
    monkeypatch.setattr(resend, "FAILURES_MAX", 2)
    batch = letters([None] * 3, body=[b""] * 3, topic=[None, "other", TOPIC])
    total, _ = bed.with_(topic=TOPIC).send(batch)
    assert [failure["topic"] for failure in total.failures] == [TOPIC] * 2
    assert (total.failed, total.codes) == (3, {"EMPTY_BODY": 3})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        # Failures are counted and not raised.
        ({"onInvalid": "fail", "maxFailures": 3},
         {"max_failures": "", "on_invalid": "dead_letter"}),
        ({"columns": "body=payload", "bodyFormat": "json", "orderBy": "x", "nameServer": "a:1"},
         {"columns": (), "body_format": "column", "order_by": "", "name_servers": ("a:1",)}),
        ({"orderWaitMs": "90s", "strictColumns": True},
         {"order_wait_ms": 90_000, "strict_columns": False}),
        ({}, {"order_wait_ms": 10_000, "ledger_retention_ms": (("body", 0),)}),
        ({"delivery": "transactional", "ledger": "/l"}, {"delivery": "at_least_once"}),
        ({"delivery": "effectively_once"}, {"delivery": "effectively_once"}),
        ({"accessKey": "a", "secretKey": "s", "tlsMode": "insecure", "faultTable": "1:3,2:4"},
         {"secret_key": Secret("s"), "fault_table": "1:3,2:4"}),
    ],
)  # fmt: skip
def test_which_options_a_backfill_keeps(given, kept):
    reduced = backfill_options(SinkOptions.parse(given))
    assert {name: getattr(reduced, name) for name in kept} == kept


def test_what_was_settled_since_the_plan_is_left_out(bed):
    settled = {"letter-1", "letter-3", "letter-7"}
    total, spool = bed.send(letters(["a", "a", "b", "b"]), settled=settled, chunk=2)
    assert (total.resent, total.left_out, len(bed.stored())) == (2, 2, 2)
    assert spool.resolved() == {"letter-0", "letter-2"}


def test_a_task_whose_backfill_was_taken_over_sends_nothing_more(bed):
    check, spool = Mock(side_effect=[None, LedgerError("taken over")]), Spool()
    with pytest.raises(LedgerError, match="taken over"):
        bed.send(letters(["a", "b", "c", "d"]), spool=spool, chunk=2, check=check)
    assert len(bed.stored()) == len(spool.resolved()) == 2
    assert set(spool.marks()) == {"letter-0", "letter-1"}


@pytest.fixture
def claim(bed):
    Ledger(bed.options.ledger).create(session())
    claim = BackfillClaim(resolve_path(bed.options.ledger))
    claim.acquire(0)
    yield claim
    claim.release()


def send_all(bed, claim, *batches, **more):
    """Send the batches as a partition; return the task's totals."""
    batches = iter(batches)
    [rows] = send_partition(bed.options, "backfill-1", batches, claim=claim, version=0, **more)
    total = Resent()
    total.add(*rows.to_pylist())
    return total


def sealed_rows(bed):
    """Return the rows that the ledger's next fold takes in."""
    place = resolve_path(bed.options.ledger)
    return spool_rows(*(Path(file.path) for file in sealed_files(place, place.filesystem())))


def test_a_task_that_ends_by_any_error_leaves_its_notes_to_the_fold(bed, claim):
    """The notes go to the fold even while the worker lives on for the next task."""

    def batches():
        yield letters(["k"])
        raise ValueError("of what Spark runs before it")

    with pytest.raises(ValueError, match="Spark"):
        list(send_partition(bed.options, "backfill-1", batches(), claim=claim.token, version=0))
    assert {row["kind"] for row in sealed_rows(bed)} >= {BACKFILL, RESOLUTION}


def test_a_task_of_another_claim_or_ledger_sends_nothing(bed, claim, monkeypatch):
    monkeypatch.setattr(tokens, "_BETWEEN_LOOKS_S", 0.0)
    absent = LedgerToken(resolve_path(bed.options.ledger).uri, "absent", spools=True)
    with pytest.raises(LedgerError, match="has taken over"):
        send_all(bed, "of another")
    with pytest.raises(LedgerError, match="not the one that the driver sees"):
        send_all(bed, claim.token, token=absent)
    assert sealed_rows(bed) == []


def test_a_task_looks_at_claim_and_ledger_before_each_chunk(bed, claim, monkeypatch):
    """Somebody parks a letter after the plan; then another backfill takes the claim."""
    parked = resolution_rows({"letter_id": ["letter-0"], "resolution": "parked"}, CTX)
    Ledger(bed.options.ledger).append(session(), parked)
    total = send_all(bed, claim.token, letters(["a", "b"]))
    assert (total.left_out, total.resent) == (1, 1)
    facts = {(row["lane"], row["query_id"], row["epoch"]) for row in sealed_rows(bed)}
    assert facts == {("backfill", "backfill-1", 0)}
    monkeypatch.setattr(backfill_marks, "_CHECK_S", 0.0)

    def batches():
        yield letters(["c"])
        NoteStore(resolve_path(bed.options.ledger), "backfill").write("token", "of another")
        yield letters(["d"], body=[b"late"])

    with pytest.raises(LedgerError, match="taken over"):
        list(send_partition(bed.options, "backfill-2", batches(), claim=claim.token, version=0))
    assert b"late" not in {message.body for message in bed.stored()}


@pytest.mark.parametrize("is_folded", [False, True])
def test_a_task_asks_about_all_that_an_earlier_attempt_may_have_sent(bed, claim, is_folded):
    """In a later attempt of its stage, too, where Spark counts its attempts from 0 again; also if a
    fold for a query has taken the spool file of the earlier attempt meanwhile."""

    # The attempt dies after the send. Its first call of `_resolve` notes stored letters: none.
    dies = patch.object(Resender, "_resolve", side_effect=[None, ValueError("it dies")])
    with dies, pytest.raises(ValueError, match="dies"):
        send_all(bed, claim.token, letters(["k"]))
    assert len(bed.stored()) == 1
    if is_folded:
        assert Ledger(bed.options.ledger).sync(session()).files == 1
    total = send_all(bed, claim.token, letters(["k"]))
    assert (total.resent, total.found, len(bed.stored())) == (0, 1, 1), total


def test_a_later_attempt_of_spark_asks_about_all_although_no_note_is_left(bed, claim, monkeypatch):
    bed.send(letters(["k"]))
    monkeypatch.setattr(TaskContext, "get", lambda: task_of({}))
    assert send_all(bed, claim.token, letters(["k"])).found == len(bed.stored()) == 1
