"""A thread that serves many scripted ports: sockets, frames, timers.

All handlers run in this thread, so they need no locks.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.frame import NEED_DATA, FrameReader
from rocket_sink.wire.headers import Frame

_RESET: Final = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with time 0, with which `close` sends RST."""

Handler = Callable[["Peer", Frame], None]


class Peer:
    """An accepted connection."""

    def __init__(self, sock: socket.socket, port: Port) -> None:
        self.socket = sock
        self.port = port
        self.reader = FrameReader()
        self.outgoing = bytearray()
        self.closed = False
        self.holds_back = False
        """Whether `flush` waits, so that several answers are sent together."""
        self._late: deque[tuple[bytes, float]] = deque()
        """The queue of (bytes to send, seconds per byte). 0 seconds sends all bytes at once."""

    def send(self, data: bytes) -> None:
        self.drip(data, 0.0)

    def drip(self, data: bytes, seconds_per_byte: float) -> None:
        """Send bytes one by one; later answers wait for them."""
        self._late.append((data, seconds_per_byte))
        if len(self._late) == 1:
            self._send_late()

    def _send_late(self) -> None:
        while self._late and not self.closed:
            data, seconds_per_byte = self._late.popleft()
            count = 1 if seconds_per_byte else len(data)
            self.outgoing += data[:count]
            self.port.loop.flush(self)
            if len(data) > count:
                self._late.appendleft((data[count:], seconds_per_byte))
                self.after(seconds_per_byte, self._send_late)
                return

    def reset(self) -> None:
        self.port.loop.drop(self, reset=True)

    def drop(self) -> None:
        self.port.loop.drop(self)

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function later; only from the loop's thread."""
        self.port.loop.after(seconds, function)


class Port:
    """A listening loopback port whose frames go to `handler`."""

    def __init__(self, loop: Loop, handler: Handler) -> None:
        self.loop = loop
        self.handler = handler
        self.peers: set[Peer] = set()
        self.frozen = False
        self.number = 0
        self._listener: socket.socket | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.number}"

    def open(self) -> None:
        """Listen, after `close` on the same port again. Idempotent."""
        if self.is_open:
            return
        if not self.number:
            self.number = self.loop.reserve_port()
        listener = _bound_socket(self.number)
        listener.listen(128)
        listener.setblocking(False)
        self._listener = listener
        self.loop.watch(listener, self)

    def reset_peers(self) -> None:
        for peer in list(self.peers):
            peer.reset()

    def close(self) -> None:
        """Refuse connections and reset the open ones, as after kill -9."""
        if self._listener is not None:
            self.loop.forget(self._listener)
            self._listener = None
        self.frozen = False
        self.reset_peers()

    @property
    def is_open(self) -> bool:
        return self._listener is not None


def _bound_socket(number: int = 0) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", number))
    return sock


class Loop:
    """The thread of scripted servers."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._posted: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._reserved: list[socket.socket] = []
        self._running = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Run `function` in the loop's thread and wait for it."""
        if threading.current_thread() is self._thread:
            function()
            return
        completion: Future[None] = Future()

        def posted() -> None:
            try:
                function()
            except Exception as error:
                completion.set_exception(error)
            else:
                completion.set_result(None)

        with self._lock:
            self._posted.append(posted)
        self._wake_write.send(b"x")
        if not wait([completion], timeout=10).done:
            raise TimeoutError("the scripted servers' thread does not answer")
        completion.result()

    def reserve_port(self) -> int:
        """Reserve a port until the loop stops, and return its number.

        A socket is bound to the port and does not listen. So no other process gets the port while
        its server is down, and connections are refused.
        """
        self._reserved.append(_bound_socket())
        return int(self._reserved[-1].getsockname()[1])

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Run `function` in `seconds`; only from the loop's thread."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), function))

    def watch(self, listener: socket.socket, port: Port) -> None:
        self._selector.register(listener, selectors.EVENT_READ, port)

    def forget(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()

    def drop(self, peer: Peer, *, reset: bool = False) -> None:
        if peer.closed:
            return
        peer.closed = True
        peer.port.peers.discard(peer)
        if reset:
            with contextlib.suppress(OSError):
                peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.forget(peer.socket)

    def thaw(self, port: Port) -> None:
        """Handle the frames that came while the port was frozen; send the answers together."""
        port.frozen = False
        for peer in list(port.peers):
            peer.holds_back = True
            self._frames(peer)
            peer.holds_back = False
            self.flush(peer)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self.call(lambda: setattr(self, "_running", False))
        self._thread.join(10)
        for sock in (self._wake_read, self._wake_write, *self._reserved):
            sock.close()
        self._selector.close()

    def _run(self) -> None:
        while self._running:
            wait_s = None
            if self._timers:
                wait_s = max(0.0, self._timers[0][0] - time.monotonic())
            for key, events in self._selector.select(wait_s):
                self._ready(key, events)
            self._run_due()

    def _run_due(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
        for function in posted:
            function()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _ready(self, key: selectors.SelectorKey, events: int) -> None:
        owner = key.data
        if owner is None:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        elif isinstance(owner, Port):
            self._accept(key.fileobj, owner)  # type: ignore[arg-type]
        else:
            if events & selectors.EVENT_WRITE:
                self.flush(owner)
            if events & selectors.EVENT_READ and not owner.closed:
                self._receive(owner)

    def _accept(self, listener: socket.socket, port: Port) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(sock, port)
            port.peers.add(peer)
            self._selector.register(sock, selectors.EVENT_READ, peer)

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(peer)
            return
        try:
            peer.reader.receive_data(data)
            self._frames(peer)
        except RemoteProtocolError:
            self.drop(peer)

    def _frames(self, peer: Peer) -> None:
        while not peer.closed and not peer.port.frozen:
            frame = peer.reader.next_frame()
            if frame is NEED_DATA:
                return
            assert isinstance(frame, Frame)
            peer.port.handler(peer, frame)

    def flush(self, peer: Peer) -> None:
        if peer.closed or peer.port.frozen or peer.holds_back:
            return
        try:
            while peer.outgoing:
                sent = peer.socket.send(peer.outgoing)
                del peer.outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        self._selector.modify(peer.socket, events, peer)
