"""The batch reader's options, ranges and rows; tests run the tasks by hand, without Spark."""

import contextlib
import json
import pickle
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition

from rocket_sink.errors import ConfigurationError, NoRouteError, OptionError
from rocket_sink.message import Message
from rocket_sink.options import OPTIONS, SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.producer import Producer
from rocket_sink.rows.stored_rows import STORED_SCHEMA, stored_batch
from rocket_sink.spark.reading import batch
from rocket_sink.spark.reading.batch import FilteringReader, MessageReader
from rocket_sink.spark.reading.filters import Narrowed
from rocket_sink.spark.reading.options import READ_OPTIONS, ReadOptions
from rocket_sink.testing import Answer
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.stored import StoredMessage
from tests.clusters import scripted_cluster
from tests.spark.two_brokers import TOPIC, fill

cluster = scripted_cluster(t=2)


def plan(cluster, **options):
    settings = {"nameserver": cluster.name_server, "topic": TOPIC, **options}
    reader = pickle.loads(pickle.dumps(MessageReader(*ReadOptions.parse(settings))))
    return reader, pickle.loads(pickle.dumps(list(reader.partitions())))


def bodies(cluster, **options):
    reader, parts = plan(cluster, **options)
    batches = [batch for part in parts for batch in reader.read(part)]
    return sorted(body.decode() for batch in batches for body in batch["body"].to_pylist())


def test_all_queues_of_all_brokers_are_read(cluster):
    fill(cluster, 3)
    fill(cluster, 2, broker=1, queue=1)
    _, parts = plan(cluster)
    assert [(p.queue.broker_name, p.queue.queue_id, p.begin, p.end) for p in parts] == [
        ("broker-a", 0, 0, 3), ("broker-b", 1, 0, 2),
    ]  # fmt: skip
    assert bodies(cluster) == ["000", "001", "002", "110", "111"]


def test_long_queues_are_cut(cluster, monkeypatch):
    fill(cluster, 10)
    _, parts = plan(cluster, maxmessagesperpartition="4")
    assert [(p.begin, p.end) for p in parts] == [(0, 4), (4, 8), (8, 10)]
    assert len(bodies(cluster, maxmessagesperpartition="4")) == 10
    pull = Admin._pull
    monkeypatch.setattr(Admin, "_pull", lambda a, queue, at, _, *m: pull(a, queue, at, 5, *m))
    monkeypatch.setattr(batch, "_BATCH_BYTES", 1)
    reader, (whole,) = plan(cluster)
    sizes = [[each.num_rows for each in reader.read(part)] for part in (*parts, whole)]
    assert sizes == [[4], [4], [2], [5, 5]]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"startingOffsets": " LATEST "}, []), ({"endTimestamp": 0}, []),
        ({"startingOffsets": '{"broker-a:0": 3}'}, [3, 4]),
        ({"startingOffsets": '{"broker-a:0": "Earliest"}', "endingOffsets": '{"broker-a:0": 1}'},
         [0]),
        ({"startingOffsets": '{"broker-a:0": -2}', "endingOffsets": '{"broker-a:0": -1}'},
         [0, 1, 2, 3, 4]),
        ({"endingOffsets": '{"broker-a:0": 2}'}, [0, 1]),
        ({"startTimestamp": 1020}, [2, 3, 4]),
        ({"startTimestamp": 1011, "endTimestamp": 1030}, [2]),
        ({"endTimestamp": 1030}, [0, 1, 2]),
        ({"endTimestamp": 999_999}, [0, 1, 2, 3, 4]),
        ({"endTimestamp": 1000}, []),
    ],
)  # fmt: skip
def test_offsets_and_times(cluster, options, numbers):
    fill(cluster, 5)
    assert bodies(cluster, **options) == [f"00{n}" for n in numbers]


