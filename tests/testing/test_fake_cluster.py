"""The scripted cluster does what its script says, seen over plain sockets."""

import contextlib
import socket
import time

import pytest

from rocket_sink.testing import Answer, CutAnswer, Delay, Drip, FakeCluster, FaultProxy
from rocket_sink.wire import requests
from rocket_sink.wire.batch import encode_inner
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.frame import FrameReader, encode_frame
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.responses import decode_send_answer
from rocket_sink.wire.route import decode_route
from tests.clusters import scripted_cluster


class Client:
    """A blocking connection that reads frames; `read` returns None if no frame comes."""

    def __init__(self, address, timeout_s=5.0):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self.reader = FrameReader()
        self.received = b""

    def ask(self, frame):
        self.socket.sendall(encode_frame(frame))
        return self.read()

    def read(self, timeout_s=None):
        if timeout_s is not None:
            self.socket.settimeout(timeout_s)
        while (frame := self.reader.next_frame()) is None:
            try:
                data = self.socket.recv(65536)
            except TimeoutError:
                return None
            if not data:
                return None
            self.received += data
            self.reader.receive_data(data)
        return frame


def send(topic="t", queue_id=0, body=b"hello", **more):
    return requests.send_message_v2(
        producer_group="g", topic=topic, queue_id=queue_id, born_ms=1, broker_name="broker-a",
        properties="KEYS\x01k1\x02UNIQ_KEY\x01U1\x02", body=body, **more,
    )  # fmt: skip


cluster = scripted_cluster()


@pytest.fixture
def client(cluster):
    client = Client(cluster.brokers[0].address)
    yield client
    client.socket.close()


def test_a_batch_is_stored_as_its_messages(cluster, client):
    assert Client(cluster.name_server).ask(requests.get_route("t")).code == 17
    inner = b"".join(encode_inner(b"m%d" % n, f"UNIQ_KEY\x01B{n}\x02", 7) for n in range(3))
    sent = decode_send_answer(client.ask(send(body=inner, batch=True)))
    assert (sent.status, sent.queue_offset) == ("SEND_OK", 0)
    assert sent.offset_message_id.count(",") == 2
    stored = [(m.body, m.properties["UNIQ_KEY"], m.queue_offset) for m in cluster.messages("t")]
    assert stored == [(b"m%d" % n, f"B{n}", n) for n in range(3)]
    assert {message.flag for message in cluster.messages("t")} == {7}
    assert [queue.broker_name for queue in cluster.route("t").queues] == ["broker-a"]


def test_legacy_name_servers_write_bare_keys():
    with FakeCluster(brokers=1, legacy_json=True) as cluster:
        cluster.create_topic("t")
        answer = Client(cluster.name_server).ask(requests.get_route("t"))
        assert b"{0:" in bytes(answer.body or b"")
        assert decode_route(answer.body).brokers[0].master == cluster.brokers[0].address


@pytest.mark.parametrize("at_byte", [0, 1, 8, 30])
def test_answers_cut_at_a_byte(cluster, client, at_byte):
    cluster.brokers[0].on_send(CutAnswer(at_byte))
    assert client.ask(send()) is None
    assert len(client.received) == at_byte
    assert client.socket.recv(1) == b"", "the connection is closed"


def test_late_and_dripping_answers_do_not_hold_up_others(cluster, client):
    broker = cluster.brokers[0]
    broker.on_send(Delay(150))
    broker.on_send(Drip(0.2))
    begun_s = time.monotonic()
    client.socket.sendall(encode_frame(send(body=b"slow")))
    other = Client(broker.address)
    assert other.ask(send(body=b"dripped")).code == 0
    assert client.read(5).code == 0
    assert time.monotonic() - begun_s >= 0.15


@pytest.mark.parametrize("through_a_proxy", [False, True])
def test_what_is_answered_meanwhile_comes_after_the_bytes_that_drip(cluster, through_a_proxy):
    broker = cluster.brokers[0]
    with FaultProxy(broker.address) as proxy:
        client = Client(proxy.address if through_a_proxy else broker.address)
        (proxy if through_a_proxy else broker).on_send(Drip(0.2), times=2)
        bodies = (b"one", b"two", b"three")
        client.socket.sendall(b"".join(encode_frame(send(body=body)) for body in bodies))
        answers = [client.read(30) for _ in bodies]
    assert [answer and answer.code for answer in answers] == [0, 0, 0]


def test_a_rule_for_no_request_is_none(cluster, client):
    cluster.brokers[0].on_send(Answer(2, "busy"), times=0)
    assert client.ask(send()).code == 0


def test_freeze_takes_bytes_and_thaw_handles_them(cluster, client):
    cluster.brokers[0].freeze()
    client.socket.sendall(encode_frame(send()))
    assert client.read(0.2) is None
    assert cluster.messages("t") == []
    cluster.brokers[0].thaw()
    assert client.read(5).code == 0
    assert len(cluster.messages("t")) == 1


def test_kill_refuses_and_restart_keeps_port_and_store(cluster, client):
    broker = cluster.brokers[0]
    assert client.ask(send()).code == 0
    address = broker.address
    broker.freeze()
    broker.kill()
    with pytest.raises(ConnectionRefusedError):
        Client(address)
    host, _, port = address.rpartition(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    for _ in range(2):
        broker.restart()
    assert broker.address == address
    assert Client(address).ask(send()).code == 0, "it is not frozen any more"
    assert len(cluster.messages("t")) == 2
    broker.fail_over()
    assert broker.address != address and Client(broker.address).ask(send()).code == 0
    with pytest.raises(ConnectionRefusedError):
        Client(address)


BAD_BATCH = {"a": "g", "b": "t", "c": "TBW102", "m": "true"}


@pytest.mark.parametrize(
    "request_",
    [
        Frame(RequestCode.RECALL_MESSAGE, {"recallHandle": "none"}),
        Frame(RequestCode.SEND_BATCH_MESSAGE, BAD_BATCH, b""),
    ],
)
def test_a_request_that_cannot_be_handled_is_an_answer(client, request_):
    """An exception would end the thread of all servers."""
    answers = client.ask(request_), client.ask(send())
    assert [answer and answer.code for answer in answers] == [ResponseCode.SYSTEM_ERROR, 0]


def test_the_proxy_passes_cuts_freezes_and_refuses(cluster):
    with FaultProxy(cluster.brokers[0].address) as proxy:
        client = Client(proxy.address)
        assert client.ask(send()).code == 0
        proxy.freeze()
        client.socket.sendall(encode_frame(send()))
        assert client.read(0.2) is None
        proxy.thaw()
        assert client.read(5).code == 0
        proxy.cut_after(len(encode_frame(send())))
        assert client.ask(send()).code == 0
        with contextlib.suppress(OSError):
            assert client.ask(send()) is None
        assert len(cluster.messages("t")) == 3
        proxy.refuse()
        with pytest.raises(OSError):
            refused = Client(proxy.address)  # The reset may come before the connect returns.
            refused.socket.sendall(b"x")
            if refused.socket.recv(1) == b"":
                raise ConnectionResetError
        proxy.accept()
        assert Client(proxy.address).ask(send()).code == 0
