"""The order of a route's brokers, fair shares among equals, and what load changes."""

import itertools
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import ConfigurationError
from rocket_sink.message import MessageQueue
from rocket_sink.routing.fault import BUSY, FAILING, FAR, LAST, SILENT, SLOW, SUSPECT, UNREACHABLE
from rocket_sink.routing.rate_limit import AimdWindow
from rocket_sink.routing.selectors import (
    FREE_IN_FLIGHT,
    LOAD_FACTOR,
    Ranking,
    RouteBroker,
    by_latency,
    by_share,
    least_latency,
    random_queue,
    round_robin,
    select_by,
    selector_named,
    weights_of,
)
from tests.routing.infos import info_of

SELECTORS = ["round_robin", "random", "weighted", "least_latency"]


class Load:
    """The load of one broker, as the ranking asks for it."""

    def __init__(self, latency_s=0.0, in_flight=0):
        self.latency_s, self.in_flight, self.window = latency_s, in_flight, None

    def room_for(self, requests):
        return requests if self.window is None else self.window.room_for(requests, self.in_flight)

    def fill(self, limit):
        self.window = AimdWindow(2 * limit, 0.0)
        self.in_flight = limit


class Route:
    """A ranking of brokers with so many queues each; `take` returns (broker, queue)."""

    def __init__(self, queues, name="round_robin", seed=1, **ranks):
        weights = weights_of(name)
        self.rng = rng = random.Random(seed)
        self.queues = [(broker, n) for broker, count in queues.items() for n in range(count)]
        self.loads = {broker: Load() for broker in queues}
        self.brokers = [
            RouteBroker(
                broker, [(broker, number) for number in range(count)], self.loads[broker],
                (weights or queues).get(broker, 1.0) or 1.0, rng.randrange(count),
            )
            for broker, count in queues.items()
        ]  # fmt: skip
        self.selector = selector_named(name)
        self.order(**ranks)

    def order(self, **ranks):
        all_ranks = {broker.name: ranks.get(broker.name, 0) for broker in self.brokers}
        self.ranking = Ranking(self.brokers, all_ranks, self.selector, self.rng)

    def take(self, requests=1, **more):
        return self.ranking.take(requests, **more)

    def names(self, count, **more):
        return Counter(self.take(**more)[0] for _ in range(count))


CAUSES = {
    "available": 0, "far": FAR, "suspect": SUSPECT, "slow": SLOW,
    "slow-and-suspect": SLOW | SUSPECT, "busy": BUSY, "busy-and-suspect": BUSY | SUSPECT,
    "failing": FAILING, "silent": SILENT | SUSPECT, "unreachable": UNREACHABLE,
}  # fmt: skip
"""{state of a broker: its rank}, from the best to the worst."""


def test_the_guide_has_the_ranks_in_their_order():
    guide = Path(__file__).parents[2] / "docs" / "guarantees" / "brokers.md"
    ranks = re.findall(r"^\| (\w+) \| .* \|", guide.read_text(), re.MULTILINE)[1:]
    assert [CAUSES[rank] for rank in ranks] == sorted(CAUSES[rank] for rank in ranks)
    assert set(ranks) == {cause for cause in CAUSES if "-" not in cause}


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize(("better", "worse"), [*itertools.combinations(CAUSES, 2)])
def test_the_better_cause_gets_all_messages(better, worse, count):
    """The others of 2 to 5 brokers are worse: all for the same cause, or each for another."""
    worse_causes = list(CAUSES.values())[list(CAUSES).index(better) + 1 :]
    same, mixed = [CAUSES[worse]] * 4, [CAUSES[worse], *worse_causes, *worse_causes[-1:] * 4]
    for name, others in itertools.product(SELECTORS, (same, mixed)):
        ranks = dict(zip("bcde"[: count - 1], others, strict=False))
        route = Route(dict.fromkeys("abcde"[:count], 2), name, a=CAUSES[better], **ranks)
        route.loads["a"].in_flight = 2000
        assert set(route.names(20)) == set(route.names(20, worse=True)) == {"a"}


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("other", [0, SUSPECT, FAILING, SILENT | SUSPECT])
def test_a_failed_broker_is_not_asked_again_while_another_will_do(name, other):
    """C38, and apache/rocketmq#2358: the test for the last broker was inverted."""
    route = Route({"a": 8, "b": 1}, name, b=other)
    assert set(route.names(100, last="a")) == {"b"}
    assert set(Route({"a": 8, "b": 1}, name, b=UNREACHABLE).names(9, last="a")) == {"a"}
    assert set(Route({"a": 8}, name).names(9, last="a")) == {"a"}


brokers = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 6), min_size=1)
ranked = st.dictionaries(
    st.sampled_from("abcdef"),
    st.sets(st.sampled_from([FAR, SUSPECT, SLOW, BUSY, FAILING, SILENT, UNREACHABLE])).map(sum),
)