def test_lost_offsets_fail_the_read_unless_told_otherwise(cluster, monkeypatch):
    fill(cluster, 3)
    for option, words, rest in (
        ("endingOffsets", "failOnDataLoss", ["000", "001", "002"]),
        ("startingOffsets", "ends at offset 3; startingOffsets asks for 9", []),
    ):
        lost = {option: '{"broker-a:0": 9}'}
        with pytest.raises(ConfigurationError, match=words):
            plan(cluster, **lost)
        assert bodies(cluster, failOnDataLoss="false", **lost) == rest
    reader, (part,) = plan(cluster)
    with monkeypatch.context() as patch:
        patch.setattr(Admin, "min_offset", lambda self, queue: 2)
        gone = {"startingOffsets": '{"broker-a:0": 1}'}
        for lose in (lambda: plan(cluster, **gone), lambda: list(reader.read(part))):
            with pytest.raises(ConfigurationError, match=r"begins at offset 2 now; [01] was asked"):
                lose()
        assert bodies(cluster, failOnDataLoss="false", **gone) == ["002"]
    cluster.brokers[0].store.forget(TOPIC)
    with pytest.raises(ConfigurationError, match="up to 0 only"):
        list(reader.read(part))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOfsets": "latest"}, "did you mean 'startingOffsets'"), ({"zzz": "x"}, "zzz"),
        ({"topicc": "x"}, "topic'"), ({"startingOffsets": "soon"}, "earliest"),
        ({"startingOffsets": '{"broker-a:0": -3}'}, "0 and more"),
        ({"startingOffsets": "[1]"}, "JSON"),
        ({"startingOffsets": "earliest", "startTimestamp": 1}, "not both"),
        ({"startingOffsets": '{"broker-z:0": 1}'}, "startingOffsets: .*no queue 'broker-z:0'"),
        ({"endingOffsets": '{"broker-z:0": 1}'}, "endingOffsets: .*no queue 'broker-z:0'; .*a:0"),
        ({"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is for readStream, not read"),
        ({"topic": ""}, "which topic is read"),
        ({"endingOffsets": "latest", "endTimestamp": 1}, "give endTimestamp or endingOffsets"),
        ({"topic": "nosuch"}, "nosuch"),
    ],
)  # fmt: skip
def test_bad_options_say_what_to_do(cluster, options, words):
    with pytest.raises((OptionError, NoRouteError), match=words) as caught:
        plan(cluster, **options)
    assert isinstance(caught.value, NoRouteError) or caught.value.option


def test_there_may_be_nothing_to_read(cluster):
    reader, parts = plan(cluster)
    assert parts == []
    assert list(reader.read(InputPartition(None))) == []  # Spark asks for this one.


NOON = datetime(2026, 11, 28, 12, tzinfo=timezone.utc)
LONG_AGO = datetime(1900, 1, 1, tzinfo=timezone.utc)
NOON_MS = int(NOON.timestamp() * 1000)


@pytest.mark.parametrize(
    ("filters", "narrowed"),
    [
        ([("EqualTo", "tags", "a")], Narrowed(("a",))),
        ([("In", "tags", ("b", None, "a"))], Narrowed(("a", "b"))),
        ([("In", "tags", ("a", "b")), ("EqualTo", "tags", "b")], Narrowed(("a", "b"))),
        ([("EqualTo", "topic", "a"), ("StringContains", "tags", "a")], Narrowed()),
        *(([("EqualTo", "tags", tag)], Narrowed()) for tag in ("", "*", " a", "a||b", "\ufffd")),
        ([("In", "tags", tuple(f"t{n:04}" for n in range(500)))], Narrowed()),
        ([("GreaterThan", "store_timestamp", NOON)], Narrowed((), NOON_MS - 60_000)),
        ([("GreaterThanOrEqual", "store_timestamp", NOON), ("LessThan", "store_timestamp", NOON)],
         Narrowed((), NOON_MS - 60_000, NOON_MS + 60_001)),
        ([("EqualTo", "tags", "t" * 4096)], Narrowed(("t" * 4096,))),
        ([("LessThanOrEqual", "store_timestamp", LONG_AGO), ("LessThan", "store_timestamp", NOON)],
         Narrowed((), -1, 0)),
        ([("GreaterThan", "store_timestamp", NOON), ("GreaterThan", "store_timestamp", LONG_AGO)],
         Narrowed((), NOON_MS - 60_000)),
        ([("EqualTo", "store_timestamp", NOON)],
         Narrowed((), NOON_MS - 60_000, NOON_MS + 60_001)),
    ],
)  # fmt: skip
def test_which_filters_narrow(filters, narrowed):
    objects = [type(kind, (), {"attribute": (column,), "value": value})()
            for kind, column, value in filters]  # fmt: skip
    reader = FilteringReader(*ReadOptions.parse({"nameServer": "h:1", "topic": TOPIC}))
    assert reader.pushFilters([*objects, object()])[:-1] == objects
    assert reader.narrowed == narrowed


def test_filters_and_options_narrow_together(cluster):
    fill(cluster, 5)
    for narrowed, options, numbers in (
        (Narrowed(start_ms=1020), {"startingOffsets": '{"broker-a:0": 1}'}, (2, 5)),
        (Narrowed(start_ms=1020), {"startingOffsets": '{"broker-a:0": 4}'}, (4, 5)),
        (Narrowed(end_ms=1010), {"endingOffsets": '{"broker-a:0": 4}'}, (0, 2)),
        (Narrowed(end_ms=1030), {"endTimestamp": 1010}, (0, 2)),
        (Narrowed(end_ms=0), {}, (0, 1)),
    ):
        reader, _ = plan(cluster, **options)
        reader.narrowed = narrowed
        (part,) = reader.partitions()
        assert (part.begin, part.end) == numbers


def test_tags_narrow_no_queue_that_holds_batches(cluster):
    fill(cluster, 5)
    reader, _ = plan(cluster)
    reader.narrowed = Narrowed(("a", "b"))
    (part,) = reader.partitions()
    assert part.expression == "a || b"
    cluster.create_topic(TOPIC, 2, attributes={"queue.type": "BatchCQ"})
    (part,) = reader.partitions()
    assert part.expression == "*"


