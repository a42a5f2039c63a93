"""NetworkClient: what it does around garbage, and its count of late answers."""

import gc
import itertools
import time

import pytest

from rocket_sink.errors import ConnectionLostError
from rocket_sink.net.client import Call, NetworkClient, invoke
from rocket_sink.net.transport import StreamState
from rocket_sink.options import SinkOptions
from rocket_sink.testing.server import Loop, Port
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame, response_to
from tests.producer.waiting import until

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


def test_a_late_answer_counts_once_when_its_connection_ends(serve):
    """The count also holds if an owner drains the connection when its last request ends."""
    late = []

    def handle(peer, request):
        if request.code == 1:
            late.append((peer, encode_frame(response_to(request, 0))))
        elif request.code == 2:
            peer.send(encode_frame(response_to(request, 0)))

    clock = itertools.count()
    client = NetworkClient(SinkOptions.parse(nameServer="n:1"), clock=lambda: float(next(clock)))
    channel, errors = client.channel(serve(handle), client.clock()), []

    def end(answer, error, at_s):
        errors.append(error)

    def drain(answer, error, at_s):
        errors.append(error)
        client.drain(channel, at_s)

    def call(code, done):
        owner, at_s = Call(done), client.clock()
        client.call_on(channel, Frame(code), owner, deadline_s=at_s + 1e6, now_s=at_s)
        return owner

    def wait(over):
        until(lambda: client.poll(0.01) or over(), 10.0)

    first = call(1, end)
    call(2, end)  # The answer shows that the connection lives.
    wait(lambda: len(errors) == 1)
    channel.connection.hasten(first)
    wait(lambda: len(errors) == 2)
    assert channel.is_open and not channel.draining
    last = call(3, drain)
    wait(lambda: not channel.has_unwritten)
    peer, answer = late[0]
    peer.port.loop.call(lambda: peer.send(answer))
    wait(lambda: channel.connection.unexpected_answers)
    channel.connection.hasten(last)
    wait(lambda: len(errors) == 3)
    client.poll(0.02)
    assert channel.closed and channel.connection.unexpected_answers == 1
    client.close()


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


def expiry_cpu_s(count: int) -> float:
    """Return the CPU time in which so many unwritten requests expire together."""
    client = NetworkClient(SinkOptions.parse(nameServer="n:1"))
    ends: list[object] = []
    channel = client.channel("127.0.0.1:9", client.clock())
    owner = Call(lambda *end: ends.append(end))
    for _ in range(count):
        client.call_on(channel, Frame(1), owner, deadline_s=1.0, now_s=0.0)
    channel.transport.state = StreamState.OPEN
    gc.collect()
    gc.disable()  # A collection takes the longer, the more objects other tests have left.
    try:
        began_s = time.process_time()
        channel.expire(2.0)
        took_s = time.process_time() - began_s
    finally:
        gc.enable()
    assert len(ends) == count and not channel.write_queue and not channel.connection.in_flight
    client.close()
    return took_s


def test_requests_that_expire_together_take_linear_time():
    """8,000 requests took 2.4 s under the lock of the producer."""
    few = min(expiry_cpu_s(1000) for _ in range(3))
    many = min(expiry_cpu_s(16_000) for _ in range(3))
    assert many <= 80 * few, "16 times as many take some 16 times as long, not 256 times"
