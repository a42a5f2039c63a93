"""TopicPublishInfo: the writable queues of a route."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.message import MessageQueue
from rocket_sink.routing.topic_publish_info import NO_BROKER, QueueList, TopicPublishInfo
from rocket_sink.wire.route import BrokerData, QueueData, QueueMapping, TopicRoute
from tests.routing.infos import static_info


def broker(name, *ids):
    return BrokerData("c", name, {number: f"{name}:{10911 + number}" for number in ids or (0,)})


def route(*queues, brokers=None, **more):
    names = {data.broker_name for data in queues}
    return TopicRoute(tuple(queues), brokers or tuple(broker(name) for name in names), **more)


def info_with(*queues, **more):
    return TopicPublishInfo.of("t", route(*queues, **more))


def pairs(info):
    return [(queue.broker_name, queue.queue_id) for queue in info.queues]


def test_c41_write_queues_count():
    info = info_with(QueueData("BrokerA", 3, 4, 6))
    assert pairs(info) == [("BrokerA", number) for number in range(4)]
    assert not info.order
    assert info.masters == {"BrokerA": "BrokerA:10911"}


def test_c42_order_topic_conf_keeps_its_own_order():
    info = info_with(QueueData("b1", 3, 4, 6), order_topic_conf="b2:1;b1:2;")
    assert pairs(info) == [("b2", 0), ("b1", 0), ("b1", 1)] and info.order
    assert info.queues_by_broker == {"b2": range(1), "b1": range(1, 3)}


@pytest.mark.parametrize(
    ("addresses", "proxy"),
    [(["p:1", "p:1"], "p:1"), (["p:1", "q:1"], ""), (["p:1"], ""), (["n:1"], "n:1"), ([], "")],
)
def test_a_proxy_gives_all_brokers_its_own_address(addresses, proxy):
    """A route with a single broker has one address, too, so that must be a name server's."""
    names = [f"b{number}" for number in range(len(addresses))]
    brokers = [BrokerData("c", name, {0: a}) for name, a in zip(names, addresses, strict=True)]
    queues = [QueueData(name, 4, 4, 6) for name in names]
    assert TopicPublishInfo.of("t", route(*queues, brokers=brokers)).proxy(["n:1"]) == proxy


@pytest.mark.parametrize("conf", ["b1", "b1:x", ":4", "b1:-4", "b1:99999999999", "b1:2147483647"])
def test_an_impossible_order_topic_conf_is_an_error_with_the_topic(conf):
    with pytest.raises(RemoteProtocolError, match="'t'"):
        TopicPublishInfo.of("t", route(order_topic_conf=conf))


def test_c43_empty_static_mapping():
    assert not info_with(QueueData("b", 4, 4), mappings={"b": QueueMapping("b", 0, 0)}).ok


def test_static_topic():
    mapping = {
        "b1": QueueMapping("b1", 4, 1, queue_ids={0: 0, 1: 1}),
        "b2": QueueMapping("b2", 4, 2, queue_ids={1: 0, 2: 1}),
    }
    info = info_with(QueueData("b1", 4, 4), QueueData("b2", 4, 4), mappings=mapping)
    assert pairs(info) == [("__syslo__global__", number) for number in range(4)]
    # Queue 1 moved to b2 in the newer epoch; queue 3 has no broker.
    assert [info.broker_of(queue) for queue in info.queues] == ["b1", "b2", "b2", NO_BROKER]
    assert [info.index_of(queue) for queue in info.queues] == [0, 1, 2, 3]
    assert info.index_of(MessageQueue("t", "b1", 0)) is None


class Unsearchable(tuple):
    def __contains__(self, sought):
        raise AssertionError("a pass over all queues for one of them")

    index = __contains__


def test_a_queue_of_a_static_topic_is_found_without_a_search():
    """A caller asks for all queues, one by one: for 65,536 queues a search each took minutes."""
    info = static_info(b1={0: 0, 1: 1})
    by_broker = {name: Unsearchable(queues) for name, queues in info.queues_by_broker.items()}
    info = replace(info, queues=Unsearchable(info.queues), queues_by_broker=by_broker)
    assert [info.index_of(queue) for queue in info.queues] == [0, 1, 2, 3]
    assert [info.broker_of(queue) for queue in info.queues] == ["b1", "b1", NO_BROKER, NO_BROKER]
    assert info.broker_of(MessageQueue("t", "b1", 0)) == "b1"


