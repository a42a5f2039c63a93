"""`write_batch` and `write` without Java: delta-rs commits, and tasks run in this process."""

import contextlib
import shutil
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.pandas.types import from_arrow_schema

from rocket_sink import errors
from rocket_sink.ledger import token
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.epoch_starts import NamedBatch
from rocket_sink.ledger.lock import ENDS_LOCK, LedgerLock, ledger_lock
from rocket_sink.ledger.path import resolve_path
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.half_commits import HalfMessageCommitter
from rocket_sink.producer.pool import worker_pool
from rocket_sink.producer.transactions import ROLLBACK, UNKNOWN
from rocket_sink.spark import console, foreach_batch, frames, lineage, transactions
from rocket_sink.spark.checks import own_input, reach
from rocket_sink.spark.checks.context import PENDING, QUERY_ID, RUN_ID
from rocket_sink.spark.foreach_batch import BatchWriter
from rocket_sink.spark.transactions import EndReport, TransactionChecker, TransactionCommitter
from rocket_sink.testing import Answer
from tests.clusters import scripted_cluster
from tests.killed import Killed
from tests.ledger import values
from tests.ledger.views import view_rows
from tests.producer.waiting import until

NO_ROWS = pa.schema([("kind", "string")])


def dies(death):
    """Return a function in which the driver dies when the tasks have sent, before the commit."""

    def append(results, *_):
        results.collect()
        raise death

    return append


class Frame:
    """The stand-in of a frame, whose tasks run in this process when it is collected."""

    isStreaming = False

    def __init__(self, session, rows):
        self.sparkSession, self._rows = session, rows
        values = {"deterministic": True, "toString": "Project", "getNumPartitions": 1}
        plan = Mock(**{f"{name}.return_value": value for name, value in values.items()})
        execution = Mock(analyzed=lambda: plan, executedPlan=lambda: plan, toRdd=lambda: plan)
        self.plan, self._jdf = plan, Mock(queryExecution=lambda: execution)
        self.queries = self._jdf.sparkSession().sharedState().activeStreamingQueries().values
        self.queries.return_value = []

    @property
    def schema(self):
        return from_arrow_schema(self._rows().schema)

    def __getitem__(self, name):
        return SimpleNamespace(alias=lambda alias: (name.strip("`"), alias))

    def _changed(self, change):
        return Frame(self.sparkSession, lambda: change(self._rows()))

    def select(self, *columns):
        pairs = (each if isinstance(each, tuple) else (each, each) for each in columns)
        names, aliases = map(list, zip(*pairs, strict=True))
        return self._changed(lambda rows: rows.select(names).rename_columns(aliases))

    def where(self, condition):
        name, value = condition.replace("'", "").split(" = ")
        return self._changed(lambda rows: rows.filter(pa.compute.field(name) == value))

    def mapInArrow(self, make, ddl):
        def made(rows):
            batches = [*make(iter(rows.to_batches()))]
            return pa.Table.from_batches(batches, None if batches else NO_ROWS)

        return self._changed(made)

    def collect(self):
        return [Row(**row) for row in self._rows().to_pylist()]

    def count(self):
        return self._rows().num_rows

    def sameSemantics(self, other):
        return self._rows() == other._rows()


class World:
    """A topic, a ledger, and a session whose stages have so many attempts."""

    def __init__(self, cluster, ledger):
        self.cluster, self.session = cluster, values.session()
        self.ledger, self.local, self.attempt = str(ledger), {}, 0
        self.settings: dict[str, Any] = {
            "nameServer": cluster.name_server, "topic": "t", "ledger": self.ledger,
            "storedCheckDelay": 100,
        }  # fmt: skip
        tracker = Mock(**{"getJobIdsForTag.return_value": [1]})
        tracker.getJobInfo.return_value = Row(status="SUCCEEDED", stageIds=[1])
        tracker.getStageInfo = lambda number: Row(currentAttemptId=self.attempt)
        context = Mock(master="local[2]", applicationId="app", defaultParallelism=1)
        context.getLocalProperty, context.getConf().get.return_value = self.local.get, None
        context.statusTracker = context._jsc.sc().statusTracker = lambda: tracker
        self.session.sparkContext = context

    def writer(self, **more):
        return BatchWriter(SinkOptions.parse({**self.settings, **more}))

    def frame(self, *bodies, session=None):
        table = pa.table({"body": pa.array(bodies, "string"), "sharding_key": ["k"] * len(bodies)})
        return Frame(session or self.session, lambda: table)

    def epoch(self, writer, number, *bodies, run="r", query="q"):
        self.local.update({QUERY_ID: query, RUN_ID: run})
        writer.write_epoch(self.frame(*bodies), number)

    def sent(self):
        return sorted(message.body.decode() for message in self.cluster.messages("t"))

    def notes(self, *kinds):
        """Return the kind of each note of these kinds."""
        root = Path(self.ledger, "_notes")
        return [kind for kind in kinds for _ in root.glob(f"{kind}/**/*.json")]

    def rows(self, columns, view="epochs"):
        rows = view_rows(self.ledger, f"SELECT {columns} FROM {view} ORDER BY epoch")
        return [tuple(vars(row).values()) for row in rows]


