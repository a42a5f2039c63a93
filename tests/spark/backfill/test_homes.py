"""Letters of a strict query stay on their keys' queues, whatever brokers the route has today."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rocket_sink.errors import DeliveryError
from rocket_sink.ledger.records import RunContext
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.spark.backfill.backfill import backfill_options
from rocket_sink.spark.backfill.resend import waiting_of
from rocket_sink.testing import FakeCluster
from tests.spark.backfill.test_resend import TOPIC, letters, make
from tests.task.one_task import run_task

QUERY = RunContext("q-1", "r", 3, 0, 1, 7, 0, worker="w:1", lane="foreach")
KEYS = [f"key-{n}" for n in range(32)]


def java_hash(text: str) -> int:
    """Return String.hashCode(), written once more for the test."""
    value = 0
    for character in text:
        value = (31 * value + ord(character)) % 2**32
    return value - 2**32 if value >= 2**31 else value


def home(key: str, queues: int = 4) -> tuple[str, int]:
    """Return SelectMessageQueueByHash's choice from the queues of broker-a, then broker-b."""
    index = abs(java_hash(key)) % (2 * queues)
    return ("broker-a" if index < queues else "broker-b"), index % queues


@pytest.fixture
def given(cluster: FakeCluster, tmp_path: Path) -> SinkOptions:
    return SinkOptions.parse(
        nameServer=cluster.name_server, ledger=str(tmp_path), topic=TOPIC, ordering="strict",
        sendMsgTimeout="20s", connectTimeoutMs="20s", pollNameServerInterval=10,
    )  # fmt: skip


def query(given: SinkOptions, ctx: RunContext = QUERY) -> None:
    """Run an epoch of a strict query, which pins the topic's queues."""
    columns = {"body": [b"x"] * len(KEYS), "sharding_key": KEYS}
    assert run_task(given, ctx, columns).acked == len(KEYS)


def backfill(given: SinkOptions, batch: pa.RecordBatch, **more: Any) -> Any:
    """Run a task of a backfill; return its totals and its spool."""
    options = backfill_options(given.with_(topic="", ordering="none"))
    engine = SendEngine(options, shared=None)
    try:
        resender, spool = make(options, engine, **more)
        resender.send(batch)
    finally:
        engine.close()
    return resender.total, spool


def stored(cluster: FakeCluster) -> dict[str, set[tuple[str, int]]]:
    found: dict[str, set[tuple[str, int]]] = {}
    for broker in cluster.brokers:
        for message in broker.store.messages(TOPIC):
            if message.body.startswith(b"body"):
                key = message.properties["__SHARDINGKEY"]
                found.setdefault(key, set()).add((broker.name, message.queue_id))
    return found


@pytest.mark.parametrize("missing", ["broker-a", "broker-b"])
def test_a_key_waits_for_its_broker(cluster: FakeCluster, given: SinkOptions, missing: str) -> None:
    query(given)
    cluster.broker(missing).is_master = False
    waiting = [key for key in KEYS if home(key)[0] == missing]
    assert 0 < len(waiting) < len(KEYS)
    total, spool = backfill(given, letters(KEYS))
    assert total.waiting == {missing: len(waiting)}
    assert total.settled == len(KEYS) - len(waiting) == len(spool.resolved())
    assert total.moved == 0
    assert stored(cluster) == {key: {home(key)} for key in KEYS if key not in waiting}
    marked = {number for number, marks in spool.marks().items() if marks}
    assert marked == spool.resolved(), "what waits was not tried"

    cluster.broker(missing).is_master = True
    indices = [n for n, key in enumerate(KEYS) if key in waiting]
    total, _ = backfill(given, letters(KEYS).take(pa.array(indices)))
    assert (total.settled, total.waiting) == (len(waiting), {})
    assert stored(cluster) == {key: {home(key)} for key in KEYS}


def test_the_plan_names_the_broker(cluster: FakeCluster, given: SinkOptions) -> None:
    query(given)
    cluster.broker("broker-b").is_master = False
    waiting = sum(home(key)[0] == "broker-b" for key in KEYS)
    options = backfill_options(given.with_(topic="", ordering="none"))
    columns = ["query_id", "topic", "sharding_key", "queue_id", "broker_name"]
    [found] = waiting_of(options, [letters(KEYS).select(columns)])
    assert found.to_pylist() == [{"broker": "broker-b", "letters": waiting}]
    assert stored(cluster) == {}
    options = options.with_(nameServer="127.0.0.1:1", sendMsgTimeout=500)
    [found] = waiting_of(options, [letters(KEYS).select(columns)])
    assert found.to_pylist() == [{"broker": "", "letters": 1}]


