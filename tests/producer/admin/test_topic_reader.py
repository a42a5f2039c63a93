"""Reading back what was acknowledged a moment ago."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rocket_sink import cli, errors
from rocket_sink.message import Message, MessageQueue
from rocket_sink.options import NO_TEMPLATE, SinkOptions
from rocket_sink.producer.admin import admin as admins
from rocket_sink.producer.admin import dlq
from rocket_sink.producer.admin.admin import Admin, is_away
from rocket_sink.producer.admin.stored_messages import StoredMessages
from rocket_sink.producer.engine.stored_check import HIDDEN_TOPICS
from rocket_sink.producer.producer import Producer
from rocket_sink.spark.reading.batch import MessageReader
from rocket_sink.spark.reading.options import ReadOptions
from rocket_sink.task import dlq_export
from rocket_sink.testing import Answer
from rocket_sink.testing import store as reads
from rocket_sink.wire.batch import encode_inner
from rocket_sink.wire.codes import PermName, RequestCode, ResponseCode, SysFlag
from rocket_sink.wire.compress import CompressionType, compress
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.responses import decode_runtime_info
from rocket_sink.wire.stored import StoredMessage, encode_stored
from tests.clusters import read_topic
from tests.memory import memory_below


def test_a_message_is_viewed_by_its_id_and_found_by_its_keys(cluster, admin):
    cluster.create_topic("t", 1, brokers=["broker-b"])
    with Producer(nameServer=cluster.name_server) as producer:
        sent = [producer.send(Message("t", b"%d" % n, keys=["k", f"k{n}"])) for n in range(2)]
    assert admin.view("t", sent[1].offset_message_id).body == b"1"
    assert [message.body for message in admin.query_by_key("t", "k")] == [b"0", b"1"]
    assert [message.body for message in admin.query_by_key("t", "k0")] == [b"0"]
    assert admin.query_by_key("t", "k1", max_messages=1)[0].queue_offset == 1
    assert admin.query_by_key("t", "none") == []
    flags, inner = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP, encode_inner(b"first", "")
    batch = replace(cluster.messages("t")[0], body=inner + inner, sys_flag=flags)
    stored = cluster.brokers[1].store.append(batch)
    assert admin.view("t", stored.offset_message_id).body == b"first"
    with pytest.raises(errors.BrokerError, match="can not find message"):
        admin.view("t", sent[1].offset_message_id[:-16] + f"{1 << 40:016X}")
    with pytest.raises(errors.RemoteProtocolError, match="is a client's id"):
        admin.view("t", sent[1].message_id)
    # The id names the address that the broker knows of itself.
    address = cluster.brokers[1].address
    elsewhere = cluster.brokers[0].address
    mapped = Admin(nameServer=cluster.name_server, addressMap=f"{address}={elsewhere}")
    with mapped as admin, pytest.raises(errors.BrokerError):
        admin.view("t", sent[1].offset_message_id)
    assert cluster.brokers[0].requests[-1].code == RequestCode.VIEW_MESSAGE_BY_ID


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.NoRouteError, True), (errors.BrokerBusyError, True), (errors.GoAwayError, True),
        (errors.TlsRefusedError, False), (errors.InvalidQueueError, False),
        (errors.PermissionDeniedError, False),
    ],
)  # fmt: skip
def test_who_is_away_may_come_back(error, expected):
    assert is_away(error("no")) is expected


YOUNG = errors.BrokerError("java.util.NoSuchElementException")
"""The answer of a broker in its first second."""


@pytest.mark.parametrize(
    ("answers", "are_dispatched"),
    [([5, 3, 0], True), ([YOUNG, YOUNG, 5, 0], True), ([1], False)],
)
def test_it_waits_until_brokers_have_caught_up(
    cluster, admin, monkeypatch, answers, are_dispatched
):
    """Steady traffic is not waited for without end: the last answer stays."""
    remaining = [*answers]

    def runtime_info(self, name, address):
        answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if answer is YOUNG:
            raise answer
        return {"dispatchBehindBytes": str(answer)}

    monkeypatch.setattr(Admin, "runtime_info", runtime_info)
    cluster.create_topic("t", 1)
    assert admin.await_dispatched("t", timeout_s=20 if are_dispatched else 0.1) is are_dispatched
    assert len(remaining) == 1


def test_a_broker_without_dispatch_figures_is_read_at_once(cluster, admin, monkeypatch):
    cluster.create_topic("t", 1)
    assert not admin.await_dispatched("t")
    monkeypatch.setattr(Admin, "runtime_info", lambda *_: {"bootTimestamp": "1"})
    assert admin.await_dispatched("t", timeout_s=1)
    assert list(read_topic(cluster.name_server, "t")) == []
    codes = [request.code for broker in cluster.brokers for request in broker.requests]
    assert RequestCode.PULL_MESSAGE not in codes, "an empty queue is not read"


def test_copies_of_delayed_messages_wait_until_their_broker_has_come_to_them(
    cluster, admin, monkeypatch
):
    """A broker has its own position in each delay level. A timer is late by a minute at most."""
    cluster.create_topic("t", 1)
    places = {broker.name: broker.address for broker in cluster.brokers}

    def runtime_info(self, name, address):
        assert places[name] == address
        return {"scheduleMessageOffset_2": "1,9"} if name == "broker-b" else {}

    monkeypatch.setattr(Admin, "runtime_info", runtime_info)
    assert [*admin.hidden_copies("t", 0)] == []
    for hidden in HIDDEN_TOPICS:
        cluster.create_topic(hidden, 2)
    copies = [(broker, HIDDEN_TOPICS[0], {"REAL_TOPIC": topic}) for broker in cluster.brokers
              for topic in ("t", "u", "t")]  # fmt: skip
    copies += [
        (cluster.brokers[0], HIDDEN_TOPICS[1], {"REAL_TOPIC": "t", "TIMER_OUT_MS": str(due_ms)})
        for due_ms in (10_000, 10_001)
    ]
    for number, (broker, hidden, properties) in enumerate(copies):
        own = {**properties, "UNIQ_KEY": f"ID{number}"}
        broker.store.append(StoredMessage(hidden, b"", queue_id=1, properties=own))
    assert dict(admin.hidden_copies("t", 70_000)) == {
        "ID0": True, "ID2": True, "ID3": False, "ID5": True, "ID6": False, "ID7": True,
    }  # fmt: skip


def test_a_group_that_a_broker_does_not_have_is_made(cluster, monkeypatch):
    queue, (broker, _) = MessageQueue("ns%orders", "broker-a", 0), cluster.brokers
    cluster.create_topic("ns%orders", 1)
    update = RequestCode.UPDATE_CONSUMER_OFFSET
    broker.on(update, Answer(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST))
    broker.on(update, Answer(0))
    with Admin(nameServer=cluster.name_server, namespace="ns") as admin:
        admin.set_consumer_offset(queue, "billing", 7)
    first, beat, again = broker.requests
    assert [first.code, beat.code, again.code] == [update, RequestCode.HEART_BEAT, update]
    assert first.ext == again.ext and first.ext["consumerGroup"] == "ns%billing"
    assert (again.ext["commitOffset"], again.ext["queueId"]) == ("7", "0")
    body = json.loads(bytes(beat.body))
    assert [group["groupName"] for group in body["consumerDataSet"]] == ["ns%billing"]
    assert body["clientID"] == "rocket-sink"


def test_brokers_that_one_of_several_name_servers_shares_are_of_one_cluster(admin, monkeypatch):
    one, two, three = ({name: {0: f"{name}:1"}} for name in "xyz")
    answers = {"a:1": one | two, "b:1": two | three, "c:1": {}, "d:1": one}
    monkeypatch.setattr(admin, "_ask", lambda frame: answers)
    monkeypatch.setattr(admins.responses, "decode_cluster_info", lambda brokers, name: brokers)
    assert admin.cluster() == one | two | three
    del answers["b:1"]
    answers["d:1"] = three
    with pytest.raises(errors.NoRouteError, match=r"a:1, c:1, d:1 .* d:1 that of z: take"):
        admin.cluster()


@pytest.mark.parametrize(("expression", "code", "first"), [("*", 0, 1), ("b", 0, 0), ("b", 21, 2)])
def test_where_a_filter_may_have_left_messages_out(expression, code, first, admin, monkeypatch):
    """An answer names the offset of its first message. A filter may have left out the messages
    before it."""
    queue, asked = MessageQueue("t", "broker-a", 0), []
    data = encode_stored(StoredMessage("t", b"x", queue_offset=1))

    def pull(*told):
        asked.append(told)
        return Frame(code, {"nextBeginOffset": "2", "minOffset": "0", "maxOffset": "2"}, data)

    monkeypatch.setattr(admin, "_pull", pull)
    pulls = [*admin.read_bytes(queue, 0, 2, expression=expression)]
    assert pulls == [((b"" if code else data, first), 0, 2)]
    assert asked == [(queue, 0, 2, expression)]


@pytest.mark.parametrize("empty", [3, 4])
def test_a_queue_whose_end_is_not_dispatched_is_asked_again(empty, monkeypatch):
    """Three empty answers are waited for, with pauses that grow."""
    pauses, answers = [], [*[[]] * empty, [0, 1], [2], [3]]
    monkeypatch.setattr(admins.time, "sleep", pauses.append)

    def pull(begin, *, max_messages):
        assert max_messages == 4 - begin
        answer = answers.pop(0)
        return answer, begin + len(answer)

    pages = [*admins._pages(0, 4, pull)]
    ends = [([0, 1], 0, 2), ([2], 2, 3), ([3], 3, 4)] if empty == 3 else []
    assert pages == [*[([], 0, 0)] * empty, *ends]
    assert pauses == pytest.approx([0.05, 0.1, 0.15])


def test_a_broker_that_is_away_is_waited_for_as_long_as_asked(cluster, monkeypatch):
    """Without patience the broker is asked twice, because the first route may have been old."""
    cluster.create_topic("t", 1)
    queue, pauses, moments = MessageQueue("t", "broker-a", 0), [], [0.0]

    def sleep(seconds):
        pauses.append(seconds)
        moments[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: moments[0], sleep=sleep)
    monkeypatch.setattr(admins, "time", clock)
    for patience_s, expected in ((0, [0]), (1, [0, 0.5, 0.5])):
        pauses.clear()
        busy = Answer(ResponseCode.SYSTEM_BUSY, "busy")
        cluster.on(RequestCode.GET_MAX_OFFSET, busy, times=len(expected) + 1)
        with Admin(nameServer=cluster.name_server, patience_s=patience_s) as admin:
            with pytest.raises(errors.BrokerBusyError):
                admin.max_offset(queue)
            assert admin.max_offset(queue) == 0
        assert pauses == expected
    cluster.on(RequestCode.GET_MAX_OFFSET, Answer(1, "check signature failed"), times=None)
    with Admin(nameServer=cluster.name_server, patience_s=9) as admin:
        with pytest.raises(errors.AuthenticationError):
            admin.max_offset(queue)
        cluster.behave()
        monkeypatch.setattr(admin, "topic_route", None)
        assert admin.max_offset(queue) == 0, "the route is kept"


def test_the_brokers_figures_are_texts():
    answer = Frame(0, {}, b'{"table":{"dispatchBehindBytes":"12","bootTimestamp":"1"}}')
    assert decode_runtime_info(answer)["dispatchBehindBytes"] == "12"
    with pytest.raises(errors.RemoteProtocolError):
        decode_runtime_info(Frame(0, {}, b'{"table":{"dispatchBehindBytes":12}}'))


GBK = "订单".encode("gbk").decode("utf-8", "surrogateescape")
"""A property value as a C++ client with another encoding stores it."""


def test_a_property_in_another_encoding_is_replaced_and_its_place_named(cluster, admin, caplog):
    group = "%DLQ%billing"
    broker = cluster.brokers[0]
    for topic in ("orders", group):
        cluster.create_topic(topic, 1, brokers=[broker.name])
        for number in range(3):
            properties = {"UNIQ_KEY": f"ID{number}", "TAGS": GBK if number == 1 else "t"}
            broker.store.append(StoredMessage(topic, b"%d" % number, properties=properties))

    def warnings():
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [text.partition(" has properties")[0] for text in texts]

    place = f"the message at offset 1 of queue 0 of topic %s on {broker.name}"
    assert [m.body for m in admin.read_topic("orders")] == [b"0", b"1", b"2"]
    assert warnings() == [place % "orders"]
    (copy,) = admin.query_by_unique_key("orders", "ID1")
    assert (copy.body, set(copy.properties["TAGS"])) == (b"1", {"\ufffd"})
    assert warnings() == [place % "orders"]
    assert admin.query_by_unique_key("orders", "ID0")[0].properties["TAGS"] == "t"
    assert len(list(dlq.read(admin, dlq.DlqQuery("billing")))) == 3
    assert warnings() == [place % group]


def test_a_topic_that_nobody_may_read_is_opened_by_the_advised_command(cluster, admin):
    cluster.create_topic("orders", perm=PermName.WRITE, brokers=["broker-b"])
    with pytest.raises(errors.PermissionDeniedError, match="may not be read on broker-b") as caught:
        admin.queues("orders")
    assert "topic create orders --permission 'read and write' -n" in caught.value.text
    facts = {"topic": "orders", "broker_name": "broker-b"}
    assert facts.items() <= caught.value.facts.items()
    assert len(admin.queues("orders", to_read=False)) == 8


def test_a_queue_with_messages_that_nobody_may_read_ends_a_read(cluster, admin):
    """Brokers refuse pulls from readQueueNums on, and sends go to all write queues."""
    with Admin(nameServer=cluster.name_server, topic="new", createTopic="") as other:
        assert NO_TEMPLATE in other.check_name_servers()
    name = cluster.brokers[0].name
    cluster.create_topic("orders", 8, brokers=[name], read_queues=4)
    store = cluster.brokers[0].store
    for number in range(8):
        queue_id = number % 4
        store.append(StoredMessage("orders", b"%d" % number, queue_id=queue_id))
    assert len(list(admin.read_topic("orders"))) == admin.count("orders") == 8
    store.append(StoredMessage("orders", b"unread", queue_id=5))
    for read in (admin.queues, lambda topic: list(admin.read_topic(topic))):
        with pytest.raises(errors.PermissionDeniedError) as caught:
            read("orders")
        text = str(caught.value)
        assert f"{name} has 8 write queues and 4 read queues" in text
        assert "queue 5 has messages" in text and "--queues 8" in text
    assert admin.count("orders") == 9
    with pytest.raises(errors.InvalidQueueError):
        admin.pull(MessageQueue("orders", name, 5), 0)


# Readers of brokers whose answers are much larger in memory than on the wire.


MIB = 1 << 20
BODY = bytes(4 * MIB)
COUNT = 30
GROUP = "billing"


@pytest.fixture
def topic(cluster, monkeypatch):
    """Return a dead-letter topic whose messages take 4 kB on the wire and 4 MiB in memory."""
    kind = CompressionType.ZSTD
    small = compress(BODY, kind)

    def encode(message):
        return encode_stored(replace(message, sys_flag=kind.sys_flag), stored_body=small)

    monkeypatch.setattr(reads, "encode_message", encode)
    name = f"%DLQ%{GROUP}"
    cluster.create_topic(name, 1)
    store(cluster, name, [f"ID{number}" for number in range(COUNT)])
    return name


def store(cluster, topic, ids):
    for broker in cluster.brokers:
        for number, message_id in enumerate(ids):
            broker.store.append(
                StoredMessage(
                    topic, BODY, store_ms=number, store_host=broker.store._host,
                    properties={"UNIQ_KEY": message_id, "KEYS": "k", "RETRY_TOPIC": "orders"},
                )
            )  # fmt: skip


def test_a_topic_is_read_in_bounded_memory(cluster, topic):
    with Admin(nameServer=cluster.name_server) as admin, memory_below(60 * MIB):
        bodies = (message.body for message in admin.read_topic(topic))
        assert sum(body == BODY for body in bodies) == admin.count(topic) == 2 * COUNT


def test_tail(cluster, topic, capsys):
    # fmt: off
    line = ["tail", "-n", cluster.name_server, "-t", topic, "--from-start", "--no-follow",
            "--json", "--key", "none"]
    # fmt: on
    with memory_below(80 * MIB):
        assert cli.main(line) == 0
    assert capsys.readouterr().out == ""


def test_a_query_beyond_the_limit_is_explained(cluster, admin, topic):
    store(cluster, topic, ["same"] * COUNT)
    with memory_below(90 * MIB), pytest.raises(errors.RemoteProtocolError, match="ask for fewer"):
        admin.query_by_unique_key(topic, "same")
    assert len(admin.query_by_unique_key(topic, "same", max_messages=5)) == 10
    (found, _) = admin.query_by_unique_key(topic, "ID3")
    assert found.body == BODY
    with memory_below(3 * MIB):
        (found, _) = admin.query_by_unique_key(topic, "ID3", bodies=False)
    assert found.body == b""


def test_look_ups_of_effectively_once(cluster, topic, engine):
    ids = [f"ID{number}" for number in range(COUNT)]
    with memory_below(3 * MIB):
        assert StoredMessages(engine, since_ms=0).find(topic, ids, timed=False) == set(ids)


def test_dead_letters(cluster, admin, topic, tmp_path):
    with memory_below(80 * MIB):
        assert sum(1 for _ in dlq.read(admin, dlq.DlqQuery(GROUP))) == 2 * COUNT
    stored = SimpleNamespace(status="SEND_OK", offset_message_id="0A")
    resender = dlq.Resender(admin, lambda message: stored, to_topic=topic)
    (letter,) = dlq.read(admin, dlq.DlqQuery(GROUP, limit=1))
    with memory_below(3 * MIB):
        resender.resend(letter)
    assert resender.report.resent == 1
    with memory_below(150 * MIB):
        letters = dlq.read(admin, dlq.DlqQuery(GROUP))
        assert dlq_export.to_file(letters, tmp_path / "letters.parquet") == 2 * COUNT


def test_the_spark_reader(cluster, topic):
    options = SinkOptions.parse(nameServer=cluster.name_server, topic=topic)
    reader = MessageReader(ReadOptions(), options)
    with memory_below(80 * MIB):
        rows = 0
        for partition in reader.partitions():
            for batch in reader.read(partition):
                assert batch.nbytes < 24 * MIB
                rows += batch.num_rows
        assert rows == 2 * COUNT
