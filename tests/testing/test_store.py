"""What a scripted broker stores and answers, asked as clients ask; and the cluster around it."""

import base64
import json
import time
import zlib

import pytest

from rocket_sink.testing import Answer, FakeCluster, FaultProxies, FaultProxy, TopicConfig
from rocket_sink.testing.store import HALF_TOPIC
from rocket_sink.wire.codes import PermName, RequestCode, ResponseCode, SysFlag
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.stored import StoredMessage, decode_stored
from tests.clusters import scripted_cluster

from .test_fake_cluster import Client, send

cluster = scripted_cluster(2, t=2)


@pytest.fixture
def ask(cluster):
    """Return a function that asks broker-a."""
    client = Client(cluster.brokers[0].address)
    return lambda code, **ext: client.ask(Frame(code, {k: str(v) for k, v in ext.items()}))


def put(cluster, *seconds, queue_id=0, **properties):
    for second in seconds:
        cluster.brokers[0].store.append(StoredMessage(
            "t", b"%d" % second, queue_id=queue_id, store_ms=1000 * second,
            properties={"UNIQ_KEY": f"ID{second}", "KEYS": f"k{second} all", **properties},
        ))  # fmt: skip


def bodies(answer):
    return [bytes(message.body) for message in decode_stored(answer.body)]


@pytest.mark.parametrize(
    ("code", "ext", "offset"),
    [
        (RequestCode.GET_MIN_OFFSET, {"queueId": 0}, 0),
        *((RequestCode.GET_MAX_OFFSET, {"queueId": queue}, end)
          for queue, end in ((0, 3), (1, 1), (9, 0))),
        *((RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {"queueId": 0, "timestamp": ms}, offset)
          for ms, offset in ((0, 0), (1000, 0), (1001, 1), (3000, 2), (9000, 3))),
    ],
)  # fmt: skip
def test_offsets(cluster, ask, code, ext, offset):
    put(cluster, 1, 2, 3)
    put(cluster, 4, queue_id=1)
    assert ask(code, topic="t", **ext).ext == {"offset": str(offset)}


@pytest.mark.parametrize(
    ("first", "most", "code", "read", "following"),
    [(0, 2, 0, [b"1", b"2"], 2), (2, 9, 0, [b"3"], 3), (3, 9, 19, [], 3), (7, 9, 19, [], 3)],
)
def test_a_pull(cluster, ask, first, most, code, read, following):
    put(cluster, 1, 2, 3)
    answer = ask(RequestCode.PULL_MESSAGE, topic="t", queueId=0, queueOffset=first, maxMsgNums=most)
    assert answer.code == code and answer.ext["nextBeginOffset"] == str(following)
    assert (answer.ext["minOffset"], answer.ext["maxOffset"]) == ("0", "3")
    assert (bodies(answer) if read else []) == read
    cluster.brokers[0].topics["t"] = TopicConfig(queues=8, read_queues=1)
    refused = ask(RequestCode.PULL_MESSAGE, topic="t", queueId=1, queueOffset=0, maxMsgNums=1)
    assert refused.code == ResponseCode.INVALID_PARAMETER and "queueId[1]" in str(refused.remark)