class Epochs:
    """The stand-in of the ledger's view `transactions`, as DuckDB reads it."""

    query_id = type("Named", (), {"__eq__": lambda self, query: f"query_id = '{query}'"})()

    def __init__(self, path, condition="true"):
        self._path, self._condition = path, condition

    def where(self, condition):
        return Epochs(self._path, f"({self._condition}) AND ({condition})")

    def collect(self):
        return view_rows(self._path, f"SELECT * FROM transactions WHERE {self._condition}")


cluster = scripted_cluster(1, t=1)


@pytest.fixture
def world(cluster, tmp_path):
    return World(cluster, tmp_path / "ledger")


@pytest.fixture
def half(world, monkeypatch):
    """The world with half messages; nobody else ends epochs, and all waits are short."""
    monkeypatch.setattr(Ledger, "transactions", lambda ledger, spark: Epochs(ledger.path))
    monkeypatch.setattr(transactions, "_WAIT_S", 0.1)
    world.settings |= {"delivery": "transactional", "storedCheckTimeout": 2000, "appId": "job"}
    yield world
    for checker in transactions._answerers.values():
        checker.close()
    transactions._answerers.clear()


ENDS = "query_id, epoch, halves, committed, refused, open"
EPOCHS = "epoch, query_id, run_id, lane, rows_in, acked, dead, duplicates_possible AS twice"


def test_the_epochs_of_runs(world, caplog, monkeypatch):
    caplog.set_level("INFO")
    writer, events = world.writer(), []
    monkeypatch.setattr(lineage, "is_on", lambda: True)
    monkeypatch.setattr(lineage, "_runs", {})
    monkeypatch.setattr(lineage, "_emit", lambda *event: events.append((*event[:2], event[2].job)))
    world.epoch(writer, 0, "a", "b")
    with pytest.raises(errors.ConfigurationError, match="another write_batch has written the e"):
        world.epoch(writer, 0, "c")
    with pytest.raises(errors.CheckpointError, match="has one frame of the epoch 0"):
        world.epoch(writer, 0, "c", run="p")
    world.epoch(writer, 1, "c")
    world.epoch(writer, 1, "c", run="s")
    world.epoch(writer, 2, "", "d", run="s")
    with pytest.raises(errors.CheckpointError, match="holds epochs up to 2"):
        world.epoch(writer, 1, "e", run="u")
    assert world.sent() == ["a", "b", "c", "d"]
    assert world.rows(EPOCHS) == [
        (0, "q", "r", "foreach_batch", 2, 2, 0, 0), (1, "q", "r", "foreach_batch", 1, 1, 0, 0),
        (2, "q", "s", "foreach_batch", 2, 1, 1, 0),
    ]  # fmt: skip
    starts = [text for text in caplog.messages if text.startswith("the query q sends to the top")]
    assert len(starts) == 4 and all("by foreachBatch" in text for text in starts)
    assert events == [("START", run, "rocket_sink.q") for run in "rpsu"]
    assert "begun before" not in caplog.text and "cannot note" not in caplog.text


