"""A stub of a large cluster as a separate process: it accepts all batches and stores nothing.

    python -m benchmarks.stub.server BROKERS QUEUES

It prints the name server's address, and ends at the end of its input. Frames are read whole and
answered as by real brokers; bodies are discarded.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Final

from rocket_sink.testing.server import Loop, Peer, Port
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame, response_to
from rocket_sink.wire.route import BrokerData, QueueData, TopicRoute, encode_route

_SENDS: Final = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
_POLITE: Final = (RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT)


class StubServers:
    """A name server and many brokers in one thread; every topic has all queues."""

    def __init__(self, brokers: int, queues: int) -> None:
        self._loop = Loop("stub-rocketmq")
        self._queues = queues
        self._name_server = Port(self._loop, self._tell_route)
        self._brokers = [Port(self._loop, self._take) for _ in range(brokers)]
        for port in (self._name_server, *self._brokers):
            self._loop.call(port.open)
        self._offset = 0

    @property
    def name_server(self) -> str:
        """The address of the name server."""
        return self._name_server.address

    def close(self) -> None:
        """Close every socket and end the thread."""
        for port in (self._name_server, *self._brokers):
            self._loop.call(port.close)
        self._loop.stop()

    def _tell_route(self, peer: Peer, request: Frame) -> None:
        if request.code != RequestCode.GET_ROUTEINFO_BY_TOPIC:
            _answer(peer, request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
            return
        names = [f"broker-{number:03d}" for number in range(len(self._brokers))]
        route = TopicRoute(
            queues=tuple(QueueData(name, self._queues, self._queues) for name in names),
            brokers=tuple(
                BrokerData("stub", name, {0: port.address})
                for name, port in zip(names, self._brokers, strict=True)
            ),
        )
        answer = response_to(request, ResponseCode.SUCCESS)
        peer.send(encode_frame(replace(answer, body=encode_route(route))))

    def _take(self, peer: Peer, request: Frame) -> None:
        if request.is_oneway or request.is_response:
            return
        if request.code in _SENDS:
            self._offset += 1
            ext = {
                "msgId": "7F00000100002A9F0000000000000000",
                "queueId": (request.ext or {}).get("e", "0"),
                "queueOffset": str(self._offset),
            }
            _answer(peer, request, ResponseCode.SUCCESS, ext)
        elif request.code in _POLITE:
            _answer(peer, request, ResponseCode.SUCCESS)
        else:
            _answer(peer, request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)


def _answer(
    peer: Peer, request: Frame, code: ResponseCode, ext: dict[str, str] | None = None
) -> None:
    peer.send(encode_frame(replace(response_to(request, code), ext=ext)))


def main(arguments: list[str]) -> None:
    """Serve until the input ends."""
    servers = StubServers(int(arguments[0]), int(arguments[1]))
    print(servers.name_server, flush=True)  # noqa: T201
    sys.stdin.read()
    servers.close()


if __name__ == "__main__":
    main(sys.argv[1:])
