"""Addresses, TLS with each way to refuse a certificate, and connects that go nowhere."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from pathlib import Path

import pytest

from rocket_sink.errors import ConnectError, OptionError, RemoteProtocolError, TlsError
from rocket_sink.net.pump import Pump
from rocket_sink.net.rpc import invoke
from rocket_sink.net.transport import parse_address
from rocket_sink.options import SinkOptions
from rocket_sink.wire.command import Frame, response_to
from rocket_sink.wire.frame import NEED_DATA, FrameReader, encode_frame

x509 = pytest.importorskip("cryptography.x509")
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


class Authority:
    """A CA that writes server certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        certificate = self._certificate(self.name, self.key, NOW + DAY, ca=True)
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _certificate(self, name, key, until, *, ca=False, names=()):
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 3 * DAY)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def server(self, label, *names, until=None, password=None) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, label)])
        certificate = self._certificate(subject, key, until or NOW + DAY, names=names)
        cert_file, key_file = self.folder / f"{label}.crt", self.folder / f"{label}.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(password.encode())
                if password
                else serialization.NoEncryption(),
            )
        )
        return cert_file, key_file


class Echo:
    """A server that answers every request with code 0 and the request's body."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._context = context
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        reader = FrameReader()
        try:
            if self._context is not None:
                peer = _handshaken(self._context, peer)
            while data := peer.recv(65_536):
                reader.receive_data(data)
                while (frame := reader.next_frame()) is not NEED_DATA:
                    peer.sendall(encode_frame(response_to(frame, 0, body=frame.body)))
        except (OSError, RemoteProtocolError):
            pass
        finally:
            peer.close()

    def close(self) -> None:
        self._listener.close()


def _handshaken(context, peer):
    wrapped = context.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
    try:
        wrapped.do_handshake()
    except OSError:
        # Closed with bytes unread, the kernel would send RST and take the alert away again.
        plain = socket.socket(fileno=wrapped.detach())
        with plain:
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(65_536):
                pass
        raise
    return wrapped


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "good-ca")


@pytest.fixture
def serve():
    servers = []

    def start(files=None, prepare=None, **more):
        context = None
        if files is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*files)
            for name, value in more.items():
                setattr(context, name, value)
            if prepare is not None:
                prepare(context)
        servers.append(Echo(context))
        return servers[-1].address

    yield start
    for server in servers:
        server.close()


def ask(address, body=b"hello", **options):
    pump = Pump(SinkOptions.parse(nameServer=address, **options))
    try:
        return bytes(invoke(pump, address, Frame(1, None, body), 5.0).body)
    finally:
        pump.close()


IP = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


def test_plain(serve):
    assert ask(serve()) == b"hello"


def test_names_are_resolved(serve):
    port = serve().rpartition(":")[2]
    assert ask(f"localhost:{port}") == b"hello"


@pytest.mark.parametrize("size", [1, 16_384, 16_385, 3_000_000])
def test_tls_verified_by_address(authority, serve, size):
    address = serve(authority.server("ip", IP))
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert ask(address, body, tlsMode="verify-full", tlsCa=authority.file) == body


def test_tls_with_another_name_is_refused_and_the_option_is_named(authority, serve):
    address = serve(authority.server("other", x509.DNSName("broker.example")))
    with pytest.raises(TlsError, match="tlsServerName"):
        ask(address, tlsMode="verify-full", tlsCa=authority.file)
    for mode in ({"tlsServerName": "broker.example"}, {"tlsMode": "verify-ca"}):
        options = {"tlsMode": "verify-full", "tlsCa": authority.file, **mode}
        assert ask(address, **options) == b"hello"


def test_tls_of_an_unknown_authority(authority, serve, tmp_path):
    other = Authority(tmp_path, "other-ca")
    address = serve(other.server("ip", IP))
    for mode in ("verify-full", "verify-ca"):
        with pytest.raises(TlsError, match="tlsCa"):
            ask(address, tlsMode=mode, tlsCa=authority.file)
    assert ask(address, tlsMode="insecure") == b"hello"


def test_tls_expired(authority, serve):
    address = serve(authority.server("old", IP, until=NOW - DAY))
    with pytest.raises(TlsError, match="expired"):
        ask(address, tlsMode="verify-full", tlsCa=authority.file)


def test_tls_to_a_plain_server(serve):
    with pytest.raises(TlsError, match="tlsMode=off"):
        ask(serve(), tlsMode="insecure")


def test_plain_to_a_tls_server_says_so(authority, serve):
    address = serve(authority.server("ip", IP))
    with pytest.raises(Exception, match=r"tlsMode|peer closed|reset") as caught:
        ask(address)
    assert caught.value.code in ("CONNECTION_LOST", "UNWRITTEN")


def test_a_missing_ca_file_is_an_option_error(serve):
    with pytest.raises(OptionError, match="tlsCa"):
        ask(serve(), tlsMode="verify-full", tlsCa="/nowhere/ca.pem")


def test_connection_refused_names_the_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ConnectError, match=address):
        ask(address)


def test_a_connect_has_a_deadline(monkeypatch):
    """A port whose backlog is full answers no SYN."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        with pytest.raises(ConnectError, match="too long"):
            ask(address, connectTimeoutMs=200)
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize("bad", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_bad_addresses(bad):
    with pytest.raises(ConnectError):
        parse_address(bad)


def test_good_addresses():
    assert parse_address("h:1") == ("h", 1)
    assert parse_address("[::1]:9876") == ("::1", 9876)
