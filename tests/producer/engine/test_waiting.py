"""Waiting attempts: each is in one place, leaves it once, and keeps its order."""

import math
from collections import deque
from random import Random
from types import SimpleNamespace

import pytest

from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import SendAttempt, SendRequest, Wait
from rocket_sink.producer.engine.brokers import Brokers, SendTarget
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.producer.engine.waiting import WaitingRequests
from tests.routing.fault_views import isolate
from tests.routing.infos import info_of

QUEUE = MessageQueue("orders", "a", 0)


def make(deadline_s=100.0):
    return SendAttempt(deque(), SendRequest("orders", b"x"), (b"x",), 1, False, 0.0, deadline_s)


class World:
    """Waiting requests with their events, the brokers of one engine, and a route."""

    def __init__(self, route=None, full=""):
        """`full` are the brokers with four requests in flight, and room for none."""
        self.brokers = Brokers(
            SinkOptions(name_server="127.0.0.1:9876"), SharedBrokerState.in_process()
        )
        self.events = set()
        routes = SimpleNamespace(get=lambda topic, now_s: route)
        self.waiting = WaitingRequests(self.events, routes, self.brokers)
        for name in full:
            broker = self.brokers.of(name)
            broker.in_flight = 4
            broker.busy(0.0, 0.0)

    def add(self, wait, *due_s, broker=""):
        """Let an attempt wait for each time; with `broker`, for room there."""
        attempts = [make() for _ in due_s]
        for attempt, time_s in zip(attempts, due_s, strict=True):
            if broker:
                attempt.target = SendTarget(QUEUE, broker, f"{broker}:1", self.brokers.of(broker))
            self.waiting.add(attempt, wait, time_s)
        return attempts

    def due(self, now_s):
        return self.waiting.pop_due(now_s)


def test_those_that_wait_for_a_time_come_in_its_order():
    world, late = World(), make(deadline_s=3.0)
    second, first = world.add(Wait.DELAY, 2.0, 1.0)
    world.waiting.add(late, Wait.ROUTE, 50.0)
    assert world.waiting.wait_s(10.0, 0.5) == 0.5
    assert world.due(0.9) == []
    assert world.due(2.0) == [first, second]
    assert world.due(3.0) == [late], "its deadline comes before its time"
    assert not world.waiting.size


@pytest.mark.parametrize(
    ("wait", "event"),
    [(Wait.ROUTE, "orders"), (Wait.VERSION, "a:1"), (Wait.POLICY, ("orders", "a"))],
)
def test_an_event_releases_those_that_wait_for_it(wait, event):
    world = World()
    late, early = world.add(wait, 1.0, 99.0, broker="a")
    world.events.add("another")
    assert world.due(0.0) == []
    assert world.due(1.0) == [late]
    world.events.add(event)
    assert world.waiting.wait_s(10.0, 1.0) == 0.0
    assert world.due(1.0) == [early]
    assert not world.waiting.size and world.waiting.wait_s(10.0, 1.0) == 10.0


def test_a_busy_brokers_places_are_given_out_in_order():
    world = World(full="a")
    broker = world.brokers.of("a")
    attempts = world.add(Wait.BROKER, 99.0, 99.0, 99.0, 9.0, 99.0, broker="a")
    assert world.due(1.0) == []
    broker.in_flight = int(broker.window.limit) - 2
    assert world.due(2.0) == attempts[:2]
    broker.in_flight += 2
    assert world.due(9.0) == [attempts[3]], "its share of the time is over"
    world.brokers.ranks = dict(world.brokers.ranks)
    assert world.due(9.0) == [attempts[2], attempts[4]], "another broker may be the best one now"
    assert not world.waiting.size


@pytest.mark.parametrize("wait", [Wait.VERSION, Wait.POLICY])
def test_a_change_of_ranks_releases_those_that_wait_for_a_brokers_answer(wait):
    world = World()
    [attempt] = world.add(wait, 99.0, broker="a")
    world.add(Wait.ROUTE, 99.0)
    isolate(world.brokers, "a", 1.0, reachable=True)
    world.brokers.view(1.0)
    assert world.due(1.0) == [attempt] and world.waiting.size == 1


def test_a_retry_takes_its_place_before_the_requests_in_line():
    world = World(full="a")
    broker = world.brokers.of("a")
    line = world.add(Wait.BROKER, 99.0, 99.0, 99.0, broker="a")
    limit = int(broker.window.limit) if broker.window is not None else 0
    broker.in_flight = limit - 1  # A request has just failed, and goes again at once.
    retries = world.add(Wait.DELAY, 1.0)
    assert world.due(1.0) == retries
    broker.in_flight = limit  # The retry is sent.
    assert world.due(1.0) == []
    broker.in_flight -= 2
    assert world.due(1.0) == line[:2], "the line has kept its order"


