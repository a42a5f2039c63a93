"""Traces of a sample of a task's requests: sent beside the rows, never in their way."""

import numpy as np
import pyarrow as pa
import pytest

from rocket_sink.errors import Outcome
from rocket_sink.options import SinkOptions
from rocket_sink.producer import tracing
from rocket_sink.producer.engine.attempt import Completion
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.testing import Answer, Drop
from rocket_sink.wire.trace import MessageType, PubTrace
from tests.clusters import scripted_cluster
from tests.decoding import decode_trace
from tests.task.one_task import CTX, run_task

TOPIC = "RMQ_SYS_TRACE_TOPIC"


cluster = scripted_cluster(**{TOPIC: 1})


def send(cluster, ledger, columns, **options):
    defaults = {
        "nameServer": cluster.name_server, "topic": "t", "ledger": str(ledger), "traceSample": 1,
        "producerGroup": "g", "sendMsgTimeout": 60_000,
    }  # fmt: skip
    return run_task(SinkOptions.parse({**defaults, **options}), CTX, columns)


def traces(cluster):
    return [line for m in cluster.messages(TOPIC) for line in decode_trace(m.body.decode())]


def test_a_batch_is_one_message_with_all_its_ids(cluster, tmp_path):
    columns = {"body": [b"a", b"bcd"], "tags": ["x", None], "keys": [["k1", "k2"], None]}
    assert send(cluster, tmp_path, columns).acked == 2
    (message,) = cluster.messages(TOPIC)
    stored = {m.body: m.properties["UNIQ_KEY"] for m in cluster.messages("t")}
    first, second = decode_trace(message.body.decode())
    assert isinstance(first, PubTrace) and isinstance(second, PubTrace)
    assert (first.message_id, first.tags, first.keys) == (stored[b"a"], "x", "k1 k2")
    assert (second.message_id, second.tags, second.keys) == (stored[b"bcd"], "", "")
    assert (first.topic, first.producer_group, first.message_type) == ("t", "g", MessageType.NORMAL)
    assert (first.body_length, second.body_length, first.success) == (1, 3, True)
    assert first.store_host in {broker.address for broker in cluster.brokers}
    assert set(message.properties["KEYS"].split(" ")) == {*stored.values(), "k1", "k2"}


def test_a_large_batch_takes_several_messages(cluster, tmp_path):
    """The ids of 3,000 messages are keys of 99,000 bytes; a message has room for 32,767."""
    columns = {"body": [b"x"] * 3000, "sharding_key": ["one"] * 3000}
    assert send(cluster, tmp_path, columns).requests == 1
    assert {line.message_id for line in traces(cluster)} == {
        message.properties["UNIQ_KEY"] for message in cluster.messages("t")
    }
    assert 4 <= len(cluster.messages(TOPIC)) <= 6


def test_messages_of_a_group_are_drawn_one_by_one(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "_IN_FLIGHT", 9999)  # Lose none, however busy the machine is.
    monkeypatch.setattr(tracing, "_CLOSE_S", 60.0)
    columns = {"body": [b"%d" % n for n in range(2000)], "delay_level": pa.array([1] * 2000)}
    assert send(cluster, tmp_path, columns, traceSample=0.1).acked == 2000
    ids = {m.properties["UNIQ_KEY"]: m.body for m in cluster.messages("t")}
    lines = traces(cluster)
    assert 100 < len(lines) < 320  # 6 standard deviations of 200
    assert {line.message_type for line in lines} == {MessageType.DELAY}
    assert {line.message_id for line in lines} <= ids.keys()
    for line in lines:
        assert isinstance(line, PubTrace)
        assert line.body_length == len(ids[line.message_id])


@pytest.mark.parametrize("share", [0, 1])
def test_none_without_the_option_or_where_a_broker_wants_none(cluster, tmp_path, share):
    fields = {"msgId": "7F0000010000238F000000000001E240", "queueId": "0", "queueOffset": "0"}
    fields["TRACE_ON"] = "false" if share else "true"
    cluster.on_send(Answer(0, ext=(*fields.items(),), stores=True), times=None)
    assert send(cluster, tmp_path, {"body": [b"x"]}, traceSample=share).acked == 1
    assert not cluster.messages(TOPIC)


@pytest.mark.parametrize("behaviour", [Answer(13, "illegal"), Drop(), None])
def test_a_trace_fails_and_delays_nothing(cluster, tmp_path, behaviour):
    """Where `behaviour` is None, the topic of traces has no route, and brokers make none."""
    options = {"requestMaxMessages": 1, "retryTimesWhenSendFailed": 0, "traceTopic": TOPIC}
    for broker in cluster.brokers if behaviour is not None else ():
        broker.script.add(
            behaviour, matches=lambda frame: (frame.ext or {}).get("b") == TOPIC, times=None
        )
    if behaviour is None:
        cluster.create_topic("t", 4)
        options |= {"traceTopic": "nowhere", "createTopic": ""}
    summary = send(cluster, tmp_path, {"body": [b"x"] * 500}, **options)
    assert (summary.acked, summary.dead, summary.unknown) == (500, 0, 0)
    assert len(cluster.messages("t")) == 500


def test_keys_that_fill_a_message_lose_its_trace_only(cluster, tmp_path, caplog):
    """The trace's keys are the row's and its id, for which the properties have no more room."""
    columns = {"body": [b"x"], "keys": ["k" * 32_430], "message_id": ["0" * 40]}
    assert send(cluster, tmp_path, columns).acked == 1
    assert not cluster.messages(TOPIC) and "traces is lost" in caplog.text


def test_as_many_requests_are_drawn_as_the_sample_says(cluster):
    options = SinkOptions.parse(nameServer=cluster.name_server, topic="t", traceSample=0.2)
    sample = tracing.RequestTraces(options, SendEngine(options), np.random.default_rng(1))
    counts = [len(sample._sampled_positions(1 + n % 7)) for n in range(7000)]
    assert sum(counts) == pytest.approx(0.2 * 28_000, rel=0.05)
    sample.in_flight = 2
    ends = [Completion(token, Outcome.ACKED, None, None) for token in (sample, "a row's request")]
    assert [sample.take(end) for end in ends] == [True, False] and sample.in_flight == 1