def test_messages_are_found_by_keys_and_ids(cluster, ask):
    put(cluster, 1, 2, 3)
    store, by_id = cluster.brokers[0].store, {"_UNIQUE_KEY_QUERY": "true"}
    first, second, third = store.messages("t")
    for key, most, more, found in (
        ("all", 9, {}, [b"1", b"2", b"3"]), ("all", 2, {}, [b"1", b"2"]), ("k2", 9, {}, [b"2"]),
        ("ID2", 9, by_id, [b"2"]), ("k2", 9, by_id, []), ("ID2", 9, {}, []),
    ):  # fmt: skip
        answer = ask(RequestCode.QUERY_MESSAGE, topic="t", key=key, maxNum=most, **more)
        assert answer.code == (ResponseCode.SUCCESS if found else ResponseCode.QUERY_NOT_FOUND)
        assert (bodies(answer) if found else []) == found
        if found:
            indexed_s = int(answer.ext["indexLastUpdateTimestamp"]) / 1000
            assert abs(indexed_s - time.time()) < 900
    assert bodies(ask(RequestCode.VIEW_MESSAGE_BY_ID, offset=second.commit_log_offset)) == [b"2"]
    assert ask(RequestCode.VIEW_MESSAGE_BY_ID, offset=7).code == ResponseCode.SYSTEM_ERROR
    store.tear(third.commit_log_offset, {"KEYS": "k3"})
    store.remove(first.commit_log_offset)
    assert [(m.body, m.properties.get("UNIQ_KEY"), m.torn) for m in cluster.messages("t")] == [
        (b"2", "ID2", False), (b"3", None, True)
    ]  # fmt: skip
    pulled = ask(RequestCode.PULL_MESSAGE, topic="t", queueId=0, queueOffset=0, maxMsgNums=9)
    assert len(decode_stored(pulled.body)) == 3, "the queue keeps what the log has lost"
    cluster.brokers[1].store.append(StoredMessage("u", b"stays"))
    store.tear(second.commit_log_offset, {})
    cluster.brokers[0].store.forget("u")
    assert len(cluster.messages("t")) == 2 and len(cluster.messages("u")) == 1


@pytest.mark.parametrize(
    ("settings", "ext", "code", "queues"),
    [
        ({"b": "new"}, {}, 0, 4), ({"b": "new", "d": "2"}, {}, 0, 2),
        ({"b": "new", "d": "9"}, {}, 0, 4),
        ({"b": "new", "c": "none"}, {}, ResponseCode.TOPIC_NOT_EXIST, None),
        ({"e": "1"}, {}, 0, 2), ({"e": "2"}, {}, ResponseCode.INVALID_PARAMETER, 2),
        ({"e": "-1"}, {}, 0, 2), ({}, {"perm": PermName.READ}, ResponseCode.NO_PERMISSION, 2),
        ({}, {"attributes": {"cleanup.policy": "COMPACTION"}}, 0, 2),
        ({"i": ""}, {"attributes": {"cleanup.policy": "COMPACTION"}},
         ResponseCode.MESSAGE_ILLEGAL, 2),
    ],
)  # fmt: skip
def test_a_send_meets_the_topics_settings(cluster, settings, ext, code, queues):
    cluster.create_topic("t", 2, **ext)
    frame = send("t")
    frame.ext.update(settings)
    answer = Client(cluster.brokers[0].address).ask(frame)
    assert answer.code == code
    topic = settings.get("b", "t")
    made = cluster.brokers[0].topics.get(topic)
    assert (made.queues if made else None) == queues
    assert topic == "t" or topic not in cluster.brokers[1].topics
    assert len(cluster.messages(topic)) == (code == 0)
    if code == 0:
        (stored,) = cluster.messages(topic)
        place = str(stored.queue_id), str(stored.queue_offset), stored.offset_message_id
        assert place == (answer.ext["queueId"], answer.ext["queueOffset"], answer.ext["msgId"])
        assert stored.queue_id == max(0, int(settings.get("e", 0))) and stored.born_ms == 1
        assert stored.properties["CLUSTER"] == "FakeCluster"


def test_a_compressed_body_is_stored_as_it_was(cluster, ask):
    frame = send("t", body=zlib.compress(b"text " * 9))
    frame.ext["f"] = str(SysFlag.COMPRESSED | 3 << 8)
    assert Client(cluster.brokers[0].address).ask(frame).code == 0
    pulled = ask(RequestCode.PULL_MESSAGE, topic="t", queueId=0, queueOffset=0, maxMsgNums=1)
    assert bodies(pulled) == [b"text " * 9]


COMMIT, ROLLBACK, UNKNOWN = SysFlag.TRANSACTION_COMMIT, SysFlag.TRANSACTION_ROLLBACK, 0