def test_times_that_are_over_leave_no_memory_behind():
    world, most = World(), 0
    for _ in range(10_000):
        attempts = world.add(Wait.ROUTE, 99.0)
        most = max(most, len(world.waiting._times))
        world.events.add("orders")
        assert world.due(0.0) == attempts
    assert 1000 < most < 2000 and not world.waiting._lines


def test_room_at_any_of_the_best_brokers_is_given_out():
    """An attempt that may go to any of the equal brokers waits for all of them."""
    info = info_of({"a": 1, "b": 1, "c": 1})
    world = World(info, full="ab")
    isolate(world.brokers, "c", 0.0, reachable=True)
    assert world.brokers.ranking(info, 0.0).take(1) is None, "c is idle, and worse"
    world.due(0.0)
    attempts = world.add(Wait.BROKER, *[99.0] * 5)
    assert world.due(0.0) == []
    world.brokers.of("b").in_flight = 0
    assert world.due(1.0) == attempts[:2], "as many as its window has places for"
    target = world.brokers.ranking(info, 1.0).take(1)
    assert target is not None and target.home == "b"
    for name in "ab":
        isolate(world.brokers, name, 1.0, reachable=True)
    world.brokers.view(1.0)
    assert world.due(1.0) == attempts[2:], "c is as good now"
    assert not world.waiting.size


def test_room_at_a_worse_broker_is_given_to_those_whose_share_of_the_time_is_over():
    """The attempts would go to any broker but an unreachable one."""
    world = World(info_of({"a": 1, "b": 1, "c": 1}), full="ab")
    isolate(world.brokers, "b", 0.0, reachable=True)
    isolate(world.brokers, "c", 0.0, reachable=False)
    world.brokers.view(0.0)
    world.due(0.0)
    patient, late = world.add(Wait.BROKER, 100.0, math.inf)
    assert world.due(1.0) == []
    world.brokers.of("b").in_flight = 0
    assert world.due(2.0) == [late], "the other one waits for a"
    world.brokers.of("a").in_flight = 0
    assert world.due(3.0) == [patient] and not world.waiting.size


def test_a_change_of_ranks_during_a_look_wakes_all_at_the_next():
    """The look for a topic reads the fault table, after the look for a broker."""
    info = info_of({"a": 1, "b": 1, "c": 1})
    world = World(info, full="abc")
    world.brokers.ranking(info, 0.0)
    world.due(0.0)
    attempts = world.add(Wait.BROKER, 99.0, broker="a") + world.add(Wait.BROKER, 99.0)
    isolate(world.brokers, "a", 1.0, reachable=True)
    assert world.due(1.0) == []
    assert world.due(1.0) == attempts, "another broker may be the best one now"


def test_the_next_of_an_ordered_queue_is_due_when_the_first_leaves():
    waiting = World().waiting
    first, second, third = make(), make(), make(deadline_s=5.0)
    assert waiting.ordered.enter(first, QUEUE)
    for attempt in (second, third):
        assert not waiting.ordered.enter(attempt, QUEUE)
        waiting.add(attempt, Wait.TURN, 99.0)
    again = first.next_attempt(1.0, counts=True)
    waiting.ordered.replace(first, again)
    assert waiting.ordered.enter(again, QUEUE), "a retry keeps the place"
    assert waiting.pop_due(5.0) == [third], "its turn did not come in time"
    waiting.leave(third)
    assert waiting.pop_due(5.0) == []
    waiting.leave(again)
    assert waiting.pop_due(6.0) == [second] and not waiting.size


def test_drain_all_finds_each_once():
    waiting = World().waiting
    rng, added = Random(1), []
    waiting.ordered.enter(make(), QUEUE)
    for _ in range(50):
        attempt = make()
        wait = rng.choice([Wait.DELAY, Wait.ROUTE, Wait.TURN])
        if wait is Wait.TURN:
            waiting.ordered.enter(attempt, QUEUE)
        waiting.add(attempt, wait, 9.0)
        added.append(attempt)
    assert waiting.size == 50
    assert sorted(map(id, waiting.drain_all())) == sorted(map(id, added))
    assert not waiting.size and waiting.pop_due(1000.0) == []
