"""C58 and C63 on brokers with ACL: 4.9 (aclEnable, code 1) and 5.3 (authentication, code 16).

The modes run on both generations on the way: what is signed wrongly in one of them is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from rocket_sink.cluster import LocalCluster
from rocket_sink.errors import AuthenticationError, BrokerTooOldError
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.admin.stored_messages import StoredMessages, read_topic
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.producer import Producer
from rocket_sink.producer.transactions import COMMIT, ROLLBACK
from rocket_sink.wire.acl import Credentials
from tests.clusters import make_topic
from tests.producer.waiting import until

pytestmark = pytest.mark.cluster


@dataclass(frozen=True)
class Keys:
    access_key: str = "RocketMQ"
    secret_key: str = "1234-of-tests"

    def options(self) -> dict[str, str]:
        return {"accessKey": self.access_key, "secretKey": self.secret_key}


KEYS = Keys()


@pytest.fixture(scope="module", params=["4.9.7", "5.3.3"])
def guarded(request) -> Iterator[LocalCluster]:
    with LocalCluster(brokers=1, version=request.param, acl=KEYS) as cluster:
        make_topic(cluster, "orders")
        yield cluster


def found(cluster, topic="orders"):
    return list(read_topic(cluster.name_server, topic, **KEYS.options()))


def test_c63_every_mode_is_signed_as_the_broker_reckons(guarded):
    with Producer(nameServer=guarded.name_server, autoBatch=True, **KEYS.options()) as producer:
        producer.send(
            Message("orders", b"sync", tags="t", keys=["k"], properties={"中": "文 \U0001f680"})
        )
        producer.send(Message("orders", b"z" * 10_000))
        producer.send_oneway(Message("orders", b"oneway"))
        producer.send_batch([Message("orders", b"b0"), Message("orders", b"b1")])
        gathered = [producer.send_async(Message("orders", b"g%d" % n)) for n in range(20)]
        assert {future.result(20).status for future in gathered} == {"SEND_OK"}
        for state in (COMMIT, ROLLBACK):
            body = state.name.encode()
            ended = producer.send_in_transaction(Message("orders", body), lambda m, a, s=state: s)
            assert ended.ended, ended.end_error
        producer.send(Message("orders", b"level", delay_level=1))
    wanted = Counter([b"sync", b"z" * 10_000, b"oneway", b"b0", b"b1", b"COMMIT", b"level"])
    wanted.update(b"g%d" % n for n in range(20))
    until(lambda: Counter(m.body for m in found(guarded)) == wanted, 30.0)


def test_messages_are_found_by_id_and_key(guarded):
    """The fields of these requests are signed as brokers of both generations check them."""
    options = SinkOptions.parse(nameServer=guarded.name_server, **KEYS.options())
    with Producer(options) as producer:
        sent = producer.send(Message("orders", b"by id", keys=["sought"]))
    with Admin(options) as admin:
        until(lambda: admin.query_by_unique_key("orders", sent.message_id), 30.0)
        until(lambda: admin.query_by_key("orders", "sought"), 30.0)
    engine = SendEngine(options)
    stored = StoredMessages(engine, since_ms=0)
    assert stored.find("orders", [sent.message_id, "none"], timed=False) == {sent.message_id}
    engine.close()


def test_timed_messages_go_to_new_brokers_only(guarded):
    with Producer(nameServer=guarded.name_server, **KEYS.options()) as producer:
        message = Message("orders", b"timed", delay_ms=60_000)
        if guarded.version.startswith("5."):
            assert producer.send(message).recall_handle
            return
        for send in (producer.send, producer.send_oneway):
            with pytest.raises(BrokerTooOldError, match=r"4\.9\.7"):
                send(message)
    assert all(m.body != b"timed" for m in found(guarded))


@pytest.mark.parametrize(
    "stranger",
    [None, replace(KEYS, access_key="nobody"), replace(KEYS, secret_key="wrong-secret")],
    ids=["no credentials", "unknown user", "wrong secret"],
)
def test_c58_c63_wrong_credentials_are_refused_at_the_first_attempt(guarded, stranger):
    options = stranger.options() if stranger else {}
    before = len(found(guarded))
    with Producer(nameServer=guarded.name_server, **options) as producer:
        with pytest.raises(AuthenticationError) as caught:
            producer.send(Message("orders", b"stranger"))
        assert caught.value.attempts == 1
        assert caught.value.response_code == (1 if guarded.version.startswith("4.") else 16)
        with pytest.raises(AuthenticationError):
            producer.send_async(Message("orders", b"stranger")).result(20)
        assert "secret" not in str(caught.value)
        assert stranger is None or stranger.access_key not in str(caught.value)
    assert len(found(guarded)) == before


def test_c63_a_callable_gives_the_right_ones_after_a_refusal(guarded):
    given = [Credentials(KEYS.access_key, "old"), Credentials(KEYS.access_key, KEYS.secret_key)]
    with Producer(nameServer=guarded.name_server, credentials=lambda: given.pop(0)) as producer:
        assert producer.send(Message("orders", b"rotated")).status == "SEND_OK"
    assert given == []
