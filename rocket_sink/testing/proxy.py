"""A TCP proxy with faults, to put before a real broker or name server.

with FaultProxy("127.0.0.1:10911") as proxy:
    proxy.delay_ms = 200            # each way
    proxy.freeze(); proxy.thaw()    # bytes are taken in and kept back
    proxy.cut_after(100)            # RST after 100 more bytes towards the server
    proxy.refuse()                  # no new connections, the open ones are reset
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Literal

Direction = Literal["request", "answer"]


class FaultProxy:
    """Forwards `address` ("host:port") from a free loopback port; see the module.

    Attributes:
        delay_ms: added to each piece of data in each direction.
        bytes_per_s: throttles each direction of each connection; 0: not.
    """

    def __init__(self, address: str) -> None:
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
        threading.Thread(target=self._accept, daemon=True, name="fault-proxy").start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        self._closed = True
        self._flowing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

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
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            for source, sink, direction in (
                (client, server, "request"), (server, client, "answer"),
            ):  # fmt: skip
                threading.Thread(
                    target=self._pass_on, args=(source, sink, direction), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        try:
            while data := source.recv(1 << 16):
                self._flowing.wait()
                if self.delay_ms:
                    time.sleep(self.delay_ms / 1000)
                if self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                allowed = self._allowed(len(data), direction)
                sink.sendall(data[:allowed])
                if allowed < len(data):
                    self.reset()
                    return
        except OSError:
            pass
        for sock in (source, sink):
            with self._lock:
                self._sockets.discard(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _allowed(self, size: int, direction: Direction) -> int:
        with self._lock:
            budget = self._budgets[direction]
            if budget is None:
                return size
            self._budgets[direction] = None if size > budget else budget - size
            return min(size, budget)
