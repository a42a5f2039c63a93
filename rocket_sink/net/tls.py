"""TLS: contexts, the stream over a socket, and explanations of failed handshakes.

By default the certificate's chain and name are verified; Java's client verifies nothing
(TlsSystemConfig). The lowest version is TLS 1.2. There is no fallback to plain text."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from rocket_sink.errors import OptionError
from rocket_sink.option_spec import resolve_secret
from rocket_sink.options import SinkOptions


class Security:
    """The TLS context of the options. After a failed handshake its files are read again, because
    they may have been replaced."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._files = [path for path in (options.tls_ca, options.tls_cert, options.tls_key) if path]
        self.server_name = options.tls_server_name
        self._stamps = _stamps(self._files)
        self._context: ssl.SSLContext | None = _new_context(options)

    @property
    def context(self) -> ssl.SSLContext:
        if self._context is None:
            self._stamps = _stamps(self._files)
            self._context = _new_context(self._options)
        return self._context

    def reload(self, failed: ssl.SSLContext | None) -> bool:
        """Make the next handshake read the files again. `failed` is the context of the handshake
        that failed. Return whether the next handshake will use newer files than `failed` did, so
        that it may succeed."""
        if self._context is not None and self._context is not failed:
            return True
        self._context = None
        return _stamps(self._files) != self._stamps


def _new_context(options: SinkOptions) -> ssl.SSLContext:
    """Read the files, and return a new context. Raises OptionError if a file, or the source of the
    password, is missing or invalid."""
    try:
        context = ssl.create_default_context(cafile=options.tls_ca or None)
    except (OSError, ssl.SSLError) as error:
        raise OptionError(f"option tlsCa: {options.tls_ca}: {error}", option="tlsCa") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python 3.13 and later set this flag, and then refuse certificates without key identifiers.
    # RocketMQ's own instructions make such certificates; Java and older Pythons accept them.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if options.tls_mode != "verify-full":
        context.check_hostname = False
    if options.tls_mode == "insecure":
        context.verify_mode = ssl.CERT_NONE
    secret, cert, key = options.tls_key_password, options.tls_cert, options.tls_key
    if not cert:
        return context
    password = resolve_secret("tlsKeyPassword", secret).reveal() if secret else ""
    try:
        context.load_cert_chain(cert, key or None, password=lambda: password)
    except (OSError, ssl.SSLError) as error:
        raise OptionError(
            f"options tlsCert, tlsKey, tlsKeyPassword: cannot load {cert} and {key}: {error}",
            option="tlsCert",
        ) from error
    return context


