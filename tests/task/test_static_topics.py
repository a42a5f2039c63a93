"""Strict order on a static topic: keys keep their queues while these move between brokers."""

from dataclasses import replace

import pyarrow as pa
import pytest

from rocket_sink.errors import DeliveryError
from rocket_sink.ledger.records import RunContext
from rocket_sink.options import SinkOptions
from rocket_sink.routing.sharding import queues_for_keys
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.spark.backfill.home_queues import absent_homes
from rocket_sink.task.queue_snapshot import Pinned, queues_of
from rocket_sink.wire.route import QueueMapping
from tests.clusters import scripted_cluster

from .one_task import run_task

KEYS = [f"key-{n}" for n in range(32)]
QUEUES = 8


cluster = scripted_cluster(orders=QUEUES)


@pytest.fixture
def options(cluster, tmp_path):
    return SinkOptions.parse(
        nameServer=cluster.name_server, ledger=str(tmp_path), topic="orders", ordering="strict",
        sendMsgTimeout="20s", connectTimeoutMs="20s", pollNameServerInterval=10,
    )  # fmt: skip


def mapped(cluster, patch, epoch, places, total=QUEUES):
    """Return the route of a static topic whose queues are on these brokers."""
    patch.undo()
    mappings = {
        name: QueueMapping(name, total, epoch, queue_ids={queue: queue for queue in queues})
        for name, queues in places.items()
    }
    route = replace(cluster.route("orders"), mappings=mappings)
    patch.setattr(cluster, "route", lambda topic: route)
    return route


@pytest.fixture(params=["java", "rendezvous"])
def hashed(request, options):
    return options.with_(sharding_hash=request.param)


def send(options, epoch):
    ctx = RunContext("q-1", "r", epoch, 0, 1, epoch, 0, worker="w:1", lane="foreach")
    return run_task(options, ctx, {"body": [b"x"] * len(KEYS), "sharding_key": KEYS}).acked


def queues_by_key(cluster, broker):
    queues: dict[str, set[int]] = {}
    for message in next(b for b in cluster.brokers if b.name == broker).store.messages("orders"):
        queues.setdefault(message.properties["__SHARDINGKEY"], set()).add(message.queue_id)
    return queues


def test_keys_keep_their_queues_while_these_move(cluster, hashed, monkeypatch):
    mapped(cluster, monkeypatch, 1, {"broker-a": [0, 1, 2, 3], "broker-b": [4, 5, 6, 7]})
    assert send(hashed, 0) == len(KEYS)
    before = {**queues_by_key(cluster, "broker-a"), **queues_by_key(cluster, "broker-b")}
    assert set(before) == set(KEYS)
    assert {min(queues) for queues in before.values()} == set(range(QUEUES))
    mapped(cluster, monkeypatch, 2, {"broker-a": [], "broker-b": list(range(QUEUES))})
    assert send(hashed, 1) == len(KEYS)
    assert queues_by_key(cluster, "broker-b") == before


def test_more_queues_are_a_change(cluster, options, monkeypatch):
    places = {"broker-a": [0, 1, 2, 3], "broker-b": [4, 5, 6, 7]}
    mapped(cluster, monkeypatch, 1, places)
    send(options, 0)
    mapped(cluster, monkeypatch, 2, {**places, "broker-a": [0, 1, 2, 3, 8]}, total=9)
    with pytest.raises(DeliveryError, match="has 9 queues, not 8"):
        send(options, 1)


def test_a_backfill_waits_for_the_broker_that_a_queue_is_on(cluster, monkeypatch):
    route = mapped(cluster, monkeypatch, 1, {"broker-a": [0, 1, 2, 3], "broker-b": [4, 5, 6, 7]})
    info = TopicPublishInfo.of("orders", route)
    keys, pinned = pa.array(KEYS), Pinned(queues_of(info), "java")
    assert not any(absent_homes(keys, pinned, info))
    away = replace(info, masters={"broker-a": info.masters["broker-a"]})
    places = queues_for_keys(info, keys, "java").tolist()
    absent = absent_homes(keys, pinned, away)
    assert [name is None for name in absent] == [place < 4 for place in places]
    assert "__syslo__global__ (queue 4)" in absent