@pytest.mark.parametrize(
    ("state", "changes", "code", "stored"),
    [
        (COMMIT, {}, 0, 1), (ROLLBACK, {}, 0, 0), (UNKNOWN, {}, None, 0),
        (COMMIT, {"producerGroup": "other"}, 1, 0), (COMMIT, {"tranStateTableOffset": "1"}, 1, 0),
        (COMMIT, {"commitLogOffset": "77"}, 1, 0),
    ],
)  # fmt: skip
def test_a_half_message_is_hidden_until_its_end(cluster, state, changes, code, stored):
    broker = cluster.brokers[0]
    client, frame = Client(broker.address), send("t", 1)
    frame.ext["i"] += "TRAN_MSG\x01true\x02PGROUP\x01g\x02"
    assert client.ask(frame).code == 0 and not cluster.messages("t")
    broker.check_transactions()
    check = client.read(10)
    (half,) = broker.half_messages()
    assert (check.ext["topic"], check.ext["msgId"]) == ("t", "U1")
    assert check.ext["commitLogOffset"] == str(half.commit_log_offset)
    assert check.ext["tranStateTableOffset"] == "1" == str(half.queue_offset)
    (copy,) = decode_stored(check.body)
    assert (copy.topic, copy.queue_id, bytes(copy.body)) == ("t", 1, b"hello")
    ext = {
        "commitOrRollback": str(state), "producerGroup": "g", "tranStateTableOffset": "1",
        "commitLogOffset": str(half.commit_log_offset), **changes,
    }  # fmt: skip
    if "tranStateTableOffset" in changes:
        ext["tranStateTableOffset"] = "0"
    answer = client.ask(Frame(RequestCode.END_TRANSACTION, ext)) if code is not None else None
    if code is None:
        client.socket.sendall(encode_frame(Frame(RequestCode.END_TRANSACTION, ext, flag=2)))
        assert client.ask(Frame(RequestCode.HEART_BEAT)).code == 0
    assert (answer.code if answer else None) == code
    assert len(cluster.messages("t")) == stored and len(broker.half_messages()) == (code != 0)
    if stored:
        (message,) = cluster.messages("t")
        assert message.queue_id == 1 and not {"TRAN_MSG", "REAL_TOPIC"} & message.properties.keys()
    broker.lose_half_messages()
    assert not broker.half_messages() and not cluster.messages(HALF_TOPIC)


def test_a_timed_message_is_recalled_once(cluster, ask):
    put(cluster, 1, TIMER_DELAY_MS="5000")
    put(cluster, 2)
    recalled = []
    for place in ("broker-a 5000 ID2", "broker-b 5000 ID1", *["broker-a 5000 ID1"] * 2):
        handle = base64.urlsafe_b64encode(f"v1 t {place}".encode()).decode()
        answer = ask(RequestCode.RECALL_MESSAGE, recallHandle=handle, topic="t")
        recalled.append(answer.code == 0)
    assert recalled == [False, False, True, False]
    assert [m.body for m in cluster.messages("t")] == [b"2"]