@given(brokers, ranked, st.none() | st.sampled_from("abcdef"), st.data())
def test_only_the_best_brokers_are_taken(queues, ranks, last, data):
    name, seed = data.draw(st.sampled_from(SELECTORS)), data.draw(st.integers(0, 99))
    ranks = {broker: ranks.get(broker, 0) for broker in queues}
    route = Route(queues, name, seed, **ranks)
    for load in route.loads.values():
        load.in_flight = data.draw(st.integers(0, 5000))
    own = {broker: rank | (LAST if broker == last else 0) for broker, rank in ranks.items()}
    best = {broker for broker in queues if own[broker] == min(own.values())}
    assert set(route.names(6, last=last)) <= best, "load chooses among equals only"


@given(brokers, st.sets(st.sampled_from("abcdef")), st.integers(0, 99), st.integers(1, 200))
def test_fair_shares_per_queue(queues, faulty, seed, count):
    """apache/rocketmq#5672 put half of all messages on one queue. Here each queue gets its share,
    to within two messages."""
    route = Route(queues, seed=seed, **{broker: FAILING for broker in faulty if broker in queues})
    chosen = Counter(route.take() for _ in range(count))
    names = set(queues) - faulty or set(queues)
    shares = [chosen[queue] for queue in route.queues if queue[0] in names]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 2


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6), min_size=2),
    st.integers(0, 99),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=3),
)
def test_fair_shares_while_brokers_come_and_go(queues, seed, outages):
    """The queues of one broker take turns, whatever happens to the others."""
    route, chosen = Route(queues, seed=seed), Counter()
    for down in [None, *outages]:
        route.order(**({down: FAILING} if down in queues else {}))
        for number in range(37):
            # Retries take every third turn: a common cursor would lock into this pattern.
            queue = route.take()
            chosen[queue] += 1
            if number % 3 == 0:
                chosen[route.take(last=queue[0])] += 1
    for name in queues:
        shares = [chosen[queue] for queue in route.queues if queue[0] == name]
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("name", ["random", "weighted", "least_latency"])
@pytest.mark.parametrize("faulty", [{}, {"b": FAILING}])
def test_fair_shares_of_the_other_selectors(name, faulty):
    route = Route({"a": 4, "b": 4, "c": 4}, name, **faulty)
    for load in route.loads.values():
        load.latency_s = 0.003
    chosen = Counter(route.take() for _ in range(12_000))
    eligible = [queue for queue in route.queues if queue[0] not in faulty]
    expected = 12_000 / len(eligible)
    assert chosen.keys() == set(eligible)
    assert all(0.8 * expected < count < 1.2 * expected for count in chosen.values())


def test_many_producers_do_not_start_on_one_queue():
    starts = {Route({"a": 8}, seed=seed).take() for seed in range(100)}
    assert starts == {("a", number) for number in range(8)}
    starts = {Route({"a": 1, "b": 1}, seed=seed).take() for seed in range(100)}
    assert len(starts) == 2


def test_weights():
    chosen = Route({"a": 1, "b": 1, "c": 1}, "a=3,c=0.0", 5, c=FAR).names(4000)
    assert 2800 < chosen["a"] < 3200
    assert chosen["c"] == 0
    ranks = {"a": FAILING, "b": FAILING, "c": FAR}
    assert set(Route({"a": 1, "b": 1, "c": 1}, "a=3,c=0.0", 5, **ranks).names(9)) == {"c"}


def test_weighted_without_weights_sends_half_to_a_broker_twice_as_slow():
    route = Route({"a": 4, "b": 8}, "weighted")
    route.loads["a"].latency_s, route.loads["b"].latency_s = 0.004, 0.016
    chosen = route.names(6000)
    assert 1.8 < chosen["a"] / chosen["b"] < 2.2


def test_least_latency_prefers_fast_idle_brokers_and_starves_none():
    route = Route({"a": 2, "b": 2}, "least_latency")
    route.loads["a"].latency_s, route.loads["b"].latency_s = 0.001, 0.05
    quick = route.names(2000)
    assert quick["a"] > 1900
    assert quick["b"] > 0
    route.loads["a"].in_flight, route.loads["b"].latency_s = 10, 0.002
    assert route.names(2000)["b"] > 1900
    route = Route({"a": 1, "b": 1, "c": 1}, "least_latency")
    route.loads["c"].latency_s = 9.0
    assert route.names(2000)["c"] < 60, "two different brokers are compared"


# --- load ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("window", [16, 64, 200, 500, 2000])
def test_a_broker_that_answers_nothing_collects_its_share_and_little_more(name, window):
    """The other broker answers at once, so `window` bounds the messages in flight."""
    route = Route({"dead": 4, "a": 4}, name)
    stuck, answering = route.loads["dead"], route.loads["a"]
    for _ in range(20 * window):
        if stuck.in_flight + answering.in_flight == window:
            answering.in_flight -= 1
        route.loads[route.take()[0]].in_flight += 1
    most = (FREE_IN_FLIGHT + LOAD_FACTOR * window) / (1 + LOAD_FACTOR)
    assert stuck.in_flight <= max(most, FREE_IN_FLIGHT) + 1


