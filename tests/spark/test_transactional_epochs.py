"""`delivery=transactional` over whole epochs: Delta is real, the brokers are scripted.

All tests share a ledger, because making one takes most of a short test's time; each test has its
own query.
"""

import dataclasses
import uuid
from collections import Counter
from typing import Any

import pytest

from rocket_sink import Ledger, RocketSink
from rocket_sink.errors import ConfigurationError, DeliveryError
from rocket_sink.ledger.append import table
from rocket_sink.ledger.path import resolve_path
from rocket_sink.producer.admin.half_commits import HalfMessageCommitter
from rocket_sink.spark import foreach_batch, transactions
from rocket_sink.spark.checks.context import QUERY_ID, RUN_ID
from rocket_sink.spark.decided_epoch import decided_epoch
from rocket_sink.spark.transactions import TransactionCommitter
from rocket_sink.task.transaction_marker import HalfMark
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import RequestCode
from tests.killed import Killed
from tests.ledger.views import view_rows
from tests.producer.waiting import until

pytestmark = pytest.mark.spark
ROWS = 40


class Query:
    """A query of the shared ledger; its bodies are `query/epoch/row`."""

    def __init__(self, spark, cluster, ledger, name):
        self.spark, self.cluster, self.name = spark, cluster, name
        self.ledger = Ledger(ledger)
        self.settings: dict[str, Any] = {
            "nameServer": cluster.name_server, "topic": "t", "ledger": ledger, "appId": name,
            "delivery": "transactional", "storedCheckDelay": 100, "storedCheckTimeout": 2000,
        }  # fmt: skip

    def sink(self, **more):
        """Return a new sink, as in a new process."""
        return RocketSink(**{**self.settings, **more})

    def rows(self, epoch):
        body = f"concat('{self.name}/{epoch}/', id) AS body"
        return self.spark.range(0, ROWS, 1, 2).selectExpr(body)

    def epoch(self, number, **more):
        """Send an epoch as a run of its own, by a new sink."""
        properties = {QUERY_ID: self.name, RUN_ID: str(uuid.uuid4())}
        context = self.spark.sparkContext
        try:
            for key, value in properties.items():
                context.setLocalProperty(key, value)
            self.sink(**more).write_batch(self.rows(number), number)
        finally:
            for key in properties:
                context.setLocalProperty(key, None)

    def killed(self, monkeypatch, owner, name, kill, **more):
        """Run epoch 0; its driver dies in the function `name`."""
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, kill)
            with pytest.raises(Killed):
                self.epoch(0, **more)

    def seen(self):
        """Return {epoch: messages that consumers see}; fail if a body is there twice."""
        own = self.bodies()
        assert len(set(own)) == len(own)
        return dict(Counter(int(body.split("/")[1]) for body in own))

    def bodies(self):
        bodies = [m.body.decode() for m in self.cluster.messages("t")]
        return [body for body in bodies if body.startswith(f"{self.name}/")]

    def open(self):
        halves = [half for broker in self.cluster.brokers for half in broker.half_messages()]
        marks = [HalfMark.read(half.properties) for half in halves]
        return sum(mark is not None and mark.query_id == self.name for mark in marks)

    def epochs(self):
        select = f"SELECT * FROM transactions WHERE query_id = '{self.name}'"
        return {row.epoch: row for row in view_rows(self.ledger.path, select)}


@pytest.fixture(scope="module")
def shared(spark, tmp_path_factory):
    with FakeCluster(brokers=2) as cluster:
        yield spark, cluster, str(tmp_path_factory.mktemp("transactional") / "ledger")
        for answerer in transactions._answerers.values():
            answerer.close()
        transactions._answerers.clear()


@pytest.fixture
def query(shared, request):
    return Query(*shared, request.node.name)


def die(*given, **more):
    raise Killed


def run_without_append(results, *_):
    """Run all tasks; the driver dies before Delta commits."""
    results.collect()
    raise Killed


def test_an_epoch_is_hidden_until_its_append(query, monkeypatch):
    query.killed(monkeypatch, foreach_batch, "_append", run_without_append)
    assert not query.seen() and query.open() == ROWS
    query.epoch(0)
    # The killed attempt's rows stay hidden; the epoch's own rows are visible once.
    assert query.seen() == {0: ROWS} and query.open() == ROWS
    row = query.epochs()[0]
    assert (row.halves, row.committed, row.refused, row.open) == (ROWS, ROWS, 0, False)
    # Brokers ask about the dead attempt's messages, and the driver answers from the ledger.
    query.cluster.check_transactions()
    until(lambda: not query.open(), timeout_s=60)
    # Delta skips an epoch that it has; a second run sends and commits nothing.
    query.epoch(0)
    assert query.seen() == {0: ROWS} and not query.open()


def test_halves_that_another_cluster_refused_are_committed_later(query, monkeypatch):
    """The other cluster's brokers have the same names as the first cluster's."""
    query.killed(monkeypatch, HalfMessageCommitter, "commit", die)
    with FakeCluster(brokers=2) as other:
        other.create_topic("t", 4)
        with pytest.raises(DeliveryError, match="leads to another cluster"):
            query.epoch(1, nameServer=other.name_server)
    committer = TransactionCommitter(query.spark, query.sink().options)
    assert not query.seen() and not committer.open_epochs(query.name)
    [row] = committer.open_epochs(query.name, refused=True)
    assert committer.end(row.query_id, row.epoch, wait_s=60, again=True).committed == ROWS
    assert query.seen() == {0: ROWS} and not committer.open_epochs(query.name, refused=True)


def test_delta_rs_and_spark_read_the_same_of_an_epoch(query, monkeypatch):
    place = resolve_path(query.ledger.path)

    def read_once(epoch, name):
        epoch_read = decided_epoch(query.spark, place, name, epoch)
        if epoch_read is None:
            return None
        return dataclasses.replace(epoch_read, halves=epoch_read.halves.sort_by("message_id"))

    def read(epoch, name=query.name):
        direct = read_once(epoch, name)
        with monkeypatch.context() as patch:
            patch.setattr(table, "open_direct", lambda *given: None)
            assert read_once(epoch, name) == direct
        return direct

    # An attempt that its broker refused is no message of the epoch.
    query.cluster.on(RequestCode.SEND_MESSAGE_V2, Answer(1, "not now"), times=1)
    query.killed(monkeypatch, TransactionCommitter, "_end", die)
    decided = read(0)
    assert decided is not None and len(decided.halves) == ROWS and not decided.is_ended
    query.epoch(1)
    for epoch in (0, 1):
        decided = read(epoch)
        assert decided is not None and len(decided.halves) == ROWS and decided.is_ended
    assert read(2) is None and read(0, "another") is None


def test_batch_writes_have_it_and_foreach_does_not(query, tmp_path):
    summary = query.sink().write(query.rows(0))
    assert summary.acked == ROWS and query.seen() == {0: ROWS} and not query.open()
    with pytest.raises(ConfigurationError, match="foreachBatch"):
        query.sink().stream(query.spark.readStream.schema("body STRING").parquet(str(tmp_path)))
