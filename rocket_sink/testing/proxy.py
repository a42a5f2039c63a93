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

`on_send`, `on` and `FaultProxies` read frames, and so need connections without TLS.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.testing.script import Behaviour, Script, is_send, perform, stores
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.frame import FrameReader, encode_frame
from rocket_sink.wire.headers import DEFAULT_LIMITS, Frame, response_to
from rocket_sink.wire.route import decode_route, encode_route

_LENGTH = 4


@dataclass(frozen=True)
class Piece:
    """Bytes to forward; `frame` is set if the bytes are one readable frame."""

    data: bytes
    frame: Frame | None = None


class Cutter:
    """Cuts one direction of a connection into pieces."""

    def __init__(self) -> None:
        self._prefix = b""
        """Forwarded bytes of the next frame's length field."""
        self._remaining = 0
        """Number of bytes that a partly forwarded frame lacks."""
        self._buffer = bytearray()
        """The incomplete frame that is held back."""

    def cut(self, data: bytes, *, whole: bool) -> Iterator[Piece]:
        """Yield the pieces to forward now.

        With `whole`, hold back each frame, from the next one on, until it is complete. Later calls
        must then set `whole`, too. A stream without frames (TLS) is forwarded unchanged.
        """
        while data:
            if self._remaining:
                piece, data = data[: self._remaining], data[self._remaining :]
                self._remaining -= len(piece)
                yield Piece(piece)
            elif whole and not self._prefix:
                self._buffer += data
                data = yield from self._frames()
            else:
                missing = _LENGTH - len(self._prefix)
                piece, data = data[:missing], data[missing:]
                self._prefix += piece
                if len(self._prefix) == _LENGTH:
                    self._remaining, self._prefix = int.from_bytes(self._prefix, "big"), b""
                yield Piece(piece)

    def _frames(self) -> Generator[Piece, None, bytes]:
        buffer = self._buffer
        while len(buffer) >= _LENGTH:
            size = _LENGTH + int.from_bytes(buffer[:_LENGTH], "big")
            if size > DEFAULT_LIMITS.frame_bytes:
                self._remaining, remainder = size, bytes(buffer)
                buffer.clear()
                return remainder
            if len(buffer) < size:
                break
            data = bytes(buffer[:size])
            del buffer[:size]
            yield Piece(data, _read(data))
        return b""


def _read(data: bytes) -> Frame | None:
    reader = FrameReader()
    with contextlib.suppress(RemoteProtocolError):
        reader.receive_data(data)
        frame = reader.next_frame()
        return frame if isinstance(frame, Frame) else None
    return None


Direction = Literal["request", "answer"]
_RESET = b"\x01\0\0\0\0\0\0\0"


