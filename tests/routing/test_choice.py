"""Queue choice: fair shares, tiers, never the last broker while another will do."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import ConfigurationError
from rocket_sink.message import MessageQueue
from rocket_sink.routing.selectors import (
    VIEWS_MAX,
    Cursor,
    QueueChooser,
    Weighted,
    least_latency,
    random_queue,
    round_robin,
    select_by,
    selector_named,
)
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.route import BrokerData, QueueData, QueueMapping, TopicRoute

SELECTORS = ["round_robin", "random", "weighted", "least_latency"]


def info_of(queues, topic="t", without_master=()):
    return TopicPublishInfo.of(
        topic,
        TopicRoute(
            tuple(QueueData(name, count, count) for name, count in queues.items()),
            tuple(BrokerData("c", name, {0: f"{name}:1"}) for name in queues),
        ),
    )


def chooser(name="round_robin", seed=1, **options):
    return QueueChooser(selector_named(name), random.Random(seed), **options)


class Loads:
    def __init__(self, latency_ms=(), in_flight=()):
        self._latency_ms, self._in_flight = dict(latency_ms), dict(in_flight)

    def latency_ms(self, name):
        return self._latency_ms.get(name, 0.0)

    def in_flight(self, name):
        return self._in_flight.get(name, 0)


def test_c40_the_cursor_starts_anywhere_and_never_is_negative():
    cursor = Cursor(3, 2**31 - 1)
    assert [cursor.take() for _ in range(5)] == [1, 2, 0, 1, 2]
    assert [Cursor(3, start).take() for start in range(4)] == [0, 1, 2, 0]


def test_c38_consecutive_attempts_visit_other_brokers():
    info, choose = info_of({"a": 4, "b": 4, "c": 4}), chooser()
    for _ in range(50):
        last, seen = None, set()
        for _ in range(3):
            queue = choose.select(info, last_broker=last)
            assert queue.broker_name != last
            last = queue.broker_name
            seen.add(last)
        assert len(seen) >= 2


@pytest.mark.parametrize("name", SELECTORS)
def test_a_failed_broker_is_not_asked_again_while_another_will_do(name):
    """apache/rocketmq#2358: the test for the last broker was inverted."""
    info, choose = info_of({"a": 8, "b": 1}), chooser(name)
    assert {choose.select(info, last_broker="a").broker_name for _ in range(100)} == {"b"}


brokers = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 6), min_size=1)
subset = st.sets(st.sampled_from("abcdef"))


@given(brokers, subset, subset, subset, st.none() | st.sampled_from("abcdef"), st.data())
def test_tiers(queues, unavailable, unreachable, suspects, last, data):
    degrees = {name: data.draw(st.integers(1, 3)) for name in sorted(suspects)}
    info = info_of(queues)
    choose = chooser(data.draw(st.sampled_from(SELECTORS)), data.draw(st.integers(0, 99)))
    names = set(queues)
    well = names - unavailable - suspects - {last}
    reached = names - unreachable
    least = min((degrees.get(name, 0) for name in reached - {last}), default=0)
    doubted = {name for name in reached - {last} if degrees.get(name, 0) == least}
    tiers = [well, doubted, reached, names - {last}, names]
    best = next(tier for tier in tiers if tier)
    for _ in range(6):
        queue = choose.select(
            info,
            available=lambda name: name not in unavailable,
            reachable=lambda name: name not in unreachable,
            suspicion=lambda name: degrees.get(name, 0),
            last_broker=last,
            load=Loads(dict.fromkeys(queues, 5.0)),
        )
        assert queue in info.queues
        assert queue.broker_name in best


