"""A TCP proxy with faults, to put before a real broker or name server.

with FaultProxy("127.0.0.1:10911") as proxy:
    proxy.delay_ms = 200            # each way
    proxy.freeze(); proxy.thaw()    # bytes are taken in and kept back
    proxy.cut_after(100)            # RST after 100 more bytes towards the server
    proxy.refuse()                  # no new connections, the open ones are reset
    proxy.on_send(Answer(2, "busy"), times=3)   # and all else that scripted brokers do

What is said with `on_send` and `on` needs connections without TLS: it reads the frames.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Literal

from rocket_sink.testing.perform import perform, stores
from rocket_sink.testing.proxy_frames import Cutter
from rocket_sink.testing.script import Behaviour, Script, is_send
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.command import Frame, response_to
from rocket_sink.wire.frame import encode_frame

Direction = Literal["request", "answer"]
_RESET = b"\x01\0\0\0\0\0\0\0"


class FaultProxy:
    """Forwards `address` ("host:port") from a free loopback port; see the module.

    Args:
        seed: of every chance that `on_send` takes.

    Attributes:
        delay_ms: added to each piece of data in each direction.
        bytes_per_s: throttles each direction of each connection; 0: not.
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

    # --- what a test says -------------------------------------------------------------------

    def on_send(self, behaviour: Behaviour, *, times: int | None = 1, chance: float = 1.0) -> None:
        """Treat the next `times` sends (None: all) like this, each with this chance.

        With `stores=False` (the default of Answer) the request does not reach the server, else
        the server has it, and only its answer is changed.
        """
        self.script.add(behaviour, matches=is_send, times=times, chance=chance)
        self._scripted = True

    def on(self, code: int, behaviour: Behaviour, *, times: int | None = 1) -> None:
        """Treat the next `times` requests of this code like this."""
        self.script.add(behaviour, matches=lambda frame: frame.code == code, times=times)
        self._scripted = True

    def on_route(self, change: Callable[[Frame], Frame]) -> None:
        """Pass answers to route queries on as `change` makes them."""
        self.change_route = change
        self._scripted = True

    def behave(self) -> None:
        """Forget what was said with `on_send` and `on`."""
        self.script.clear()

    def freeze(self) -> None:
        """Let nothing pass in either direction; nothing is lost."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def refuse(self) -> None:
        """Reset every connection, the new ones too, until `accept`."""
        self._refusing = True
        self.reset()

    def accept(self) -> None:
        self._refusing = False

    def cut_after(self, count: int, direction: Direction = "request") -> None:
        """Reset all connections once `count` more bytes went in that direction."""
        with self._lock:
            self._budgets[direction] = count

    def reset(self) -> None:
        """Reset every open connection."""
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

    # --- passing on -------------------------------------------------------------------------

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
            line = _Line(client, server, self)
            for source, sink, direction in (
                (client, server, "request"), (server, client, "answer"),
            ):  # fmt: skip
                threading.Thread(
                    target=self._pass_on, args=(line, source, sink, direction), daemon=True
                ).start()

    def _pass_on(
        self, line: _Line, source: socket.socket, sink: socket.socket, direction: Direction
    ) -> None:
        cutter = Cutter()
        treat = line.requested if direction == "request" else line.answered
        try:
            while data := source.recv(1 << 16):
                self._flowing.wait()
                if self.delay_ms:
                    time.sleep(self.delay_ms / 1000)
                if self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                for piece in cutter.cut(data, whole=self._scripted):
                    if piece.frame is None or not treat(piece.frame):
                        self._forward(line, sink, piece.data, direction)
        except OSError:
            pass
        for sock in (source, sink):
            with self._lock:
                self._sockets.discard(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _forward(self, line: _Line, sink: socket.socket, data: bytes, direction: Direction) -> None:
        allowed = self._allowed(len(data), direction)
        if direction == "answer":
            line.send(data[:allowed])
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


class _Line:
    """One connection through the proxy, and what is to be done with its answers by opaque id."""

    def __init__(self, client: socket.socket, server: socket.socket, proxy: FaultProxy) -> None:
        self._client, self._server, self._proxy = client, server, proxy
        self._sending = threading.Lock()
        self._planned: dict[int, Behaviour] = {}
        self._routes: set[int] = set()

    def requested(self, request: Frame) -> bool:
        """True: the request ends here."""
        if request.is_response:
            return False
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            self._routes.add(request.opaque)
        behaviour = self._proxy.script.decide(request)
        if behaviour is None:
            return False
        if not stores(behaviour):
            perform(self, behaviour, _refusal(request))
            return True
        if not request.is_oneway:
            self._planned[request.opaque] = behaviour
        return False

    def answered(self, answer: Frame) -> bool:
        """True: something else was done than to pass the answer on."""
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

    # --- the line that `perform` acts on ------------------------------------------------------

    def send(self, data: bytes) -> None:
        with self._sending:
            self._client.sendall(data)

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


def _refusal(request: Frame) -> Frame:
    return response_to(request, ResponseCode.SYSTEM_ERROR)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
