"""TLS streams: bytes that went into a record cannot be withdrawn, all others can."""

import socket
import threading

import pytest

from rocket_sink.errors import SendError
from rocket_sink.net import transport
from rocket_sink.net.client import NetworkClient
from rocket_sink.options import SinkOptions
from rocket_sink.wire.frame import FrameReader
from rocket_sink.wire.headers import Frame
from tests.net.test_transport import IP, Echo, authority, handshaken, serve, server_context

assert authority and serve  # fixtures


class Late(Echo):
    """A server that reads nothing until `go` is set, and then everything into `bodies`. `ended` is
    the end of the handshake."""

    def __init__(self, files):
        self.go, self.bodies, self.ended = threading.Event(), [], threading.Event()
        super().__init__(server_context(files))
        # The buffer is small beside the bytes that are sent, but holds more than one loopback
        # segment.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 << 10)

    def _serve(self, peer):
        reader = FrameReader()
        with handshaken(self._context, peer) as stream:
            self.ended.set()
            self.go.wait(60)
            while data := stream.recv(65_536):
                reader.receive_data(data)
                while (frame := reader.next_frame()) is not None:
                    self.bodies.append(bytes(frame.body[:8]))


class Sent:
    def __init__(self, number):
        self.name = b"%08d" % number

    def on_end(self, result, sent_s, now_s):
        assert isinstance(result, SendError), "nothing is answered"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [1000, 16_000, 300_000])
def test_what_is_taken_back_never_arrives_and_all_else_does(authority, size, monkeypatch):
    """The peer reads nothing for a while, like a broker that stalls and comes back."""
    # A kernel without room for a whole segment drops the segment again and again. On a busy machine
    # this may last longer than the ten seconds after which a connection is given up.
    monkeypatch.setattr(transport, "USER_TIMEOUT_MS", 100_000)
    server = Late(authority.server("ip", IP))
    address = server.address
    options = {"nameServer": address, "tlsMode": "verify-full", "tlsCa": authority.file}
    client = NetworkClient(SinkOptions.parse(options))

    def call(request, size):
        frame, now_s = Frame(1, None, request.name + bytes(size)), client.clock()
        client.call(address, frame, request, deadline_s=now_s + 100, now_s=now_s)

    try:
        channel = client.channel(address, client.clock())
        while not channel.is_open:
            client.poll(0.05)
        # Servers close connections whose handshake does not end, also before the first request.
        assert server.ended.wait(60)
        sent = [Sent(number) for number in range(10_000_000 // size)]
        for request in sent:
            call(request, size)
        before = -1
        while before != channel.write_queue.size:
            before = channel.write_queue.size
            for _ in range(5):
                client.poll(0.01)
        assert channel.write_queue, "the kernel took it all: this shows nothing"
        back = {request.name for request in channel.withdraw()}
        assert back
        kept = {request.name for request in sent} - back
        last = Sent(99_999_999)
        call(last, 0)
        server.go.set()
        while last.name not in server.bodies and not channel.closed:
            client.poll(0.01)
        assert sorted(server.bodies) == sorted({*kept, last.name})
    finally:
        server.go.set()
        client.close()
        server.close()