def test_an_epoch_whose_append_died_counts_its_rows_twice(world, monkeypatch, caplog):
    writer = world.writer()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(foreach_batch, "_append", dies(Killed()))
        world.epoch(writer, 0, "a", "b")
    with pytest.raises(errors.ConfigurationError, match="failed with another frame"):
        world.epoch(writer, 0, "c")
    with pytest.raises(errors.CheckpointError, match="begun with delivery=at_least_once"):
        world.epoch(world.writer(delivery="effectively_once"), 0, "a", "b", run="s")
    world.attempt = 1  # Spark has run the stage again.
    world.epoch(writer, 0, "a", "b")
    world.epoch(writer, 1, "c")
    world.attempt = 0
    assert [row[-1] for row in world.rows(EPOCHS)] == [2, 1]
    # A count of rows here would count twice with the tasks' accounts.
    rows = world.rows("epoch, num_input_rows", "rows_of_epoch")
    assert rows == [(0, None), (1, None), (1, None)]
    assert "of epoch 1 of the query q again" in caplog.text and "1 row may be st" in caplog.text
    # The checkpoint has the pending epoch 7, of which a new ledger has no record.
    world.settings["ledger"] = world.ledger = world.ledger + "-2"
    world.session.conf.set(PENDING, "7")
    world.epoch(world.writer(), 7, "d", run="s")
    world.epoch(world.writer(), 8, "e", run="t")
    assert [row[-1] for row in world.rows(EPOCHS)] == [1, 0]


def test_two_sinks_of_a_run_know_their_own_pending_epochs(world, monkeypatch):
    """The sink with the new ledger looks first, and sends when the other one has sent."""
    old_sink, new_sink = world.writer(), world.writer(ledger=f"{world.ledger}-2")
    world.epoch(old_sink, 8, "a")
    world.session.conf.set(PENDING, "9")
    meanwhile = [partial(world.epoch, old_sink, 9, "b", run="s")]
    look = Mock(side_effect=lambda *_: meanwhile and meanwhile.pop()())
    monkeypatch.setattr(foreach_batch, "check_reachable", look)
    world.epoch(new_sink, 9, "b", run="s")
    assert [row[-1] for row in world.rows(EPOCHS)] == [0, 0]
    world.ledger += "-2"
    assert [row[-1] for row in world.rows(EPOCHS)] == [1] and len(world.sent()) == 3


def test_a_ledger_that_was_deleted_between_epochs(world):
    writer = world.writer(appId="nightly")
    world.epoch(writer, 0, "a")
    shutil.rmtree(world.ledger)
    with pytest.raises(errors.LedgerError, match="was deleted while a query wrote to it"):
        world.epoch(writer, 1, "b")
    assert world.sent() == ["a"] and not Path(world.ledger, "_delta_log").exists()
    world.epoch(writer, 1, "b", run="s")  # A new start makes a new ledger.
    assert world.sent() == ["a", "b"] and [row[0] for row in world.rows(EPOCHS)] == [1]


def test_without_a_ledger(world, caplog):
    caplog.set_level("INFO")
    writer = world.writer(ledger="")
    for number in (0, 0, 1):
        world.epoch(writer, number, "a")
    assert world.sent() == ["a", "a", "a"] and caplog.text.count("the query q sends") == 1
    for session, twice in ((None, 0), (SimpleNamespace(), 2)):
        summary = writer.write(world.frame("b", "c", session=session))
        assert (summary.acked, summary.duplicates_possible, summary.ledger) == (2, twice, "")
        assert summary.query_id in caplog.messages[-1] and 0 < summary.duration_s < 60
    with pytest.raises(errors.ConfigurationError, match="this frame is a stream"):
        frame = world.frame("d")
        frame.isStreaming = True
        writer.write(frame)
    assert len(world.sent()) == 7


def test_a_run_without_an_id_makes_a_new_ledger_at_each_epoch(world, monkeypatch):
    monkeypatch.setattr(lineage, "is_on", lambda: True)
    monkeypatch.setattr(lineage, "_runs", {})
    emit = Mock()
    monkeypatch.setattr(lineage, "_emit", emit)
    writer = world.writer(appId="job")
    world.epoch(writer, 0, "a", run="")
    shutil.rmtree(world.ledger)
    world.epoch(writer, 1, "b", run="")
    assert world.rows(EPOCHS) == [(1, "job", "job", "foreach_batch", 1, 1, 0, 0)]
    assert values.claimant(world.ledger, "job") == "q"
    with pytest.raises(errors.CheckpointError, match="the streaming query q, and this query is p"):
        world.epoch(writer, 2, "c", query="p", run="p")
    assert world.sent() == ["a", "b"]
    assert [event.args[1] for event in emit.call_args_list] == ["p"]


