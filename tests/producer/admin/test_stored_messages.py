"""Look-ups of many messages by id, over all brokers."""

from unittest.mock import MagicMock

import pytest

from rocket_sink.errors import AuthenticationError, DeliveryError
from rocket_sink.producer.admin.stored_messages import StoredMessages
from rocket_sink.testing import Answer, CloseConnection, Drop
from rocket_sink.wire.codes import RequestCode
from tests.producer.conftest import request, send


def _send(engine, count):
    """Send to each queue in turn: by its own choice an engine leaves out a broker that is slow."""
    queues = engine.publish_info("orders").queues
    for number in range(count):
        engine.submit(request(number, queue=queues[number % len(queues)]))
    engine.drain()


def test_each_message_is_found_on_its_broker_and_no_other(cluster, engine):
    _send(engine, 600)
    assert all(len(broker.store.messages("orders")) for broker in cluster.brokers)
    stored = StoredMessages(engine, since_ms=0)
    wanted = [f"ID{i}" for i in range(0, 1200, 2)]
    assert stored.find("orders", wanted, timed=False) == {f"ID{i}" for i in range(0, 600, 2)}
    asked = [len(broker.requests) for broker in cluster.brokers]
    assert stored.find("orders", ["ID2", "none"], timed=True) == {"ID2"}
    for broker, count in zip(cluster.brokers, asked, strict=True):
        codes = {frame.code for frame in broker.requests[count:]}
        assert RequestCode.GET_MAX_OFFSET not in codes, "the ends of queues are kept"


def test_a_torn_message_is_not_a_stored_one(cluster, engine):
    """A torn message counts only if this or another broker also has it whole."""
    for number in (0, 1, 0):
        send(engine, number)
    for number in (0, 1):
        broker, message = next(
            (b, m) for b in cluster.brokers for m in b.store.messages("orders")
            if m.message_id == f"ID{number}"
        )  # fmt: skip
        broker.store.tear(message.commit_log_offset, {"UNIQ_KEY": f"ID{number}"})
    stored = StoredMessages(engine, since_ms=0)
    assert stored.find("orders", ["ID0", "ID1"], timed=False) == {"ID0"}
    assert stored.torn.keys() == {"ID1"}


def test_messages_of_a_topic_that_was_made_anew_are_not_stored(cluster, engine):
    """Brokers find them as long as their log has them (observed with 5.5.0)."""
    _send(engine, 16)
    wanted = [f"ID{number}" for number in range(16)]
    for broker in cluster.brokers:
        broker.store._queues.clear()
    assert StoredMessages(engine, since_ms=0).find("orders", wanted, timed=False) == set()
    _send(engine, 1)
    assert StoredMessages(engine, since_ms=0).find("orders", wanted, timed=False) == {"ID0"}


def test_failed_look_ups_are_asked_again(cluster, engine):
    _send(engine, 50)
    cluster.on(RequestCode.QUERY_MESSAGE, Answer(2, "busy"), times=5)
    cluster.on(RequestCode.QUERY_MESSAGE, CloseConnection(), times=1)
    wanted = [f"ID{i}" for i in range(50)]
    assert StoredMessages(engine, since_ms=0).find("orders", wanted, timed=False) == set(wanted)


def test_a_user_who_may_not_look_up_learns_the_right_that_is_missing(cluster, make_engine):
    """The remark is that of AclAuthorizationHandler (5.3.3)."""
    remark = "User:w has no permission to access Topic:orders from 127.0.0.1, no matched policies."
    cluster.on(RequestCode.QUERY_MESSAGE, Answer(16, remark), times=None)
    engine = make_engine(storedCheckTimeout=2000)
    with pytest.raises(DeliveryError, match="rights Sub and Get"):
        StoredMessages(engine, since_ms=0).find("orders", ["ID1"], timed=False)


@pytest.mark.parametrize(("behaviour", "why"), [(Answer(1, "odd"), "odd"), (Drop(), "no answer")])
def test_silence_is_not_absence(cluster, make_engine, behaviour, why):
    engine = make_engine(storedCheckTimeout=200)
    _send(engine, 1)
    cluster.brokers[1].on(RequestCode.QUERY_MESSAGE, behaviour, times=None)
    with pytest.raises(DeliveryError, match=f"^broker-b does not say .*{why}") as caught:
        StoredMessages(engine, since_ms=0).find("orders", ["none"], timed=False)
    assert ("odd" in caught.value.facts["first_error"]) == (why == "odd")


@pytest.mark.parametrize("are_new", [True, False])
def test_new_credentials_are_read_before_a_refusal_is_final(are_new, cluster, engine, monkeypatch):
    _send(engine, 8)
    cluster.on(RequestCode.QUERY_MESSAGE, Answer(1, "check signature failed"))
    monkeypatch.setattr(engine, "reread_credentials", lambda signed_s: are_new and signed_s > 0)
    stored = StoredMessages(engine, since_ms=0)
    if are_new:
        assert stored.find("orders", ["ID1", "none"], timed=False) == {"ID1"}
        return
    with pytest.raises(AuthenticationError):
        stored.find("orders", ["ID1", "none"], timed=False)


def test_what_is_on_its_way_gets_time_to_arrive(cluster, make_engine, monkeypatch):
    engine = make_engine(storedCheckDelay=250)
    stored, drive_for = StoredMessages(engine, since_ms=0), MagicMock()
    monkeypatch.setattr(engine, "drive_for", drive_for)
    for _ in range(2):
        stored.settle("orders")
    drive_for.assert_called_once_with(0.25)
    codes = [[request.code for request in broker.requests] for broker in cluster.brokers]
    assert [of.count(RequestCode.QUERY_MESSAGE) for of in codes] == [1, 1], "each is asked once"


def test_a_broker_without_the_topic_is_asked(cluster, make_engine):
    """A topic that the first send made is on one broker; an earlier attempt may have tried both."""
    cluster.create_topic("new", brokers=["broker-a"])
    engine = make_engine(storedCheckTimeout=5000)
    stored = StoredMessages(engine, since_ms=0, brokers={"new": ["broker-b"]})
    stored.settle("new")
    assert stored.find("new", ["NONE"], timed=False) == set()
    assert any(request.code for request in cluster.brokers[1].requests)