def test_each_choice_between_two_brokers_counts_the_answers_before_it():
    route = Route({"dead": 4, "a": 4})
    for _ in range(4):
        route.loads["dead"].in_flight, route.loads["a"].in_flight = 29, 11
        route.take()
        route.loads["a"].in_flight = 5
        assert set(route.names(2)) == {"a"}


def test_a_choice_among_many_brokers_does_not_look_at_the_load_of_each():
    looks = [0]

    class Watched(Load):
        def __getattribute__(self, name):
            looks[0] += name == "in_flight"
            return super().__getattribute__(name)

    route = Route({f"b{number}": 1 for number in range(100)})
    for broker in route.brokers:
        broker.load = Watched(in_flight=200)
    names = route.names(1000)
    assert looks[0] <= 10 * 1000 and len(set(names)) == 100


@pytest.mark.parametrize(
    ("in_flight", "full", "expected"),
    [
        ({"a": 10**6, "b": 9}, "b", {"a": 12}),  # Only broker a has room.
        ({"a": 30, "b": 11, "c": 1000}, "c", {"b": 12}),  # Only brokers with room have a share.
        ({"a": 28, "b": 11, "c": 1000}, "c", {"a": 4, "b": 8}),
        ({"a": 16, "b": 0, "c": 0}, "", {"a": 4, "b": 4, "c": 4}),
        ({"a": 80, "b": 10, "four": 30}, "", {"b": 2, "four": 10}),  # 30 / 4 is less than 10.
    ],
)
def test_load_chooses_among_equals_with_room(in_flight, full, expected):
    route = Route({name: 4 if name == "four" else 1 for name in in_flight})
    for name, requests in in_flight.items():
        route.loads[name].in_flight = requests
        if name == full:
            route.loads[name].fill(requests)
    assert route.names(12) == expected


@pytest.mark.parametrize("name", SELECTORS)
def test_a_full_broker_is_waited_for_and_not_escaped_to_a_worse_one(name):
    route = Route({"busy": 4, "other": 4, "bad": 4}, name, bad=FAILING)
    route.loads["busy"].fill(8)
    assert set(route.names(20)) == {"other"}, "an equal has room"
    route.loads["other"].fill(8)
    assert route.take() is None
    assert route.take(worse=True)[0] == "bad"
    route.order(bad=UNREACHABLE)
    assert route.take(worse=True) is None
    route.loads["busy"].in_flight = 7
    assert set(route.names(20)) == {"busy"}


def test_a_group_takes_a_broker_with_room_for_much_of_it():
    route = Route({"a": 4, "b": 4})
    for load, in_flight in zip(route.loads.values(), (60, 40), strict=True):
        load.fill(100)
        load.in_flight = in_flight
    assert {route.take(256)[0] for _ in range(8)} == {"b"}
    assert {route.take(5)[0] for _ in range(8)} == {"a", "b"}
    route.loads["b"].in_flight = 60
    assert route.take(256) is None


def test_what_failed_at_a_broker_goes_there_again_rather_than_wait_for_another():
    route = Route({"a": 4, "b": 4, "frozen": 4}, frozen=SILENT)
    route.loads["b"].fill(8)
    assert set(route.names(9, last="a")) == {"a"}


def test_the_own_machine_room_comes_first_and_the_others_help_when_it_is_full():
    near = {"c": FAR, "d": FAR}
    route = Route({"a": 2, "b": 2, "c": 2, "d": 2}, **near)
    chosen = Counter(route.take() for _ in range(400))
    assert {name for name, _ in chosen} == {"a", "b"}
    assert max(chosen.values()) - min(chosen.values()) <= 2
    route.loads["a"].fill(4)
    route.loads["b"].fill(4)
    assert set(route.names(20)) == {"c", "d"}
    route.order(a=FAILING, b=FAILING, **near)
    assert set(route.names(20)) == {"c", "d"}
    route.order(c=SUSPECT | FAR, d=SUSPECT | FAR)
    assert route.take() is None, "distance is no fault, and suspicion is one"


def test_a_route_without_brokers():
    route = Route({})
    assert route.take() is None and route.ranking.best == [] and not route.ranking.is_silent
    assert Route({"a": 1}, a=SILENT).ranking.is_silent


def test_a_user_selector_gets_all_queues_and_must_return_one():
    info = info_of({"a": 2, "b": 2}, "t")

    def full(queue):
        return MessageQueue("t", "b", 1) if queue.topic == "bare" else queue

    queue = select_by(lambda queues, message, arg: queues[message + arg], info, 1, 2, full)
    assert queue == MessageQueue("t", "b", 1)
    assert select_by(lambda *_: MessageQueue("bare", "b", 1), info, 1, 2, full) == queue
    for wrong in (None, MessageQueue("t", "x", 0), MessageQueue("u", "a", 0), "a"):
        with pytest.raises(ConfigurationError, match="4 queues of topic 't'"):
            select_by(lambda *_, wrong=wrong: wrong, info, 1, 2, full)


def test_selectors_by_name():
    expected = [round_robin, random_queue, by_latency, least_latency]
    assert [selector_named(name) for name in SELECTORS] == expected
    assert selector_named("a=2") is by_share
    with pytest.raises(KeyError):
        selector_named("hash")