def test_what_is_refused_before_a_ledger_is_made(world, monkeypatch):
    monkeypatch.setattr(reach, "_PAUSES_S", ())
    away = world.writer(nameServer="127.0.0.1:9", connectTimeoutMs=200)
    broken = Frame(world.session, lambda: pa.table({"bodi": ["a"]}))
    with pytest.raises(errors.ColumnError):
        world.writer(batchId="b").write(broken)
    for function in (lambda: away.write(world.frame("a")), lambda: world.epoch(away, 0, "a")):
        with pytest.raises(errors.NameServerUnavailableError):
            function()
    world.session.conf.set("spark.speculation", "true")
    with pytest.raises(errors.ConfigurationError, match="allowSpeculation"):
        world.writer().write(world.frame("a"))
    assert not (world.notes("batches") or Path(world.ledger, "_delta_log").exists())
    # The next start knows that the epoch was begun with this ledger.
    assert world.notes("queries") == ["queries"]
    with pytest.raises(errors.ConfigurationError, match="allowSpeculation"):
        world.epoch(world.writer(), 0, "a")
    refuse = Mock(side_effect=errors.ConfigurationError("no right"))
    monkeypatch.setattr(foreach_batch, "check_rights", refuse)
    world.session.conf.unset("spark.speculation")
    with pytest.raises(errors.ConfigurationError, match="no right"):
        world.epoch(world.writer(), 0, "a", run="s")
    assert not world.sent()


def test_the_budget_of_an_epoch(world, monkeypatch):
    keep_small = Mock()
    monkeypatch.setattr(foreach_batch, "keep_small", keep_small)
    writer = world.writer(maxEpochFailures=1, maxMessagesPerSecond=1000)
    world.epoch(writer, 0, "a", "")
    with pytest.raises(errors.DeliveryError, match="2 of 3 rows of epoch 1 could not be sent"):
        world.epoch(writer, 1, "b", "", "")
    with pytest.raises(errors.DeliveryError, match="2 of 3 rows could not be sent"):
        writer.write(world.frame("c", "", ""))
    world.epoch(writer, 2, "d")
    assert world.sent() == ["a", "b", "c", "d"] and keep_small.call_count == 4


@pytest.mark.parametrize("lane", ["write", "epoch"])
def test_tasks_look_for_the_drivers_ledger(world, monkeypatch, lane):
    monkeypatch.setattr(token, "_BETWEEN_LOOKS_S", 0)

    def lost():
        shutil.rmtree(f"{world.ledger}/_notes/tokens", ignore_errors=True)
        return pa.table({"body": ["a"]})

    frame = Frame(world.session, lost)
    world.local[QUERY_ID] = "q"
    with pytest.raises(errors.LedgerError, match="The task ends before it sends"):
        world.writer().write(frame) if lane == "write" else world.writer().write_epoch(frame, 0)
    assert not world.sent()


@pytest.mark.parametrize(
    ("delivery", "change", "stored", "twice"),
    [
        ("at_least_once", {}, 0, 2), ("effectively_once", {}, 2, 0),
        ("effectively_once", {"getNumPartitions.return_value": 2}, 2, 2),
        ("effectively_once", {"toString.return_value": "Filter"}, 0, 2),
    ],
)  # fmt: skip
def test_a_write_that_dies_leaves_notes_for_the_next(
    world, monkeypatch, caplog, delivery, change, stored, twice
):
    caplog.set_level("INFO")
    events: list[Any] = []
    monkeypatch.setattr(lineage, "start", lambda *args, **more: events.append((args[2], more)))
    monkeypatch.setattr(lineage, "end", lambda run, *facts: events.append(facts))
    writer = world.writer(appId="load", delivery=delivery)
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(foreach_batch, "_append", dies(KeyError("died")))
        writer.write(world.frame("a", "b"))
    assert world.sent() == ["a", "b"]
    assert events == [("write", {"is_stream": False}), ({}, "KeyError: 'died'")]
    frame = world.frame("a", "b")
    frame.plan.configure_mock(**change)
    summary = writer.write(frame)
    assert (summary.acked, summary.found_stored, summary.duplicates_possible) == (2, stored, twice)
    assert events[2:] == [("write", {"is_stream": False}), ({"acked": 2, "degraded": 0},)]
    again = writer.write(world.frame("a", "b"))
    assert not (again.found_stored or again.duplicates_possible or world.notes("writes", "starts"))
    assert len(world.sent()) == 6 - stored and "a later attempt of" not in caplog.text
    rows = world.rows("query_id, lane, rows_in, confirmed, adds_up")
    assert {row[1:] for row in rows} == {("batch", 2, True, True)}
    assert {summary.query_id, again.query_id} <= {row[0] for row in rows}


