"""Addresses, TLS with each way to refuse a certificate, and connects that go nowhere."""

import contextlib
import datetime
import ipaddress
import socket
import ssl
import struct
import threading

import pytest

from rocket_sink import errors
from rocket_sink.message import Message
from rocket_sink.net.client import READ, UNREAD_ANSWERS_BYTES, WRITE, NetworkClient, invoke
from rocket_sink.net.resolve import KEEP_S, Resolver
from rocket_sink.net.transport import StreamState, Transport
from rocket_sink.options import SinkOptions
from rocket_sink.producer.producer import Producer
from rocket_sink.testing import FakeCluster
from rocket_sink.testing.broker import FakeBroker
from rocket_sink.wire.frame import FrameReader, encode_frame
from rocket_sink.wire.headers import Frame, response_to

x509 = pytest.importorskip("cryptography.x509")
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


class Authority:
    """A CA that writes server certificates."""

    def __init__(self, folder, name):
        folder.mkdir(exist_ok=True)
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

    def server(self, label, *names, until=None, password=None):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, label)])
        certificate = self._certificate(subject, key, until or NOW + DAY, names=names)
        cert_file, key_file = self.folder / f"{label}.crt", self.folder / f"{label}.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        encryption = serialization.NoEncryption()
        if password:
            encryption = serialization.BestAvailableEncryption(password.encode())
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        key_file.write_bytes(key.private_bytes(*form, encryption))
        return cert_file, key_file


class Echo:
    """A server that answers every request with code 0 and the request's body."""

    def __init__(self, context=None):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._context = context
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer):
        reader = FrameReader()
        try:
            if self._context is not None:
                peer = handshaken(self._context, peer)
            while data := peer.recv(65_536):
                reader.receive_data(data)
                while (frame := reader.next_frame()) is not None:
                    peer.sendall(encode_frame(response_to(frame, 0, body=frame.body)))
        except (OSError, errors.RemoteProtocolError):
            pass
        finally:
            peer.close()

    def close(self):
        self._listener.close()


def handshaken(context, peer):
    wrapped = context.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
    try:
        wrapped.do_handshake()
    except OSError:
        # If the socket were closed with bytes unread, the kernel would send RST and drop the alert.
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
def serve(closing):
    def start(files=None, prepare=None):
        context = server_context(files) if files else None
        if prepare is not None:
            prepare(context)
        return closing(Echo(context)).address

    return start


def server_context(files):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context


def ask(address, body=b"hello", **options):
    client = NetworkClient(SinkOptions.parse(nameServer=address, **options))
    with contextlib.closing(client):
        return bytes(invoke(client, address, Frame(1, None, body), 5.0).body)


IP = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


class Names:
    """The system's resolver with test names; look-ups of slow.example end when `go` is set."""

    def __init__(self, monkeypatch):
        self.known = {"broker.example": "127.0.0.1", "slow.example": "127.0.0.1"}
        self.asked = []
        self.go = threading.Event()
        self._system = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host, port, *args, flags=0, **more):
        if flags & socket.AI_NUMERICHOST or not host.endswith(".example"):
            return self._system(host, port, *args, flags=flags, **more)
        self.asked.append(host)
        if host == "slow.example":
            self.go.wait(30)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        addresses = self.known[host].split()
        return [self._system(address, port, *args, **more)[0] for address in addresses]


@pytest.fixture
def names(monkeypatch):
    resolver = Names(monkeypatch)
    yield resolver
    resolver.go.set()


@pytest.fixture
def client(names, closing):
    return closing(NetworkClient(SinkOptions.parse(nameServer="unused:1")))


class Asked:
    """The owner of one request: it keeps the result."""

    def __init__(self, client, address, deadline_s=5.0):
        self.client, self.end = client, None
        now_s = client.clock()
        frame = Frame(1, None, b"hello")
        client.call(address, frame, self, deadline_s=now_s + deadline_s, now_s=now_s)

    def on_end(self, result, sent_s, now_s):
        self.end = bytes(result.body) if isinstance(result, Frame) else result

    def wait(self):
        while self.end is None:
            self.client.poll(1.0)
        return self.end


