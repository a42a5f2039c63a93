"""Messages without keys, and topics that want keys: brokers are asked before a batch goes there."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink.errors import MessageIllegalError, NotSentError
from rocket_sink.message import Message, MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine import questions
from rocket_sink.testing.script import Drop
from rocket_sink.wire.codes import RequestCode, ResponseCode
from tests.producer.waiting import until
from tests.task.one_task import CTX, run_task

KEYED = {"attributes": {"cleanup.policy": "COMPACTION"}}


@pytest.fixture
def cluster(cluster):
    cluster.create_topic("keyed", **KEYED)
    return cluster


def asked(cluster):
    return len(cluster.requests(RequestCode.GET_TOPIC_CONFIG))


def bodies(cluster, topic):
    return sorted(message.body for message in cluster.messages(topic))


@pytest.mark.parametrize("blank", [(), "\t"])
def test_a_batch_sends_what_has_keys_and_refuses_what_has_none(cluster, make_producer, blank):
    messages = [Message("keyed", b"%d" % n, keys=f"k{n}" if n % 2 else blank) for n in range(6)]
    with pytest.raises(MessageIllegalError, match="key"):
        make_producer().send_batch(messages)
    assert bodies(cluster, "keyed") == [b"1", b"3", b"5"]


def test_a_batch_of_one_message_is_refused_as_the_message_is(cluster, producer):
    for send in (producer.send, lambda one: producer.send_batch([one])):
        with pytest.raises(MessageIllegalError, match="key") as refused:
            send(Message("keyed", b"x"))
        assert refused.value.response_code == ResponseCode.MESSAGE_ILLEGAL
    assert bodies(cluster, "keyed") == []


def test_automatic_batches_refuse_the_message_without_keys_only(cluster, make_producer):
    producer = make_producer(autoBatch=True)
    futures = [producer.send_async(Message("keyed", b"%d" % n, keys=["k"] * n)) for n in range(4)]
    errors = [type(future.exception(10)) for future in futures]
    assert errors == [MessageIllegalError, *[type(None)] * 3]
    assert bodies(cluster, "keyed") == [b"1", b"2", b"3"]


@pytest.mark.parametrize("keys", [None, ["a", None, None, "\t"], [["a"], [], None, ["\t"]]])
@pytest.mark.parametrize("ordering", ["none", "strict"])
def test_rows_without_keys_are_dead_letters_of_the_kind_data(cluster, tmp_path, keys, ordering):
    columns = {"body": [b"0", b"1", b"2", b"3"], "sharding_key": list("abcd")}
    if keys is not None:
        columns["keys"] = keys
    options = SinkOptions.parse(
        nameServer=cluster.name_server, topic="keyed", ledger=str(tmp_path), ordering=ordering
    )
    total = run_task(options, CTX, columns)
    kept = 0 if keys is None else 1
    assert (total.acked, total.dead, total.unknown) == (kept, 4 - kept, 0)
    assert bodies(cluster, "keyed") == [b"0"][:kept]
    assert "cleanup.policy=COMPACTION" in total.first_error


def test_a_batch_with_keys_asks_nobody(cluster, make_producer):
    make_producer().send_batch([Message("keyed", b"x", keys="k")] * 3)
    assert asked(cluster) == 0 and len(cluster.requests(RequestCode.SEND_BATCH_MESSAGE)) == 1


def test_a_question_has_its_own_time_and_costs_neither_an_attempt_nor_an_isolation(
    cluster, make_producer, monkeypatch
):
    """The first who asks has less time than the question, the second one more."""
    monkeypatch.setattr(questions, "QUESTION_S", 1.0)
    broker = cluster.brokers[0]
    broker.on(RequestCode.GET_TOPIC_CONFIG, Drop(), times=2)
    producer = make_producer(retryTimesWhenSendFailed=0)
    queue = MessageQueue("orders", broker.name, 0)
    batch = [Message("orders", b"x")] * 2
    with ThreadPoolExecutor(1) as pool:
        short = pool.submit(producer.send_batch, batch, queue=queue, timeout_ms=300)
        until(lambda: asked(cluster) == 1)
        [result] = producer.send_batch(batch, queue=queue, timeout_ms=60_000)
        with pytest.raises(NotSentError, match="did not tell whether the topic wants keys"):
            short.result(30)
    assert result.status == "SEND_OK" and result.attempts == 1 and asked(cluster) == 3
    assert producer.isolations() == []


def test_a_broker_that_cannot_be_asked_is_avoided_as_one_that_cannot_be_sent_to(cluster, producer):
    producer.fetch_publish_message_queues("orders")
    gone = cluster.brokers[0]
    gone.kill()
    for _ in range(4):
        assert len(producer.send_batch([Message("orders", b"x")] * 2)) == 1
    assert {event.broker_name for event in producer.isolations()} == {gone.name}