def test_writes_and_epochs_without_rows(world, monkeypatch, caplog):
    writer = world.writer()
    assert writer.write(world.frame()).rows_in == 0
    world.epoch(writer, 0)
    assert world.rows("epoch, rows_in, confirmed") == [(0, 0, True)]
    first = foreach_batch.begin_append(world.session, resolve_path(world.ledger))
    monkeypatch.setattr(foreach_batch, "begin_append", Mock(side_effect=[first]))
    assert writer.write(world.frame()).rows_in == 0
    assert f"cannot note in the ledger {world.ledger} that a write is done" in caplog.text


def test_a_write_says_its_losses_and_its_end(world, caplog):
    caplog.set_level("INFO")
    summary = world.writer().write(world.frame("a", ""))
    assert summary.adds_up and not summary.all_delivered and "<table>" in summary._repr_html_()
    warning, end = caplog.messages[-2:]
    assert warning.startswith(f"1 of 2 rows of the write {summary.query_id} were not delivered")
    assert f"{summary.query_id} ended: 2 rows in, 1 acknowledged, 1 dead letter;" in end


BY_DELIVERY = pytest.mark.parametrize(
    ("delivery", "sent"),
    [("at_least_once", "aa"), ("effectively_once", "a"), ("transactional", "a")],
)


@BY_DELIVERY
def test_a_batch_id_is_written_once(half, monkeypatch, caplog, delivery, sent):
    caplog.set_level("INFO")
    half.settings["delivery"] = delivery
    of_load = {"batchId": "b/1", "appId": "load"}
    writer, is_half = half.writer(**of_load), delivery == "transactional"
    lock = ledger_lock(resolve_path(half.ledger), 0, name="batch_load_b=2F1.lock")
    with lock, pytest.raises(errors.LedgerError, match="is writing the batchId 'b/1'") as caught:
        writer.write(half.frame("a", ""))
    assert caught.value.path == half.ledger and not half.sent()
    end = NamedBatch, "end", Mock(side_effect=Killed)
    for death in ((foreach_batch, "_append", dies(Killed())), end):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(*death)
            writer.write(half.frame("a", ""))
    assert bool(half.sent()) is not is_half
    for _ in range(2):
        summary = writer.write(half.frame("a", ""))
        assert summary.is_repeated and (summary.rows_in, summary.acked, summary.dead) == (2, 1, 1)
        assert summary.query_id.startswith("load/b/1/") and not summary.duration_s
    assert half.sent() == [*sent] and caplog.text.count("is complete in the ledger") == 2
    with pytest.raises(errors.CheckpointError, match="number of rows was 2, and is 1"):
        writer.write(half.frame("a"))
    refusal = pytest.raises(errors.CheckpointError, match="delivery was transactional, and is at_l")
    with refusal if is_half else contextlib.nullcontext():
        plain = half.writer(**of_load, delivery="at_least_once")
        assert plain.write(half.frame("a", "")).is_repeated
    for other in ({"appId": "x"}, {"batchId": ""}):
        assert not half.writer(**of_load | other).write(half.frame("b")).is_repeated
    later, half.local[QUERY_ID] = half.writer(batchId="b/2"), "q"
    first = later.write(half.frame("c"))
    assert not first.is_repeated
    assert later.write(half.frame("c")) == replace(first, is_repeated=True)
    half.local[QUERY_ID] = "p"
    with pytest.raises(errors.CheckpointError, match="streaming query was q, and is p"):
        later.write(half.frame("c"))
    assert half.sent() == [*sent, "b", "b", "c"]


@BY_DELIVERY
def test_a_batch_over_its_budget_is_not_complete(half, delivery, sent):
    """Messages of a transactional write are visible then, so it cannot be repeated."""
    half.settings |= {"delivery": delivery, "batchId": "b", "maxEpochFailures": 0}
    for _ in range(2):
        with pytest.raises(errors.DeliveryError, match="1 of 2 rows could not be sent"):
            half.writer().write(half.frame("a", ""))
    # With a larger budget it is: the last write counts.
    last = half.writer(maxEpochFailures=1).write(half.frame("a", ""))
    assert (last.is_repeated, last.rows_in, last.dead) == (True, 2, 1)
    assert last.duplicates_possible == len(sent) - 1
    assert "".join(half.sent()) == sent
    log = [path.read_text() for path in Path(half.ledger, "_delta_log").glob("*.json")]
    assert ('"txn"' in "".join(log)) is (delivery == "transactional")


