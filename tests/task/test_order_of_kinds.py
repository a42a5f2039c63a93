"""Order per key if rows of a key cannot share a request, or have no route for a while."""

import time

import pyarrow as pa
import pytest

from rocket_sink import TableProducer
from rocket_sink.ledger.records import RunContext
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import RequestCode
from tests.clusters import scripted_cluster

IN_ORDER = ("strict", "best_effort")


@pytest.mark.parametrize("ordering", IN_ORDER)
def test_a_key_given_up_for_want_of_a_route_is_held_when_there_is_one(ordering, tmp_path):
    def batch(number):
        return pa.RecordBatch.from_pydict(
            {"topic": ["late"], "body": [b"%d" % number], "sharding_key": ["K"]}
        )

    with FakeCluster(brokers=1, queues=0) as cluster:
        options = SinkOptions.parse(
            nameServer=cluster.name_server, ledger=str(tmp_path), ordering=ordering,
            createTopic="",
        )  # fmt: skip
        pool = ProducerPool(make=lambda given: SendEngine(given, shared=None))
        context = RunContext("query", "run", 3, 0, 1, 7, 0, worker="host:1", lane="foreach")
        task = TaskRunner(options, context, pool=pool)
        plan = resolve_columns(batch(0).schema, options)
        task.feed(batch(0), plan)
        cluster.create_topic("late", 4)
        time.sleep(1.5)  # A missing route is asked for again only after this time.
        task.feed(batch(1), plan)
        summary = task.finish()
        pool.close()
        assert [message.body for message in cluster.messages("late")] == []
        assert (summary.dead, summary.held_back) == (2, 1)


cluster = scripted_cluster(1, t=1)


@pytest.mark.parametrize("ordering", IN_ORDER)
def test_rows_of_a_batch_that_may_be_stored_are_not_said_to_be_held_back(cluster, ordering):
    """The broker stored the batch and answered with an error; sent singly, the first row fails."""
    script = cluster.brokers[0].script
    script.add(
        Answer(1, "java.lang.IllegalStateException: x", stores=True),
        matches=lambda frame: frame.code == RequestCode.SEND_BATCH_MESSAGE, times=1,
    )  # fmt: skip
    script.add(
        Answer(13, "illegal"), times=None,
        matches=lambda frame: frame.code == RequestCode.SEND_MESSAGE_V2 and b"a1" in frame.body,
    )  # fmt: skip
    options = {"nameServer": cluster.name_server, "topic": "t", "retryTimesWhenSendFailed": 0}
    with TableProducer(ordering=ordering, **options) as producer:
        result = producer.send(pa.table({"body": ["a1", "a2", "a3"], "sharding_key": ["A"] * 3}))
    assert len(cluster.messages("t")) == 3
    assert (result.summary.unknown, result.summary.dead) == (3, 0)
    letters = result.dead_letters.select(["reason", "outcome", "maybe_duplicate"]).to_pylist()
    assert letters == [{"reason": "unknown", "outcome": "unknown", "maybe_duplicate": True}] * 3
