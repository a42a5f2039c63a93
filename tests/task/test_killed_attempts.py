"""The ledger announces the messages of a killed task attempt: the next attempt sends them again."""

import multiprocessing
import time
from collections import Counter

import pyarrow as pa
import pytest

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.epoch_starts import IdFacts
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.transport.files import spooled_rows
from rocket_sink.ledger.transport.handed import spool_handed
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import Answer, Delay, Drop, FakeCluster
from rocket_sink.wire.codes import ResponseCode
from tests.ledger.values import confirmed, context
from tests.ledger.views import view_rows
from tests.task.one_task import run_task

DEADLINE_S = 60.0
ROWS = {"body": [f"row {number}" for number in range(200)]}
KEYED = {**ROWS, "sharding_key": [f"key {number % 6}" for number in range(200)]}


def _attempt(options, columns):
    """Run a first attempt that waits for answers until it is killed."""
    parsed = SinkOptions.parse(options)
    batch = pa.RecordBatch.from_pydict(columns)
    run = TaskRunner(parsed, context(query_id="q"))
    run.feed(batch, resolve_columns(batch.schema, parsed))
    run.finish()


@pytest.mark.spark
@pytest.mark.parametrize("ordering", ["none", "strict"])
def test_all_that_is_stored_twice_is_announced(spark, tmp_path, ordering):
    columns = ROWS if ordering == "none" else KEYED
    with FakeCluster(brokers=2) as cluster:
        cluster.create_topic("t", 4)
        options = {
            "nameServer": cluster.name_server, "topic": "t", "ledger": str(tmp_path / "ledger"),
            "ordering": ordering, "requestMaxMessages": "10", "sendMsgTimeout": "60000",
            "orderWaitMs": "120000", "deliveryTimeoutMs": "120000",
        }  # fmt: skip
        # Some requests of the killed attempt are answered, others are stored without an answer.
        cluster.on_send(Delay(0), times=2)
        cluster.on_send(Drop(), times=None)
        killed = multiprocessing.get_context("spawn").Process(
            target=_attempt, args=(options, columns)
        )
        killed.start()
        before, until_s = -1, time.monotonic() + DEADLINE_S
        while before < 1 or before != len(cluster.messages("t")):
            assert time.monotonic() < until_s
            before = len(cluster.messages("t"))
            time.sleep(0.5)
        killed.kill()
        killed.join()
        sent_by_killed = len(cluster.messages("t"))
        cluster.behave()
        again = context(query_id="q", task_attempt_id=20, attempt_number=1)
        summary = run_task(SinkOptions.parse(options), again, columns)
        ids = Counter(message.properties["UNIQ_KEY"] for message in cluster.messages("t"))
    doubled = sum(count - 1 for count in ids.values())
    assert summary.acked == len(ids) == len(ROWS["body"])
    assert doubled == sent_by_killed > 0
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(spark, confirmed(again, len(ids)))
    ledger.sync(spark)
    [epoch] = view_rows(ledger.path, "SELECT * FROM epochs")
    assert (epoch.superseded_attempts, epoch.superseded_rows) == (1, doubled)
    assert (epoch.acked, epoch.adds_up) == (len(ids), True)
    [row] = ledger.epochs(spark).collect()
    assert row.superseded_rows == doubled


EPOCH = str(context().epoch)
PENDING = IdFacts(pending_epoch=EPOCH)
UNRECORDED = IdFacts(pending_epoch=EPOCH, unrecorded_epoch=EPOCH)


@pytest.mark.parametrize(
    ("lane", "attempt", "speculation", "settings", "is_doubtful", "is_repeated"),
    [
        ("foreach_batch", 0, False, IdFacts(), False, False),
        ("foreach_batch", 1, False, IdFacts(), True, True),
        ("foreach_batch", 0, True, IdFacts(), True, True),
        ("foreach_batch", 0, False, PENDING, False, True),  # the driver knows, and says `again`
        ("foreach_batch", 0, False, UNRECORDED, True, True),
        ("batch", 0, False, UNRECORDED, False, False),  # of the stream that writes the batch
        ("handed", 0, False, IdFacts(), False, False),
        ("handed", 1, False, IdFacts(), True, True),
        ("handed", 0, False, PENDING, True, True),
        ("spool", 1, True, PENDING, False, True),  # the spool has the rows of the earlier attempts
        ("spool", 0, False, UNRECORDED, True, True),
    ],
)
def test_an_attempt_beside_others_that_left_no_record_doubts_all(
    tmp_path, lane, attempt, speculation, settings, is_doubtful, is_repeated
):
    """A dead letter may be stored if any earlier attempt may have sent its row."""
    rows: list[pa.RecordBatch] = []
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", 1)
        cluster.brokers[0].on_send(Answer(ResponseCode.NO_PERMISSION, "closed"), times=1)
        options = SinkOptions.parse(
            nameServer=cluster.name_server, topic="t", ledger=str(tmp_path / "ledger"),
            allowSpeculation=speculation, ledgerVia="spark" if lane == "handed" else "spool",
            requestMaxMessages=1, retryTimesWhenSendFailed=0,
        )  # fmt: skip
        batch = pa.RecordBatch.from_pydict(ROWS).slice(0, 9)
        run = TaskRunner(
            options, context(attempt_number=attempt, lane=lane), settings=settings,
            emit=rows.append if "batch" in lane else None, hands_over=lane == "handed",
        )  # fmt: skip
        run.feed(batch, resolve_columns(batch.schema, options))
        run.finish()
    place = resolve_path(options.ledger)
    if run.handed is not None:
        spool_handed(place, [run.handed])
    rows += spooled_rows(place.spools).to_batches()
    kinds = {row["kind"]: row for part in rows for row in part.to_pylist()}
    assert kinds["epoch"]["duplicates_possible"] == (8 if is_doubtful else 0)
    assert kinds["dead_letter"]["maybe_duplicate"] is is_repeated
