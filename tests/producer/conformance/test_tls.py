"""C66 on real brokers: Netty's side of the handshake, with client certificates and without."""

from pathlib import Path

import pytest

from rocket_sink.cluster import LocalCluster
from rocket_sink.cluster.tls import make_certificates
from rocket_sink.errors import NotSentError, SendError, TlsError, TlsRefusedError
from rocket_sink.message import Message
from rocket_sink.producer.producer import Producer
from tests.net.test_transport import IP, authority
from tests.tls_relay import TlsRelay

assert authority  # The name is a fixture.

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def requiring():
    """Yield a cluster with optional TLS; TLS requires a client certificate."""
    with LocalCluster(brokers=1, tls="permissive", tls_client_auth="require") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def enforcing():
    with LocalCluster(brokers=1, tls="enforcing", tls_client_auth="optional") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """Return certificates of an untrusted authority."""
    return make_certificates(tmp_path_factory.mktemp("strangers"))


def send(cluster, **options):
    with Producer(nameServer=cluster.name_server, sendMsgTimeout=5000, **options) as producer:
        return producer.send(Message("tls", b"x")).status


def verified(cluster, **more):
    return {"tlsMode": "verify-full", "tlsCa": cluster.tls_ca, **more}


def mutual(cluster, **more):
    cert, key = cluster.tls_client
    return verified(cluster, tlsCert=cert, tlsKey=key, **more)


def test_c66_both_verify_each_other(requiring, enforcing):
    for cluster in (requiring, enforcing):
        assert send(cluster, **mutual(cluster)) == "SEND_OK"
        assert send(cluster, **mutual(cluster, tlsServerName="localhost")) == "SEND_OK"


def test_c66_without_a_client_certificate(requiring, enforcing):
    assert send(enforcing, **verified(enforcing)) == "SEND_OK"
    with pytest.raises(NotSentError, match="tlsCert"):
        send(requiring, **verified(requiring))


def test_c66_with_a_client_certificate_of_another_authority(requiring, strangers):
    more = {"tlsCert": strangers.client_cert, "tlsKey": strangers.client_key}
    with pytest.raises(NotSentError, match="tlsCert"):
        send(requiring, **verified(requiring, **more))


def test_c66_a_server_certificate_of_another_authority(requiring, strangers):
    with pytest.raises(SendError, match="tlsCa"):
        send(requiring, **mutual(requiring) | {"tlsCa": strangers.ca})
    assert send(requiring, **mutual(requiring) | {"tlsMode": "insecure"}) == "SEND_OK"


def test_c66_a_certificate_of_another_name(requiring):
    options = mutual(requiring, tlsServerName="broker.example")
    with pytest.raises(SendError, match="tlsServerName"):
        send(requiring, **options)
    assert send(requiring, **options | {"tlsMode": "verify-ca"}) == "SEND_OK"


def test_c66_plain_text_where_it_may_be_and_where_not(requiring, enforcing):
    assert send(requiring) == "SEND_OK"
    with pytest.raises(SendError, match="speaks TLS only, set tlsMode"):
        send(enforcing)


def test_c66_tls_to_brokers_without(real):
    with pytest.raises((TlsError, SendError), match="tlsMode=off"):
        send(real, tlsMode="insecure")


@pytest.mark.parametrize(
    ("case", "named"), [("wrong CA", "tlsCa"), ("no client certificate", "tlsCert")]
)
def test_a_refusal_by_the_brokers_only_is_fatal_at_once(
    requiring, authority, closing, tmp_path, case, named
):
    """The name server's certificate is a trusted one, so only Netty's handshake fails."""
    relay = closing(TlsRelay(requiring.name_server, authority.server("ns", IP)))
    trusted = authority.file.read_text()
    if case == "no client certificate":
        trusted += Path(requiring.tls_ca).read_text()
    (tmp_path / "trusted.pem").write_text(trusted)
    options = {"tlsMode": "verify-full", "tlsCa": tmp_path / "trusted.pem"}
    with Producer(nameServer=relay.address, sendMsgTimeout=60_000, **options) as producer:
        for _ in range(5):
            with pytest.raises(TlsRefusedError, match=named) as caught:
                producer.send(Message("tls", b"x"))
            assert caught.value.attempts == 1
        assert producer.isolations() == []
