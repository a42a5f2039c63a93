"""The ranks that an engine gives to brokers, and the rankings that it keeps."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from rocket_sink.net.channel import HEARD_RECENTLY_S
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.brokers import BrokerHealth, Brokers
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.routing.fault import FAILING, FAR, SILENT, SUSPECT, UNREACHABLE
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.route import BrokerData, QueueData, TopicRoute
from tests.routing.fault_views import isolate
from tests.routing.infos import info_of, static_info

NOW_S = 1000.0
VIEW_S = 0.02


def make(shared=None, **options):
    parsed = SinkOptions.parse({"nameServer": "h:9876", **options})
    return Brokers(parsed, shared or SharedBrokerState.in_process(), random.Random(1))


def homes(brokers, info, now_s=NOW_S, count=30, **more):
    ranking = brokers.ranking(info, now_s)
    return {ranking.take(1, **more).home for _ in range(count)}


INFO = info_of({"a": 4, "b": 4, "c": 4})


def test_an_isolation_counts_for_the_next_request():
    """A late answer isolates, too: otherwise a window of requests would go there at once."""
    brokers = make()
    assert homes(brokers, INFO) == set("abc")
    brokers.note_answer(brokers.of("b"), 0.6, NOW_S, stored=True)
    assert homes(brokers, INFO) == set("ac")
    brokers.faults.isolate_topic("orders", "a", NOW_S, "NO_PERMISSION")
    assert homes(brokers, INFO) == {"c"}
    assert homes(brokers, info_of({"a": 4, "b": 4, "c": 4}, "other")) == set("ac")
    assert homes(brokers, INFO, NOW_S + 2.1) == set("bc"), "it ends by itself"
    brokers.note_answer(brokers.of("c"), 60.0, NOW_S + 2.1, stored=False)
    assert homes(brokers, INFO, NOW_S + 2.1) == set("bc") and not brokers.of("c").stored_sent_s
    isolate(brokers, "c", NOW_S + 2.2, reachable=False)
    brokers.view(NOW_S + 2.2)
    brokers.note_answer(brokers.of("c"), 0.25, NOW_S + 2.2, stored=True)
    health = BrokerHealth("c", False, pytest.approx(10_000.0), True, False, 0.0, 2)
    brokers.of("c").in_flight = 2
    assert brokers.health(NOW_S + 2.2)[-1] == replace(health, latency_ms=pytest.approx(52531.25))
    assert brokers.health(NOW_S + 2.2)[1] == BrokerHealth("b", True, 0.0, True, False, 600.0, 0)


def test_an_isolation_by_another_worker_counts_the_same():
    shared = SharedBrokerState.in_process()
    brokers, other = make(shared), make(shared)
    assert homes(brokers, INFO) == set("abc")
    isolate(other, "b", NOW_S, reachable=True)
    assert homes(brokers, INFO, NOW_S + VIEW_S) == set("ac")
    assert brokers.rank("b", "orders") == FAILING


def test_ranks():
    """An isolation that ended leaves no mark, even without a probe since (apache/rocketmq#7812)."""
    brokers = make(machineRoom="r")
    for name in ("r@well", "r@suspect", "r@silent", "r@dead"):
        brokers.of(name)
    later_s = NOW_S + 1.0
    brokers.of("r@silent").measure(1e6)  # only a send may take long
    brokers.update_suspicion(
        [
            ("r@well", None, NOW_S),
            ("r@suspect", NOW_S, later_s),
            ("r@silent", NOW_S, later_s - 1.1 * HEARD_RECENTLY_S),
        ],
        later_s,
    )
    isolate(brokers, "r@dead", NOW_S, reachable=False)
    isolate(brokers, "r@silent", NOW_S, reachable=True)
    for name in ("r@well", "r@suspect"):
        brokers.faults.isolate_topic("orders", name, NOW_S, "NO_PERMISSION")
    brokers.view(later_s)

    def ranks(topic):
        return [brokers.rank(f"r@{name}", topic) for name in ("well", "suspect", "silent", "dead")]

    bad = [FAILING | SUSPECT | SILENT, UNREACHABLE]
    assert ranks("orders") == [FAILING, FAILING | SUSPECT, *bad]
    assert ranks("other") == [0, SUSPECT, *bad]
    assert brokers.rank("else", "orders") == FAR
    brokers.view(NOW_S + 10.1)
    assert ranks("other") == [0, SUSPECT, SUSPECT | SILENT, 0]


def test_without_fault_tolerance_only_suspicion_counts():
    brokers = make(faultTable="off")
    isolate(brokers, "a", NOW_S, reachable=False)
    brokers.faults.isolate_topic("orders", "a", NOW_S, "NO_PERMISSION")
    brokers.note_answer(brokers.of("a"), 60.0, NOW_S, stored=True)
    assert homes(brokers, INFO) == set("abc")
    brokers.update_suspicion([("a", NOW_S - 1.0, NOW_S)], NOW_S)
    assert homes(brokers, INFO) == set("abc"), "its usual latency explains it"
    brokers.update_suspicion([("a", NOW_S - 3.1, NOW_S)], NOW_S)
    assert homes(brokers, INFO) == set("bc")
    brokers.of("b").in_flight = 4
    brokers.of("b").busy(0.0, NOW_S)
    assert homes(brokers, INFO) == {"c"}, "b is full"


def test_an_answer_lets_a_window_grow_once():
    limits = []
    for answers in ([], [1], [1, 1], [2]):
        broker = make().of("a")
        broker.in_flight = 10
        broker.busy(0.0, 0.0)
        for count in answers:
            broker.grow_window(100, *([count] if count > 1 else []))
        limits.append(broker.window.limit)
    assert limits[0] < limits[1] < limits[2] == limits[3]
    broker.grow_window(int(limits[3]) + 1, 100)
    assert broker.window is None, "it has grown back to its full size"


def test_who_is_worse_than_another_is_told_once():
    """Requests of which no byte was written leave such a broker."""
    brokers = make()
    for name in "ab":
        isolate(brokers, name, NOW_S, reachable=True)
    brokers.of("a"), brokers.of("b")
    brokers.view(NOW_S)
    assert brokers.take_worsened() == [], "no other one is better"
    brokers.of("c")
    brokers.update_suspicion([("b", NOW_S - 9.0, NOW_S)], NOW_S)
    assert brokers.take_worsened() == ["b"]
    assert brokers.take_worsened() == []
    brokers.of("d")
    isolate(brokers, "c", NOW_S, reachable=True)
    brokers.view(NOW_S)
    brokers.update_suspicion([("a", NOW_S - 9.0, NOW_S)], NOW_S)
    assert brokers.take_worsened() == ["a", "c"]


def test_who_falls_silent_after_all_were_suspect_is_worse_than_the_others():
    brokers = make()
    for name in "ab":
        brokers.of(name)
    brokers.update_suspicion([(name, NOW_S - 9.0, NOW_S) for name in "ab"], NOW_S)
    assert brokers.take_worsened() == [], "both are suspect"
    later_s = NOW_S + 1.1 * HEARD_RECENTLY_S
    heard = [("a", NOW_S - 9.0, later_s), ("b", NOW_S - 9.0, NOW_S)]
    brokers.update_suspicion(heard, later_s)
    assert brokers.take_worsened() == ["b"]
    brokers.update_suspicion(heard, later_s)
    assert brokers.take_worsened() == []


def test_brokers_of_other_topics_change_nothing():
    """The ranking ignores both their load and their state."""
    brokers, info = make(), info_of({"a": 4, "b": 4})
    brokers.of("idle"), brokers.of("full")
    brokers.of("full").in_flight = 5000
    for name in "ab":
        brokers.of(name).in_flight = 400
    before = brokers.ranking(info, NOW_S)
    isolate(brokers, "idle", NOW_S, reachable=True)
    ranking = brokers.ranking(info, NOW_S)
    assert ranking is before
    assert Counter(ranking.take(1).home for _ in range(80)) == {"a": 40, "b": 40}


def test_brokers_without_a_master_are_never_chosen():
    route = TopicRoute((), (BrokerData("c", "a", {0: "a:1"}),), "a:2;gone:6")
    info, brokers = TopicPublishInfo.of("t", route), make()
    assert homes(brokers, info) == homes(brokers, info, last="a") == {"a"}
    lost = TopicPublishInfo.of("t", TopicRoute((), (BrokerData("c", "a", {1: "a:1"}),), "a:2"))
    for none in (lost, TopicPublishInfo.of("u", TopicRoute())):
        assert brokers.ranking(none, NOW_S).take(1) is None


def test_static_topics_use_the_broker_that_hosts_the_queue():
    info, brokers = static_info(b1={0: 0, 3: 1}, b2={1: 0, 2: 1}), make()
    isolate(brokers, "b2", NOW_S, reachable=True)
    ranking = brokers.ranking(info, NOW_S)
    chosen = [ranking.take(1) for _ in range(8)]
    assert {target.queue.queue_id for target in chosen} == {0, 3}
    assert {(target.home, target.address) for target in chosen} == {("b1", "b1")}


def test_turns_outlive_a_refreshed_route():
    brokers = make()
    chosen = Counter(
        brokers.ranking(info_of({"a": 4}), NOW_S).take(1).queue.queue_id for _ in range(40)
    )
    assert set(chosen.values()) == {10}
    assert homes(brokers, info_of({"b": 1})) == {"b"}


def test_nothing_is_ranked_anew_for_a_message():
    """Ranks are computed when something changes, not for each message."""
    brokers = make()
    ranked, views = [], []
    rank, view = brokers.rank, brokers.faults.ranks
    brokers.rank = lambda name, topic: ranked.append(name) or rank(name, topic)
    brokers.faults.ranks = lambda now_s: views.append(now_s) or view(now_s)
    for number in range(1000):
        brokers.ranking(INFO, NOW_S + number * VIEW_S / 50).take(1)
        brokers.view(NOW_S + number * VIEW_S / 50)
    assert sorted(ranked) == ["a", "b", "c"] and len(views) in (20, 21)
    isolate(brokers, "a", NOW_S, reachable=True)
    for _ in range(1000):
        brokers.ranking(INFO, NOW_S + 1.0).take(1, last="b")
    assert sorted(ranked) == ["a", "a", "b", "b", "c", "c"]
    isolate(brokers, "else", NOW_S, reachable=True)
    for _ in range(1000):
        brokers.ranking(INFO, NOW_S + 1.0)
    assert len(ranked) == 9


@pytest.mark.parametrize("room", ["r1", "r2"])
def test_machine_room(room):
    brokers = make(machineRoom=room)
    info = info_of({"r1@a": 2, "r1@b": 2, "r2@c": 2, "d": 2})
    near = {name for name in info.masters if name.startswith(f"{room}@")}
    assert homes(brokers, info) == near
    for name in near:
        isolate(brokers, name, NOW_S, reachable=True)
    assert homes(brokers, info) == info.masters.keys() - near


def test_weights_of_zero():
    brokers = make(queueSelector="a=3, c=0")
    chosen = Counter(brokers.ranking(INFO, NOW_S).take(1).home for _ in range(4000))
    assert 2800 < chosen["a"] < 3200 and chosen["c"] == 0
    for name in "ab":
        isolate(brokers, name, NOW_S, reachable=True)
    assert homes(brokers, INFO) == {"c"}


@pytest.mark.parametrize(
    ("addresses", "room"),
    [
        ({"a": "p:8080", "b": "p:8080"}, 120), ({"a": "h:9876"}, 120),
        ({"a": "a:1", "b": "b:1"}, 1000), ({"a": "a:1"}, 1000),
    ],
)  # fmt: skip
def test_brokers_behind_a_proxy_share_a_window(addresses, room):
    """A proxy gives its own address for each broker; it may be that of the option nameServer."""
    queues = tuple(QueueData(name, 4, 4) for name in addresses)
    route = tuple(BrokerData("c", name, {0: address}) for name, address in addresses.items())
    brokers = make()
    info = TopicPublishInfo.of("orders", TopicRoute(queues, route))
    before = brokers.ranks
    broker = brokers.target(info, info.queues[0]).broker
    assert (brokers.ranks is before) == (room == 1000), "whether a new window wakes requests"
    brokers.ranking(info, NOW_S)
    assert brokers.of("a") is broker
    assert (broker.window is None) == (room == 1000)
    assert broker.batch_places(4000) == (1 if room == 1000 else 120)
    if room == 120:
        other = brokers.of(max(addresses))
        other.in_flight = 20
        assert broker.room_for(200) == 100
        broker.grow_window(2048, 200)
        assert broker.window.limit == 120, "the proxy drops answers beyond"
        broker.busy(1.0, 2.0)
        later = TopicPublishInfo.of("later", TopicRoute(queues, route))
        brokers.ranking(later, NOW_S)
        assert broker.window.limit == 10, "another topic begins no new window"


def test_a_refused_batch_halves_the_limit_unless_larger_ones_were_stored(caplog):
    brokers, broker = make(), make().of("a")
    cases = (10_000, True, 5000), (10_000, False, 5000), (1500, True, 1024), (1024, False, 1024)
    for size, is_new, limit in cases:
        assert (broker.batch_refused(size), broker.batch_limit) == (is_new, limit)
    broker.batch_limit, broker.largest_batch = None, 4000
    assert not broker.batch_refused(4000) and broker.batch_limit is None
    assert broker.batch_refused(6000) and broker.batch_limit == 4000
    brokers.note_batch_refused("d", 10_000)
    assert "d refused a batch of 10000 bytes" in caplog.text and "most 5000 bytes" in caplog.text
    for name, limit in (("a", None), ("b", 3000), ("c", 2000)):
        brokers.of(name).batch_limit = limit
    limits = [brokers.batch_limit(info_of(dict.fromkeys(names, 1))) for names in ("a", "bca", "e")]
    assert limits == [None, 2000, None]
    assert make(faultTable="4.x").faults.profile.success_resets


def test_the_latency_is_smoothed_as_in_rfc_6298():
    broker = make().of("a")
    broker.measure(0.8)
    assert (broker.latency_s, broker.deviation_s) == (0.8, 0.4)
    broker.measure(1.6)
    assert (broker.latency_s, broker.deviation_s) == pytest.approx((0.9, 0.5))
    assert broker.suspect_after_s(0.1) == pytest.approx(2.9)
    assert (broker.suspect_after_s(5.0), make().of("b").suspect_after_s(0.1)) == (5.0, 0.1)
