"""TLS over a non-blocking socket, with all that is read and written in our hands.

`ssl.SSLSocket` reads and writes by itself: what a server without TLS has answered is then known by
OpenSSL's words alone, which change with each release, and a record that the kernel has taken in
part counts as not written. Over memory (RFC 8446 records in, bytes out) both are seen.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence
from typing import Any, Final

RECORD_BYTES: Final = 16_384
"""The most that one record holds; so much of what is written is encrypted at a time."""
_READ_BYTES: Final = 65_536
_HANDSHAKE, _ALERT = 22, 21
"""ContentType of a record (RFC 8446, 5.1): a server's first is one of these."""
_MAJOR: Final = 3
"""legacy_record_version of all of them is 3.x."""


class NoTlsError(ConnectionError):
    """The peer answers the handshake with something else."""


class TlsStream:
    """`handshake` until it is done, then `recv` and `sendmsg` as of a socket."""

    def __init__(self, socket: Any, context: ssl.SSLContext, server_name: str) -> None:
        """Sends nothing yet."""
        self._socket = socket
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._unsent = b""
        self.answered = False
        """The peer has sent something."""
        self.readable_now = False
        """What was read from the socket may hold more for `recv`."""

    @property
    def unsent(self) -> bool:
        """Encrypted bytes wait for the kernel; `sendmsg`, of nothing too, goes on with them."""
        return bool(self._unsent)

    def handshake(self) -> bool:
        """Go on with it; True when it is done.

        Raises:
            NoTlsError: what came is no TLS.
            ConnectionAbortedError: the peer closed the connection.
            OSError: of the socket, or ssl.SSLError.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send()
            except OSError:
                # The alert that tells the peer.
                with contextlib.suppress(OSError):
                    self._send()
                raise
            else:
                self._send()
                self.readable_now = True
                return True
            try:
                if not self._receive():
                    raise ConnectionAbortedError("the peer closed the connection")
            except (BlockingIOError, InterruptedError):
                return False

    def recv(self, size: int) -> bytes:
        """At most so many bytes; none when the peer closed its side.

        Raises:
            BlockingIOError: nothing has arrived.
            OSError: of the socket, or ssl.SSLError.
        """
        while True:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                self.readable_now = False
            except ssl.SSLZeroReturnError:
                return b""
            if not self._receive():
                return b""

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        """Take at most one record of the buffers; the number of bytes taken.

        What is taken cannot be taken back: it goes to the kernel now or, while `unsent`, with the
        next calls, which take nothing before that.

        Raises:
            OSError: of the socket, or ssl.SSLError; of what this call took nothing has arrived.
        """
        if self._unsent and not self._send():
            return 0
        record = _first_bytes(buffers, RECORD_BYTES)
        if record:
            self._tls.write(record)
            self._send()
        return len(record)

    def _receive(self) -> bool:
        """Read from the socket; False at the stream's end."""
        data = self._socket.recv(_READ_BYTES)
        if data and not self.answered:
            self.answered = True
            if data[0] not in (_HANDSHAKE, _ALERT) or data[1:2] not in (b"", bytes((_MAJOR,))):
                raise NoTlsError("the peer does not speak TLS")
        self.readable_now = bool(data)
        self._incoming.write(data)
        return bool(data)

    def _send(self) -> bool:
        """Hand encrypted bytes to the kernel; True when it took all."""
        self._unsent += self._outgoing.read()
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return False
        return True


def _first_bytes(buffers: Sequence[Any], limit: int) -> bytes:
    parts, left = [], limit
    for buffer in buffers:
        part = memoryview(buffer).cast("B")[:left]
        parts.append(part)
        left -= len(part)
        if not left:
            break
    return b"".join(parts)
