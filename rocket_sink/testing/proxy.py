"""A TCP proxy with faults for a real broker or name server, and a set of them for a cluster.

with FaultProxy("127.0.0.1:10911") as proxy:
    proxy.delay_ms = 200            # each way
    proxy.freeze(); proxy.thaw()    # bytes are received and held back
    proxy.cut_after(100)            # RST after 100 more bytes towards the server
    proxy.refuse()                  # no new connections, the open ones are reset
    proxy.on_send(Answer(2, "busy"), times=3)   # any behaviour of scripted brokers

with FaultProxies("127.0.0.1:9876") as proxies:
    producer = Producer(nameServer=proxies.name_server)
    proxies.of("127.0.0.1:10911").freeze()

A frame is forwarded when it is complete. `on_send`, `on` and `FaultProxies` need connections
without TLS, because they read frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.testing.script import Behaviour, Scripted, perform
from rocket_sink.testing.server import Connection, Loop, reset
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.frame import FrameReader, encode_frame
from rocket_sink.wire.headers import Frame, Limits, response_to
from rocket_sink.wire.route import decode_route, encode_route

_LENGTH = 4
_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Cutter:
    """Cuts one direction of a connection into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        """The incomplete frame that is held back."""
        self._has_frames = True
        """False from the first bytes on that are no frame (TLS)."""

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that are complete now, or a stream without frames as it comes."""
        buffer = self._buffer
        buffer += data
        while self._has_frames and len(buffer) >= _LENGTH:
            size = _LENGTH + int.from_bytes(buffer[:_LENGTH], "big")
            self._has_frames = size <= Limits.FRAME_BYTES
            if len(buffer) < size:
                break
            frame = bytes(buffer[:size])
            del buffer[:size]
            yield frame
        if not self._has_frames:
            yield self.incomplete()

    def incomplete(self) -> bytes:
        """Return and forget the bytes that are held back."""
        data = bytes(self._buffer)
        self._buffer.clear()
        return data


def _read(data: bytes) -> Frame | None:
    """Return the frame; None if the bytes are no readable frame."""
    reader = FrameReader()
    with contextlib.suppress(RemoteProtocolError):
        reader.receive_data(data)
        frame = reader.next_frame()
        return frame if isinstance(frame, Frame) else None
    return None


Direction = Literal["request", "answer"]
_CHUNK_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 5.0


class FaultProxy(Scripted):
    """Forwards a free loopback port to `address` ("host:port"); the module has an example.

    A request is not forwarded if its behaviour has `stores=False` (the default of Answer).
    Otherwise the request is forwarded, and only the answer is changed.

    Args:
        seed: the seed of the random generator of `on_send`.

    Attributes:
        delay_ms: the delay of each piece of data in each direction.
        bytes_per_s: the limit of each direction of each connection; 0: no limit.
    """

    def __init__(self, address: str, *, seed: int = 0) -> None:
        super().__init__(seed)
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self.address = ""
        self.delay_ms = 0.0
        self.bytes_per_s = 0.0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self._budgets: dict[Direction, int] = {}
        self._connections: set[_Connection] = set()
        self.change_route: Callable[[Frame], Frame] | None = None
        self._loop = Loop("fault-proxy")
        self._loop.call(self._listen)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for tests --------------------------------------------------------------------------

    def on_route(self, change: Callable[[Frame], Frame]) -> None:
        """Forward `change(answer)` for each answer to a route query."""
        self.change_route = change

    def freeze(self) -> None:
        """Hold all bytes in both directions, until `thaw`."""
        self._loop.call(self._flowing.clear)

    def thaw(self) -> None:
        self._loop.call(self._flowing.set)

    def refuse(self) -> None:
        """Reset all connections, and new ones until `accept`."""
        self._refusing = True
        self.reset()

    def accept(self) -> None:
        self._refusing = False

    def cut_after(self, count: int, direction: Direction = "request") -> None:
        """Reset all connections after `count` more bytes in this direction."""
        self._budgets[direction] = count

    def reset(self) -> None:
        """Reset all open connections."""
        self._loop.call(self._reset)

    def close(self) -> None:
        """Stop listening, and reset all connections. Idempotent."""
        if self._loop.is_running:
            self._loop.call(self._server.close)
            self.reset()
            self._loop.stop()

    # --- forwarding -------------------------------------------------------------------------

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _reset(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._refusing:
                raise ConnectionRefusedError
            connecting = asyncio.open_connection(*self._target)
            server = await asyncio.wait_for(connecting, _CONNECT_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):
            reset(writer.transport)
            return
        connection = _Connection((reader, writer), server, self)
        self._connections.add(connection)
        await asyncio.gather(
            self._forward_all(connection, "request"), self._forward_all(connection, "answer")
        )
        self._connections.discard(connection)

    async def _forward_all(self, connection: _Connection, direction: Direction) -> None:
        """Forward until an end closes; then close the other end, too."""
        cutter = Cutter()
        source, sink = connection.client, connection.server
        handle: Callable[[Frame], bool] = connection.on_request
        send: Callable[[bytes], None] = connection.server[1].write
        if direction == "answer":
            source, sink = sink, source
            handle, send = connection.on_answer, connection.send
        with contextlib.suppress(OSError):
            while data := await source[0].read(_CHUNK_BYTES):
                await self._flowing.wait()
                if self.delay_ms:
                    await asyncio.sleep(self.delay_ms / 1000)
                if self.bytes_per_s:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                budget = self._budgets.get(direction)
                for piece in cutter.cut(data[:budget]):
                    frame = _read(piece)
                    if frame is None or not handle(frame):
                        send(piece)
                if budget is not None:
                    self._budgets[direction] = budget - len(data)
                    if budget < len(data):
                        del self._budgets[direction]
                        send(cutter.incomplete())
                        self._reset()
                await sink[1].drain()
        for _, writer in (source, sink):
            writer.close()


class _Connection(Connection):
    def __init__(self, client: _Stream, server: _Stream, proxy: FaultProxy) -> None:
        super().__init__()
        self.client, self.server, self._proxy = client, server, proxy
        self.transport = client[1].transport
        self._waiting: dict[int, tuple[int, Behaviour | None]] = {}
        """{opaque id of a request: its code, and the behaviour of the answer}"""

    def on_request(self, request: Frame) -> bool:
        """Apply the behaviours to a request; return True if the request must not be forwarded."""
        if request.is_response:
            return False
        behaviour = self._proxy.script.decide(request)
        if behaviour is not None and not behaviour.keeps_message:
            perform(self, behaviour, response_to(request, ResponseCode.SYSTEM_ERROR))
            return True
        if not request.is_oneway:
            self._waiting[request.opaque] = request.code, behaviour
        return False

    def on_answer(self, answer: Frame) -> bool:
        """Apply the behaviours to an answer; return True if the answer must not be forwarded."""
        if not answer.is_response or answer.opaque not in self._waiting:
            return False
        code, behaviour = self._waiting.pop(answer.opaque)
        if behaviour is not None:
            perform(self, behaviour, answer)
            return True
        change = self._proxy.change_route
        is_route = (
            code == RequestCode.GET_ROUTEINFO_BY_TOPIC and answer.code == ResponseCode.SUCCESS
        )
        if is_route and change is not None:
            self.send(encode_frame(change(answer)))
            return True
        return False

    def reset(self) -> None:
        super().reset()
        reset(self.server[1].transport)


class FaultProxies:
    """A proxy for a name server. It changes routes so that they lead to a proxy for each broker.

    Args:
        address: the address of the real name server, "host:port".
        seed: the seed of the random generators.

    Attributes:
        front: the proxy of the name server.
    """

    def __init__(self, address: str, *, seed: int = 0) -> None:
        self._seed = seed
        self._proxies: dict[str, FaultProxy] = {}
        self._lock = threading.Lock()
        self.front = FaultProxy(address, seed=seed)
        self.front.on_route(self._to_proxies)

    def __enter__(self) -> FaultProxies:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name_server(self) -> str:
        """The address for the option nameServer."""
        return self.front.address

    def of(self, address: str) -> FaultProxy:
        """Return the proxy of the broker at this address; make one if there is none."""
        with self._lock:
            if address not in self._proxies:
                self._proxies[address] = FaultProxy(address, seed=self._seed)
            return self._proxies[address]

    def close(self) -> None:
        self.front.close()
        with self._lock:
            for proxy in self._proxies.values():
                proxy.close()

    def _to_proxies(self, answer: Frame) -> Frame:
        route = decode_route(bytes(answer.body or b""))
        brokers = tuple(
            replace(
                broker, addresses={n: self.of(at).address for n, at in broker.addresses.items()}
            )
            for broker in route.brokers
        )
        return replace(answer, body=encode_route(replace(route, brokers=brokers)))
