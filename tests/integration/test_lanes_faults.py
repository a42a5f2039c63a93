"""Real brokers that are frozen or killed under a task, and replays that ask them."""

import dataclasses
import threading
import uuid
from contextlib import closing

import pyarrow as pa
import pytest

from rocket_sink.options import SinkOptions
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from tests.clusters import are_in_order, make_topic, read_topic
from tests.damaged import damaged
from tests.task.one_task import CTX, run_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

ROWS = 8_000
KEYS = 200


def options_of(cluster, ledger, **more):
    """Return options for a topic of their own."""
    topic = f"t-{uuid.uuid4().hex[:8]}"
    make_topic(cluster, topic)
    servers = cluster.name_server
    return SinkOptions.parse(nameServer=servers, topic=topic, ledger=str(ledger), **more)


def send_whole(cluster, options, during, after):
    """Send rows, and call `during` after a third of them. No row may be missing; return the summary
    and the stored messages, read when `after` has repaired the broker."""
    bodies = [f"{i:07d}" for i in range(ROWS)]
    table = pa.table({"body": bodies, "sharding_key": [f"N{i % KEYS}" for i in range(ROWS)]})
    batches = table.to_batches(max_chunksize=200)
    plan = resolve_columns(table.schema, options)
    with closing(ProducerPool()) as pool, TaskRunner(options, CTX, pool=pool) as run:
        for number, batch in enumerate(batches):
            if number == len(batches) // 3:
                during()
            run.feed(batch, plan)
        summary = run.finish()
    after()
    cluster.await_route(options.topic)
    stored = list(read_topic(cluster.name_server, options.topic))
    assert summary.acked == ROWS and summary.given_up == 0
    assert {int(message.body) for message in stored} == set(range(ROWS))
    assert len(stored) - ROWS <= summary.duplicates_possible
    undamaged = [message for message in stored if not damaged(message)]
    assert options.ordering != "strict" or are_in_order(undamaged)
    return summary, stored


@pytest.mark.parametrize(
    ("delivery", "ordering"),
    [("at_least_once", "strict"), ("effectively_once", "none"), ("effectively_once", "strict")],
)
def test_a_frozen_broker_disorders_nothing_and_doubles_nothing_once(
    cluster, tmp_path, delivery, ordering
):
    """Requests to a frozen broker run out of time, and it stores them when it wakes up."""
    options = options_of(
        cluster, tmp_path, delivery=delivery, ordering=ordering, orderWaitMs=200_000,
        sendMsgMaxTimeoutPerRequest=300, sendMsgTimeout=60_000, requestMaxMessages=100,
        storedCheckTimeout=300_000, connectTimeoutMs=500,
    )  # fmt: skip
    broker = cluster.brokers[0]
    thaw = threading.Timer(5.0, broker.thaw)

    def freeze():
        broker.freeze()
        thaw.start()

    summary, stored = send_whole(cluster, options, freeze, thaw.join)
    if delivery == "effectively_once":
        assert (len(stored), summary.duplicates_possible) == (ROWS, 0)
    status = cluster.admin("topicStatus", "-t", options.topic)
    offsets = [line.split() for line in status.splitlines() if line.startswith("broker")]
    assert sum(int(parts[3]) - int(parts[2]) for parts in offsets) == len(stored)


@pytest.mark.parametrize("ordering", ["none", "best_effort"])
def test_nothing_is_lost_when_a_broker_is_killed(cluster, tmp_path, ordering):
    options = options_of(cluster, tmp_path, ordering=ordering, sendMsgTimeout=20_000)
    broker = cluster.brokers[1]
    send_whole(cluster, options, broker.kill, broker.restart)


def test_delayed_messages_are_found_where_they_wait(cluster, tmp_path):
    options = options_of(cluster, tmp_path, delivery="effectively_once")
    rows = {
        "body": [str(i) for i in range(40)], "delay_level": [18] * 20 + [None] * 20,
        "delay_ms": [None] * 20 + [3_600_000] * 20,
    }  # fmt: skip
    again = dataclasses.replace(CTX, run_id="r2", task_attempt_id=1)
    for ctx, skipped in ((CTX, 0), (again, 40)):
        summary = run_task(options, ctx, rows)
        assert (summary.acked, summary.found_stored) == (40, skipped)