def test_half_messages_of_epochs(half, monkeypatch):
    writer, death = half.writer(), pytest.raises(Killed)
    with monkeypatch.context() as patch, death:
        patch.setattr(foreach_batch, "_append", dies(Killed()))
        half.epoch(writer, 0, "a", "b")
    half.epoch(writer, 0, "a", "b")
    assert half.sent() == ["a", "b"]
    assert half.rows(ENDS, "transactions") == [("job", 0, 2, 2, 0, False)]
    # The driver rolls the first attempt's messages back, when brokers ask.
    half.cluster.check_transactions()
    until(lambda: not half.cluster.brokers[0].half_messages())
    with monkeypatch.context() as patch, death:
        patch.setattr(TransactionCommitter, "_end", Mock(side_effect=Killed))
        half.epoch(writer, 1, "c")
    half.attempt = 1  # Half messages of a stage's earlier attempt are never committed.
    half.epoch(writer, 2, "d", run="s")
    assert half.sent() == ["a", "b", "c", "d"]
    assert {row[0] for row in half.rows("duplicates_possible")} == {0}
    with monkeypatch.context() as patch, death:
        patch.setattr(TransactionCommitter, "_note", Mock(side_effect=Killed))
        half.epoch(writer, 3, "e", run="s")
    half.epoch(writer, 4, "f", run="t")
    assert half.sent() == [*"abcdef"]
    stored = [(0, 2, 0), (1, 1, 0), (2, 1, 0), (3, 1, 1), (4, 1, 0)]
    assert half.rows("epoch, committed, found_stored", "transactions") == stored
    assert not half.notes("ends")


def test_an_epoch_that_cannot_be_ended_ends_the_query(half):
    writer = half.writer()
    half.epoch(writer, 0, "a")
    lock = ledger_lock(resolve_path(half.ledger), 0, name=ENDS_LOCK)
    with lock, pytest.raises(errors.DeliveryError, match=r"1 is in the ledger.* has long been end"):
        half.epoch(writer, 1, "b", "c")
    half.cluster.brokers[0].lose_half_messages()
    with pytest.raises(errors.DeliveryError, match="2 messages of epoch 1 are in") as caught:
        half.epoch(writer, 2, "d", run="s")
    assert caught.value.counts == {"acked": 0}
    assert half.sent() == ["a"] and half.rows(ENDS, "transactions")[1][2:] == (2, 0, 2, False)
    columns = "lane, run_id, committed, refused, topic, broker_name, remark"
    lost = (None, None, "t", "broker-a", "Find prepared transaction message failed")
    ends = ((1, 0, None, None, None), (0, 2, None, None, None), lost, lost)
    rows = half.rows(columns, "rows_of_transaction")
    assert Counter(rows) == Counter(("foreach_batch", "r", *end) for end in ends)
    [(duration_ms,)] = half.rows("duration_ms", "rows_of_transaction WHERE refused > 0")
    assert 1 < duration_ms < 60_000


@pytest.mark.parametrize("seconds", [200, 310])
def test_a_committer_knows_order_and_age_of_half_messages(half, monkeypatch, caplog, seconds):
    commits = Mock(side_effect=HalfMessageCommitter)
    monkeypatch.setattr(transactions, "HalfMessageCommitter", commits)
    clock = Mock(monotonic=time.monotonic, time=lambda: time.time() + seconds)
    writers = half.writer(), half.writer(appId="", ordering="strict")
    half.epoch(writers[0], 0, "a")
    monkeypatch.setattr(transactions, "time", clock)
    half.epoch(writers[1], 0, "a", "b")
    facts = [committer.kwargs for committer in commits.call_args_list]
    assert [each["ordered"] for each in facts] == [False, True]
    assert all(abs(each["since_ms"] / 1000 - time.time()) < 60 for each in facts)
    warned = caplog.text.count("half messages of epoch 0 were up to 3")
    assert warned == (seconds > 300)
    committer = TransactionCommitter(half.session, writers[0]._options, ordered=True)
    steps = list[Any]()
    report = committer.end("job", 0, wait_s=0, again=True, progress=lambda *n: steps.append(n))
    assert report == EndReport("job", 0, 1, found_stored=1, topics=("t",))
    assert steps[-1] == (1, 1) and commits.call_args.kwargs["ordered"]
    assert committer.end("job", 0, wait_s=0) == EndReport("job", 0)
    assert {committer.members(*epoch) for epoch in (("job", 1), ("another", 0))} == {None}
    assert committer.end("job", 1, wait_s=0) == EndReport("job", 1)
    assert len(committer.members("q", 0) or ()) == 2 and not committer.open_epochs(refused=True)
    shutil.rmtree(half.ledger)
    Ledger(half.ledger).create(half.session)
    for ask in (committer.members, partial(committer.end, wait_s=0)):
        with pytest.raises(errors.LedgerError, match="deleted and made anew") as caught:
            ask("job", 0)
        assert caught.value.path == f"file:{half.ledger}"


