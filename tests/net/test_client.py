"""NetworkClient: what it does around garbage, and its count of late answers."""

import pytest

from rocket_sink.errors import ConnectionLostError
from rocket_sink.net.client import Call, NetworkClient, invoke
from rocket_sink.options import SinkOptions
from rocket_sink.testing.server import Loop, Port
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame, response_to

GARBAGE = b"\x00\x00\x00\x01no frame"


@pytest.fixture
def serve():
    loop, ports = Loop("served"), []

    def open_port(handle):
        ports.append(Port(loop, handle))
        loop.call(ports[-1].open)
        return ports[-1].address

    yield open_port
    for port in ports:
        loop.call(port.close)
    loop.stop()


@pytest.fixture
def client(closing):
    return closing(NetworkClient(SinkOptions.parse(nameServer="n:1")))


def test_who_asks_again_after_an_answer_with_garbage_gets_a_new_connection(serve, client):
    """The second call waited on the broken connection for ever, and so did a look-up of a route."""

    def handle(peer, request):
        peer.send(encode_frame(response_to(request, request.code)) + GARBAGE * (request.code == 1))

    address, results = serve(handle), []

    def call(code, done):
        at_s = client.clock()
        client.call(address, Frame(code), Call(done), deadline_s=at_s + 9, now_s=at_s)

    call(1, lambda answer, error, at_s: call(2, lambda *end: results.append(end)))
    assert client.prepare(5.0) == 0.02, "deadlines of requests in flight are checked"
    while not results:
        client.poll(0.01)
    ((answer, error, _),) = results
    assert error is None and answer.code == 2 and client.opened == 2


def test_a_connection_that_ended_after_a_last_frame_is_not_used_again(serve, client):
    """A write to it has an unknown outcome. The frame is the end of the first read."""
    peers = []

    def handle(peer, request):
        peers.append(peer)
        peer.send(encode_frame(response_to(request, 0)))

    address = serve(handle)
    invoke(client, address, Frame(1), 10)
    channel = client.peek(address)
    assert client.prepare(5.0) == 5.0, "nothing is in flight"

    def end():
        peers[0].send(encode_frame(Frame(999, {}, flag=2)))
        peers[0].drop()

    peers[0].port.loop.call(end)  # The call returns when the connection is closed.
    second = client.channel(address, client.clock() + 1)
    assert second is not channel
    assert client.channel(address, client.clock() + 130) is not second, "it was idle for too long"


def test_a_request_of_the_peer_before_garbage_is_not_answered(serve, client):
    """Sends and the producer's thread raised RemoteProtocolError, and no future was completed."""
    address = serve(lambda peer, request: peer.send(encode_frame(Frame(999, {})) + GARBAGE))
    with pytest.raises(ConnectionLostError, match="does not speak RocketMQ"):
        invoke(client, address, Frame(1), 9.0)
    assert client.channels == []


def test_connections_begin_with_request_ids_of_their_own(serve):
    """A proxy answers a time-out at a broker under an id of its own, counted from 0, which must not
    be that of another request (DefaultMessagingProcessor.request keeps the id on success only)."""
    opaques = []

    def handle(peer, request):
        opaques.append(request.opaque)
        peer.send(encode_frame(response_to(request, 0)))

    address = serve(handle)
    for _ in range(3):
        client = NetworkClient(SinkOptions())
        invoke(client, address, Frame(1), 10)
        client.close()
    assert len(set(opaques)) == 3 and 1000 < min(opaques) < max(opaques) < 10**9
