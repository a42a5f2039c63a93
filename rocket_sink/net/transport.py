"""A non-blocking byte stream to `host:port`: connect, TLS, read, gathered write.

This module converts exceptions of sockets and TLS: failures to connect become ConnectError,
UnknownHostError or TlsError; failures of an open stream become `StreamEnded`."""

from __future__ import annotations

import contextlib
import enum
import errno
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final

from rocket_sink.errors import (
    ConnectError,
    LocalResourcesError,
    OptionError,
    TlsError,
    TlsRefusedError,
    UnknownHostError,
)
from rocket_sink.message_rules import host_and_port
from rocket_sink.net import tls
from rocket_sink.net.resolve import Resolver
from rocket_sink.net.tls import TlsStream

READ_BYTES: Final = 65_536
GATHER_BUFFERS: Final = 1000
"""Limit of buffers in one sendmsg; IOV_MAX is 1024 on Linux and macOS."""
GATHER_BYTES: Final = 1 << 20
USER_TIMEOUT_MS: Final = 10_000
"""TCP_USER_TIMEOUT (Linux): the kernel closes a connection whose peer acknowledges nothing for this
time. It does not detect a frozen process, because the kernel of its host acknowledges."""
_USER_TIMEOUT: Final[int | None] = getattr(socket, "TCP_USER_TIMEOUT", None)
PATIENCE_S: Final = 0.25
"""Time after which the next address is tried (Connection Attempt Delay, RFC 8305)."""
_ONLY_TLS: Final = "; it has sent nothing: if it speaks TLS only, set tlsMode"
_NO_RESOURCES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class StreamState(enum.Enum):
    RESOLVING = "resolving"
    CONNECTING = "connecting"
    HANDSHAKING = "handshaking"
    OPEN = "open"
    CLOSED = "closed"


class StreamEnded(Exception):
    """The end of an open stream; the text is the reason."""


class Targets:
    """The addresses of a host, in the order in which to try them. After the last one, those that
    were silent come again, with twice the patience."""

    def __init__(self, host: str, port: int, resolver: Resolver) -> None:
        self.host, self.port = host, port
        self._resolver = resolver
        self.look_up = resolver.look_up(host, port)
        self.current: Any = None
        self._untried: list[Any] = []
        self._silent: list[Any] = []
        self._patience_s = PATIENCE_S
        self._since_s: float | None = None
        """Time at which `is_silent` was first called for the current target."""

    def begin(self) -> None:
        """Take the addresses that the look-up has found."""
        self._untried = self._resolver.in_order(self.host, self.port, self.look_up.targets)

    def next(self) -> Any:
        """Return the next target; None after the last one."""
        self._since_s = None
        if not self._untried:
            self._untried, self._silent = self._silent, []
            self._patience_s *= 2
        self.current = self._untried.pop(0) if self._untried else None
        return self.current

    def is_silent(self, now_s: float) -> bool:
        """Return whether to try another address: the current one has been silent for too long."""
        if not (self._untried or self._silent):
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= self._patience_s

    def skip(self) -> None:
        """Try the current target again after the others."""
        self._silent.append(self.current)

    def note(self, *, works: bool) -> None:
        """Tell the resolver whether this address works: it puts failed addresses last."""
        if self.current is not None and len(self.look_up.targets) > 1:
            self._resolver.note(self.host, self.port, self.current[4], works=works)

    def forget(self) -> None:
        self._resolver.forget(self.host, self.port)


