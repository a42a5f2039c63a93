"""The queue of a sharding key."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.message import MessageQueue
from rocket_sink.routing import sharding
from rocket_sink.routing.hashing import rendezvous, sip_hash24
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.route import TopicRoute
from tests.java_client import FOLDER, run_java
from tests.routing.infos import info_of, static_info

HASHES = ["java", "java_long", "siphash24", "rendezvous", sharding.LITE_TOPIC_HASH]
LITE_TOPICS = {
    "session-1": "b 10", "s0": "a 6", "a": "c 18", "b": "a 5", "user_42": "b 10", "Z-9": "a 1",
    "Kjfl-O_": "a 0", "dskz-2s": "a 0",
}  # fmt: skip
"""{lite topic: broker and queue index among a's 8, b's 8 and c's 3 queues}, by `PlaceLite.java`.
The hashes of the last two make Guava's integer overflow."""
KEYS = [f"user-{number}" for number in range(500)]


def test_c39_by_hash_over_the_sorted_queues():
    info = info_of({"b": 5, "a": 5})
    assert sharding.queue_for_key(info, "123") == MessageQueue("orders", "a", 0)
    assert sharding.queue_for_key(info, "234") == MessageQueue("orders", "a", 3)
    assert sharding.queue_for_key(info, "GydZG_") == MessageQueue("orders", "b", 3)
    assert sharding.queue_for_key(info, "user-1", "siphash24") == MessageQueue("orders", "b", 4)


def lite_places(queues, names):
    info = info_of(queues)
    column = sharding.queues_for_keys(info, pa.array(names), sharding.LITE_TOPIC_HASH).tolist()
    return {
        name: f"{info.queues[index].broker_name} {index}"
        for name, index in zip(names, column, strict=True)
    }


def test_lite_topics_lie_where_brokers_and_proxies_look_for_them():
    assert lite_places({"a": 8, "b": 8, "c": 3}, list(LITE_TOPICS)) == LITE_TOPICS


@pytest.mark.cluster
@pytest.mark.parametrize("queues", [{"a": 8, "b": 8, "c": 3}, {"a": 300, "b": 700}])
def test_javas_own_code_places_lite_topics_alike(queues):
    names = [*LITE_TOPICS, *(f"{kind}_{n}-x" for kind in ("session", "S") for n in range(2000))]
    brokers = ",".join(f"{name}:{count}" for name, count in queues.items())
    lines = "".join(f"{name}\n" for name in names)
    placed = run_java(FOLDER / "PlaceLite.java", "t", brokers, version="5.5.0", lines=lines)
    expected = {name: f"{broker} {index}" for _, name, broker, index in placed}
    assert lite_places(queues, names) == expected


@pytest.mark.parametrize("sharding_hash", HASHES)
@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 9), min_size=1),
    st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
)
def test_a_column_and_a_key_have_one_owner(sharding_hash, queues, keys):
    info = info_of(queues)
    column = sharding.queues_for_keys(info, pa.array(keys, pa.string()), sharding_hash).tolist()
    assert [info.queues[index] for index in column] == [
        sharding.queue_for_key(info, key or "", sharding_hash) for key in keys
    ]


def test_rendezvous_moves_only_the_keys_of_the_broker_that_left():
    before, after = info_of({"a": 4, "b": 8, "c": 4}), info_of({"a": 4, "c": 4})
    moved = 0
    for key in KEYS:
        old = sharding.queue_for_key(before, key, "rendezvous")
        new = sharding.queue_for_key(after, key, "rendezvous")
        assert old == new or old.broker_name == "b"
        moved += old != new
    assert 0.4 * len(KEYS) < moved < 0.6 * len(KEYS)


def test_rendezvous_of_a_static_topic_names_the_hosts():
    info = static_info(b1={0: 0, 3: 1}, b2={1: 0, 2: 1})
    chosen = {sharding.queue_for_key(info, key, "rendezvous").queue_id for key in KEYS}
    assert chosen == {0, 1, 2, 3}
    for key in KEYS:
        host = ["b1", "b2"][rendezvous(sip_hash24(key.encode()), ["b1", "b2"])]
        assert info.broker_of(sharding.queue_for_key(info, key, "rendezvous")) == host


def test_best_effort_moves_home_queues_of_an_unavailable_broker_and_back():
    info = info_of({"a": 4, "b": 4, "c": 4})
    for home in info.queues:
        assert sharding.fallback_queue(info, home, lambda name: True) == home
        moved = sharding.fallback_queue(info, home, lambda name: name != "a")
        assert (moved == home) == (home.broker_name != "a")
        assert moved.broker_name != "a"
        # If a second broker fails, only the keys that moved to it move again.
        again = sharding.fallback_queue(info, home, lambda name: name not in ("a", "b"))
        assert again == moved or moved.broker_name == "b"
        assert sharding.fallback_queue(info, home, lambda name: False) == home
    of_a = [sharding.fallback_queue(info, home, lambda name: name != "a") for home in info.queues]
    assert len(set(of_a[:4])) > 1


def test_a_home_that_is_gone_and_a_route_that_is_empty():
    info, gone = info_of({"a": 2}), MessageQueue("orders", "z", 0)
    assert sharding.fallback_queue(info, gone, lambda name: True).broker_name == "a"
    assert sharding.fallback_queue(info, gone, lambda name: False).broker_name == "a"
    empty = TopicPublishInfo.of("t", TopicRoute())
    assert sharding.fallback_queue(empty, gone, lambda name: True) is None
    with pytest.raises(ValueError, match="'t'"):
        sharding.queue_for_key(empty, "k")
    with pytest.raises(ValueError, match="'t'"):
        sharding.queues_for_keys(empty, pa.array(["k"]))
    with pytest.raises(KeyError):
        sharding.queue_for_key(info, "k", "md5")