def test_answers_that_a_peer_does_not_read_are_dropped(serve, client, caplog, monkeypatch):
    """A stopped broker whose requests are in the kernel's buffers, or an unfriendly peer."""
    address = serve()
    assert Asked(client, address).wait() == b"hello"
    channel = client.peek(address)
    write, channel.transport.write = channel.transport.write, lambda buffers: 0
    asked = Asked(client, address, deadline_s=60)
    monkeypatch.setattr("rocket_sink.net.client.UNREAD_ANSWERS_BYTES", 150_000)
    for _ in range(1500):
        client.respond(channel, Frame(9), 3, "x" * 100)
    assert 150_000 <= channel.write_queue.size <= 151_000 < UNREAD_ANSWERS_BYTES <= 1 << 20
    assert "code 9 gets none" in caplog.text and channel.interest == READ | WRITE
    channel.transport.write = write
    assert asked.wait() == b"hello", "requests of our own still go"
    assert channel.interest == READ
    assert (channel.write_queue.size, channel.write_queue.unowned_bytes) == (0, 0)
    client.respond(channel, Frame(9), 3)
    assert channel.write_queue, "a peer that reads again gets answers again"


def test_a_spurious_event_does_not_open_a_connecting_socket(serve, client, holes):
    """The connection counted as open: connect time-out and next address did not apply any more."""
    port = serve().rpartition(":")[2]
    holes(port)
    channel = client.channel(f"127.0.0.2:{port}", client.clock())
    for mask in (WRITE, READ, READ | WRITE):
        client.process([(channel, mask)])
        assert channel.transport.state is StreamState.CONNECTING and not client.opened
    asked = Asked(client, f"127.0.0.2:{port}", deadline_s=60)
    channel.connect_deadline_s = client.clock()
    assert isinstance(asked.wait(), errors.ConnectError)


def named(address, host):
    return f"{host}:{address.rpartition(':')[2]}"


def test_a_slow_look_up_does_not_delay_others(serve, names, client):
    address = serve()
    slow = [Asked(client, named(address, "slow.example")) for _ in range(3)]
    assert Asked(client, address).wait() == b"hello"
    assert [call.end for call in slow] == [None] * 3
    client.prepare(0.0)
    names.go.set()
    assert client.wait(30.0)  # Without the wake-up the result would be empty, after 30 s.
    assert [call.wait() for call in slow] == [b"hello"] * 3
    assert names.asked == ["slow.example"]


def test_an_unknown_name_is_an_error_with_its_option(names, client):
    error = Asked(client, "nobody.example:9876").wait()
    assert type(error) is errors.UnknownHostError and isinstance(error, errors.ConnectError)
    assert error.host == "nobody.example" and error.address == "nobody.example:9876"
    assert "nameServer" in error.text and "brokerIP1" in error.text


def test_a_name_is_looked_up_again_when_it_leads_nowhere(serve, names, client):
    address = serve()
    assert Asked(client, named(address, "broker.example")).wait() == b"hello"
    gone = named("x:1", "broker.example")
    for number in (1, 2):
        error = Asked(client, gone).wait()
        assert isinstance(error, errors.ConnectError) and gone in error.text
        assert names.asked == ["broker.example"] * (1 + number)


def test_an_answer_of_the_resolver_serves_for_a_short_time(names):
    now_s = [0.0]
    woken = threading.Event()
    resolver = Resolver(woken.set, lambda: now_s[0])
    first = resolver.look_up("broker.example", 1)
    assert woken.wait(10) and first.done
    now_s[0] = KEEP_S - 0.1
    assert resolver.look_up("broker.example", 1) is first
    now_s[0] = KEEP_S
    assert resolver.look_up("broker.example", 1) is not first
    hanging = resolver.look_up("slow.example", 1)
    now_s[0] += 2 * KEEP_S
    assert resolver.look_up("slow.example", 1) is hanging
    failed = resolver.look_up("nobody.example", 1)
    while not failed.done:
        woken.wait(0.01)
    assert resolver.look_up("nobody.example", 1) is not failed