def test_c74_only_a_slave_is_left():
    info = info_with(QueueData("b", 8, 8), brokers=(broker("b", 1),))
    assert not info.ok and info.masters == {}


def test_c74_wiped_write_permission():
    wiped = (QueueData("a", 8, 8, 4), QueueData("c", 8, 0, 6), QueueData("d", 8, -1, 6))
    info = info_with(*wiped, QueueData("b", 8, 2, 6))
    assert pairs(info) == [("b", 0), ("b", 1)]


def test_c74_three_brokers_sorted_by_name():
    """apache/rocketmq#1999: clients that do not sort the brokers send one key to two queues."""
    info = info_with(QueueData("c", 1, 1), QueueData("a", 1, 2), QueueData("b", 1, 1))
    assert pairs(info) == [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
    assert list(info.queues_by_broker) == ["a", "b", "c"]


def test_c74_a_new_master_changes_the_address_and_no_key():
    before = info_with(QueueData("b", 4, 4))
    moved = BrokerData("c", "b", {0: "other:10911"})
    after = info_with(QueueData("b", 4, 4), brokers=(moved,))
    assert after != before and after.fingerprint == before.fingerprint


def test_queue_data_of_a_broker_without_broker_data_is_skipped():
    info = info_with(QueueData("a", 1, 1), QueueData("b", 1, 1), brokers=(broker("b"),))
    assert pairs(info) == [("b", 0)]


def test_default_topic_gives_no_more_than_the_read_queues():
    template = route(QueueData("a", 8, 8, 7), QueueData("b", 2, 8, 7))
    info = TopicPublishInfo.default("new", template, 4)
    assert pairs(info) == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 1)]
    assert {queue.topic for queue in info.queues} == {"new"}


def test_f75_a_route_of_two_billion_queues_is_refused_without_making_them():
    static = TopicRoute(mappings={"a": QueueMapping("a", 2**31 - 1, 1)})
    for large in (route(QueueData("a", 1, 2**31 - 1)), static):
        with pytest.raises(RemoteProtocolError, match="limit is 65536"):
            TopicPublishInfo.of("t", large)


def test_the_largest_route_costs_nothing():
    info = TopicPublishInfo.of("t", route(QueueData("a", 65_536, 65_536)))
    assert len(info.queues) == 65_536
    assert info.queues[-1] == MessageQueue("t", "a", 65_535)
    assert info.index_of(MessageQueue("t", "a", 60_000)) == 60_000


def test_fingerprint_is_the_layouts_and_is_the_same_in_every_process():
    base = TopicPublishInfo.of("t", route(QueueData("a", 4, 4)))
    assert base.fingerprint == TopicPublishInfo.of("t", route(QueueData("a", 9, 4))).fingerprint
    for topic, queues in (("t", ("a", 4, 5)), ("u", ("a", 4, 4)), ("t", ("b", 4, 4))):
        other = TopicPublishInfo.of(topic, route(QueueData(*queues)))
        assert other.fingerprint != base.fingerprint
    assert base.fingerprint == "11f09ed400bc07be"


def test_publish_info_pickles():
    for info in (info_with(QueueData("a", 4, 4)), static_info(b1={0: 0, 1: 1})):
        copy = pickle.loads(pickle.dumps(info))
        assert (copy, copy.fingerprint, hash(copy)) == (info, info.fingerprint, hash(info))


spans = st.lists(st.tuples(st.text("ab", min_size=1), st.integers(0, 5)), unique_by=lambda s: s[0])


@given(spans, st.integers(-30, 30), st.slices(20))
def test_queue_list_is_the_tuple_of_its_queues(layout, index, part):
    queues = QueueList("t", layout)
    plain = tuple(MessageQueue("t", name, i) for name, count in layout for i in range(count))
    assert tuple(queues) == plain
    assert len(queues) == len(plain)
    assert queues[part] == plain[part]
    assert tuple(queues[i] for i in range(len(queues))) == plain
    assert [queues.position(queue) for queue in plain] == list(range(len(plain)))
    assert all(queue in queues for queue in plain)
    assert MessageQueue("t", "zzz", 0) not in queues
    assert MessageQueue("u", "a", 0) not in queues
    if -len(plain) <= index < len(plain):
        assert queues[index] == plain[index]
    else:
        with pytest.raises(IndexError):
            queues[index]
