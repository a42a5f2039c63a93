"""The option deadLetterTopic: its messages, and its errors, which do not fail the task."""

import itertools
import logging

import pyarrow as pa
import pytest

from rocket_sink.options import SinkOptions
from rocket_sink.testing import Answer
from tests.clusters import scripted_cluster
from tests.task.one_task import CTX, run_task
from tests.task.test_worker import spooled

cluster = scripted_cluster(t=4, dead=4)


def refuse(cluster, topic, behaviour=None, *, every=1):
    """Let brokers refuse messages of a topic, each `every`th of a broker."""
    for broker in cluster.brokers:
        numbers = itertools.count()
        broker.script.add(
            behaviour or Answer(13, "the message is illegal"), times=None,
            matches=lambda frame, numbers=numbers: (
                (frame.ext or {}).get("b") == topic and next(numbers) % every == 0
            ),
        )  # fmt: skip


def send(cluster, ledger, columns, **options):
    defaults = {"nameServer": cluster.name_server, "topic": "t", "ledger": str(ledger),
             "deadLetterTopic": "dead", "sendMsgTimeout": 500, **options}  # fmt: skip
    return run_task(SinkOptions.parse(defaults), CTX, columns)


def test_a_letter_is_a_message_that_tells_its_story(cluster, tmp_path):
    refuse(cluster, "t")
    columns = {
        "body": [b"x"], "tags": ["a"], "keys": ["k1"], "sharding_key": ["s"],
        "properties": pa.array([[("colour", "red")]], pa.map_(pa.string(), pa.string())),
        "message_id": ["mine"],
    }  # fmt: skip
    summary = send(cluster, tmp_path, columns, ordering="strict")
    assert (summary.rows_in, summary.dead) == (1, 1)
    (message,) = cluster.messages("dead")
    (letter,) = [row for row in spooled(tmp_path) if row["kind"] == "dead_letter"]
    assert message.body == b"x"
    expected = {
        "TAGS": "a", "KEYS": "k1", "__SHARDINGKEY": "s", "colour": "red",
        "UNIQ_KEY": letter["letter_id"], "__dead_letter_id": letter["letter_id"],
        "DLQ_ORIGIN_TOPIC": "t", "DLQ_ORIGIN_MESSAGE_ID": "mine",
        "__dead_letter_reason": "data", "__dead_letter_code": "MESSAGE_ILLEGAL",
        "__dead_letter_error": letter["last_error"], "__dead_letter_query": "q",
        "__dead_letter_epoch": "3",
    }  # fmt: skip
    assert expected.items() <= message.properties.items()


def test_refused_rows_go_there_as_far_as_they_can(cluster, tmp_path):
    """Row 1 has no body, row 2 a tag that no message may have: both are sent as far as possible."""
    columns = {"body": [None, b"tagged", b"good"], "tags": ["a", "b\x01c", "a"]}
    summary = send(cluster, tmp_path, columns)
    assert (summary.acked, summary.invalid) == (1, 2)
    (message,) = cluster.messages("dead")
    assert message.body == b"tagged" and "TAGS" not in message.properties
    assert message.properties["__dead_letter_reason"] == "data"


def test_what_the_topic_does_not_take_is_in_the_ledger(cluster, tmp_path, caplog):
    refuse(cluster, "t")
    refuse(cluster, "dead")
    with caplog.at_level(logging.WARNING):
        summary = send(cluster, tmp_path, {"body": [b"x", b"y", None]})
        assert "3 of 3 dead letters are not in the topic dead" in caplog.text
        assert (summary.dead, cluster.messages("dead")) == (3, [])
        cluster.behave()
        send(cluster, tmp_path / "2", {"body": [b"", b"y\x00", None]}, maxMessageSize=1)
    assert "2 of 3 dead letters are not in the topic dead" in caplog.text
    rows = spooled(tmp_path)
    assert sum(row["kind"] == "dead_letter" for row in rows) == 3
    refused = [row for row in rows if row["kind"] == "send" and row["topic"] == "dead"]
    assert refused and {row["outcome"] for row in refused} == {"rejected"}


@pytest.mark.parametrize(("every", "least", "most"), [(1, 50, 300), (2, 600, 600)])
def test_a_hopeless_topic_is_left_alone(cluster, tmp_path, every, least, most):
    """A topic that takes each second letter is not hopeless, however many letters it refuses."""
    refuse(cluster, "t")
    refuse(cluster, "dead", every=every)
    columns = {"body": [str(i).encode() for i in range(600)]}
    options = {"requestMaxMessages": 10, "backPressureForAsyncSendNum": 20}
    send(cluster, tmp_path, columns, sendMsgTimeout=60_000, **options)
    tried = [r for r in cluster.requests() if (r.ext or {}).get("b") == "dead"]
    assert least <= len(tried) <= most


def test_it_is_in_the_namespace_as_the_topic_is(cluster, tmp_path):
    refuse(cluster, "ns%t")
    send(cluster, tmp_path, {"body": [b"x"]}, namespace="ns")
    assert [message.body for message in cluster.messages("ns%dead")] == [b"x"]


def test_each_letters_attempts_have_a_number_of_their_own(cluster, tmp_path):
    refuse(cluster, "t")
    refuse(cluster, "dead", Answer(16, "no permission"))
    send(cluster, tmp_path, {"body": [b"1", b"2"]}, requestMaxMessages=1)
    sends = [row for row in spooled(tmp_path) if row["kind"] == "send" and row["topic"] == "dead"]
    assert sorted({row["request"] for row in sends}) == [-2, -1]
