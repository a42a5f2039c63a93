"""The task body with the real engine over real sockets, and the real spool; no Spark."""

import pyarrow as pa
import pytest

from rocket_sink.errors import CheckpointError, DeliveryError, NameServerUnavailableError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import FakeCluster
from tests.clusters import are_in_order, scripted_cluster
from tests.ledger.values import spool_rows
from tests.task.one_task import CTX

PATIENT = {"sendMsgTimeout": 60_000, "suspectAfterMs": 60_000, "faultTable": "60s:1s"}
"""Options by which no broker looks slow on a busy machine: best_effort would move keys then."""


def spooled(ledger):
    return spool_rows(*sorted((ledger / "_spool").rglob("*.arrow")))


def send(cluster, path, pool, *, again=False, query="", **options):
    count = options.pop("count", 2000)
    settings = {"nameServer": cluster.name_server, "topic": "t", "ledger": str(path), **options}
    parsed = SinkOptions.parse(settings)
    batch = pa.RecordBatch.from_pydict({
        "body": [f"{i:06d}".encode() for i in range(count)],
        "sharding_key": [f"k{i % 50}" for i in range(count)],
        "tags": ["a"] * count,
    })  # fmt: skip
    plan = resolve_columns(batch.schema, parsed.with_(bodyFormat="column"))  # It is packed.
    with TaskRunner(parsed, CTX, pool=pool, again=again, streaming_query=query) as run:
        for start in range(0, count, 500):
            run.feed(batch.slice(start, 500), plan)
        return run.finish()


cluster = scripted_cluster(t=4)


@pytest.fixture
def pool(closing):
    return closing(ProducerPool())


@pytest.mark.parametrize("ordering", ["none", "best_effort", "strict"])
def test_every_row_is_stored_in_order_and_the_spool_says_so(cluster, pool, tmp_path, ordering):
    summary = send(cluster, tmp_path, pool, ordering=ordering, **PATIENT)
    stored = cluster.messages("t")
    assert sorted({m.body for m in stored}) == [f"{i:06d}".encode() for i in range(2000)]
    # A busy machine may make an answer late: then a request is sent twice, but it is counted.
    assert len(stored) - 2000 <= summary.duplicates_possible
    assert summary.acked == 2000
    assert ordering == "none" or are_in_order(stored)
    rows = spooled(tmp_path)
    answered = [r for r in rows if r["kind"] == "send"]
    assert sum(r["message_count"] for r in answered) == 2000
    assert all(r["outcome"] != "in_flight" for r in answered)
    assert [r["acked"] for r in rows if r["kind"] == "epoch"] == [2000]


def test_an_engine_is_used_again(cluster, pool, tmp_path):
    send(cluster, tmp_path, pool)
    options = SinkOptions.parse({"nameServer": cluster.name_server, "topic": "t",
                                 "ledger": str(tmp_path)})  # fmt: skip
    engine = pool.acquire(options)
    pool.release(engine)
    send(cluster, tmp_path, pool)
    assert pool.acquire(options) is engine


def test_no_name_server_fails_the_task_and_names_each(pool, tmp_path):
    with FakeCluster(brokers=1) as gone:
        pass
    with pytest.raises(NameServerUnavailableError, match=gone.name_server):
        send(gone, tmp_path, pool, count=10)


def test_dead_brokers_fail_the_task_and_its_letters_are_on_record(cluster, pool, tmp_path):
    send(cluster, tmp_path / "warm", pool, count=10)
    cluster.kill()
    with pytest.raises(DeliveryError, match="no broker took any of 100 rows"):
        send(cluster, tmp_path, pool, count=100, deliveryTimeoutMs=300)
    (account,) = [r for r in spooled(tmp_path) if r["kind"] == "epoch"]
    assert (account["dead"], account["complete"]) == (100, False)
    letters = [r for r in spooled(tmp_path) if r["kind"] == "dead_letter"]
    assert sorted(r["body"] for r in letters) == [f"{i:06d}".encode() for i in range(100)]
    assert {r["reason"] for r in letters} == {"transport"}


@pytest.mark.parametrize(
    ("again", "delivery", "possible"),
    [(False, "at_least_once", 0), (True, "at_least_once", 20), (True, "effectively_once", 0)],
)
def test_rows_that_may_be_stored_already_are_counted(
    cluster, pool, tmp_path, again, delivery, possible
):
    cluster.create_topic("t")
    send(cluster, tmp_path, pool, again=again, delivery=delivery, count=20)
    (account,) = [row for row in spooled(tmp_path) if row["kind"] == "epoch"]
    assert (account["acked"], account["duplicates_possible"]) == (20, possible)


def test_an_app_id_of_another_query_sends_nothing(cluster, pool, tmp_path):
    for query in ("q1", "q1", "q2"):
        if query == "q2":
            with pytest.raises(CheckpointError, match="'app' names the streaming query q1"):
                send(cluster, tmp_path, pool, count=10, appId="app", query=query)
        else:
            send(cluster, tmp_path, pool, count=10, appId="app", query=query)
    assert len(cluster.messages("t")) == 20