@pytest.fixture
def holes(closing):
    """Return a function that makes an address that answers no SYN, like a firewall that drops them:
    its backlog is full."""

    def dig(port):
        listener = closing(socket.create_server(("127.0.0.2", int(port)), backlog=0))
        with contextlib.suppress(OSError):
            while True:
                filling = closing(socket.socket())
                filling.settimeout(0.2)
                filling.connect(listener.getsockname())

    return dig


@pytest.fixture
def mutes(closing):
    """Return a function that makes an address that accepts connections and sends nothing, like a
    balancer without a server."""

    def listen(port, host):
        listener = closing(socket.create_server((host, int(port)), backlog=50))
        listener.settimeout(20)
        return listener

    return listen


def test_a_request_in_flight_does_not_hide_that_its_address_is_mute(
    serve, names, client, mutes, closing
):
    """A heartbeat kept the connection for 3 s, so each attempt of a send got the same address."""
    address = named(serve(), "three.example")
    names.known["three.example"] = "127.0.0.2 127.0.0.3 127.0.0.1"
    port = address.rpartition(":")[2]
    for mute in [mutes(port, host) for host in ("127.0.0.2", "127.0.0.3")]:
        heartbeat = Asked(client, address, deadline_s=60)
        assert isinstance(Asked(client, address, deadline_s=0.3).wait(), errors.SendError)
        assert heartbeat.end is None
        closing(mute.accept()[0])
    assert Asked(client, address, deadline_s=60).wait() == b"hello"


def test_the_second_address_is_tried_when_the_first_ends_no_handshake(
    authority, serve, names, mutes
):
    address = named(serve(authority.server("two", x509.DNSName("two.example"))), "two.example")
    names.known["two.example"] = "127.0.0.2 127.0.0.1"
    mute = mutes(address.rpartition(":")[2], "127.0.0.2")
    assert ask(address, tlsMode="verify-full", tlsCa=authority.file) == b"hello"
    mute.accept()[0].close()


def test_name_servers_and_brokers_have_names_with_a_silent_address(names, holes, monkeypatch):
    names.known["two.example"] = "127.0.0.2 127.0.0.1"
    with FakeCluster(brokers=1) as cluster:
        server, broker = cluster.name_server, cluster.brokers[0].address
        for address in (server, broker):
            holes(address.rpartition(":")[2])
        monkeypatch.setattr(FakeBroker, "address", named(broker, "two.example"))
        with Producer(nameServer=named(server, "two.example")) as producer:
            assert producer.send(Message("orders", b"x")).status == "SEND_OK"


@pytest.mark.parametrize("literal", ["127.0.0.1", "::1"])
def test_a_literal_address_needs_no_look_up(names, literal):
    lookup = Resolver(lambda: None, float).look_up(literal, 1)
    assert lookup.done and lookup.targets


@pytest.mark.parametrize("size", [1, 16_384, 16_385, 3_000_000])
def test_tls_verified_by_address(authority, serve, size):
    address = serve(authority.server("ip", IP))
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert ask(address, body, tlsMode="verify-full", tlsCa=authority.file) == body


def test_tls_with_another_name_is_refused_and_the_option_is_named(authority, serve):
    address = serve(authority.server("other", x509.DNSName("broker.example")))
    with pytest.raises(errors.TlsError, match="tlsServerName"):
        ask(address, tlsMode="verify-full", tlsCa=authority.file)
    for mode in ({"tlsServerName": "broker.example"}, {"tlsMode": "verify-ca"}):
        options = {"tlsMode": "verify-full", "tlsCa": authority.file, **mode}
        assert ask(address, **options) == b"hello"