def test_a_key_is_held_until_its_letter_is_resolved(world, monkeypatch):
    writer = world.writer(ordering="strict", retryTimesWhenSendFailed=0, deliveryTimeoutMs=500)
    world.epoch(writer, 0, "a")
    world.cluster.on_send(Answer(1, "boom"), times=None)
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(foreach_batch, "_append", dies(KeyError("died")))
        writer.write(world.frame("b"))
    # A failed write notes its queues and no key: nobody would release the key.
    assert world.notes("queues", "pending") == ["queues"]
    world.epoch(writer, 1, "b")
    world.cluster.behave()
    world.epoch(writer, 2, "c")
    letters = [row[1:] for row in world.rows("epoch, letter_id", "rows_of_dead_letter")]
    for letter_id in letters:
        assert world.sent() == ["a"]
        done = values.resolved({"letter_id": [*letter_id]}, "parked")
        Ledger(world.ledger).append(world.session, done)
    assert world.notes("pending")
    world.epoch(writer, 3, "d")
    assert world.sent() == ["a", "d"] and not world.notes("pending")
    assert len(letters) == 2 and writer.write(world.frame("e")).acked == 1
    assert world.notes("queues") == ["queues"]


@pytest.mark.parametrize("name", ["", "day"])
def test_a_write_that_can_go_on_keeps_its_queues(world, monkeypatch, name):
    def writer():
        """Return a writer whose tasks ask for the route anew."""
        worker_pool().close()
        return world.writer(ordering="strict", batchId=name, pollNameServerInterval=10)

    world.cluster.create_topic("t", 4)
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(foreach_batch, "_append", dies(KeyError("died")))
        writer().write(world.frame("a"))
    assert world.notes("queues") == ["queues"] * bool(name)
    world.cluster.create_topic("t", 8)
    if name:
        with pytest.raises(errors.DeliveryError, match="onRouteChange"):
            writer().write(world.frame("a"))
        world.cluster.create_topic("t", 4)
    assert writer().write(world.frame("a")).acked == 1 and not world.notes("queues")


def test_an_epoch_is_ended_under_a_live_lock_alone(half, monkeypatch):
    check = Mock(side_effect=errors.LedgerError("another process may hold it now"))
    with monkeypatch.context() as patch:
        patch.setattr(LedgerLock, "check", check)
        for query in ("z", "a"):
            with pytest.raises(errors.LedgerError, match="may hold it now"):
                half.epoch(half.writer(appId=""), 0, query, query=query)
    committer = TransactionCommitter(half.session, half.writer()._options)
    is_open = [("a", 0), ("z", 0)]
    assert [(row.query_id, row.epoch) for row in committer.open_epochs()] == is_open
    assert [row.query_id for row in committer.open_epochs("z")] == ["z"] and not half.sent()


def test_brokers_of_topics_in_rows_get_answers(half, monkeypatch):
    answerer = Mock()
    monkeypatch.setattr(transactions, "driver_answerer", answerer)
    half.cluster.create_topic("k", 1)
    half.epoch(half.writer(topic="", columns="topic=sharding_key"), 0, "a")
    assert answerer.call_args.args[2].startswith("rocket-sink-")
    assert answerer().watch.mock_calls == [call("k")]


