"""C54: sync, oneway and many requests at once, against a server that echoes their header."""

import pytest

from rocket_sink.net.client import NetworkClient, invoke
from rocket_sink.options import SinkOptions
from rocket_sink.testing.server import Loop, Port
from rocket_sink.wire.codes import LanguageCode
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame, response_to

HEADER = {"count": "1", "messageTitle": "Welcome"}


@pytest.fixture
def server():
    loop, requests = Loop("echo"), []

    def handle(peer, request):
        requests.append(request)
        if not request.is_oneway:
            answer = response_to(request, 0, ext=request.ext, remark=f"hi {peer.port.address}")
            answer.language = LanguageCode.JAVA
            peer.send(encode_frame(answer))

    port = Port(loop, handle)
    loop.call(port.open)
    yield port.address, requests
    loop.call(port.close)
    loop.stop()


def test_c54_sync_oneway_and_many_at_once(server):
    address, requests = server
    client = NetworkClient(SinkOptions.parse(nameServer=address))
    answer = invoke(client, address, Frame(0, HEADER), 5.0)
    assert answer.ext == HEADER and answer.language == LanguageCode.JAVA
    assert answer.remark == f"hi {address}"
    client.oneway(address, Frame(0, HEADER), client.clock())
    frames = []

    class Owner:
        def on_end(self, result, sent_s, now_s):
            frames.append(result)

    now_s = client.clock()
    for number in range(20):
        frame = Frame(0, {**HEADER, "count": str(number)})
        client.call(address, frame, Owner(), deadline_s=now_s + 5.0, now_s=now_s)
    while len(frames) < 20 and client.clock() < now_s + 5.0:
        client.poll(0.05)
    assert [frame.ext["count"] for frame in frames] == [str(n) for n in range(20)]
    assert [request.is_oneway for request in requests] == [False, True] + [False] * 20
    assert len({request.opaque for request in requests}) == 22
    assert client.in_flight == 0
    client.close()
