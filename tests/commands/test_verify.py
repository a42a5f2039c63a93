"""`rocket-sink verify` against the scripted cluster: planted faults, retention, delays, keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.query.verify import StoredPlaces, Verification
from rocket_sink.ledger.records import RunContext, in_order, send_rows
from rocket_sink.message import Message, MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.producer.producer import Producer
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import FakeCluster
from rocket_sink.wire.stored import StoredMessage
from tests.ledger.night import store
from tests.ledger.values import accounts, attempt, confirmed, context
from tests.run_command import run_command

ROWS = 300


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=2) as fake:
        fake.create_topic("t", queues=2)
        yield fake


def run(cluster: FakeCluster, folder: Path, ctx: RunContext, nth: int = 1, **more: Any) -> None:
    """Run a task with `ROWS` rows, and fold its ledger rows."""
    options = SinkOptions.parse(nameServer=cluster.name_server, topic="t", requestMaxMessages=20)
    rows: list[pa.RecordBatch] = []
    columns = {"body": [f"{ctx.epoch}-{n}" for n in range(ROWS)],
               "keys": [[f"key-{n}"] for n in range(ROWS)], **more}  # fmt: skip
    batch = pa.RecordBatch.from_pydict(columns)
    pool = ProducerPool(make=lambda own: SendEngine(own, shared=None))
    runner = TaskRunner(options, ctx, emit=rows.append, pool=pool, keeps_dead_letters=True)
    with contextlib.closing(pool), runner:
        runner.feed(batch, resolve_columns(batch.schema, options))
        runner.finish()
    rows.append(confirmed(ctx, ROWS, rows_in=ROWS))
    store(folder, in_order(rows, nth << 32))


def verified(cluster: FakeCluster, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = run_command("verify", "-n", cluster.name_server, "-t", "t", "--json", *arguments)
    assert done.code == code, (done.out, done.err)
    [result] = done.json()
    assert result["adds_up"] is (code == 0)
    return {name: value for name, value in result.items() if value and name != "examples"}


Delete = Callable[[int], None]


@pytest.fixture
def delete(monkeypatch: pytest.MonkeyPatch) -> Delete:
    """Return a function that makes a message of the queue 1 of broker-a unreadable."""
    read = Admin.read_queue
    gone: set[int] = set()

    def reading(self: Admin, queue: MessageQueue, *ends: int) -> Iterator[StoredMessage]:
        for message in read(self, queue, *ends):
            is_other = (queue.broker_name, queue.queue_id) != ("broker-a", 1)
            if is_other or message.queue_offset not in gone:
                yield message

    monkeypatch.setattr(Admin, "read_queue", reading)
    return gone.add


def queue_of(cluster: FakeCluster) -> list[StoredMessage]:
    """Return the messages of a queue, as its broker has them."""
    messages: list[StoredMessage] = cluster.brokers[0].store._queues["t", 1]
    assert len(messages) > 40
    return messages


def test_deleted_doubled_and_foreign_messages_are_told(
    cluster: FakeCluster, tmp_path: Path, delete: Delete
) -> None:
    ledger = tmp_path / "ledger"
    for epoch in range(2):
        run(cluster, ledger, context(epoch=epoch, task_attempt_id=epoch), epoch + 1)
    sums = verified(cluster, "--ledger", str(ledger))
    assert sums == {"topic": "t", "acknowledged": 600, "found": 600, "adds_up": True}
    queue = queue_of(cluster)
    delete(25)
    cluster.brokers[0].store.append(queue[3])
    with Producer(nameServer=cluster.name_server) as producer:
        producer.send(Message("t", b"somebody else's"))
    faults = verified(cluster, "--ledger", str(ledger), code=1)
    assert faults == {
        "topic": "t", "acknowledged": 600, "found": 599, "missing": 1, "twice": 1, "foreign": 1,
    }  # fmt: skip
    text = run_command("verify", "-n", cluster.name_server, "-t", "t", "--ledger", str(ledger)).out
    assert "It does not add up." in text
    assert "missing: broker-a:1 @25" in text and f"{queue[3].message_id}" in text


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_message_is_missed_wherever_it_was(
    cluster: FakeCluster, tmp_path: Path, place: int, delete: Delete
) -> None:
    run(cluster, tmp_path / "ledger", context())
    delete(queue_of(cluster)[place].queue_offset)
    faults = verified(cluster, "--ledger", str(tmp_path / "ledger"), code=1)
    assert faults["missing"] == 1 and faults["found"] == ROWS - 1


def test_rows_of_one_query_and_of_attempts_that_do_not_count(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    run(cluster, ledger, context())
    run(cluster, ledger, context(query_id="other"), 2)
    assert verified(cluster, "--ledger", str(ledger), "--query", "other")["acknowledged"] == ROWS
    run(cluster, ledger, context(run_id="run-2", task_attempt_id=99), 3)
    sums = verified(cluster, "--ledger", str(ledger), code=1)
    assert (sums["acknowledged"], sums["twice"]) == (2 * ROWS, ROWS)


def compared(path: Path, first: int, ids: dict[int, str], waiting: set[str]) -> Verification:
    """Compare a queue that has these ids by offset, and begins at the offset `first`."""
    quick = open_quick(path)
    assert quick is not None
    messages = [
        StoredMessage("t", b"", 3, place, properties={"UNIQ_KEY": text})
        for place, text in ids.items()
    ]
    with contextlib.closing(StoredPlaces()) as places:
        places.add("broker-a", 3, first, messages)
        return places.compare(quick.query, "t", lambda wanted: waiting & set(wanted))


def test_what_retention_has_deleted_is_no_fault(tmp_path: Path) -> None:
    """The request has the offsets 42 to 48; the queue begins at 45 now."""
    ctx = context()
    rows = [sends_of("A" * 32), accounts(ctx, acked=7), confirmed(ctx, 7)]
    path = Path(store(tmp_path, in_order(rows, 1 << 32)))
    result = compared(path, 45, {place: f"{place}" for place in range(45, 49)}, set())
    assert (result.expired, result.found, result.missing, result.adds_up) == (3, 4, 0, True)


def sends_of(message_id: str, **more: Any) -> pa.RecordBatch:
    return send_rows([attempt(message_id=message_id, **more)], context(), requests=[1])


def test_a_delayed_message_waits_or_is_elsewhere_or_missing(tmp_path: Path) -> None:
    """The answer to a delayed message has an offset of a system topic."""
    ctx, own = context(), "B" * 32
    rows = [sends_of(own, message_count=1), accounts(ctx, acked=1), confirmed(ctx, 1)]
    path = Path(store(tmp_path, in_order(rows, 1 << 32)))
    others = {42: "C" * 32}
    waits = compared(path, 0, others, {own})
    assert (waits.not_due, waits.missing, waits.foreign) == (1, 0, 1)
    came = compared(path, 0, {**others, 43: own}, set())
    assert (came.found, came.not_due, came.missing, came.twice, came.foreign) == (1, 0, 0, 0, 1)
    gone = compared(path, 0, others, set())
    assert (gone.found, gone.missing, gone.foreign) == (0, 1, 1)


def test_keys_of_a_table_are_compared(cluster: FakeCluster, tmp_path: Path, delete: Delete) -> None:
    run(cluster, tmp_path / "ledger", context())
    file = tmp_path / "orders.parquet"
    keys = [f"key-{n}" for n in range(ROWS)]
    pq.write_table(pa.table({"order": keys}), file)
    named = ("--path", str(file), "--key", "order")
    assert verified(cluster, *named)["found"] == ROWS
    queue = queue_of(cluster)
    cluster.brokers[0].store.append(queue[3])
    delete(7)
    pq.write_table(pa.table({"order": [*keys, "not sent"][1:]}), file)
    faults = verified(cluster, *named, code=1)
    assert (faults["missing"], faults["twice"], faults["foreign"]) == (2, 1, 1)


def test_what_is_compared_must_be_named(cluster: FakeCluster) -> None:
    done = run_command("verify", "-n", cluster.name_server, "-t", "t")
    assert done.code == 2 and "--path FILES and --key COLUMN" in done.err