@given(brokers, subset, st.integers(0, 99), st.integers(1, 200))
def test_fair_shares_per_queue(queues, faulty, seed, count):
    """apache/rocketmq#5672: half of all messages on one queue. Here: equal to one each."""
    info, choose = info_of(queues), chooser(seed=seed)
    chosen = Counter(
        choose.select(info, available=lambda name: name not in faulty) for _ in range(count)
    )
    names = set(queues) - faulty or set(queues)
    eligible = [queue for queue in info.queues if queue.broker_name in names]
    shares = [chosen[queue] for queue in eligible]
    assert sum(shares) == count
    # Two cursors deal: one over all queues, one over what is left when it names a faulty broker.
    assert max(shares) - min(shares) <= 2


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6), min_size=2),
    st.integers(0, 99),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=3),
)
def test_fair_shares_while_brokers_come_and_go(queues, seed, outages):
    """Queues of one broker see the same outages: they differ by one per cursor at most."""
    info, choose = info_of(queues), chooser(seed=seed)
    chosen = Counter()
    for down in [None, *outages]:
        for number in range(37):
            # Each third message is a retry: the pattern that one common cursor locks into.
            queue = choose.select(info, available=lambda name, down=down: name != down)
            chosen[queue] += 1
            if number % 3 == 0:
                again = choose.select(
                    info,
                    available=lambda name, down=down: name != down,
                    last_broker=queue.broker_name,
                )
                chosen[again] += 1
    sets = len(queues) * (len(set(outages)) + 1) + 1
    for name in queues:
        shares = [chosen[queue] for queue in info.queues if queue.broker_name == name]
        assert max(shares) - min(shares) <= sets


def test_a_broker_that_recovers_gets_its_messages_on_all_queues():
    """apache/rocketmq#5672, one thread: each message to `a` makes it unavailable for a while."""
    info, choose = info_of({"a": 4, "b": 4}), chooser()
    chosen, isolated = Counter(), 0
    for _ in range(1700):
        isolated -= 1
        queue = choose.select(info, available=lambda name, i=isolated: name == "b" or i <= 0)
        if queue.broker_name == "a":
            isolated = 17  # not a multiple of anything here
        chosen[queue] += 1
    for name in "ab":
        shares = [chosen[queue] for queue in info.queues if queue.broker_name == name]
        assert max(shares) - min(shares) <= 2
    assert sum(chosen[queue] for queue in info.queues if queue.broker_name == "a") >= 90


@pytest.mark.parametrize("name", ["random", "weighted", "least_latency"])
@pytest.mark.parametrize("faulty", [set(), {"b"}])
def test_fair_shares_of_the_other_selectors(name, faulty):
    info, choose = info_of({"a": 4, "b": 4, "c": 4}), chooser(name)
    loads = Loads(dict.fromkeys("abc", 3.0))
    chosen = Counter(
        choose.select(info, available=lambda broker: broker not in faulty, load=loads)
        for _ in range(12_000)
    )
    eligible = [queue for queue in info.queues if queue.broker_name not in faulty]
    expected = 12_000 / len(eligible)
    assert all(0.8 * expected < chosen[queue] < 1.2 * expected for queue in eligible)
    assert sum(chosen[queue] for queue in eligible) == 12_000


def test_many_producers_do_not_start_on_one_queue():
    info = info_of({"a": 8})
    starts = {chooser(seed=seed).select(info).queue_id for seed in range(100)}
    assert starts == set(range(8))


def test_weights():
    info = info_of({"a": 1, "b": 1, "c": 1})
    choose = QueueChooser(Weighted({"a": 3, "c": 0}), random.Random(5))
    chosen = Counter(choose.select(info).broker_name for _ in range(4000))
    assert 2800 < chosen["a"] < 3200
    assert chosen["c"] == 0
    only_c = {choose.select(info, available=lambda name: name == "c").broker_name for _ in range(9)}
    assert only_c == {"c"}
    with pytest.raises(ValueError, match="negative"):
        Weighted({"a": -1})


def test_weighted_without_weights_sends_half_to_a_broker_twice_as_slow():
    info = info_of({"a": 4, "b": 4})
    choose = chooser("weighted")
    loads = Loads({"a": 4.0, "b": 8.0})
    chosen = Counter(choose.select(info, load=loads).broker_name for _ in range(6000))
    assert 1.8 < chosen["a"] / chosen["b"] < 2.2


