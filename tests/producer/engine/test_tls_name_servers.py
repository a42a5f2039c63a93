"""Name servers with untrusted certificates: an error after one attempt for each address."""

import contextlib
import itertools
import shutil

import pytest

from rocket_sink.errors import NameServerUnavailableError, TlsError
from rocket_sink.message import Message
from rocket_sink.producer.producer import Producer
from tests.net.test_transport import IP, Authority, Echo, authority, server_context

assert authority  # The name is a fixture.


class Handshakes(Echo):
    """A TLS server that counts connections; no handshake succeeds."""

    def __init__(self, files, before=list):
        self.count = 0
        self._before = before
        super().__init__(server_context(files))

    def _serve(self, peer):
        self.count += 1
        self._before()
        with peer, contextlib.suppress(OSError):
            self._context.wrap_socket(peer, server_side=True).close()


@pytest.fixture
def serve(authority, closing):
    numbers = itertools.count()

    def start(*names, before=list):
        return closing(Handshakes(authority.server(f"s{next(numbers)}", *names), before))

    return start


def send(servers, ca, **options):
    options["nameServer"] = ";".join(getattr(server, "address", server) for server in servers)
    # The deadline is far: a test that waits for it fails by its own time-out.
    with Producer(tlsMode="verify-full", tlsCa=str(ca), **options) as producer:
        producer.send(Message("orders", b"x"))


@pytest.mark.timeout(60)
def test_each_name_server_is_tried_once_and_the_reason_reported(authority, serve):
    servers = [serve(), serve()]  # The certificates have no name.
    with pytest.raises(TlsError, match="tlsServerName") as caught:
        send(servers, authority.file, sendMsgTimeout=600_000)
    assert [server.count for server in servers] == [1, 1]
    assert all(server.address in str(caught.value) for server in servers)


@pytest.mark.timeout(60)
def test_an_untrusted_issuer_is_reported_by_every_request(serve, tmp_path):
    stranger, server = Authority(tmp_path / "bad", "bad-ca"), serve(IP)
    options = {"tlsMode": "verify-full", "tlsCa": str(stranger.file), "sendMsgTimeout": 600_000}
    with Producer(nameServer=server.address, **options) as producer:
        for ask in (
            lambda: producer.send(Message("orders", b"x")),
            lambda: producer.send_oneway(Message("orders", b"x")),
            lambda: producer.send_async(Message("orders", b"x")).result(),
            lambda: producer.fetch_publish_message_queues("orders"),
        ):
            with pytest.raises(TlsError, match="tlsCa"):
                ask()


def test_another_kind_of_failure_may_pass_and_is_tried_again(authority, serve):
    server = serve()
    with pytest.raises(NameServerUnavailableError, match="tlsServerName"):
        send([server, "127.0.0.1:1"], authority.file, sendMsgTimeout=2000)
    assert server.count > 1


def test_a_file_that_is_half_written_meanwhile_ends_nothing(serve, tmp_path):
    ca = tmp_path / "ca.pem"
    shutil.copy(Authority(tmp_path / "bad", "bad-ca").file, ca)
    server = serve(IP, before=lambda: ca.write_text("-----BEGIN CERT"))
    with pytest.raises(NameServerUnavailableError, match="option tlsCa"):
        send([server], ca, sendMsgTimeout=2000)