@pytest.mark.parametrize("name", [".example.com", "a..b", "a" * 64])
def test_a_name_that_no_certificate_has_is_refused(authority, serve, name):
    with pytest.raises(errors.TlsRefusedError, match="tlsServerName") as error:
        ask(serve(), tlsMode="verify-full", tlsCa=authority.file, tlsServerName=name)
    assert error.value.address


def close_at_once(peer):
    pass


def close_after_reading(peer):
    peer.recv(65_536)


def reset_after_reading(peer):
    peer.recv(65_536)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def greet(peer):
    """Write before the client does, as SSH and SMTP servers do."""
    peer.sendall(b"SSH-2.0-OpenSSH\r\n")
    linger(peer)


def answer(data, stays=True):
    """Return an act: read, answer with these bytes, and stay until the client leaves, or close."""

    def act(peer):
        peer.recv(65_536)
        peer.sendall(data)
        if stays:
            linger(peer)

    return act


def linger(peer):
    peer.settimeout(10)
    while peer.recv(65_536):
        pass


class Plain(Echo):
    """A server without TLS that runs `act` on each connection and closes it."""

    def __init__(self, act):
        self._act = act
        super().__init__()

    def _serve(self, peer):
        with peer, contextlib.suppress(OSError):
            self._act(peer)


@pytest.fixture
def plain(closing):
    return lambda act: closing(Plain(act)).address


ENDS = [close_at_once, close_after_reading, reset_after_reading]
ROCKETMQ = encode_frame(response_to(Frame(105, {}), 1, remark="decode error"))
OLD_SSL = b"\x16\x02\0\0\4none"
ANSWERS = [
    greet, answer(b"HTTP/1.1 400 Bad Request\r\n\r\n"), answer(ROCKETMQ), answer(OLD_SSL),
    answer(b"\0", stays=False),
]  # fmt: skip


@pytest.mark.parametrize("act", ENDS + ANSWERS)
def test_tls_to_a_plain_server(plain, act):
    """An answer without TLS is final, and a connection that ends may be a restart."""
    with pytest.raises(errors.TlsError, match="tlsMode=off") as caught:
        ask(plain(act), tlsMode="insecure")
    assert caught.value.fatal == (act in ANSWERS)
    assert isinstance(caught.value, errors.TlsRefusedError) == caught.value.fatal
    assert act in ENDS or "does not speak TLS" in caught.value.text


def test_a_tls_server_that_closes_in_the_middle_is_none_without_tls(plain):
    with pytest.raises(errors.TlsError, match="client certificate") as caught:
        ask(plain(answer(b"\x16\x03\x03\x00\x7a\x02", stays=False)), tlsMode="insecure")
    assert "tlsMode=off" not in str(caught.value) and not caught.value.fatal


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x15\x03\x03\0\2\2\x46", "answers with TLS; set tlsMode"),
        (b"\x16\x03\x03\0\x7a\2\0\0", "answers with TLS; set tlsMode"),
        (b"HTTP", "does not speak RocketMQ's protocol"),
    ],
)
def test_a_plain_request_is_told_what_answered(plain, data, words):
    with pytest.raises(errors.SendError, match=words):
        ask(plain(answer(data)))


@pytest.mark.parametrize("options", [("tlsCa",), ("tlsCert", "tlsKey")])
def test_a_missing_file_is_an_option_error(serve, options):
    with pytest.raises(errors.OptionError, match=f"{options[0]}.* /nowhere") as caught:
        ask(serve(), tlsMode="verify-full", **dict.fromkeys(options, "/nowhere/file.pem"))
    assert caught.value.facts["option"] == options[0]


@pytest.mark.parametrize("bad", ["host:x", "host:" + "1" * 5000])
def test_bad_addresses(bad):
    with pytest.raises(errors.ConnectError, match="of the form host:port"):
        Transport(bad, None, None)