class Transport:
    """A TCP or TLS stream. To open it, call `advance` once its `look_up` is done, and then whenever
    the socket is ready. If an address does not answer within `PATIENCE_S`, `advance(skip=True)`
    tries the next one of `targets`."""

    def __init__(self, address: str, security: tls.Security | None, resolver: Resolver) -> None:
        """Begin to connect. Raises ConnectError if the address is malformed or unknown, or
        connecting failed at once."""
        self.address = address
        self.state = StreamState.RESOLVING
        self.wants_write = True
        self.unsent = False
        """Whether encrypted bytes are not written yet (TLS)."""
        parts = host_and_port(address)
        if parts is None:
            text = f"{address!r} is not an address of the form host:port"
            raise ConnectError(text, address=address)
        self._security = security
        self._heard = False
        self._failure: OSError | None = None
        self._socket: Any = None
        self._tls: TlsStream | None = None
        self._stream: Any = None
        """The socket, or TLS over it."""
        self._context: ssl.SSLContext | None = None
        self.full_read = READ_BYTES if security is None else 0
        """A `read` that returns fewer bytes has emptied the socket. 0 for TLS: a `read` returns at
        most one record."""
        self.targets = Targets(*parts, resolver)
        if self.targets.look_up.done:
            self._begin_connecting()

    def fileno(self) -> int:
        """The socket's descriptor; -1 before there is a socket."""
        return -1 if self._socket is None else int(self._socket.fileno())

    def advance(self, *, skip: bool = False) -> bool:
        """Continue to connect; return whether the stream is open. With `skip`, try the next
        address, because this one is silent. Raises ConnectError, UnknownHostError or TlsError."""
        if skip:
            self.targets.skip()
            self._leave_target()
            self.state, self._tls = StreamState.CONNECTING, None
            self.wants_write, self.unsent = True, False
            self._next_target()
            return False
        if self.state is StreamState.RESOLVING:
            if self.targets.look_up.done:
                self._begin_connecting()
            return False
        if self.state is StreamState.CONNECTING:
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._leave_target(code)
                self._next_target()
                return False
            if not self._is_connected():
                return False  # The event was not of this socket, or came too early.
            self._begin_stream()
        if self.state is StreamState.HANDSHAKING:
            self._handshake()
        return self.state is StreamState.OPEN

    def write(self, buffers: Sequence[Any]) -> int:
        """Write, and return the number of bytes taken: 0 if the kernel takes none. TLS takes at
        most one record per call, and nothing while the last record is partly `unsent`. Raises
        StreamEnded, or TlsError if the server refuses our certificate and has read no request."""
        try:
            count = int(self._stream.sendmsg(buffers))
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._read_alert()
            raise StreamEnded(f"writing failed: {_text(error)}") from error
        if self._tls is not None:
            self.unsent = self._tls.unsent
        return count

    def read(self, size: int = READ_BYTES) -> bytes | None:
        """Return at most `size` received bytes; None if there are none. Raises StreamEnded if the
        stream failed or the peer closed its side, and TlsError if the server refuses our
        certificate; the server has then read no request."""
        try:
            data: bytes = self._stream.recv(size)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            self._check_refusal(error)
            raise StreamEnded(f"reading failed: {_text(error)}{self._only_tls}") from error
        if not data:
            raise StreamEnded(f"the peer closed the connection{self._only_tls}")
        if not self._heard:
            self._heard = True
            self.targets.note(works=True)
        return data

    @property
    def _only_tls(self) -> str:
        # A RocketMQ server with tlsMode enforcing closes plain connections (HandshakeHandler).
        return "" if self._heard or self._tls is not None else _ONLY_TLS

    def _read_alert(self) -> None:
        """Read the server's TLS alert after a failed write, because it may give the reason."""
        if self._tls is None or self._heard:
            return
        try:
            self._tls.recv(1)
        except OSError as error:
            self._check_refusal(error)

    def _check_refusal(self, error: OSError) -> None:
        if not self._heard and tls.refuses_us(error):
            raise self._refusal_error(error) from error

    def _refusal_error(self, error: OSError) -> TlsError:
        assert self._security is not None and self._tls is not None
        why = tls.explain(error, self._server_name, answered=self._tls.answered)
        final = not self._security.reload(self._context) and tls.is_final(error)
        return (TlsRefusedError if final else TlsError)(
            f"TLS handshake with {self.address} failed: {why}", address=self.address
        )

    @property
    def readable_now(self) -> bool:
        """Whether TLS has bytes to read, even if the socket is not readable."""
        tls = self._tls
        return tls is not None and self.state is StreamState.OPEN and tls.readable_now

    def note_silence(self) -> None:
        """Tell the resolver that this address does not work if it has sent nothing."""
        if not self._heard and self.state is not StreamState.CLOSED:
            self.targets.note(works=False)

    def close(self) -> None:
        self.note_silence()
        self.state = StreamState.CLOSED
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()

    def timeout_error(self) -> ConnectError:
        """Return the error for a connect that took too long."""
        if self.state is StreamState.RESOLVING:
            return self._unknown_host("the name look-up took too long")
        self.targets.forget()
        step, hint = "connecting", ""
        if self.state is StreamState.HANDSHAKING:
            step = "TLS handshake"
            if self._tls is None or not self._tls.answered:
                hint = f"; the server has answered nothing: {tls.SILENT}"
        return ConnectError(
            f"{step} to {self.address} took too long (option connectTimeoutMs, or the share of "
            f"sendMsgTimeout){hint}",
            address=self.address,
        )

    def _begin_connecting(self) -> None:
        error = self.targets.look_up.error
        if error is not None:
            self.state = StreamState.CLOSED
            raise self._unknown_host(_text(error)) from error
        self.targets.begin()
        self.state = StreamState.CONNECTING
        self._next_target()

    def _unknown_host(self, why: str) -> UnknownHostError:
        return UnknownHostError(
            f"cannot resolve the host {self.targets.host!r}: {why}; it comes from the option "
            "nameServer, or from brokerIP1 in a broker's configuration",
            address=self.address, host=self.targets.host,
        )  # fmt: skip

    def _leave_target(self, code: int = 0) -> None:
        """Give up the present address. `code` is the errno of its failure."""
        if code:
            self._failure = OSError(code, errno.errorcode.get(code, ""))
        self._socket.close()
        self.targets.note(works=False)

    def _next_target(self) -> None:
        while (address := self.targets.next()) is not None:
            family, kind, protocol, _, target = address
            try:
                self._socket = _new_socket(family, kind, protocol)
            except OSError as error:
                self._failure = error
                if error.errno in _NO_RESOURCES:
                    self.state = StreamState.CLOSED
                    raise no_resources(f"connect to {self.address}", error, self.address) from error
                continue
            code = self._socket.connect_ex(target)
            if code in (0, errno.EINPROGRESS):
                return
            self._leave_target(code)
        self.state = StreamState.CLOSED
        self.targets.forget()
        raise ConnectError(
            f"cannot connect to {self.address}: {_text(self._failure)}", address=self.address
        ) from self._failure

    def _is_connected(self) -> bool:
        try:
            self._socket.getpeername()
        except OSError:
            return False
        return True

    def _begin_stream(self) -> None:
        if self._security is None:
            self.state, self._stream = StreamState.OPEN, self._socket
            return
        self.state = StreamState.HANDSHAKING
        try:
            self._context = self._security.context
        except OptionError as error:
            # The files may be incomplete while they are replaced, so this error is not final.
            raise TlsError(
                f"{error.text}; needed by {self.address}", address=self.address
            ) from error
        try:
            self._stream = self._tls = TlsStream(self._socket, self._context, self._server_name)
        except ValueError as error:
            raise TlsRefusedError(
                f"{self._server_name!r} cannot be a name in a certificate: {error}; it comes from "
                f"the option tlsServerName, or from the address {self.address}",
                address=self.address,
            ) from error

    @property
    def _server_name(self) -> str:
        assert self._security is not None
        return self._security.server_name or self.targets.host

    def _handshake(self) -> None:
        assert self._tls is not None
        try:
            done = self._tls.handshake()
        except OSError as error:
            raise self._refusal_error(error) from error
        self.wants_write = self.unsent = self._tls.unsent
        if done:
            self.state = StreamState.OPEN


def no_resources(what: str, error: OSError, address: str = "") -> LocalResourcesError:
    """Return the error of an operation that lacked descriptors or memory."""
    return LocalResourcesError(
        f"cannot {what}: {_text(error)}; this process has run out of descriptors or memory: close "
        "what it does not need, or raise its limits (ulimit -n)",
        address=address, errno=error.errno,
    )  # fmt: skip


def _new_socket(family: int, kind: int, protocol: int) -> socket.socket:
    new_socket = socket.socket(family, kind, protocol)
    try:
        new_socket.setblocking(False)
        new_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if _USER_TIMEOUT is not None:
            new_socket.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, USER_TIMEOUT_MS)
    except OSError:
        new_socket.close()
        raise
    return new_socket


def _text(error: OSError | None) -> str:
    if error is None:
        return "no address"
    return error.strerror or str(error) or type(error).__name__
