"""Which links can be read or written: a selector, and a way to end its wait from outside."""

from __future__ import annotations

import contextlib
import selectors
import socket
from typing import Final

from rocket_sink.net.link import Link

READ: Final = selectors.EVENT_READ
WRITE: Final = selectors.EVENT_WRITE


class Readiness:
    """A selector over the links' sockets; `wake` may be called from any thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, READ, None)

    def watch(self, link: Link, interest: int) -> None:
        """Begin with a link, or change what is waited for."""
        link.interest = interest
        number = link.transport.fileno()
        if number in self._selector.get_map():
            self._selector.modify(number, interest, link)
        else:
            self._selector.register(number, interest, link)

    def forget(self, link: Link) -> None:
        number = link.transport.fileno()
        if number in self._selector.get_map():
            self._selector.unregister(number)

    def wait(self, timeout_s: float) -> list[tuple[Link, int]]:
        ready = []
        for key, mask in self._selector.select(timeout_s):
            if key.data is None:
                self._wake_read.recv(4096)
            else:
                ready.append((key.data, mask))
        return ready

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"w")

    def close(self) -> None:
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
