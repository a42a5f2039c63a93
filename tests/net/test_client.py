"""The client's own accounts."""

from __future__ import annotations

import itertools
import time

from rocket_sink.net.client import Call, NetworkClient
from rocket_sink.options import SinkOptions
from rocket_sink.testing.server import Loop, Port
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame, response_to


def test_a_late_answer_counts_once_when_its_connection_ends():
    """Also when an owner drains the connection at the end of the last request on it."""
    loop, late = Loop("late"), []

    def handle(peer, request):
        if request.code == 1:
            late.append(lambda: peer.send(encode_frame(response_to(request, 0))))
        elif request.code == 2:
            peer.send(encode_frame(response_to(request, 0)))

    port = Port(loop, handle)
    loop.call(port.open)
    clock = itertools.count()
    client = NetworkClient(SinkOptions.parse(nameServer="n:1"), clock=lambda: float(next(clock)))
    channel, ended = client.channel(port.address, client.clock()), []

    def end(answer, error, at_s):
        ended.append(error)

    def drain(answer, error, at_s):
        ended.append(error)
        client.drain(channel, at_s)

    def call(code, done):
        owner, at_s = Call(done), client.clock()
        client.call_on(channel, Frame(code), owner, deadline_s=at_s + 1e6, now_s=at_s)
        return owner

    def wait(over):
        end_s = time.monotonic() + 10
        while not over() and time.monotonic() < end_s:
            client.poll(0.01)

    try:
        first = call(1, end)
        call(2, end)  # its answer shows that the connection lives
        wait(lambda: len(ended) == 1)
        channel.connection.hasten(first)
        wait(lambda: len(ended) == 2)
        assert channel.is_open and not channel.draining
        last = call(3, drain)
        wait(lambda: not channel.unwritten)
        loop.call(late[0])
        wait(lambda: channel.connection.late_answers)
        channel.connection.hasten(last)
        wait(lambda: len(ended) == 3)
        client.poll(0.02)
        assert channel.closed and client.late_answers == 1
    finally:
        client.close()
        loop.call(port.close)
        loop.stop()