class FaultProxy:
    """Forwards a free loopback port to `address` ("host:port"); the module has an example.

    Args:
        seed: the seed of the random generator of `on_send`.

    Attributes:
        delay_ms: the delay of each piece of data in each direction.
        bytes_per_s: the limit of each direction of each connection; 0: no limit.
    """

    def __init__(self, address: str, *, seed: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay_ms = 0.0
        self.bytes_per_s = 0.0
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = False
        self._closed = False
        self._budgets: dict[Direction, int | None] = {"request": None, "answer": None}
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.script = Script(seed)
        self._scripted = False
        self.change_route: Callable[[Frame], Frame] | None = None
        threading.Thread(target=self._accept, daemon=True, name="fault-proxy").start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for tests --------------------------------------------------------------------------

    def on_send(self, behaviour: Behaviour, *, times: int | None = 1, chance: float = 1.0) -> None:
        """Apply a behaviour to the next `times` sends (None: all), each with this chance.

        A request is not forwarded if the behaviour has `stores=False` (the default of Answer).
        Otherwise the request is forwarded, and only the answer is changed.
        """
        self.script.add(behaviour, matches=is_send, times=times, chance=chance)
        self._scripted = True

    def on(self, code: int, behaviour: Behaviour, *, times: int | None = 1) -> None:
        """Apply a behaviour to the next `times` requests of this code."""
        self.script.add(behaviour, matches=lambda frame: frame.code == code, times=times)
        self._scripted = True

    def on_route(self, change: Callable[[Frame], Frame]) -> None:
        """Forward `change(answer)` for each answer to a route query."""
        self.change_route = change
        self._scripted = True

    def behave(self) -> None:
        """Remove the behaviours of `on_send` and `on`."""
        self.script.clear()

    def freeze(self) -> None:
        """Hold all bytes in both directions, until `thaw`."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def refuse(self) -> None:
        """Reset all connections, and new ones until `accept`."""
        self._refusing = True
        self.reset()

    def accept(self) -> None:
        self._refusing = False

    def cut_after(self, count: int, direction: Direction = "request") -> None:
        """Reset all connections after `count` more bytes in this direction."""
        with self._lock:
            self._budgets[direction] = count

    def reset(self) -> None:
        """Reset all open connections."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for sock in sockets:
            _reset(sock)

    def close(self) -> None:
        self._closed = True
        self._flowing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    # --- forwarding -------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._refusing:
                    raise ConnectionRefusedError
                server = socket.create_connection(self._target, timeout=5)
                server.settimeout(None)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            connection = _Connection(client, server, self)
            for source, sink, direction in (
                (client, server, "request"), (server, client, "answer"),
            ):  # fmt: skip
                threading.Thread(
                    target=self._forward_all,
                    args=(connection, source, sink, direction),
                    daemon=True,
                ).start()

    def _forward_all(
        self,
        connection: _Connection,
        source: socket.socket,
        sink: socket.socket,
        direction: Direction,
    ) -> None:
        cutter = Cutter()
        handle = connection.on_request if direction == "request" else connection.on_answer
        try:
            while data := source.recv(1 << 16):
                self._flowing.wait()
                if self.delay_ms:
                    time.sleep(self.delay_ms / 1000)
                if self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                for piece in cutter.cut(data, whole=self._scripted):
                    if piece.frame is None or not handle(piece.frame):
                        self._forward(connection, sink, piece.data, direction)
        except OSError:
            pass
        for sock in (source, sink):
            with self._lock:
                self._sockets.discard(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _forward(
        self, connection: _Connection, sink: socket.socket, data: bytes, direction: Direction
    ) -> None:
        allowed = self._allowed(len(data), direction)
        if direction == "answer":
            connection.send(data[:allowed])
        else:
            sink.sendall(data[:allowed])
        if allowed < len(data):
            self.reset()
            raise ConnectionResetError

    def _allowed(self, size: int, direction: Direction) -> int:
        with self._lock:
            budget = self._budgets[direction]
            if budget is None:
                return size
            self._budgets[direction] = None if size > budget else budget - size
            return min(size, budget)


class _Connection:
    """A connection through the proxy. It keeps {opaque id: behaviour of the answer}."""

    def __init__(self, client: socket.socket, server: socket.socket, proxy: FaultProxy) -> None:
        self._client, self._server, self._proxy = client, server, proxy
        self._sending = threading.Lock()
        self._planned: dict[int, Behaviour] = {}
        self._routes: set[int] = set()

    def on_request(self, request: Frame) -> bool:
        """Apply the behaviours to a request; return True if the request must not be forwarded."""
        if request.is_response:
            return False
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            self._routes.add(request.opaque)
        behaviour = self._proxy.script.decide(request)
        if behaviour is None:
            return False
        if not stores(behaviour):
            perform(self, behaviour, response_to(request, ResponseCode.SYSTEM_ERROR))
            return True
        if not request.is_oneway:
            self._planned[request.opaque] = behaviour
        return False

    def on_answer(self, answer: Frame) -> bool:
        """Apply the behaviours to an answer; return True if the answer must not be forwarded."""
        if not answer.is_response:
            return False
        behaviour = self._planned.pop(answer.opaque, None)
        if behaviour is not None:
            perform(self, behaviour, answer)
            return True
        routed = answer.opaque in self._routes
        self._routes.discard(answer.opaque)
        change = self._proxy.change_route
        if routed and change is not None and answer.code == ResponseCode.SUCCESS:
            self.send(encode_frame(change(answer)))
            return True
        return False

    # --- for `perform` ------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        with self._sending:
            self._client.sendall(data)

    def drip(self, data: bytes, seconds_per_byte: float) -> None:
        with self._sending:
            for at in range(len(data)):
                self._client.sendall(data[at : at + 1])
                time.sleep(seconds_per_byte)

    def reset(self) -> None:
        for sock in (self._client, self._server):
            _reset(sock)

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        def late() -> None:
            with contextlib.suppress(OSError):
                function()

        timer = threading.Timer(seconds, late)
        timer.daemon = True
        timer.start()


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


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
