"""Fixtures of the producer's tests: a scripted cluster, and engines with short waits."""

import re
import time

import pytest

from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.producer import Producer
from tests.clusters import make_topic, read_topic, repair, scripted_cluster
from tests.producer.waiting import until

cluster = scripted_cluster(orders=4)


@pytest.fixture
def make_engine(cluster):
    """Make engines that are closed at the test's end, and must then count nothing as open."""
    engines = []

    def make(shared=None, rng=None, clock=time.monotonic, **options):
        parsed = SinkOptions.parse({"nameServer": cluster.name_server, **options})
        engines.append(SendEngine(parsed, shared=shared, rng=rng, clock=clock))
        return engines[-1]

    yield make
    for engine in reversed(engines):
        engine.close(0.2)
        flow, brokers = engine.flow, engine.brokers.health(engine.clock())
        counts = [flow.window.requests, flow.window.bytes, flow.waiting.size]
        assert not any([*counts, *(broker.in_flight for broker in brokers)])


@pytest.fixture
def make_producer(cluster, closing):
    return lambda **options: closing(Producer(nameServer=cluster.name_server, **options), 0.3)


@pytest.fixture
def engine(make_engine):
    """Return an engine with the defaults of all options."""
    return make_engine()


@pytest.fixture
def producer(make_producer):
    """Return a producer with the defaults of all options."""
    return make_producer()


@pytest.fixture
def admin(cluster, closing):
    return closing(Admin(nameServer=cluster.name_server))


@pytest.fixture(scope="session")
def real(local_cluster):
    """Return a real cluster for modules that need no special one."""
    return local_cluster


@pytest.fixture
def topic(real, request):
    """Make a topic for the test on both brokers, with four queues each."""
    name = "p-" + re.sub("[^a-z0-9-]", "", request.node.name.replace("_", "-"))[-60:]
    make_topic(repair(real), name)
    return name


def stored(real, topic):
    """Return the messages of a topic of a real cluster."""
    # A name server on a busy machine may need seconds to answer.
    options = real.client_options()
    return list(read_topic(options.pop("nameServer"), topic, timeout_s=30.0, **options))


def request(token=None, topic="orders", **more):
    """Return a request of one message with the token in its body."""
    key = f"ID{token}"
    return SendRequest(
        topic, f"body-{token}".encode(), properties=f"UNIQ_KEY\x01{key}\x02", message_id=key,
        token=token, **more,
    )  # fmt: skip


def is_well(engine, name):
    """Return whether the broker is neither isolated nor under suspicion."""
    brokers = engine.brokers.health(engine.clock())
    return all(b.available and not b.suspect for b in brokers if b.broker_name == name)


def submit(engine, count, first=0, **more):
    """Submit so many requests, whose tokens are the numbers from `first` on."""
    for number in range(first, first + count):
        engine.submit(request(number, **more))


def drive_until(engine, condition, timeout_s=120.0):
    """Drive the engine until the condition holds; fail when the time is over."""
    until(lambda: engine.drive() or condition(), timeout_s, 0.0)


def send(engine, token=None, **more):
    """Send one request and wait for its end."""
    engine.submit(request(token, **more))
    (completion,) = engine.drain()
    return completion
