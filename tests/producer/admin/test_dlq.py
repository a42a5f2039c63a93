"""Dead-letter topics on the scripted cluster: reading and resending."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from rocket_sink.errors import AuthenticationError
from rocket_sink.message_rules import DLQ_PREFIX
from rocket_sink.producer.admin import dlq
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.admin.dlq import ORIGIN, RESENDS, DlqQuery, Resender
from rocket_sink.producer.producer import Producer
from rocket_sink.testing import Answer
from rocket_sink.wire.stored import StoredMessage
from tests.clusters import scripted_cluster

GROUP = "billing"
TOPIC = DLQ_PREFIX + GROUP


cluster = scripted_cluster(orders=4, **{TOPIC: 1})


def give_up(cluster, number, *, broker=0, **properties):
    """Store a dead letter as a broker does (AbstractSendMessageProcessor.consumerSendMsgBack)."""
    stored = {
        "UNIQ_KEY": f"ID{number}", "KEYS": f"k{number} all", "TAGS": "t", "WAIT": "false",
        "RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": f"OFFSET{number}", "color": "red",
        "CLUSTER": "DefaultCluster", "RECONSUME_TIME": "16", **properties,
    }  # fmt: skip
    store = cluster.brokers[broker].store
    return store.append(
        StoredMessage(
            TOPIC, b"body %d" % number, flag=7, store_ms=1000 + number,
            born_ms=number, reconsume_times=16, store_host=(f"10.0.0.{broker}", 10911),
            properties={n: v for n, v in stored.items() if v},
        )
    )  # fmt: skip


def ids(admin, **query):
    return [letter.message_id for letter in dlq.read(admin, DlqQuery(GROUP, **query))]


def test_letters_come_in_the_order_in_which_they_were_given_up(cluster, admin):
    for number in range(6):
        give_up(cluster, number, broker=number % 2)
    assert ids(admin) == [f"ID{n}" for n in range(6)]
    assert ids(admin, limit=2) == ["ID0", "ID1"]
    assert dlq.groups(admin) == {GROUP: 6}


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ({"topic": "orders"}, [0, 1, 2, 3]), ({"topic": "elsewhere"}, [4]),
        ({"since_ms": 1002}, [2, 3, 4]), ({"until_ms": 1002}, [0, 1]),
        ({"since_ms": 1001, "until_ms": 1003, "key": "all"}, [1, 2]), ({"key": "k3"}, [3]),
        ({"message_id": "ID2"}, [2]), ({"message_id": "OFFSET2"}, [2]),
        ({"key": "k", "topic": "orders"}, []),
    ],
)  # fmt: skip
def test_queries(cluster, admin, query, numbers):
    for number in range(4):
        give_up(cluster, number, broker=number % 2)
    give_up(cluster, 4, RETRY_TOPIC="", DLQ_ORIGIN_TOPIC="elsewhere")
    assert ids(admin, **query) == [f"ID{n}" for n in numbers]


@pytest.mark.parametrize("topic", ["orders", "ns%orders"])
def test_the_origin_topic_may_be_named_either_way(cluster, topic):
    cluster.create_topic(f"{DLQ_PREFIX}ns%{GROUP}", 1)
    letter = StoredMessage(
        f"{DLQ_PREFIX}ns%{GROUP}", b"x", properties={"RETRY_TOPIC": "ns%orders", "UNIQ_KEY": "A"}
    )
    cluster.brokers[0].store.append(letter)
    with Admin(nameServer=cluster.name_server, namespace="ns") as admin:
        assert ids(admin, topic=topic) == ["A"]
        assert ids(admin, topic="others") == []


@pytest.fixture
def run(cluster, admin):
    def go(message_id=None, **more):
        with Producer(nameServer=cluster.name_server, retryTimesWhenSendFailed=0) as producer:
            work = Resender(admin, producer.send, **more)
            for letter in dlq.read(admin, DlqQuery(GROUP, message_id=message_id)):
                work.resend(letter)
        return work.report

    return go


ODD = ["a\u00a0b", "a\tb", "\u3000", "a\x85b", "a\nb\x7f"]
"""Texts that Java sends, as test_conformance_texts shows."""


@pytest.mark.parametrize("text", ODD)
def test_whatever_java_sends_is_sent_again(cluster, run, text):
    give_up(cluster, 1, TAGS=text, KEYS=f"{text} k2", __SHARDINGKEY=text, value=text, **{text: "v"})
    assert (report := run()).resent == 1, report.failures
    (message,) = cluster.messages("orders")
    assert run().already == 1
    for name, value in (("TAGS", text), ("KEYS", f"{text} k2"), ("value", text), (text, "v")):
        assert message.properties[name] == value


def test_a_topic_that_is_not_there_is_left_to_the_send(cluster, admin):
    give_up(cluster, 1)
    send = MagicMock(return_value=SimpleNamespace(status="SEND_OK", offset_message_id=""))
    resender = Resender(admin, send, to_topic="new")
    for letter in dlq.read(admin, DlqQuery(GROUP)):
        resender.resend(letter)
    assert [each.args[0].topic for each in send.call_args_list] == ["new"]
    assert resender.report.settled


@pytest.mark.parametrize("degraded", [0, 1])
def test_a_message_goes_back_as_it_was(cluster, run, degraded):
    give_up(cluster, 1, __SHARDINGKEY="customer")
    give_up(cluster, 2)
    give_up(cluster, 3)
    for broker in cluster.brokers:
        broker.on_send(Answer(10, "no flush in time"), times=3 * degraded)
    report = run()
    assert (report.resent, report.degraded) == (3, 3 * degraded)
    (message,) = (m for m in cluster.messages("orders") if m.body == b"body 1")
    assert (message.body, message.flag) == (b"body 1", 7)
    kept = {"UNIQ_KEY": "ID1", "KEYS": "k1 all", "TAGS": "t", "__SHARDINGKEY": "customer"}
    assert {**kept, "color": "red", RESENDS: "1"}.items() <= message.properties.items()
    removed = {"RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "RECONSUME_TIME"}
    assert not removed & message.properties.keys()


def test_running_twice_sends_once(cluster, run):
    original = StoredMessage("orders", b"body 1", properties={"UNIQ_KEY": "ID1"})
    cluster.brokers[0].store.append(original)
    give_up(cluster, 1)
    give_up(cluster, 2, UNIQ_KEY="")
    resent = [(report.resent, report.already) for report in (run(), run())]
    assert resent == [(2, 0), (0, 2)], "the original is no resend"
    assert run(again=True).resent == 2
    assert len(cluster.messages("orders")) == 5


def test_an_id_with_a_blank_is_found_again(cluster, admin, run):
    for number in (1, 2):
        give_up(cluster, number, UNIQ_KEY="order 1")
    assert [run().resent for _ in range(2)] == [2, 0], "a letter is known by id and content"
    assert admin.query_by_unique_key("orders", "order 1")
    assert not admin.query_by_unique_key("orders", "order")


@pytest.mark.parametrize("more", [{}, {"shade": "dark"}])
def test_a_copy_is_that_of_one_message(cluster, run, more):
    """Three letters have one id and body; two have one ORIGIN_MESSAGE_ID, so are one message."""
    give_up(cluster, 1)
    give_up(cluster, 1)
    give_up(cluster, 1, ORIGIN_MESSAGE_ID="OTHER", **more)
    counts = [run(message_id=origin).resent for origin in ("OTHER", "OFFSET1", "ID1")]
    assert counts == [1, 1, 0], "a run of its own for each message"
    assert {m.properties[ORIGIN] for m in cluster.messages("orders")} == {"OTHER", "OFFSET1"}


def test_what_failed_again_is_sent_again_until_it_is_enough(cluster, run):
    """In each round the group gives up the copy, and the broker keeps its properties."""
    give_up(cluster, 1)
    assert run().resent == 1
    give_up(cluster, 1, **{RESENDS: "1"})
    again = run()
    assert (again.resent, again.already) == (1, 1)
    give_up(cluster, 1, **{RESENDS: "2"})
    third = run(max_resends=2)
    assert (third.resent, third.already, third.left_alone) == (0, 2, 1)
    assert third.settled and run(max_resends=1).left_alone == 2


def test_a_letter_without_a_topic_needs_one(cluster, run):
    give_up(cluster, 1, RETRY_TOPIC="")
    give_up(cluster, 2, RETRY_TOPIC="")
    report = run()
    assert (report.homeless, report.settled) == (2, False)
    assert run(to_topic="orders").resent == 2


def test_a_failed_letter_holds_back_its_key(cluster, run, monkeypatch):
    give_up(cluster, 1, __SHARDINGKEY="a")
    give_up(cluster, 2, __SHARDINGKEY="a")
    give_up(cluster, 3)
    give_up(cluster, 4, __SHARDINGKEY="a")
    cluster.on_send(Answer(13, "no"), times=None)
    report = run()
    assert (report.failed, report.held_back, report.resent) == (2, 2, 0)
    assert report.codes == {"MESSAGE_ILLEGAL": 2} and not report.settled
    assert "no" in report.failures[0]["error"]
    cluster.behave()
    cluster.on_send(Answer(1, "check signature failed"))
    with pytest.raises(AuthenticationError):
        run()
    cluster.behave()
    monkeypatch.setattr(dlq, "FAILURES_MAX", 1)
    report = run(to_topic="no such!")
    assert (report.failed, len(report.failures)) == (2, 1)
    assert run().resent == 4
    keyed = [m.body for m in cluster.messages("orders") if "__SHARDINGKEY" in m.properties]
    assert keyed == [b"body 1", b"body 2", b"body 4"]


@pytest.mark.parametrize(("text", "number"), [("3", 3), ("\u0663", 0), ("-1", 0), ("", 0)])
def test_a_counter_of_resends_that_is_no_number_is_zero(text, number):
    assert dlq.resends_of(StoredMessage("t", b"", properties={RESENDS: text})) == number
    assert dlq.resends_of(StoredMessage("t", b"")) == 0
    assert Resender(MagicMock(), print).max_resends == 3
