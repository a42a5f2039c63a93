"""The brokers of the known route are gone: moved, away for a while, or replaced."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink.errors import Outcome, SendError
from rocket_sink.message import Message, MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.stored_messages import StoredMessages
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.testing import Delay, FakeCluster
from tests.producer.conftest import send, submit
from tests.producer.waiting import until


def _move(cluster):
    for broker in cluster.brokers:
        broker.fail_over()


@pytest.mark.parametrize("fault", ["moved", "moved slowly", "stop_name_server", "forget_brokers"])
def test_a_new_worker_begins_with_the_route_of_another_one(cluster, tmp_path, fault):
    """None of the route's brokers is there any more, or the name servers cannot answer."""
    options = SinkOptions.parse(
        {"nameServer": cluster.name_server, "pollNameServerInterval": 10, "sendMsgTimeout": 5000}
    )
    first, other = (SharedBrokerState.open(options, directory=str(tmp_path)) for _ in range(2))
    engine = SendEngine(options, shared=first)
    send(engine)
    engine.close()
    if fault.startswith("moved"):
        _move(cluster)
        cluster.on_route(Delay(0.3 if fault == "moved slowly" else 0.0), times=None)
    else:
        getattr(cluster, fault)()
        time.sleep(0.1)
    engine = SendEngine(options, shared=other)
    submit(engine, 50)
    assert {c.outcome for c in engine.drain()} == {Outcome.ACKED}
    engine.close()


def test_look_ups_follow_brokers_that_move(cluster, make_engine):
    engine = make_engine(storedCheckTimeout=5000)
    send(engine, 1)
    _move(cluster)
    stored = StoredMessages(engine, since_ms=0)
    assert stored.find("orders", ["ID1", "none"], timed=False) == {"ID1"}


def _demote(broker):
    """Take the master away: routes list its slave only."""
    broker.is_master = False
    broker.kill()


def _promote(broker):
    """Make another process the master, and list it in routes."""
    broker.fail_over()
    broker.is_master = True


@pytest.mark.parametrize("mode", ["send_batch", "queue", "strict"])
def test_a_new_master_is_found_though_the_route_had_only_a_slave(cluster, make_producer, mode):
    """The route is young, but it was fetched at the wrong moment, and is polled an hour later."""
    producer = make_producer(
        pollNameServerInterval="1h", sendMsgTimeout="60s", orderWaitMs="60s",
        ordering="strict" if mode == "strict" else "none",
    )  # fmt: skip
    queue = MessageQueue("orders", "broker-a", 0)
    key = "k" if mode == "strict" else None
    producer.send(Message("orders", b"before", sharding_key=key))
    calls = {
        "send_batch": lambda: producer.send_batch([Message("orders", b"x")] * 2),
        "queue": lambda: producer.send(Message("orders", b"x"), queue=queue),
        "strict": lambda: producer.send(Message("orders", b"x", sharding_key="k")),
    }
    for broker in cluster.brokers:
        _demote(broker)
    give_up_s = time.monotonic() + 30
    while producer._session.engine.routes.addresses() and time.monotonic() < give_up_s:
        with contextlib.suppress(SendError):
            producer.send(Message("orders", b"meanwhile"), timeout_ms=500)
    assert not producer._session.engine.routes.addresses()
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(calls[mode])
        for broker in cluster.brokers:
            _promote(broker)
        sending.result(30)
    assert b"x" in {message.body for message in cluster.messages("orders")}


def test_a_name_server_that_was_started_anew_takes_no_route_away(cluster, make_engine):
    """Brokers register every 30 s: until then the server knows neither topic nor template."""
    engine = make_engine(pollNameServerInterval=10)
    assert send(engine).outcome is Outcome.ACKED
    cluster.forget_brokers()
    until_s = time.monotonic() + 3.5
    while time.monotonic() < until_s:
        assert send(engine).outcome is Outcome.ACKED
        time.sleep(0.02)
    cluster.register()
    assert send(engine).outcome is Outcome.ACKED


def test_a_topic_that_a_registered_broker_does_not_have_any_more_is_gone(make_engine):
    """The topic's other broker has not registered with the restarted name server."""
    with FakeCluster(queues=0) as cluster:
        cluster.create_topic("orders")
        engine = make_engine(nameServer=cluster.name_server, pollNameServerInterval=10)
        assert send(engine).outcome is Outcome.ACKED
        cluster.delete_topic("orders")
        cluster.forget_brokers()
        cluster.register("broker-a")
        until(lambda: not send(engine).outcome.delivered, 30.0)
        assert isinstance(send(engine).error, SendError)


def test_the_newest_route_says_where_a_broker_is(cluster, engine):
    """The route of another topic is read again only when that topic is used."""
    cluster.create_topic("pays", 4)
    for topic in ("orders", "pays"):
        engine.publish_info(topic)
    _move(cluster)
    moved = {broker.name: broker.address for broker in cluster.brokers}
    for topic in ("orders", "pays"):
        engine.fresh_route(topic)
        assert engine.routes.addresses() == moved
