"""Effectively once, on a scripted cluster: lost answers, crashes, replays."""

import dataclasses
import threading
import time
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rocket_sink.errors import CheckpointError, ConfigurationError, DeliveryError
from rocket_sink.ledger import epoch_starts
from rocket_sink.ledger.epoch_starts import FRAME_FACT, IdFacts
from rocket_sink.options import SinkOptions
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import Answer, CloseConnection, Drop, FakeCluster
from rocket_sink.wire.codes import RequestCode
from tests.clusters import scripted_cluster
from tests.task.one_task import CTX

RETRY = dataclasses.replace(CTX, task_attempt_id=8, attempt_number=1)
RESTART = dataclasses.replace(CTX, run_id="r2", task_attempt_id=0)
MOVED = dataclasses.replace(RESTART, partition=1)
ROWS = 600
LOST = {
    "storedCheckTimeout": 2000, "sendMsgMaxTimeoutPerRequest": 1000, "retryTimesWhenSendFailed": 50
}  # fmt: skip
"""Short limits for a connection that lives but brings no answer: a task waits for both. On a busy
machine requests that a broker would answer run into them, too, hence the attempts."""


class Crash(BaseException):
    """The worker dies: no handler sees it."""


class World:
    """A cluster, a ledger, and tasks that may crash."""

    def __init__(self, cluster, ledger, ordering="none"):
        self.cluster, self.ledger = cluster, ledger
        self.settings: dict[str, Any] = {
            "nameServer": cluster.name_server, "topic": "t", "ledger": str(ledger),
            "delivery": "effectively_once", "storedCheckDelay": 200, "storedCheckTimeout": 120_000,
            "sendMsgTimeout": 120_000, "connectTimeoutMs": 60_000, "orderWaitMs": 60_000,
            "requestMaxMessages": 40, "ordering": ordering,
        }  # fmt: skip

    def run(
        self, ctx, *, cut=100, crash_after=None, rows=None, each=lambda fed: None, settings=None,
        **options,
    ):  # fmt: skip
        """Run the task in batches of `cut` rows; it crashes after `crash_after` requests."""
        parsed = SinkOptions.parse({**self.settings, **options})
        table = rows or rows_of(ROWS)
        packed = parsed.with_(bodyFormat="column")
        pool = ProducerPool()
        run = TaskRunner(parsed, ctx, pool=pool, settings=settings or IdFacts())
        try:
            for number, batch in enumerate(table.to_batches(max_chunksize=cut)):
                each(number * cut)
                run.feed(batch, resolve_columns(batch.schema, packed))
                if run._body is not None and crash_after is not None:
                    _crash_at(run._body, crash_after)
            return run.finish()
        except Crash:
            return None
        except BaseException:
            run.abort()
            raise
        finally:
            pool.close()

    def stored(self):
        return Counter(m.body for m in self.cluster.messages("t") if not m.torn)

    def check(self):
        assert self.stored() == ALL

    def questions(self):
        return len(self.cluster.requests(RequestCode.QUERY_MESSAGE))