def test_a_broker_that_is_back_is_seen_by_an_engine_that_sent_nothing(
    cluster: FakeCluster, given: SinkOptions
) -> None:
    """Workers keep their engines, and an engine that sends nothing reads no answers."""
    query(given)
    options = backfill_options(
        given.with_(topic="", ordering="none", pollNameServerInterval=600_000)
    )
    columns = ["query_id", "topic", "sharding_key", "queue_id", "broker_name"]
    for is_master in (True, False, True, False):
        cluster.broker("broker-b").is_master = is_master
        [found] = waiting_of(options, [letters(KEYS).select(columns)])
        assert found["broker"].to_pylist() == ([] if is_master else ["broker-b"])


def test_only_a_flag_moves_keys_and_only_those_that_must(
    cluster: FakeCluster, given: SinkOptions
) -> None:
    """The letters of a key stay together; a row that names its queue is never moved."""
    query(given)
    cluster.broker("broker-b").is_master = False
    twice = KEYS + KEYS
    own: dict[str, list[Any]] = {
        "broker_name": ["broker-b", *[None] * 63], "queue_id": [1, *[None] * 63]
    }  # fmt: skip
    total, _ = backfill(given, letters(twice, **own), move_keys=True)
    assert total.waiting == {"broker-b": 1}
    places = stored(cluster)
    assert set(places) == set(KEYS) - {KEYS[0]}, "its second letter waits behind the first"
    for key, queues in places.items():
        [(broker, _)] = queues
        assert broker == "broker-a"
        if home(key)[0] == "broker-a":
            assert queues == {home(key)}
    moved = [key for key in places if home(key)[0] == "broker-b"]
    assert total.moved == 2 * len(moved)


def test_a_later_query_of_the_key_waits_behind_the_first(
    cluster: FakeCluster, given: SinkOptions
) -> None:
    """The second query began when its list had other queues."""
    query(given)
    key = next(key for key in KEYS if home(key)[0] == "broker-b")
    cluster.broker("broker-b").is_master = False
    query(given, RunContext("q-2", "r", 0, 0, 1, 7, 0, worker="w:1", lane="foreach"))
    batch = letters([key, key, "free"], query_id=["q-1", "q-2", "q-2"])
    total, spool = backfill(given, batch)
    assert (total.waiting, total.held_back) == ({"broker-b": 1}, 1)
    assert spool.resolved() == {"letter-2"}


def test_the_querys_own_hash_finds_the_queue(cluster: FakeCluster, given: SinkOptions) -> None:
    query(given.with_(shardingHash="siphash24"))
    before = {
        message.properties["__SHARDINGKEY"]: {(broker.name, message.queue_id)}
        for broker in cluster.brokers
        for message in broker.store.messages(TOPIC)
    }
    total, _ = backfill(given, letters(KEYS))
    assert total.settled == len(KEYS)
    assert stored(cluster) == before


def test_a_query_that_is_started_with_another_hash_is_refused(given: SinkOptions) -> None:
    query(given)
    with pytest.raises(DeliveryError, match=r"shardingHash is siphash24, not java.*onRouteChange"):
        query(given.with_(shardingHash="siphash24"))


def test_a_broker_that_comes_back_and_new_queues_stop_nothing(
    cluster: FakeCluster, given: SinkOptions
) -> None:
    query(given)
    cluster.create_topic(TOPIC, 6, brokers=["broker-b"])
    total, _ = backfill(given, letters(KEYS))
    assert total.settled == len(KEYS)
    assert stored(cluster) == {key: {home(key)} for key in KEYS}


def test_a_queue_that_is_gone_is_waited_for(cluster: FakeCluster, given: SinkOptions) -> None:
    query(given)
    cluster.create_topic(TOPIC, 2, brokers=["broker-b"])
    total, _ = backfill(given, letters(KEYS))
    gone = [key for key in KEYS if home(key)[0] == "broker-b" and home(key)[1] >= 2]
    assert sum(total.waiting.values()) == len(gone) > 0
    assert set(total.waiting) <= {"broker-b (queue 2)", "broker-b (queue 3)"}


def test_a_tables_first_backfill_writes_its_queues_down(
    cluster: FakeCluster, given: SinkOptions
) -> None:
    """The second backfill finds a broker away: without the list, every key would move."""
    rows = letters(KEYS, query_id=["table-x"] * len(KEYS))
    total, _ = backfill(given, rows, pin_new=True)
    assert total.settled == len(KEYS)
    cluster.broker("broker-b").is_master = False
    total, _ = backfill(given, rows, pin_new=True)
    waiting = sum(home(key)[0] == "broker-b" for key in KEYS)
    assert total.waiting == {"broker-b": waiting}
    assert stored(cluster) == {key: {home(key)} for key in KEYS}


def test_letters_of_an_unordered_query_go_where_they_can(
    cluster: FakeCluster, given: SinkOptions, tmp_path: Path
) -> None:
    cluster.broker("broker-b").is_master = False
    total, _ = backfill(given, letters(KEYS))
    assert (total.settled, total.waiting) == (len(KEYS), {})
    assert not (tmp_path / "_notes" / "queues").exists()
