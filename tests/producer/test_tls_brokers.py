"""Untrusted certificates of brokers or of the client: fatal, for every lane.

The name server's certificate is good, so that the failure is the brokers' alone.
"""

import shutil
import ssl

import pytest

from rocket_sink.errors import TlsRefusedError
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.transport.files import sealed_files
from rocket_sink.ledger.transport.stream import read_batches
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.producer import Producer
from rocket_sink.wire.codes import RequestCode
from tests.net.test_transport import DAY, IP, NOW, Authority, authority
from tests.producer.waiting import until
from tests.task.one_task import run_task
from tests.tls_relay import TlsFront

assert authority  # The name is a fixture.

pytestmark = pytest.mark.timeout(60)
NAMED = {
    "wrong CA": "tlsCa", "expired": "has expired", "wrong host": "tlsServerName",
    "no client certificate": "tlsCert", "client certificate of a stranger": "tlsCert",
}  # fmt: skip
"""The faults, and the word by which the error names each."""


@pytest.fixture
def front(cluster, authority, tmp_path, closing):
    """Return a function that makes the relays for a fault and returns the client's options."""
    stranger = Authority(tmp_path / "bad", "bad-ca")

    def files(wrong, name):
        if name == "name server":
            return authority.server("ns", IP)
        if wrong == "wrong CA":
            return stranger.server(name, IP)
        if wrong == "expired":
            return authority.server(name, IP, until=NOW - DAY)
        return authority.server(name) if wrong == "wrong host" else authority.server(name, IP)

    def start(wrong, version=ssl.TLSVersion.TLSv1_3):
        def prepare(context):
            context.maximum_version = version
            if "client certificate" in wrong:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(authority.file)

        relay = closing(TlsFront(cluster, lambda name: files(wrong, name), prepare))
        options = {
            "nameServer": relay.name_server, "tlsMode": "verify-full",
            "tlsCa": str(authority.file),
        }  # fmt: skip
        if wrong == "client certificate of a stranger":
            cert, key = stranger.server("client")
            options |= {"tlsCert": str(cert), "tlsKey": str(key)}
        return relay, options

    return start


@pytest.mark.parametrize("wrong", NAMED)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_one_attempt_and_no_isolation(front, wrong, version):
    relays, options = front(wrong, version)
    # The deadline is far: a test that waits for it fails by its own time-out.
    with Producer(**options, sendMsgTimeout=600_000) as producer:
        with pytest.raises(TlsRefusedError, match=NAMED[wrong]):
            producer.send(Message("orders", b"x"))
        assert sum(relays.connections) == 1
        ways = [
            lambda: producer.send_async(Message("orders", b"x")).result(60),
            lambda: producer.send_batch([Message("orders", b"x"), Message("orders", b"y")]),
            lambda: producer.send(Message("orders", b"x", delay_ms=1000)),
        ]
        if "client" not in wrong:
            ways.append(lambda: producer.send_oneway(Message("orders", b"x")))
        for send in ways:
            with pytest.raises(TlsRefusedError, match=NAMED[wrong]):
                send()
        assert producer.isolations() == []


@pytest.mark.parametrize("wrong", NAMED)
@pytest.mark.parametrize("ordering", ["none", "strict"])
def test_a_spark_task_fails_and_no_row_is_a_dead_letter(
    front, cluster, wrong, ordering, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    _, options = front(wrong)
    place = resolve_path(str(tmp_path / "ledger"))
    parsed = SinkOptions.parse(**options, topic="orders", ledger=place.uri, ordering=ordering)
    rows = {"body": [b"%d" % n for n in range(50)], "sharding_key": [f"k{n}" for n in range(50)]}
    with pytest.raises(TlsRefusedError, match=NAMED[wrong]):
        run_task(parsed, RunContext("q", "r", 3, 0, 1, 7, 0, worker="w:1", lane="foreach"), rows)
    assert "dead_letter" not in _kinds(place)
    assert cluster.messages("orders") == []


def _kinds(place):
    files, kinds = place.filesystem(), set()
    for file in sealed_files(place, files):
        for batch in read_batches(file.path, files):
            kinds.update(batch["kind"].to_pylist())
    return kinds


def test_a_producer_goes_on_when_the_files_are_right_again(front, cluster, authority, tmp_path):
    """The heartbeats go on as well: a fatal error ends sends, not the client."""
    relays, options = front("wrong host")
    ca = tmp_path / "ca.pem"
    shutil.copy(Authority(tmp_path / "other", "other-ca").file, ca)
    options |= {"tlsCa": str(ca), "tlsMode": "verify-ca"}
    with Producer(**options, sendMsgTimeout=5000, heartbeatBrokerInterval=300) as producer:
        with pytest.raises(TlsRefusedError, match="tlsCa"):
            producer.send(Message("orders", b"x"))
        assert relays.connections == [0, 0]
        shutil.copy(authority.file, ca)
        # Routes are asked for once a second.
        until(lambda: _is_stored(producer), 30.0)
        beats = len(cluster.requests(RequestCode.HEART_BEAT))
        until(lambda: len(cluster.requests(RequestCode.HEART_BEAT)) > beats + 2, 30.0)


def _is_stored(producer):
    try:
        return producer.send(Message("orders", b"x")).outcome.delivered
    except TlsRefusedError:
        return False