def rows_of(count):
    """Return rows of which each is equal to a much later one."""
    numbers = [i % (count // 2) for i in range(count)]
    bodies = [f"{number:06d}".encode() for number in numbers]
    return pa.table({"body": bodies, "sharding_key": [f"k{number % 20}" for number in numbers]})


ALL = Counter(rows_of(ROWS)["body"].to_pylist())


def _crash_at(body, requests):
    if body.summary.requests >= requests:
        # The kernel sends the bytes that it has; no thread waits for the answers.
        body._engine.drive(0.0)
        raise Crash


cluster = scripted_cluster(t=4)


@pytest.fixture(params=["none", "best_effort", "strict"])
def world(request, cluster, tmp_path):
    return World(cluster, tmp_path / "ledger", request.param)


@pytest.fixture
def unordered(cluster, tmp_path):
    return World(cluster, tmp_path / "ledger")


def test_a_first_attempt_asks_nothing(world):
    summary = world.run(CTX)
    world.check()
    assert world.questions() == 0 and summary.found_stored == 0 and summary.acked == ROWS
    world.run(dataclasses.replace(CTX, partition=1, task_attempt_id=9))
    world.run(dataclasses.replace(CTX, epoch=4, task_attempt_id=10))
    assert world.questions() == 0


@pytest.mark.parametrize(
    ("kept", "whole"),
    [(None, 0), ((), 0), (("UNIQ_KEY", "WAIT"), 0), (("UNIQ_KEY", "WAIT", "__SHARDINGKEY"), 1)],
    ids=["a head", "a body", "a body and its id", "all but the broker's properties"],
)
def test_a_batch_that_a_killed_broker_stored_in_part(world, caplog, kept, whole):
    """SIGKILL came in the middle of the copy into the log, as seen on a real broker.

    The message behind the head lacks properties: it is sent again and counted as a possible
    duplicate.
    """
    for broker in world.cluster.brokers:
        broker.on_send(CloseConnection())
        _store_in_part(broker, kept=kept)
    summary = world.run(CTX)
    torn = [m.body for m in world.cluster.messages("t") if m.torn]
    assert len(torn) == (0 if kept is None else 2)
    assert world.stored() + Counter(torn if whole else ()) == ALL
    assert (summary.acked, summary.duplicates_possible) == (ROWS, 0 if whole else 2)
    assert summary.found_stored > 0 and caplog.text.count("was killed while it wrote") == 2


def test_a_batch_stored_in_part_by_a_broker_that_the_route_lacks(world):
    """A name server removes a killed broker and adds it some time after its restart."""
    broker = world.cluster.brokers[0]
    broker.on_send(CloseConnection())
    _store_in_part(broker, lambda: _away(broker, 1.5))
    summary = world.run(CTX)
    world.check()
    assert (summary.acked, summary.duplicates_possible) == (ROWS, 1)
    assert summary.found_stored > 0


def test_a_replay_sends_a_message_without_all_of_its_properties_again(world):
    world.run(CTX)
    for broker, lost in zip(world.cluster.brokers, ("WAIT", "CLUSTER"), strict=True):
        some = broker.store.messages("t")[-1]
        kept = {name: value for name, value in some.properties.items() if name != lost}
        broker.store.tear(some.commit_log_offset, kept)
    summary = world.run(RESTART)
    assert sum(world.stored().values()) == ROWS - 2 + 1
    assert (summary.found_stored, summary.duplicates_possible) == (ROWS - 1, 1)


def _store_in_part(broker, then=lambda: None, *, kept=None):
    """Store half of the next request's messages, and of the following one these properties only."""
    put, pending = broker.store.put, [1]

    def cut(request, queue_id):
        stored = put(request, queue_id)
        if pending and len(stored) > 2:
            pending.clear()
            kept_count = len(stored) // 2
            for message in stored[kept_count + (kept is not None) :]:
                broker.store.remove(message.commit_log_offset)
            if kept is not None:
                torn = stored[kept_count]
                some = {name: torn.properties[name] for name in kept}
                broker.store.tear(torn.commit_log_offset, some)
            then()
        return stored

    broker.store.put = cut


def test_an_outcome_that_stays_unknown_is_not_sent_again(world):
    """The task does not even send the rows one by one to find the poison row."""
    world.cluster.on_send(Answer(1, "java.lang.Exception", stores=True), times=None)
    world.cluster.on(RequestCode.QUERY_MESSAGE, Answer(1, "broken"), times=None)
    summary = world.run(CTX, storedCheckTimeout=200)
    assert max(world.stored().values()) <= 2
    assert summary.unknown == sum(world.stored().values()) > 0
    assert summary.unknown + summary.held_back == ROWS


@pytest.mark.parametrize("again", [RETRY, RESTART], ids=["retry", "restart"])
@pytest.mark.parametrize("crash_after", [0, 1, 4, 9, 10_000])
def test_a_replay_sends_what_is_missing_and_nothing_else(world, again, crash_after):
    """With 10,000, all rows were sent, but the epoch's end was not noted."""
    world.cluster.create_topic("t")  # A topic of one broker has no home for the other one's keys.
    first = world.run(CTX, crash_after=crash_after)
    summary = world.run(again, cut=70)
    world.check()
    assert summary.acked == ROWS and (first is None or crash_after >= 9)
    assert summary.found_stored == ROWS if first is not None else summary.found_stored < ROWS


def test_a_replay_asks_brokers_that_came_into_the_route_later(unordered):
    world, late = unordered, unordered.cluster.brokers[1]
    world.cluster.create_topic("t")
    late.is_master = False

    def during(fed):
        if fed == 200:
            late.is_master = True
            time.sleep(1.1)  # A route is asked for once a second.

    world.run(CTX, cut=20, pollNameServerInterval=10, each=during)
    assert late.store.messages("t")
    _away(late, 1.5)
    world.run(RETRY, pollNameServerInterval=10)
    world.check()


def test_rows_of_a_broker_that_comes_back_after_the_look_up_of_all_rows_are_counted(unordered):
    world, late = unordered, unordered.cluster.brokers[1]
    world.cluster.create_topic("t")
    world.run(CTX)
    late.is_master = False

    def during(fed):
        if fed == 200:
            late.is_master = True
            time.sleep(1.1)

    other = dataclasses.replace(CTX, query_id="other", run_id="other")
    options = {"replayCheck": "always", "pollNameServerInterval": 10}
    summary = world.run(other, cut=20, each=during, **options)
    assert 0 < sum((world.stored() - ALL).values()) <= summary.duplicates_possible
    another = dataclasses.replace(CTX, query_id="another", run_id="another")
    assert world.run(another, **options).duplicates_possible == 0


def _away(broker, seconds):
    """Keep the broker out of its routes for so many seconds."""
    broker.is_master = False
    threading.Timer(seconds, lambda: setattr(broker, "is_master", True)).start()


def test_a_replay_asks_the_brokers_of_every_topic(unordered):
    """The second topic's broker came into use after the task's first look at the route."""
    world, cluster = unordered, unordered.cluster
    cluster.create_topic("t", brokers=["broker-a"])
    cluster.create_topic("u")
    world.settings.pop("topic")
    late, topics = cluster.brokers[1], ["t"] * 100 + ["u"] * 500
    table = rows_of(ROWS).append_column("topic", pa.array(topics))
    world.run(CTX, rows=table)
    stored = len(late.store.messages("u"))
    _away(late, 1.5)
    world.run(RETRY, rows=table, pollNameServerInterval=10)
    assert 0 < stored < 500 and len(cluster.messages("t")) == 100
    assert len(cluster.messages("u")) == 500


def test_crash_upon_crash(world):
    world.cluster.create_topic("t")  # A topic of one broker has no home for the other one's keys.
    for number, crash_after in enumerate((2, 5, 1, 7)):
        world.cluster.on_send(Drop(), times=1)
        ctx = dataclasses.replace(RESTART, run_id=f"x{number}")
        world.run(ctx, cut=50 + number, crash_after=crash_after, **LOST)
    world.run(RETRY, **LOST)
    world.check()


def test_a_task_that_outlived_its_driver_sends_nothing_more(world, monkeypatch):
    monkeypatch.setattr(epoch_starts, "_CHECK_S", 0.0)
    world.cluster.create_topic("t")  # A topic of one broker has no home for the other one's keys.
    options = SinkOptions.parse(world.settings)
    batches = rows_of(ROWS).to_batches(max_chunksize=100)
    plan, pool = resolve_columns(batches[0].schema, options), ProducerPool()
    zombie = TaskRunner(options, CTX, pool=pool)
    zombie.feed(batches[0], plan)
    # A request that a broker reads after the look-up of the restart would be stored twice.
    while sum(world.stored().values()) < batches[0].num_rows:
        zombie._body._sender.poll(0.05)
    world.run(RESTART)
    with pytest.raises(CheckpointError, match="r2"):
        zombie.feed(batches[1], plan)
    zombie.abort()
    pool.close()
    world.check()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", ["strict"], indirect=True)
def test_a_broker_that_stays_away_is_given_up(world):
    """Attempts that wait for a broker use up time, although they use up no attempts.

    The limits grow until the other broker answers within them.
    """
    world.cluster.create_topic("t")
    world.run(CTX)
    away = world.cluster.brokers[1]
    away.kill()
    away.is_master = False
    for epoch, limit_ms in enumerate((300, 1000, 3000, 10_000, 30_000), 4):
        limits = {"sendMsgTimeout": limit_ms, "orderWaitMs": limit_ms}
        context = dataclasses.replace(CTX, epoch=epoch)
        summary = world.run(context, **limits, pollNameServerInterval=10)
        assert summary.dead and summary.accounted == ROWS
        if summary.acked:
            break
    assert 0 < summary.acked < ROWS


def test_a_checkpoint_that_was_cut_back_is_a_replay(unordered):
    world = unordered
    for epoch in range(10):
        world.run(dataclasses.replace(CTX, epoch=epoch), rows=rows_of(10))
    assert world.questions() == 0
    summary = world.run(dataclasses.replace(CTX, epoch=2), rows=rows_of(10))
    assert summary.found_stored == 10 and sum(world.stored().values()) == 100
    assert len(list((world.ledger / "_notes" / "starts").rglob("*.json"))) < 10
    before = world.questions()
    world.run(dataclasses.replace(CTX, epoch=3, partition=1), rows=rows_of(10))
    assert world.questions() > before


def test_a_broker_that_cannot_be_asked_stops_the_replay(unordered):
    """A broker that cannot be asked may hold messages that look missing."""
    unordered.run(CTX)
    away = unordered.cluster.brokers[0]
    away.kill()
    away.is_master = False
    with pytest.raises(DeliveryError, match=r"broker-a does not say .* replayCheck=never"):
        unordered.run(RESTART, storedCheckTimeout=300, connectTimeoutMs=200)
    unordered.check()


def test_without_a_ledger_a_replay_cannot_be_told(unordered):
    with pytest.raises(ConfigurationError, match="replayCheck=always"):
        unordered.run(CTX, ledger="")
    unordered.run(CTX, ledger="", replayCheck="always")
    assert unordered.run(CTX, ledger="", replayCheck="always").found_stored == ROWS
    unordered.check()


class TestOtherIds:
    """A replay that gives its rows other ids than the attempt before it."""

    def test_a_replay_under_settings_that_change_messages_is_refused(self, world):
        utc = IdFacts(written_by={"zone": "UTC"})
        world.run(CTX, settings=utc)
        with pytest.raises(CheckpointError, match=r"zone was UTC, is Tokyo.*replayCheck=never"):
            world.run(RESTART, settings=IdFacts(written_by={"zone": "Tokyo"}))
        world.cluster.create_topic("n%t")
        for kind, name in (("namespace", "namespace"), ("namespaceV2", "namespace_v2")):
            with pytest.raises(CheckpointError, match=f"was column, is json_nulls, {name} was not"):
                world.run(RESTART, settings=utc, bodyFormat="json_nulls", **{kind: "n"})
        summary = world.run(RESTART, settings=utc)
        assert (summary.found_stored, summary.duplicates_possible) == (ROWS, 0)
        world.check()

    def test_a_replay_under_another_plan_counts_its_rows(self, world):
        world.run(CTX, settings=IdFacts({"spark.master": "local[8]"}))
        summary = world.run(MOVED, settings=IdFacts({"spark.master": "local[2]"}))
        assert summary.duplicates_possible == sum(world.stored().values()) - ROWS == ROWS

    def test_equal_rows_of_another_frame_are_sent(self, world):
        """A write follows a failed one of its `appId`, and may be the next day's."""
        world.run(CTX, settings=IdFacts({FRAME_FACT: "monday's"}))
        summary = world.run(RESTART, settings=IdFacts({FRAME_FACT: "tuesday's"}))
        assert (summary.acked, summary.found_stored) == (ROWS, 0)
        assert summary.duplicates_possible == ROWS

    def test_an_epoch_that_another_ledger_or_query_has_begun_is_counted(self, world):
        """A copied checkpoint may have a new query id, so the ledger has no notes under it."""
        world.run(CTX)
        copy = dataclasses.replace(RESTART, query_id="copy")
        settings = IdFacts(pending_epoch="3", unrecorded_epoch="3")
        assert world.run(copy, settings=settings).duplicates_possible == ROWS
        recorded = IdFacts(pending_epoch="3")
        another = dataclasses.replace(copy, query_id="of which nothing was sent")
        assert world.run(another, settings=recorded).duplicates_possible == 0
        following = dataclasses.replace(copy, epoch=4)
        assert world.run(following, settings=settings, rows=rows_of(10)).duplicates_possible == 0

    def test_a_replay_in_another_cluster_counts_its_rows(self, world):
        """The other cluster's brokers have the same names as the first cluster's."""
        world.run(CTX)
        with FakeCluster(brokers=2) as other:
            other.create_topic("t", 4)
            moved = {"nameServer": other.name_server}
            summary = world.run(RESTART, **moved)
            assert (summary.acked, summary.duplicates_possible) == (ROWS, ROWS)
            following = dataclasses.replace(RESTART, epoch=4)
            again = dataclasses.replace(following, run_id="r3")
            world.run(following, **moved)
            summary = world.run(again, **moved)
            assert (summary.found_stored, summary.duplicates_possible) == (ROWS, 0)

    def test_ids_of_the_rows_own_depend_on_no_setting(self, world):
        table = rows_of(ROWS).append_column("message_id", pa.array(map(str, range(ROWS))))
        world.run(CTX, rows=table, settings=IdFacts({"cores": "8"}, {"zone": "UTC"}))
        summary = world.run(MOVED, rows=table, settings=IdFacts({"cores": "2"}, {"zone": "Tokyo"}))
        assert (summary.found_stored, summary.duplicates_possible) == (ROWS, 0)

    def test_settings_count_from_the_first_row_without_an_id(self, world):
        numbers = [str(number) for number in range(ROWS)]
        half = pa.array([*numbers[: ROWS // 2], *[None] * (ROWS // 2)])
        table = rows_of(ROWS).append_column("message_id", half)
        settings = IdFacts({"cores": "8"}, {"zone": "UTC"})
        world.run(CTX, rows=table, settings=settings)
        with pytest.raises(CheckpointError, match="zone was UTC, is Tokyo"):
            world.run(RESTART, rows=table, settings=IdFacts({"cores": "8"}, {"zone": "Tokyo"}))
        assert world.run(RESTART, rows=table, settings=settings).duplicates_possible == 0
        moved = dataclasses.replace(settings, planned_by={"cores": "2"})
        assert world.run(RESTART, rows=table, settings=moved).duplicates_possible == ROWS
        world.check()
        all_own = table.set_column(2, "message_id", pa.array(numbers))
        assert world.run(RESTART, rows=all_own, settings=settings).duplicates_possible == ROWS

    def test_rows_that_are_computed_anew_are_counted(self, world):
        """Nothing tells that a Python function uses a clock, but its rows match none before."""
        world.run(CTX)
        bodies = pc.binary_join_element_wise(rows_of(ROWS)["body"], b"again", b"")
        anew = rows_of(ROWS).set_column(0, "body", bodies)
        assert world.run(RESTART, rows=anew).duplicates_possible == ROWS

    def test_the_same_rows_in_another_order_are_not(self, world):
        world.run(CTX)
        backwards = rows_of(ROWS).take(list(range(ROWS))[::-1])
        summary = world.run(RESTART, rows=backwards, cut=70)
        assert (summary.found_stored, summary.duplicates_possible) == (ROWS, 0)

    def test_a_replay_without_look_ups_counts_its_rows(self, world):
        world.run(CTX)
        assert world.run(RESTART, replayCheck="never").duplicates_possible == ROWS
        following = dataclasses.replace(RESTART, epoch=4)
        summary = world.run(following, replayCheck="never", rows=rows_of(10))
        assert summary.duplicates_possible == 0
