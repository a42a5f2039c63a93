"""The proxy does to a real broker's connections what scripted brokers do on their own."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.testing import (
    Answer,
    CloseConnection,
    CutAnswer,
    Delay,
    Drip,
    Drop,
    FakeCluster,
    FaultProxy,
    Garbage,
    IncompleteAnswer,
    Twice,
    WrongOpaque,
)
from rocket_sink.testing.proxy import Cutter
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame
from tests.clusters import scripted_cluster

from .test_fake_cluster import Client, send

cluster = scripted_cluster(1, scope="module")


@pytest.fixture
def proxy(cluster):
    with FaultProxy(cluster.brokers[0].address) as one:
        yield one


@pytest.fixture(params=["proxy", "broker"])
def server(request, cluster, proxy):
    """Return what misbehaves: a proxy, or the scripted broker itself."""
    return proxy if request.param == "proxy" else cluster.brokers[0]


@pytest.mark.parametrize(
    ("behaviour", "code", "stored"),
    [
        (Answer(2, "busy"), 2, 0), (Answer(1, "after the append", stores=True), 1, 1),
        (Answer(10), 10, 1), (Delay(20), 0, 1), (Drip(1), 0, 1), (Twice(), 0, 1),
        (IncompleteAnswer(), 0, 1), (Drop(stores=False), None, 0), (Drop(), None, 1),
        (CutAnswer(9), None, 1), (CloseConnection(), None, 1),
        (CloseConnection(stores=False), None, 0),
    ],
)  # fmt: skip
def test_behaviours(cluster, server, behaviour, code, stored):
    client = Client(server.address)
    # The connection was opened before any bytes were sent.
    assert client.ask(send()).code == 0
    server.on_send(behaviour)
    before = len(cluster.messages("t"))
    client.socket.sendall(encode_frame(send()))
    try:
        # An answer that never comes is waited for shortly; one that comes may take its time.
        answer = client.read(0.2 if isinstance(behaviour, Drop) else 10)
    except OSError:
        answer = None
    assert (answer.code if answer else None) == code
    if code is None:
        client = Client(server.address)
    elif isinstance(behaviour, Twice):
        assert client.read(10).opaque == answer.opaque
    elif isinstance(behaviour, IncompleteAnswer):
        assert not answer.ext
    # The next message is treated well, and the broker stored the first one before.
    assert client.ask(send()).code == 0
    assert len(cluster.messages("t")) - before == stored + 1


def test_garbage_and_foreign_answers(server):
    client = Client(server.address)
    server.on_send(WrongOpaque())
    request = send()
    assert client.ask(request).opaque != request.opaque
    server.on_send(Garbage(b"HTTP/1.1"))
    client.socket.sendall(encode_frame(send()))
    assert client.socket.recv(100) == b"HTTP/1.1"


@pytest.mark.parametrize("is_proxy", [False, True])
def test_other_requests_are_unchanged_and_chance_is_seeded(is_proxy):
    def codes(seed):
        with (
            FakeCluster(brokers=1, seed=seed) as fake,
            FaultProxy(fake.brokers[0].address, seed=seed) as proxy,
        ):
            server = proxy if is_proxy else fake.brokers[0]
            server.on(RequestCode.HEART_BEAT, Answer(1))
            server.on_send(Answer(2), times=None, chance=0.5)
            client = Client(server.address)
            found = [client.ask(send()).code for _ in range(20)]
            server.behave()
            assert client.ask(send()).code == 0
            return found

    assert codes(3) == codes(3) != codes(4)


@given(
    frames=st.lists(st.binary(max_size=40), max_size=5),
    cuts=st.lists(st.integers(1, 60), min_size=1),
)
def test_frames_pass_whole_and_in_order(frames, cuts):
    encoded = [encode_frame(Frame(1, body=body or None)) for body in frames]
    data, cutter, passed = b"".join(encoded), Cutter(), []
    for size in itertools.cycle(cuts):
        passed += cutter.cut(data[:size])
        data = data[size:]
        if not data:
            break
    assert passed == encoded


def test_what_is_no_frame_passes_as_it_comes():
    cutter = Cutter()
    hello = b"\x16\x03\x01\x02\x00" + bytes(100)
    assert [*cutter.cut(hello), *cutter.cut(b"more")] == [hello, b"more"]


def test_a_frame_that_nobody_can_read_reaches_the_broker(proxy):
    client = Client(proxy.address, 30)
    client.socket.sendall(b"\0\0\0\x08" + b"\xff" * 8)
    assert client.socket.recv(1) == b"", "the broker closes the connection"
