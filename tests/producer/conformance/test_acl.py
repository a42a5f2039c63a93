"""C58 and C63 on brokers with ACL: 4.9 (aclEnable, code 1) and 5.3 (authentication, code 16).

The send modes run on both generations, because each of them refuses other mistakes in a signature.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from rocket_sink import errors
from rocket_sink.cluster import LocalCluster
from rocket_sink.cluster.conf import CLUSTER_NAME
from rocket_sink.commands.check import look
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.admin.stored_messages import StoredMessages
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.producer import Producer
from rocket_sink.producer.transactions import COMMIT, ROLLBACK
from rocket_sink.spark.checks.reach import check_rights
from rocket_sink.wire.acl import Credentials
from tests.clusters import make_topic, read_topic
from tests.producer.waiting import until

pytestmark = pytest.mark.cluster


@dataclass(frozen=True)
class Keys:
    access_key: str = "RocketMQ"
    secret_key: str = "1234-of-tests"

    def options(self):
        return {"accessKey": self.access_key, "secretKey": self.secret_key}


KEYS = Keys()


WRITER = Keys("publisher", "5678-of-tests")
"""A user with the right to publish to the topic `orders`, and no other right."""
_PACKAGE = "org.apache.rocketmq.auth.authorization.provider"
_AUTHORIZATION = {
    "authorizationEnabled": "true",
    "authorizationProvider": f"{_PACKAGE}.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{_PACKAGE}.LocalAuthorizationMetadataProvider",
}


@pytest.fixture(scope="module", params=["4.9.7", "5.3.3"])
def guarded(request):
    config = {} if request.param.startswith("4.") else _AUTHORIZATION
    with LocalCluster(brokers=1, version=request.param, acl=KEYS, broker_config=config) as cluster:
        make_topic(cluster, "orders")
        yield cluster


@pytest.fixture(scope="module")
def writer(guarded):
    """Return the options of a client of `WRITER`, whom mqadmin adds."""
    make_topic(guarded, "closed")
    user, where = [WRITER.access_key, WRITER.secret_key], ["-c", CLUSTER_NAME]
    if guarded.version.startswith("4."):
        rights = ["-i", "DENY", "-u", "DENY", "-t", "orders=PUB", "-m", "false"]
        guarded.admin("updateAclConfig", *where, "-a", user[0], "-s", user[1], *rights)
    else:
        guarded.admin("createUser", *where, "-u", user[0], "-p", user[1], "-t", "Normal")
        rights = ["-r", "Topic:orders", "-a", "Pub", "-d", "Allow"]
        guarded.admin("createAcl", *where, "-s", f"User:{user[0]}", *rights)
    options = {"nameServer": guarded.name_server, **WRITER.options()}

    def is_known():
        with contextlib.suppress(errors.SendError), Producer(**options) as producer:
            return bool(producer.send(Message("orders", b"known")))
        return False

    until(is_known, 30.0)
    return options


def test_a_missing_right_is_no_wrong_password(guarded, writer):
    """A row of a closed topic must not end the write of the other rows."""
    with Producer(**writer) as producer:
        with pytest.raises(errors.PermissionDeniedError) as caught:
            producer.send(Message("closed", b"x"))
        assert not caught.value.fatal
        assert producer.send(Message("orders", b"goes on")).status == "SEND_OK"
    assert not found(guarded, "closed")


def test_a_user_who_may_only_publish_learns_what_that_is_not_enough_for(guarded, writer):
    options = SinkOptions.parse(topic="orders", **writer)
    assert [check.state for check in look(options) if check.what.startswith("broker")] == ["ok"]
    once = options.with_(delivery="effectively_once", ledger="/unused")
    assert [check.state for check in look(once) if check.what.startswith("broker")] == ["fail"]
    check_rights(options)
    with pytest.raises(errors.ConfigurationError, match="Sub"):
        check_rights(once)
    check_rights(once.with_(**KEYS.options()))
    engine = SendEngine(options)
    with pytest.raises(errors.DeliveryError, match="Sub"):
        StoredMessages(engine, since_ms=0).find("orders", ["ID"], timed=False)
    engine.close()


def found(cluster, topic="orders"):
    return list(read_topic(cluster.name_server, topic, **KEYS.options()))


def test_c63_every_mode_is_signed_as_the_broker_reckons(guarded):
    before = Counter(m.body for m in found(guarded))
    with Producer(nameServer=guarded.name_server, autoBatch=True, **KEYS.options()) as producer:
        texts = {"tags": "t", "keys": ["k"], "properties": {"中": "文 \U0001f680"}}
        producer.send(Message("orders", b"sync", **texts))
        producer.send(Message("orders", b"z" * 10_000))
        producer.send_oneway(Message("orders", b"oneway"))
        producer.send_batch([Message("orders", b"b0"), Message("orders", b"b1")])
        gathered = [producer.send_async(Message("orders", b"g%d" % n)) for n in range(20)]
        assert {future.result(20).status for future in gathered} == {"SEND_OK"}
        for state in (COMMIT, ROLLBACK):
            body = state.name.encode()
            result = producer.send_in_transaction(Message("orders", body), lambda m, a, s=state: s)
            assert result.ended, result.end_error
        producer.send(Message("orders", b"level", delay_level=1))
    wanted = Counter([b"sync", b"z" * 10_000, b"oneway", b"b0", b"b1", b"COMMIT", b"level"])
    wanted.update(b"g%d" % n for n in range(20))
    until(lambda: Counter(m.body for m in found(guarded)) - before == wanted, 30.0)


def test_messages_are_found_by_id(guarded):
    """Brokers of both generations accept the signature of these requests."""
    options = SinkOptions.parse(nameServer=guarded.name_server, **KEYS.options())
    with Producer(options) as producer:
        sent = producer.send(Message("orders", b"by id"))
    with Admin(options) as admin:
        until(lambda: admin.query_by_unique_key("orders", sent.message_id), 30.0)
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
            with pytest.raises(errors.BrokerTooOldError, match=r"4\.9\.7"):
                send(message)
    assert all(m.body != b"timed" for m in found(guarded))


@pytest.mark.parametrize(
    "stranger",
    [None, replace(KEYS, access_key="nobody"), replace(KEYS, secret_key="wrong-secret")],
    ids=["no credentials", "unknown user", "wrong secret"],
)
def test_c58_c63_wrong_credentials_are_refused_at_the_first_attempt(guarded, stranger):
    options = stranger.options() if stranger else {}
    before, message = len(found(guarded)), Message("orders", b"stranger")
    with Producer(nameServer=guarded.name_server, **options) as producer:
        with pytest.raises(errors.AuthenticationError) as caught:
            producer.send(message)
        assert caught.value.attempts == 1
        assert caught.value.response_code == (1 if guarded.version.startswith("4.") else 16)
        with pytest.raises(errors.AuthenticationError):
            producer.send_async(message).result(20)
        assert stranger is None or stranger.access_key not in str(caught.value)
    assert len(found(guarded)) == before


def test_c63_a_callable_gives_the_right_ones_after_a_refusal(guarded):
    sequence = [Credentials(KEYS.access_key, "old"), Credentials(KEYS.access_key, KEYS.secret_key)]
    with Producer(nameServer=guarded.name_server, credentials=lambda: sequence.pop(0)) as producer:
        assert producer.send(Message("orders", b"rotated")).status == "SEND_OK"
    assert sequence == []
