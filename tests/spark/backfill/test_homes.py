"""Letters of a strict query stay on their keys' queues, whatever brokers the route has today."""

from dataclasses import replace
from typing import NamedTuple
from unittest.mock import Mock

import pyarrow as pa
import pytest

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.records import RunContext
from rocket_sink.options import SinkOptions
from rocket_sink.routing.sharding import queue_for_key
from rocket_sink.spark.backfill.backfill import backfill_options
from rocket_sink.spark.backfill.home_queues import HomeQueues, absent_homes
from rocket_sink.spark.backfill.resend import waiting_of
from rocket_sink.task.queue_snapshot import Pinned, queues_of
from rocket_sink.testing import FakeCluster
from tests.spark.backfill.test_resend import TOPIC, Bed, letters
from tests.task.one_task import run_task
from tests.task.stub_engine import publish_info

QUERY = RunContext("q-1", "r", 3, 0, 1, 7, 0, worker="w:1", lane="foreach")
KEYS = [f"key-{n}" for n in range(32)]


INFO = publish_info(TOPIC, [("broker-a", 4), ("broker-b", 4)])


def home(key):
    """Return the queue of SelectMessageQueueByHash, which conformance tests compare with Java."""
    queue = queue_for_key(INFO, key)
    return queue.broker_name, queue.queue_id


AT_HOME = {key: {home(key)} for key in KEYS}
OF_B = [key for key in KEYS if home(key)[0] == "broker-b"]


class World(NamedTuple):
    """A topic, and the options of a strict query."""

    cluster: FakeCluster
    given: SinkOptions

    def query(self, ctx=QUERY, **changes):
        """Run an epoch of the query, which pins the topic's queues."""
        columns = {"body": [b"x"] * len(KEYS), "sharding_key": KEYS}
        assert run_task(self.given.with_(**changes), ctx, columns).acked == len(KEYS)

    def options(self, **changes):
        return backfill_options(self.given.with_(topic="", ordering="none", **changes))

    def backfill(self, batch, topic="", **more):
        """Run a task of a backfill; return its totals and its spool."""
        return Bed(self.cluster, self.options().with_(topic=topic)).send(batch, **more)

    def waiting(self, options):
        """Return which letters a plan expects to wait."""
        columns = ["query_id", "topic", "sharding_key", "queue_id", "broker_name"]
        [batch] = waiting_of(options, [letters(KEYS).select(columns)])
        return batch.to_pylist()

    def stored(self, begin=b"body", topic=TOPIC):
        """Return {key: its places} of the messages whose bodies have this beginning."""
        places: dict[str, set[tuple[str, int]]] = {}
        for broker in self.cluster.brokers:
            for message in broker.store.messages(topic):
                if message.body.startswith(begin):
                    key = message.properties["__SHARDINGKEY"]
                    places.setdefault(key, set()).add((broker.name, message.queue_id))
        return places

    def remove(self, broker, *, back=False):
        """Take a broker out of the route, or let it come back."""
        self.cluster.broker(broker).is_master = back


@pytest.fixture
def world(cluster, tmp_path):
    options = SinkOptions.parse(
        nameServer=cluster.name_server, ledger=str(tmp_path), topic=TOPIC, ordering="strict",
        sendMsgTimeout="20s", connectTimeoutMs="20s", pollNameServerInterval=10,
    )  # fmt: skip
    return World(cluster, options)


@pytest.mark.parametrize("missing", ["broker-a", "broker-b"])
def test_a_key_waits_for_its_broker(world, missing):
    world.query()
    world.remove(missing)
    waiting = [key for key in KEYS if home(key)[0] == missing]
    assert 0 < len(waiting) < len(KEYS)
    total, spool = world.backfill(letters(KEYS))
    assert (total.waiting, total.moved) == ({missing: len(waiting)}, 0)
    assert total.unsettled == len(waiting)
    assert total.settled == len(KEYS) - len(waiting) == len(spool.resolved())
    assert world.stored() == {key: {home(key)} for key in KEYS if key not in waiting}
    marked = {number for number, marks in spool.marks().items() if marks}
    assert marked == spool.resolved(), "what waits was not tried"

    world.remove(missing, back=True)
    indices = [n for n, key in enumerate(KEYS) if key in waiting]
    total, _ = world.backfill(letters(KEYS).take(pa.array(indices)))
    assert (total.settled, total.waiting) == (len(waiting), {})
    assert world.stored() == AT_HOME


def test_the_plan_names_the_broker(world, tmp_path):
    world.query()
    world.remove("broker-b")
    options = world.options()
    assert world.waiting(options) == [{"broker": "broker-b", "letters": len(OF_B)}]
    assert world.stored() == {}
    options = options.with_(nameServer="127.0.0.1:1", sendMsgTimeout=500)
    assert world.waiting(options) == [{"broker": "", "letters": 1}]
    for note in (tmp_path / "_notes" / "queues").rglob("*.json"):
        note.write_text("torn")
    with pytest.raises(LedgerError, match="pinned queues of the topic 't' cannot be read"):
        world.waiting(world.options())


def test_a_broker_that_is_back_is_seen_by_an_engine_that_sent_nothing(world):
    """Workers keep their engines, and an engine that sends nothing reads no answers."""
    world.query()
    options = world.options(pollNameServerInterval=600_000)
    for is_master in (True, False, True, False):
        world.remove("broker-b", back=is_master)
        brokers = [row["broker"] for row in world.waiting(options)]
        assert brokers == ([] if is_master else ["broker-b"])


