"""Attempts of a task that died before: the next attempt may store each of its rows twice."""

import pyarrow as pa
import pytest

from rocket_sink.ledger.epoch_starts import IdFacts
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.transport.files import spooled_rows
from rocket_sink.ledger.transport.handed import spool_handed
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import Answer
from rocket_sink.wire.codes import ResponseCode
from tests.clusters import scripted_cluster
from tests.ledger.values import context

cluster = scripted_cluster(1, t=1)
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
    cluster, tmp_path, lane, attempt, speculation, settings, is_doubtful, is_repeated
):
    """A dead letter may be stored if any earlier attempt may have sent its row."""
    rows: list[pa.RecordBatch] = []
    cluster.brokers[0].on_send(Answer(ResponseCode.NO_PERMISSION, "closed"), times=1)
    options = SinkOptions.parse(
        nameServer=cluster.name_server, topic="t", ledger=str(tmp_path / "ledger"),
        allowSpeculation=speculation, ledgerVia="spark" if lane == "handed" else "spool",
        requestMaxMessages=1, retryTimesWhenSendFailed=0,
    )  # fmt: skip
    batch = pa.RecordBatch.from_pydict({"body": [f"row {number}" for number in range(9)]})
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