def test_least_latency_prefers_fast_idle_brokers_and_starves_none():
    info, choose = info_of({"a": 2, "b": 2}), chooser("least_latency")
    quick = Counter(
        choose.select(info, load=Loads({"a": 1.0, "b": 50.0})).broker_name for _ in range(2000)
    )
    assert quick["a"] > 1900
    assert quick["b"] > 0
    idle = Counter(
        choose.select(info, load=Loads({"a": 1.0, "b": 2.0}, {"a": 10})).broker_name
        for _ in range(2000)
    )
    assert idle["b"] > 1900


def test_machine_room_first_then_the_others():
    info = info_of({"r1@a": 2, "r1@b": 2, "r2@c": 2, "d": 2})
    choose = chooser(near=lambda name: name.startswith("r1@"))
    near = Counter(choose.select(info) for _ in range(400))
    assert {queue.broker_name for queue in near} == {"r1@a", "r1@b"}
    assert max(near.values()) - min(near.values()) <= 2
    far = {
        choose.select(info, available=lambda name: "r1" not in name).broker_name for _ in range(9)
    }
    assert far == {"r2@c", "d"}


def test_brokers_without_a_master_are_never_chosen():
    info = TopicPublishInfo.of(
        "t", TopicRoute((), (BrokerData("c", "a", {0: "a:1"}),), "a:2;gone:6")
    )
    choose = chooser()
    assert {choose.select(info).broker_name for _ in range(50)} == {"a"}
    assert choose.select(info, last_broker="a").broker_name == "a"
    lost = TopicPublishInfo.of("t", TopicRoute((), (BrokerData("c", "a", {1: "a:1"}),), "a:2"))
    assert choose.select(lost) is None
    assert choose.select(TopicPublishInfo.of("u", TopicRoute())) is None


def test_static_topics_use_the_broker_that_hosts_the_queue():
    mapping = {
        "b1": QueueMapping("b1", 4, 1, queue_ids={0: 0, 3: 1}),
        "b2": QueueMapping("b2", 4, 1, queue_ids={1: 0, 2: 1}),
    }
    hosts = tuple(BrokerData("c", name, {0: name}) for name in mapping)
    info = TopicPublishInfo.of("t", TopicRoute((), hosts, mappings=mapping))
    choose = chooser()
    chosen = {choose.select(info, available=lambda name: name == "b1") for _ in range(50)}
    assert {queue.queue_id for queue in chosen} == {0, 3}


def test_cursors_outlive_a_refresh_that_changes_no_queue():
    choose = chooser()
    chosen = Counter(choose.select(info_of({"a": 4, "b": 3})) for _ in range(70))
    assert set(chosen.values()) == {10}
    assert {choose.select(info_of({"a": 1})).broker_name for _ in range(3)} == {"a"}


def test_cursors_are_bounded():
    info, choose = info_of({f"b{number}": 1 for number in range(12)}), chooser()
    for number in range(4096):
        queue = choose.select(info, available=lambda name, n=number: not n >> int(name[1:]) & 1)
        assert number == 4095 or not number >> int(queue.broker_name[1:]) & 1
    assert len(choose._topics["t"]._by_brokers) <= VIEWS_MAX
    for number in range(2000):
        choose.select(info_of({"a": 1}, topic=f"t{number}"))
    assert len(choose._topics) <= 1024


def test_a_user_selector_gets_all_queues_and_must_return_one():
    info = info_of({"a": 2, "b": 2})

    def full(queue):
        return MessageQueue("t", "b", 1) if queue.topic == "bare" else queue

    queue = select_by(lambda queues, message, arg: queues[message + arg], info, 1, 2, full)
    assert queue == MessageQueue("t", "b", 1)
    assert select_by(lambda *_: MessageQueue("bare", "b", 1), info, 1, 2, full) == queue
    for wrong in (None, MessageQueue("t", "x", 0), MessageQueue("u", "a", 0), "a"):
        with pytest.raises(ConfigurationError, match="4 queues of topic 't'"):
            select_by(lambda *_, wrong=wrong: wrong, info, 1, 2, full)


def test_selectors_by_name():
    plain = {name: selector_named(name) for name in SELECTORS}
    assert isinstance(plain.pop("weighted"), Weighted)
    assert list(plain.values()) == [round_robin, random_queue, least_latency]
    with pytest.raises(KeyError):
        selector_named("hash")
