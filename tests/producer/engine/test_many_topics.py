"""A program may send to ever new topics: the memory that they take has a bound."""

import pytest

from rocket_sink.errors import Outcome
from rocket_sink.message import Message
from rocket_sink.producer.engine import routes
from rocket_sink.routing import topic_publish_info
from tests.producer.conftest import send

MOST = 8


@pytest.fixture
def few(monkeypatch):
    for module in (routes, topic_publish_info):
        monkeypatch.setattr(module, "TOPICS_MAX", MOST)


def test_topics_are_forgotten_and_looked_up_again(cluster, engine, few):
    for number in range(5 * MOST):
        cluster.create_topic(f"topic-{number}", 2)
        for topic in (f"topic-{number}", "orders"):
            assert send(engine, topic=topic).outcome is Outcome.ACKED
        kept = (
            engine.routes._topics, engine.brokers._rankings, engine._headers.templates,
            engine.shared._routes,
        )  # fmt: skip
        assert 0 < max(map(len, kept)) <= MOST
    assert len(cluster.messages("orders")) == 5 * MOST
    assert engine.routes.addresses() == {broker.name: broker.address for broker in cluster.brokers}


def test_a_topic_that_is_being_looked_up_is_not_forgotten(cluster, engine, few):
    for number in range(2 * MOST):
        engine.routes.get(f"topic-{number}", engine.clock())
    assert all(engine.routes.fetching(f"topic-{number}") for number in range(2 * MOST))


def test_the_topic_in_use_stays(cluster, engine, few):
    """The route of the topic in use is the newest, because it is asked for again and again."""
    engine.publish_info("orders")
    for number in range(MOST - 1):
        cluster.create_topic(f"topic-{number}", 2)
        engine.publish_info(f"topic-{number}")
    engine.routes._topics["orders"].fetched_s = engine.clock()
    engine.routes.get("new", engine.clock())
    assert {"orders", "new", f"topic-{MOST - 2}"} < engine.routes._topics.keys()
    assert len(engine.routes._topics) == MOST // 2 + 1


def test_a_producer_forgets_what_it_keeps_of_topics_and_addresses(cluster, make_producer, few):
    producer = make_producer(ordering="strict")
    session = producer._session
    heartbeats = session.engine.heartbeats
    for number in range(5 * MOST):
        cluster.create_topic(f"topic-{number}", 1)
        producer.send(Message(f"topic-{number}", b"x", sharding_key="k"))
        session.request_reply.connect_all(f"topic-{number}", session.engine.clock() + 30)
        heartbeats._sent[f"h:{number}"] = (None, 0.0)
    kept = producer._placed, session.request_reply._connected_topics, heartbeats._sent
    assert 0 < max(map(len, kept)) <= MOST