LOSS: Any = pytest.raises(ConfigurationError, match="no messages from 0 to 3 now")


def test_messages_that_go_while_they_are_read_are_a_loss(cluster):
    fill(cluster, 5)
    reader, (part,) = plan(cluster)
    lenient, _ = plan(cluster, failOnDataLoss="false")
    fields = {"nextBeginOffset": "3", "minOffset": "3", "maxOffset": "5"}
    moved, filtered = ResponseCode.PULL_OFFSET_MOVED, ResponseCode.PULL_RETRY_IMMEDIATELY
    for each, code, expression, is_loss in (
        (reader, moved, "*", True), (reader, filtered, "*", True), (lenient, moved, "*", False),
        (reader, moved, "a", True), (reader, filtered, "a", False),
    ):  # fmt: skip
        cluster.brokers[0].on(RequestCode.PULL_MESSAGE, Answer(code, ext=tuple(fields.items())))
        with LOSS if is_loss else contextlib.nullcontext():
            batches = each.read(replace(part, expression=expression))
            assert [batch.num_rows for batch in batches] == [2]


@pytest.mark.parametrize(("policy", "is_loss"), [("DELETE", True), ("COMPACTION", False)])
def test_an_answer_that_begins_late_shows_a_loss(cluster, monkeypatch, policy, is_loss):
    """Brokers pass over messages whose log file is gone."""
    cluster.create_topic(TOPIC, 2, attributes={"cleanup.policy": policy})
    fill(cluster, 5)
    pull = Admin._pull
    monkeypatch.setattr(Admin, "_pull", lambda a, queue, at, *m: pull(a, queue, max(at, 3), *m))
    with LOSS if is_loss else contextlib.nullcontext():
        assert bodies(cluster) == ["003", "004"]


def test_rows_are_the_row_contract_and_where_they_were(cluster):
    values = {
        "topic": TOPIC, "tags": "g", "keys": ["a", "b"], "sharding_key": "s", "flag": 5,
        "message_id": "ID",
    }  # fmt: skip
    with Producer(nameServer=cluster.name_server) as producer:
        producer.send(Message(body=b"\xff", properties={"x": "1"}, **values))
        producer.send(Message(TOPIC, b"z" * 9000))
    reader, parts = plan(cluster)
    batches = [batch for part in parts for batch in reader.read(part)]
    rows = {row["body"]: row for row in pa.Table.from_batches(batches, STORED_SCHEMA).to_pylist()}
    row, large = rows[b"\xff"], rows[b"z" * 9000]
    assert {name: row[name] for name in values} == values
    assert row["properties"] == [("x", "1")]
    stored = next(m for m in cluster.messages(TOPIC) if m.body == b"\xff")
    for name in ("queue_id", "queue_offset", "offset_message_id"):
        assert row[name] == getattr(stored, name)
    assert row["store_timestamp"].timestamp() * 1000 == pytest.approx(stored.store_ms)
    assert row["broker_name"] in ("broker-a", "broker-b")
    assert large["keys"] is None and large["properties"] is None


def row_of(**fields):
    """Return the row of a stored message with these fields."""
    (row,) = stored_batch([("b", StoredMessage("t", b"x", **fields))]).to_pylist()
    return row


def test_the_names_that_rocketmq_keeps_for_itself_are_apart():
    properties = {"RETRY_TOPIC": "o", "__event_time_ms": "1500", "mine": "1"}
    row = row_of(properties=properties)
    assert row["properties"] == [("mine", "1")]
    assert row["system_properties"] == [("RETRY_TOPIC", "o")]
    assert row["event_time"].timestamp() == 1.5


@pytest.mark.parametrize("text", ["", "soon", "9" * 15, "9" * 18, "9" * 30, "-99999999999999999"])
def test_an_event_time_that_is_none_is_a_property(text):
    """Any producer may set the property, for instance in microseconds."""
    row = row_of(properties={"__event_time_ms": text})
    assert row["event_time"] is None
    assert row["properties"] == [("__event_time_ms", text)]


@pytest.mark.parametrize("ms", [2**63 - 1, -(2**63), 253_402_300_800_000])
def test_a_birth_time_that_spark_cannot_hold_is_null(ms):
    """Any producer may set the birth time."""
    row = row_of(born_ms=ms, store_ms=1)
    assert row["born_timestamp"] is None
    assert row["store_timestamp"].timestamp() == 0.001


def test_no_option_of_the_reader_is_one_of_the_sink():
    assert not {o.name.lower() for o in READ_OPTIONS} & {o.name.lower() for o in OPTIONS}
    options = {"topic": "t", "NAME_SERVER": "a:1", "rocketmq.starting_offsets": "latest"}
    read, sink = ReadOptions.parse(options)
    assert (read.starting_offsets, sink.name_servers) == ("latest", ("a:1",))
    assert isinstance(sink, SinkOptions)
    assert json.loads(json.dumps({o.name: o.default for o in READ_OPTIONS}))
