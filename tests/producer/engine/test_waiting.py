"""Waiting attempts: each is in one place, leaves it once, and keeps its order."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import SendAttempt, SendRequest, Wait
from rocket_sink.producer.engine.brokers import Brokers, SendTarget
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.producer.engine.waiting import WaitingRequests
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.route import BrokerData, QueueData, TopicRoute
from tests.routing.fault_views import isolate

QUEUE = MessageQueue("orders", "a", 0)


class Routes:
    """Routes of which no look-up ends before `known` is set."""

    def __init__(self) -> None:
        self.look_ups = 0
        self.known = False

    def get(self, topic: str, now_s: float) -> object | None:
        return self if self.known else None

    def fetching(self, topic: str) -> bool:
        return not self.known

    def is_unresolvable(self, topic: str) -> bool:
        return False


def make(deadline_s: float = 100.0) -> SendAttempt:
    return SendAttempt(deque(), SendRequest("orders", b"x"), (b"x",), 1, False, 0.0, deadline_s)


def brokers_of_one_engine() -> Brokers:
    return Brokers(SinkOptions(name_server="127.0.0.1:9876"), SharedBrokerState.in_process())


def waiting_and_routes() -> tuple[WaitingRequests, Routes]:
    routes: Any = Routes()
    return WaitingRequests(routes, brokers_of_one_engine()), routes


def test_those_that_wait_for_a_time_come_in_its_order() -> None:
    waiting, _ = waiting_and_routes()
    first, second, late = make(), make(), make(deadline_s=3.0)
    waiting.add(second, Wait.DELAY, 2.0)
    waiting.add(first, Wait.DELAY, 1.0)
    waiting.add(late, Wait.QUEUE, 50.0)
    assert waiting.wait_s(10.0, 0.5) == 0.5
    assert waiting.pop_due(0.9) == []
    assert waiting.pop_due(2.0) == [first, second]
    assert waiting.pop_due(3.0) == [late], "its deadline comes before its time"
    assert waiting.size == 0


def test_a_new_route_releases_those_that_wait_for_it() -> None:
    waiting, routes = waiting_and_routes()
    early, late = make(), make(deadline_s=1.0)
    for attempt in (early, late):
        waiting.add(attempt, Wait.ROUTE, 0.0)
    assert waiting.pop_due(0.0) == []
    assert waiting.pop_due(1.0) == [late]
    routes.known, routes.look_ups = True, 1
    assert waiting.pop_due(1.0) == [early], "at once, not with the next look"
    assert waiting.size == 0


def test_a_busy_brokers_places_are_given_out_in_order() -> None:
    brokers = brokers_of_one_engine()
    broker = brokers.of("a")
    broker.in_flight = 4
    broker.busy(0.0, 0.0)
    routes: Any = Routes()
    waiting = WaitingRequests(routes, brokers)
    attempts = [make() for _ in range(5)]
    for attempt in attempts:
        attempt.target = SendTarget(QUEUE, "a", "a:1", broker)
        waiting.add(attempt, Wait.BROKER, 9.0 if attempt is attempts[3] else 99.0)
    broker.in_flight = int(broker.window.limit) if broker.window is not None else 0
    assert waiting.pop_due(1.0) == []
    broker.in_flight -= 2
    assert waiting.pop_due(2.0) == attempts[:2]
    broker.in_flight += 2
    assert waiting.pop_due(9.0) == [attempts[3]], "its share of the time is over"
    brokers.ranks = dict(brokers.ranks)
    assert waiting.pop_due(9.0) == [attempts[2], attempts[4]], (
        "another broker may be the best one now"
    )
    assert waiting.size == 0


def test_a_retry_takes_its_place_before_the_requests_in_line() -> None:
    brokers = brokers_of_one_engine()
    broker = brokers.of("a")
    broker.in_flight = 4
    broker.busy(0.0, 0.0)
    waiting = WaitingRequests(Routes(), brokers)  # type: ignore[arg-type]
    line = [make() for _ in range(3)]
    for attempt in line:
        attempt.target = SendTarget(QUEUE, "a", "a:1", broker)
        waiting.add(attempt, Wait.BROKER, 99.0)
    limit = int(broker.window.limit) if broker.window is not None else 0
    broker.in_flight = limit - 1  # A request has just failed, and goes again at once.
    retry = make()
    waiting.add(retry, Wait.DELAY, 1.0)
    assert waiting.pop_due(1.0) == [retry]
    broker.in_flight = limit  # The retry is sent.
    assert waiting.pop_due(1.0) == []
    broker.in_flight -= 2
    assert waiting.pop_due(1.0) == line[:2], "the line has kept its order"


def route_of_three() -> TopicPublishInfo:
    """Return a route with a queue at each of the brokers a, b and c."""
    return TopicPublishInfo.of(
        "orders",
        TopicRoute(
            tuple(QueueData(name, 1, 1) for name in "abc"),
            tuple(BrokerData("c", name, {0: f"{name}:1"}) for name in "abc"),
        ),
    )


def test_room_at_any_of_the_best_brokers_is_given_out() -> None:
    """An attempt that may go to any of the equal brokers waits for all of them."""
    brokers = brokers_of_one_engine()
    info = route_of_three()
    isolate(brokers, "c", 0.0, reachable=True)
    for name in "ab":
        broker = brokers.of(name)
        broker.in_flight = 4
        broker.busy(0.0, 0.0)
    assert brokers.ranking(info, 0.0).take(1) is None, "c is idle, and worse"
    routes: Any = Routes()
    waiting = WaitingRequests(routes, brokers)
    waiting.pop_due(0.0)
    attempts = [make() for _ in range(5)]
    for attempt in attempts:
        waiting.add(attempt, Wait.BROKER, 99.0)
    assert waiting.pop_due(0.0) == []
    brokers.of("b").in_flight = 0
    assert waiting.pop_due(1.0) == attempts[:2], "as many as its window has places for"
    target = brokers.ranking(info, 1.0).take(1)
    assert target is not None and target.home == "b"
    isolate(brokers, "a", 1.0, reachable=True)
    isolate(brokers, "b", 1.0, reachable=True)
    brokers.view(1.0)
    assert waiting.pop_due(1.0) == attempts[2:], "c is as good now"
    assert waiting.size == 0


def test_room_at_a_worse_broker_is_given_to_those_whose_share_of_the_time_is_over() -> None:
    """The attempts would go to any broker but an unreachable one."""
    brokers = brokers_of_one_engine()
    info = route_of_three()
    isolate(brokers, "b", 0.0, reachable=True)
    isolate(brokers, "c", 0.0, reachable=False)
    for name in "ab":
        broker = brokers.of(name)
        broker.in_flight = 4
        broker.busy(0.0, 0.0)
    assert brokers.ranking(info, 0.0).take(1, worse=True) is None
    routes: Any = Routes()
    waiting = WaitingRequests(routes, brokers)
    waiting.pop_due(0.0)
    patient, late = make(deadline_s=100.0), make(deadline_s=100.0)
    waiting.add(patient, Wait.BROKER, 50.0)
    waiting.add(late, Wait.BROKER, 100.0)
    assert waiting.pop_due(1.0) == []
    brokers.of("b").in_flight = 0
    assert waiting.pop_due(2.0) == [late], "the other one waits for a"
    brokers.of("a").in_flight = 0
    assert waiting.pop_due(3.0) == [patient] and waiting.size == 0


def test_a_change_of_ranks_during_a_look_wakes_all_at_the_next() -> None:
    """The look for a topic reads the fault table, after the look for a broker."""
    brokers, info = brokers_of_one_engine(), route_of_three()
    brokers.ranking(info, 0.0)
    for name in "abc":
        broker = brokers.of(name)
        broker.in_flight = 4
        broker.busy(0.0, 0.0)
    routes: Any = Routes()
    routes.get = lambda topic, now_s: info
    waiting = WaitingRequests(routes, brokers)
    waiting.pop_due(0.0)
    at_a, anywhere = make(), make()
    at_a.target = SendTarget(QUEUE, "a", "a:1", brokers.of("a"))
    for attempt in (at_a, anywhere):
        waiting.add(attempt, Wait.BROKER, 99.0)
    isolate(brokers, "a", 1.0, reachable=True)
    assert waiting.pop_due(1.0) == []
    assert waiting.pop_due(1.0) == [at_a, anywhere], "another broker may be the best one now"


def test_the_next_of_an_ordered_queue_is_due_when_the_first_leaves() -> None:
    waiting, _ = waiting_and_routes()
    first, second, third = make(), make(), make(deadline_s=5.0)
    assert waiting.ordered.enter(first, QUEUE)
    for attempt in (second, third):
        assert not waiting.ordered.enter(attempt, QUEUE)
        waiting.add(attempt, Wait.TURN, 0.0)
    again = first.next_attempt(1.0, counts=True)
    waiting.ordered.replace(first, again)
    assert waiting.ordered.enter(again, QUEUE), "a retry keeps the place"
    assert waiting.pop_due(5.0) == [third], "its turn did not come in time"
    waiting.leave(third, 5.0)
    assert waiting.pop_due(5.0) == []
    waiting.leave(again, 6.0)
    assert waiting.pop_due(6.0) == [second] and waiting.size == 0


def test_drain_all_finds_each_once() -> None:
    waiting, _ = waiting_and_routes()
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
    assert waiting.size == 0 and waiting.pop_due(1000.0) == []