def test_only_a_flag_moves_keys_and_only_those_that_must(world):
    """The letters of a key stay together; a row that names its queue is never moved."""
    world.query()
    world.remove("broker-b")
    own = {"broker_name": ["broker-b", *[None] * 63], "queue_id": [1, *[None] * 63]}
    total, _ = world.backfill(letters(KEYS + KEYS, **own), move_keys=True)
    assert total.waiting == {"broker-b": 1}
    places = world.stored()
    assert set(places) == set(KEYS) - {KEYS[0]}, "its second letter waits behind the first"
    for key, queues in places.items():
        [(broker, _)] = queues
        assert broker == "broker-a"
        if home(key)[0] == "broker-a":
            assert queues == {home(key)}
    moved = [key for key in places if home(key)[0] == "broker-b"]
    assert total.moved == 2 * len(moved)


def test_a_later_query_of_the_key_waits_behind_the_first(world):
    """The second query began when its list had other queues."""
    world.query()
    world.remove("broker-b")
    world.query(RunContext("q-2", "r", 0, 0, 1, 7, 0, worker="w:1", lane="foreach"))
    batch = letters([OF_B[0], OF_B[0], "free"], query_id=["q-1", "q-2", "q-2"])
    total, spool = world.backfill(batch)
    assert (total.waiting, total.held_back) == ({"broker-b": 1}, 1)
    assert spool.resolved() == {"letter-2"}


def test_the_querys_own_hash_finds_the_queue(world):
    world.query(shardingHash="siphash24")
    before = world.stored(b"x")
    total, _ = world.backfill(letters(KEYS))
    assert total.settled == len(KEYS)
    assert world.stored() == before


def test_topics_of_queries_with_two_hashes_keep_both(world):
    world.cluster.create_topic("u", 4)
    world.query()
    world.query(replace(QUERY, query_id="q-2"), topic="u", shardingHash="siphash24")
    topics, queries = ([name] * 32 + [other] * 32 for name, other in ((TOPIC, "u"), ("q-1", "q-2")))
    total, _ = world.backfill(letters(KEYS * 2, topic=[*topics], query_id=[*queries]))
    assert total.settled == 2 * len(KEYS)
    for topic in (TOPIC, "u"):
        assert world.stored(topic=topic) == world.stored(b"x", topic)


def test_a_broker_that_comes_back_and_new_queues_stop_nothing(world):
    world.query()
    world.cluster.create_topic(TOPIC, 6, brokers=["broker-b"])
    total, _ = world.backfill(letters(KEYS))
    assert total.settled == len(KEYS)
    assert world.stored() == AT_HOME


def test_a_queue_that_is_gone_is_waited_for(world):
    world.query()
    world.cluster.create_topic(TOPIC, 2, brokers=["broker-b"])
    total, _ = world.backfill(letters(KEYS))
    gone = [key for key in OF_B if home(key)[1] >= 2]
    assert sum(total.waiting.values()) == len(gone) > 0
    assert set(total.waiting) <= {"broker-b (queue 2)", "broker-b (queue 3)"}


@pytest.mark.parametrize("option", ["", TOPIC])
def test_a_tables_first_backfill_writes_its_queues_down(world, option):
    """The second backfill finds a broker away: without the list, every key would move."""
    rows = letters(KEYS, query_id=["table-x"] * len(KEYS))
    total, _ = world.backfill(rows, option, pin_new=True)
    assert total.settled == len(KEYS)
    world.remove("broker-b")
    total, _ = world.backfill(rows, option, pin_new=True)
    assert total.waiting == {"broker-b": len(OF_B)}
    assert world.stored() == AT_HOME


def test_a_task_keeps_the_queues_that_it_saw_first():
    fewer = publish_info(TOPIC, [("broker-a", 4)])
    engine = Mock(**{"fresh_route.return_value": INFO, "publish_info.return_value": fewer})
    homes = HomeQueues(SinkOptions.parse(topic=TOPIC), engine)
    assert [homes._route(TOPIC) for _ in range(2)] == [INFO, fewer]
    assert homes.queues()(fewer) == queues_of(INFO)
    [(part, lists)] = homes.runs(letters(KEYS))
    assert set(homes.absent(part, lists).to_pylist()) == {None, "broker-b"}


def test_letters_of_an_unordered_query_go_where_they_can(world, tmp_path):
    world.remove("broker-b")
    assert world.waiting(world.options()) == []
    total, _ = world.backfill(letters(KEYS))
    assert (total.settled, total.waiting) == (len(KEYS), {})
    assert not (tmp_path / "_notes" / "queues").exists()


def test_letters_that_an_option_sends_to_another_topic_wait_for_no_queue(world):
    """The query has noted a list of queues for that topic, but these letters had no order there."""
    world.query()
    world.remove("broker-b")
    total, _ = world.backfill(letters(KEYS, topic=["other"] * len(KEYS)), TOPIC)
    assert (total.settled, total.waiting) == (len(KEYS), {})
    no_route = absent_homes(pa.array([None, "k"]), Pinned(queues_of(INFO), "java"), None)
    assert list(no_route) == [None, home("k")[0]]