def test_topics_of_brokers(cluster, ask):
    ask(RequestCode.UPDATE_AND_CREATE_TOPIC, topic="x", writeQueueNums=3, readQueueNums=3, perm=4,
        attributes="+a=b=c,+d=e")  # fmt: skip
    made = cluster.brokers[0].topics["x"]
    assert made == TopicConfig(3, 4, {"a": "b=c", "d": "e"})
    assert "x" not in cluster.brokers[1].topics
    shown = ask(RequestCode.GET_TOPIC_CONFIG, topic="x")
    assert json.loads(bytes(shown.body)) == {"attributes": {"a": "b=c", "d": "e"}}
    assert ask(RequestCode.GET_TOPIC_CONFIG, topic="y").code == ResponseCode.TOPIC_NOT_EXIST
    put(cluster, 1)
    cluster.delete_topic("t")
    assert not cluster.route("t").queues and not cluster.messages("t")
    name_server = Client(cluster.name_server)
    listed = name_server.ask(Frame(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
    assert json.loads(bytes(listed.body)) == {"topicList": ["TBW102", "x"]}


def test_brokers_of_name_servers(cluster):
    def known():
        answer = Client(cluster.name_server).ask(Frame(RequestCode.GET_BROKER_CLUSTER_INFO))
        info = json.loads(bytes(answer.body))
        assert info["clusterAddrTable"] == {"FakeCluster": list(info["brokerAddrTable"])}
        return {name: each["brokerAddrs"] for name, each in info["brokerAddrTable"].items()}

    first, second = cluster.brokers
    both = {"broker-a": {"0": first.address}, "broker-b": {"0": second.address}}
    assert known() == both
    cluster.forget_brokers()
    assert known() == {} and not cluster.route("t").queues
    cluster.register("broker-b")
    assert known() == {"broker-b": both["broker-b"]}
    cluster.register()
    assert known() == both
    first.is_master, second.registered = False, "10.0.0.1:10911"
    assert known() == {"broker-a": {"1": first.address}, "broker-b": {"0": "10.0.0.1:10911"}}
    with FakeCluster(brokers=28, queues=0) as many:
        names = [broker.name for broker in many.brokers]
        assert names[25:] == ["broker-z", "broker-a26", "broker-a27"]
        assert not many.route("TBW102").queues


def test_what_is_done_to_all_brokers(cluster):
    clients = [Client(broker.address) for broker in cluster.brokers]

    def codes(frame):
        return [answer and answer.code for answer in (client.ask(frame) for client in clients)]

    heartbeat = Frame(RequestCode.HEART_BEAT)
    cluster.on_send(Answer(2, "busy"), times=2)
    cluster.on(RequestCode.HEART_BEAT, Answer(1), times=None)
    assert [codes(heartbeat), codes(send()), codes(heartbeat)] == [[1, 1], [2, 2], [1, 1]]
    cluster.behave()
    assert [codes(heartbeat), codes(send())] == [[0, 0], [0, 0]]
    assert [frame.code for frame in cluster.requests()] == [34, 310, 34, 34, 310] * 2
    assert len(cluster.requests(RequestCode.HEART_BEAT)) == 6
    assert all(broker.alive for broker in cluster.brokers)
    cluster.freeze()
    for client in clients:
        client.socket.settimeout(0.2)
    assert codes(heartbeat) == [None, None]
    cluster.kill()
    assert not any(broker.alive for broker in cluster.brokers)
    cluster.on_route(Answer(1, "no"))
    assert Client(cluster.name_server).ask(Frame(105, {"topic": "t"})).code == 1
    cluster.stop_name_server()
    with pytest.raises(ConnectionRefusedError):
        Client(cluster.name_server)


@pytest.mark.parametrize("behaviour", ["delay_ms", "bytes_per_s", "cut", "none"])
def test_a_proxy_changes_both_directions(cluster, behaviour):
    with FaultProxy(cluster.brokers[0].address) as proxy:
        client = Client(proxy.address, 30)
        if behaviour in ("delay_ms", "bytes_per_s"):
            setattr(proxy, behaviour, {"delay_ms": 150, "bytes_per_s": 2000}[behaviour])
        if behaviour == "cut":
            proxy.cut_after(3, "answer")
        begun_s = time.monotonic()
        try:
            answer = client.ask(send(body=b"x" * 400))
        except OSError:
            answer = None
        took_s = time.monotonic() - begun_s
        assert (answer is None) is (behaviour == "cut")
        assert took_s >= {"delay_ms": 0.3, "bytes_per_s": 0.2}.get(behaviour, 0)
        assert len(cluster.messages("t")) == 1
        assert answer or len(client.received) <= 3
        assert Client(proxy.address, 30).ask(send()).code == 0
    with pytest.raises(ConnectionRefusedError):
        Client(proxy.address)
    proxy.close()


def test_proxies_of_a_cluster(cluster):
    """Answers to other requests of the name server are unchanged."""
    with FaultProxies(cluster.name_server) as proxies:
        front, addresses = Client(proxies.name_server), [b.address for b in cluster.brokers]
        route = front.ask(Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"}))
        missing = front.ask(Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "none"}))
        info = front.ask(Frame(RequestCode.GET_BROKER_CLUSTER_INFO))
        assert missing.code == ResponseCode.TOPIC_NOT_EXIST
        assert all(address in str(bytes(info.body)) for address in addresses)
        text = str(bytes(route.body))
        ways = [proxies.of(address) for address in addresses]
        assert all(way.address in text for way in ways)
        assert [proxies.of(address) for address in addresses] == ways
        assert not any(address in text for address in addresses)
    for way in (*ways, proxies.front):
        with pytest.raises(ConnectionRefusedError):
            Client(way.address)
