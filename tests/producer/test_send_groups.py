"""Asynchronous sends travel in groups; each future ends as if its message had gone alone."""

from collections import Counter

import pytest

from rocket_sink.errors import BrokerTooOldError, Outcome, UnwrittenError
from rocket_sink.message import Message
from rocket_sink.producer.future import SendFuture
from rocket_sink.producer.send_group import SendGroup
from rocket_sink.testing import Drop
from rocket_sink.wire.codes import mq_version
from rocket_sink.wire.ids import decode_recall_handle
from tests.group_faults import FAULTS, groups
from tests.producer.waiting import held, until

assert groups  # a fixture

COUNT = 300
LONG_MS = 180_000
"""With this time-out no attempt is given up, however busy the machine is."""


def burst(producer, count=COUNT, *, queue=None, **fields):
    """Send `count` messages while the producer's thread cannot take them: the groups are large."""
    producer.fetch_publish_message_queues("orders")
    with held(producer):
        return [producer.send_async(message(n, **fields), queue=queue) for n in range(count)]


def message(number, **more):
    return Message("orders", b"%d" % number, tags="tag", keys=(f'k"{number}',), flag=number, **more)


def test_each_future_has_the_result_of_its_own_message(cluster, make_producer, groups):
    futures = burst(make_producer(sendMsgTimeout=LONG_MS))
    results = [future.result(60) for future in futures]
    stored = {message.properties["UNIQ_KEY"]: message for message in cluster.messages("orders")}
    assert len(stored) == COUNT and max(groups) > 100
    for number, result in enumerate(results):
        there = stored[result.message_id]
        assert (there.body, there.flag) == (b"%d" % number, number)
        assert there.properties["KEYS"] == f'k"{number}'
        assert (there.queue_id, there.queue_offset) == (result.queue.queue_id, result.queue_offset)
        assert result.outcome is Outcome.ACKED
        assert (result.attempts, result.maybe_duplicate) == (1, False)
    assert len({result.offset_message_id for result in results}) == COUNT


@pytest.mark.parametrize("delay", [{"delay_level": 1}, {"delay_ms": 60_000}])
def test_delayed_ones_travel_together_with_their_recall_handles(make_producer, groups, delay):
    producer = make_producer(sendMsgTimeout=LONG_MS)
    alone = producer.send(message(0, **delay))
    results = [future.result(60) for future in burst(producer, **delay)]
    assert max(groups) > 100
    for result in results:
        assert (result.recall_handle is None) == (alone.recall_handle is None)
        if result.recall_handle is not None:
            assert decode_recall_handle(result.recall_handle).message_id == result.message_id


def test_old_brokers_are_not_sent_timers_in_groups(cluster, make_producer, groups):
    for broker in cluster.brokers:
        broker.version = mq_version(4, 9, 4)
    futures = burst(make_producer(), 40, delay_ms=60_000)
    assert all(isinstance(future.exception(60), BrokerTooOldError) for future in futures)
    assert max(groups) > 10 and not cluster.messages("orders")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_plain_success_leaves_its_group(cluster, make_producer, groups, fault):
    # The end of a connection ends all that it has in flight: three would use up all attempts.
    times = 1 if fault in ("cut", "closed") else 4
    cluster.on_send(FAULTS[fault], times=times, chance=0.1)
    futures = burst(make_producer(sendMsgTimeout=LONG_MS))
    results = [future.result(60) for future in futures]
    copies = Counter(message.body for message in cluster.messages("orders"))
    assert set(copies) == {b"%d" % number for number in range(COUNT)}
    doubled = {int(body) for body, count in copies.items() if count > 1}
    assert doubled <= {n for n, result in enumerate(results) if result.maybe_duplicate}
    degraded = sum(result.outcome is Outcome.ACKED_DEGRADED for result in results)
    assert bool(degraded) == (fault == "degraded")
    if fault in ("busy", "degraded"):
        assert not doubled
    assert max(groups) > 50


def test_places_are_given_back_with_each_answer(cluster, make_producer, groups):
    """A message without an answer keeps no other one waiting."""
    cluster.on_send(Drop(), times=1)
    producer = make_producer(sendMsgTimeout=3_600_000)
    futures = burst(producer)
    until(lambda: sum(not future.done() for future in futures) <= 2)
    pending = [future for future in futures if not future.done()]
    window = producer._session.engine.flow.window
    assert window.requests == len(pending) == 2 and max(groups) > 50
    assert window.bytes == sum(len(b"%d" % futures.index(future)) for future in pending)


def test_a_group_whose_broker_is_down_goes_to_another_one(cluster, producer, groups):
    producer.send(message(0))
    cluster.broker("broker-a").kill()
    results = [future.result(60) for future in burst(producer)]
    assert {result.queue.broker_name for result in results} == {"broker-b"}
    assert len(results) == COUNT


def test_a_group_whose_frames_cannot_be_made_leaves_nothing_behind(
    cluster, make_producer, groups, monkeypatch
):
    # However slow this machine is, no broker looks slow.
    producer, ends = make_producer(faultTable="1h:10m"), []
    producer.send(message(0))

    def frames(self, template, **fields):
        raise MemoryError("no room for the frames")

    with monkeypatch.context() as patched:
        patched.setattr(SendGroup, "frames", frames)
        resolve = SendFuture.resolve
        patched.setattr(SendFuture, "resolve", lambda *args: ends.append(args) or resolve(*args))
        futures = burst(producer)
        errors = [future.exception(60) for future in futures]
    assert {type(error) for error in errors} == {UnwrittenError} and max(groups) > 100
    assert all("no room for the frames" in error.text for error in errors)
    engine = producer._session.engine
    until(lambda: not engine.client.in_flight)  # Heartbeats may be in flight.
    assert engine.flow.window.requests == engine.flow.window.bytes == 0
    in_flight = sum(health.in_flight for health in producer.broker_health())
    assert in_flight == 0 and not producer.isolations()
    assert len({id(args[0]) for args in ends}) == len(ends) == COUNT
