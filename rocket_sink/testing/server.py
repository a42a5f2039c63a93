"""A thread that serves scripted ports. All handlers run in this thread, so they need no locks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.frame import FrameReader
from rocket_sink.wire.headers import Frame

_RESET: Final = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with time 0, with which `close` sends RST."""
_CALL_TIMEOUT_S: Final = 10.0
_TURNS: Final = 5
"""Turns of the loop in which asyncio accepts a connection, or closes one; and one more."""


class Connection:
    """A connection to a client, to which `perform` sends; only for the loop's thread."""

    transport: asyncio.WriteTransport

    def __init__(self) -> None:
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
        while self._late and not self.transport.is_closing():
            data, seconds_per_byte = self._late.popleft()
            count = 1 if seconds_per_byte else len(data)
            self.write(data[:count])
            if len(data) > count:
                self._late.appendleft((data[count:], seconds_per_byte))
                self.after(seconds_per_byte, self._send_late)
                return

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def reset(self) -> None:
        reset(self.transport)

    def drop(self) -> None:
        """Close after sending."""
        self.transport.close()

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function later; serve other connections meanwhile."""
        asyncio.get_running_loop().call_later(seconds, function)


def reset(transport: asyncio.WriteTransport) -> None:
    """Close a connection with RST."""
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


class Peer(Connection, asyncio.Protocol):
    """An accepted connection."""

    def __init__(self, port: Port) -> None:
        super().__init__()
        self.port = port
        self._reader = FrameReader()
        self._outgoing = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.port.peers.add(self)
        if not self.port.is_open:
            self.reset()

    def connection_lost(self, error: Exception | None) -> None:
        self.port.peers.discard(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.receive_data(data)
            while self.port.reads and not self.transport.is_closing():
                frame = self._reader.next_frame()
                if frame is None:
                    return
                assert isinstance(frame, Frame)
                self.port.handler(self, frame)
        except RemoteProtocolError:
            self.drop()

    def write(self, data: bytes) -> None:
        self._outgoing += data
        self.flush()

    def flush(self) -> None:
        if self.port.writes:
            super().write(bytes(self._outgoing))
            self._outgoing.clear()


class Port:
    """A listening loopback port whose frames go to `handler`."""

    def __init__(self, loop: Loop, handler: Callable[[Peer, Frame], None]) -> None:
        self.loop = loop
        self.handler = handler
        self.peers: set[Peer] = set()
        self.reads = self.writes = True
        """Whether received frames are handled, and whether answers are sent."""
        self.number = 0
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.number}"

    async def open(self) -> None:
        """Listen, after `close` on the same port again. Idempotent."""
        if self._server is None:
            if not self.number:
                self.number = self.loop.reserve_port()
            self._server = await asyncio.get_running_loop().create_server(
                lambda: Peer(self), sock=_bound_socket(self.number)
            )

    def freeze(self, reads: bool = False) -> None:
        self.reads, self.writes = reads, False

    def thaw(self) -> None:
        """Handle the frames that came since `freeze`; send the answers of a connection together."""
        self.reads = True
        for peer in list(self.peers):
            peer.data_received(b"")  # handles the frames that the peer's reader has
        self.writes = True
        for peer in list(self.peers):
            peer.flush()

    def reset_peers(self) -> None:
        for peer in list(self.peers):
            peer.reset()

    def close(self) -> None:
        """Refuse connections and reset the open ones, as after kill -9."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reads = self.writes = True
        self.reset_peers()

    @property
    def is_open(self) -> bool:
        return self._server is not None


def _bound_socket(number: int = 0) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", number))
    return sock


class Loop:
    """The thread of scripted servers."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._reserved: list[socket.socket] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Coroutine[Any, Any, None] | None]) -> None:
        """Run `function` in the loop's thread once clients' connections so far are accepted. Wait
        for the function, and for the connections that it resets."""

        async def run() -> None:
            await _take_turns()
            if (coroutine := function()) is not None:
                await coroutine
            await _take_turns()

        if threading.current_thread() is self._thread:
            function()
        else:
            asyncio.run_coroutine_threadsafe(run(), self._loop).result(_CALL_TIMEOUT_S)

    def reserve_port(self) -> int:
        """Reserve a port until the loop stops; return it. A bound socket that does not listen keeps
        the port from other processes, and connections are refused while the server is down."""
        self._reserved.append(_bound_socket())
        return int(self._reserved[-1].getsockname()[1])

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and the tasks in it."""
        self.call(_cancel_tasks)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        for sock in self._reserved:
            sock.close()
        self._loop.close()


async def _take_turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
