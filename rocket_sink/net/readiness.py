"""Which links can go on: a selector, names looked up, and a way to end the wait from outside."""

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
        """Raises OSError when there are no descriptors left."""
        self._selector = selectors.DefaultSelector()
        self._unresolved: dict[Link, None] = {}
        """Without a socket yet; whoever looks their names up wakes the wait."""
        try:
            self._wake_read, self._wake_write = socket.socketpair()
        except OSError:
            self._selector.close()
            raise
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, READ, None)

    def watch(self, link: Link, interest: int) -> None:
        """Begin with a link, or change what is waited for."""
        link.interest = interest
        number = link.transport.fileno()
        if number < 0:
            self._unresolved[link] = None
        elif number in self._selector.get_map():
            self._selector.modify(number, interest, link)
        else:
            self._selector.register(number, interest, link)

    def forget(self, link: Link) -> None:
        self._unresolved.pop(link, None)
        number = link.transport.fileno()
        if number >= 0 and number in self._selector.get_map():
            self._selector.unregister(number)

    def wait(self, timeout_s: float) -> list[tuple[Link, int]]:
        ready = []
        for key, mask in self._selector.select(timeout_s):
            if key.data is None:
                self._wake_read.recv(4096)
            else:
                ready.append((key.data, mask))
        if self._unresolved:
            ready += [(link, WRITE) for link in self._unresolved if link.transport.resolved]
        return ready

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"w")

    def close(self) -> None:
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