def test_a_checker_of_its_own_ends_epochs(half, monkeypatch, caplog):
    monkeypatch.setattr(transactions, "driver_answerer", Mock(side_effect=errors.LedgerError("x")))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TransactionCommitter, "_end", Mock(side_effect=Killed))
        half.epoch(half.writer(), 0, "a", "b")
    assert "brokers get no answers about half messages of t: x" in caplog.text
    states, reports = list[Any](), list[Any]()
    checker = TransactionChecker(
        half.session, half.writer()._options, on_end=reports.append, ordered=True,
        on_decision=lambda mark, message_id, state: states.append((mark.query_id, state)),
    )  # fmt: skip
    for _ in range(2):
        checker.watch("t")
    # The checker may not have reached the broker yet.
    until(lambda: half.cluster.check_transactions() or reports)
    checker.close()
    assert reports == [EndReport("job", 0, 2, topics=("t",))] and half.sent() == ["a", "b"]
    assert {*states} <= {("job", UNKNOWN), ("job", ROLLBACK)}
    with pytest.raises(errors.LedgerError, match="use a classic session"):
        TransactionCommitter(SimpleNamespace(), half.writer()._options)


# --- the plan of a frame ------------------------------------------------------------------------


def table_of(session, *names):
    return Frame(session, lambda: pa.table({n: [3 if n == "delay_level" else "a"] for n in names}))


@pytest.mark.parametrize(
    ("names", "warned"),
    [("key value", 1), ("keys value", 0), ("key body", 0), ("key value sharding_key", 0)],
)
def test_a_column_named_key_is_warned_of_once(world, caplog, names, warned):
    frames._warn_of_key.cache_clear()
    for _ in range(2):
        frames.plan_of(table_of(world.session, *names.split()), SinkOptions.parse(topic="t"))
    assert caplog.text.count("for that, name it sharding_key") == warned


def test_frames_that_would_lose_or_double_rows(world, monkeypatch, caplog):
    once = SinkOptions.parse(ledger="/in/l", delivery="effectively_once", topic="t")
    frame = table_of(world.session, "BODY")
    assert frames.plan_of(frame, once).source("body") == "BODY"
    world.session.conf.set(frames._CASE, "TRUE")
    with pytest.raises(errors.ColumnError, match="body"):
        frames.plan_of(frame, once)
    console._warn_of_delays.cache_clear()
    delayed = table_of(world.session, "body", "delay_level", "sharding_key")
    delayed.plan.deterministic.return_value = False
    frames.plan_of(delayed, SinkOptions.parse(ordering="strict", topic="t"))
    assert "does not hold for rows with a delay (delay_level)" in caplog.text
    with pytest.raises(errors.ConfigurationError, match="anew in each run"):
        frames.plan_of(delayed, once)
    with_ids = table_of(world.session, "body", "message_id")
    with_ids.plan.deterministic.return_value = False
    assert frames.plan_of(with_ids, once)
    assert frames.plan_of(table_of(SimpleNamespace(), "body"), once)  # of Spark Connect
    monkeypatch.setattr(own_input, "input_folders", lambda plan: ["/in"])
    with pytest.raises(errors.ConfigurationError, match="ledger /in/l is inside /in"):
        frames.plan_of(delayed, once)


@pytest.mark.parametrize(("policy", "zone"), [("legacy", "XXX"), ("CORRECTED", "XXXXX")])
def test_the_columns_that_spark_hands_to_tasks(world, monkeypatch, policy, zone):
    options = SinkOptions.parse(columns="body=a.b", topic="t")
    frame = table_of(world.session, "a.b", "more", "tags")
    needed, plan = frames.select_needed(frame, frames.plan_of(frame, options))
    assert needed.schema.names == ["tags", "_column_1"]
    assert (plan.source("body"), plan.source("tags")) == ("_column_1", "tags")
    plain, options = table_of(world.session, "body"), SinkOptions.parse(topic="t")
    needed, _ = frames.select_needed(plain, frames.plan_of(plain, options))
    assert needed.schema.names == ["body"]
    assert frames.quoted("a`b") == "`a``b`"
    world.session.conf.set(frames._PARSER, policy)
    functions = Mock(col=lambda name: name, struct=lambda *names: names)
    functions.to_json().alias().alias = lambda alias: ("more", alias)
    monkeypatch.setattr(frames, "F", functions)
    for body_format, is_ignored in (("json", "True"), ("json_nulls", "False")):
        options = SinkOptions.parse(topic="t", bodyFormat=body_format, columns="keys=more")
        needed, plan = frames.select_needed(frame, frames.plan_of(frame, options))
        local = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
        formats = {"ignoreNullFields": is_ignored, "timestampFormat": local + zone}
        fields = ("`a.b`", "`more`")
        assert functions.to_json.call_args == call(fields, {**formats, "timestampNTZFormat": local})
        assert needed.schema.names == ["body", "tags", "more"]