def _stamps(paths: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Return the identity of each file's content; missing files are left out."""
    stamps: dict[str, tuple[int, int, int]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            state = Path(path).stat()
            stamps[path] = (state.st_mtime_ns, state.st_size, state.st_ino)
    return stamps


_NAME_MISMATCH: Final = {62, 64}  # X509_V_ERR_HOSTNAME_MISMATCH, IP_ADDRESS_MISMATCH
_VALIDITY: Final = {9: "is not valid yet", 10: "has expired"}
_UNTRUSTED: Final = {2, 18, 19, 20, 21}
"""OpenSSL's X509_V_ERR codes for a certificate whose issuer is missing, unknown or self-signed."""

_ABOUT_US: Final = {
    "UNKNOWN_CA": "the server does not trust our certificate (option tlsCert)",
    "BAD_CERTIFICATE": "the server refuses our certificate, or wants one (options tlsCert and "
    "tlsKey)",
    "UNSUPPORTED_CERTIFICATE": "the server does not take our kind of certificate (option tlsCert)",
    "CERTIFICATE_REVOKED": "our certificate has been revoked (option tlsCert)",
    "CERTIFICATE_EXPIRED": "our certificate has expired (option tlsCert)",
    "CERTIFICATE_UNKNOWN": "the server does not accept our certificate, or wants one (options "
    "tlsCert and tlsKey)",
    "CERTIFICATE_REQUIRED": "the server wants a client certificate (options tlsCert and tlsKey)",
    "ACCESS_DENIED": "the server denies access to our certificate (option tlsCert)",
}
"""{TLS alert about the client certificate (RFC 8446, 6.2): explanation}"""
_ABOUT_ALL: Final = {
    "HANDSHAKE_FAILURE": "the server refused the handshake; it may want a client certificate "
    "(options tlsCert and tlsKey)",
    "PROTOCOL_VERSION": "the server refuses TLS 1.2 and 1.3",
    "INSUFFICIENT_SECURITY": "the server wants stronger ciphers",
    "UNRECOGNIZED_NAME": "the server does not know the name that it was asked for (option "
    "tlsServerName)",
    "UNSUPPORTED_PROTOCOL": "the server only speaks TLS older than 1.2",
}
_REASONS: Final = _ABOUT_US | _ABOUT_ALL
SILENT: Final = "it may not speak TLS on this port (tlsMode=off)"


def refuses_us(error: OSError) -> bool:
    """Return whether the error is the server's alert about the client certificate. In TLS 1.3 the
    alert may come after the handshake and the first requests; the server has read none of them."""
    return _reason(error) in _ABOUT_US


def is_final(error: OSError) -> bool:
    """Return whether the error is final: a certificate or the protocol is refused. The end of a
    stream is not final, because the server may be restarting."""
    refused = isinstance(error, (ssl.SSLCertVerificationError, NoTlsError))
    return refused or _reason(error) in _REASONS


def explain(error: OSError, name: str, *, answered: bool) -> str:
    """Return the reason of a failed handshake with the server of this name. `answered` says whether
    the server has sent bytes."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate(error, name)
    if isinstance(error, NoTlsError):
        return "the server does not speak TLS on this port; set tlsMode=off or use its TLS port"
    reason = _reason(error)
    if reason in _REASONS:
        return _REASONS[reason]
    if not isinstance(error, ConnectionError):
        return reason or str(error)
    if not answered:
        return f"the server closed the connection without an answer; {SILENT}"
    return (
        "the server closed the connection during the handshake; it may want a client certificate "
        "(options tlsCert and tlsKey)"
    )


def _reason(error: OSError) -> str:
    """Return OpenSSL's reason; for an alert, only the alert's name."""
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return str(reason or "").rpartition("_ALERT_")[2]


def _certificate(error: ssl.SSLCertVerificationError, name: str) -> str:
    code = error.verify_code
    if code in _NAME_MISMATCH:
        return (
            f"the certificate does not name {name}; name servers hand out IP addresses: set "
            "tlsServerName to a name in the certificate, or tlsMode=verify-ca"
        )
    if code in _VALIDITY:
        return f"the certificate {_VALIDITY[code]}"
    if code in _UNTRUSTED:
        return (
            f"the certificate's issuer is not trusted ({error.verify_message}); "
            "set tlsCa to the issuer's certificate"
        )
    return f"the certificate is refused: {error.verify_message}"


RECORD_BYTES: Final = 16_384
"""Largest plaintext of a TLS record, and so of one `sendmsg`."""
_READ_BYTES: Final = 65_536
_HANDSHAKE, _ALERT = 22, 21
"""Possible content types of a server's first record (RFC 8446, 5.1)."""
_MAJOR: Final = 3
"""legacy_record_version is always 3.x."""


class NoTlsError(ConnectionError):
    """The peer's answer to the handshake is not TLS."""


class TlsStream:
    """TLS over a non-blocking socket: `handshake` until it is done, then `recv` and `sendmsg`."""

    def __init__(self, socket: Any, context: ssl.SSLContext, server_name: str) -> None:
        self._socket = socket
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._unsent = b""
        self.answered = False
        """Whether the peer has sent bytes."""
        self.readable_now = False
        """Whether `recv` may return bytes that were read from the socket before."""

    @property
    def unsent(self) -> bool:
        """Whether encrypted bytes are unwritten; `sendmsg` writes them first, even without data."""
        return bool(self._unsent)

    def handshake(self) -> bool:
        """Continue the handshake; return whether it is done. Raises NoTlsError if the answer is not
        TLS, ConnectionAbortedError if the peer closed, and OSError if the socket or TLS failed."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send()
            except OSError:
                # Send the alert.
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
        """Return at most `size` bytes; `b""` after the peer has closed its side. Raises
        BlockingIOError if nothing was received, and OSError if the socket or TLS failed."""
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
        """Encrypt and write at most one record; return the number of bytes taken. If the kernel
        does not take all encrypted bytes, the next call first writes the `unsent` rest. While some
        of it remains, calls take no new bytes. Raises OSError if the socket or TLS failed; the peer
        got none of this call's bytes."""
        if self._unsent and not self._send():
            return 0
        record = _first_bytes(buffers, RECORD_BYTES)
        if record:
            self._tls.write(record)
            self._send()
        return len(record)

    def _receive(self) -> bool:
        """Read from the socket; return False at the stream's end."""
        data = self._socket.recv(_READ_BYTES)
        if data and not self.answered:
            self.answered = True
            if data[0] not in (_HANDSHAKE, _ALERT) or data[1:2] not in (b"", bytes((_MAJOR,))):
                raise NoTlsError("the peer does not speak TLS")
        self.readable_now = bool(data)
        self._incoming.write(data)
        return bool(data)

    def _send(self) -> bool:
        """Write encrypted bytes; return whether the kernel took all."""
        self._unsent += self._outgoing.read()
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return False
        return True


def _first_bytes(buffers: Sequence[Any], limit: int) -> bytes:
    parts, remaining_bytes = [], limit
    for buffer in buffers:
        part = memoryview(buffer).cast("B")[:remaining_bytes]
        parts.append(part)
        remaining_bytes -= len(part)
        if not remaining_bytes:
            break
    return b"".join(parts)
