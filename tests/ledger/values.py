"""The values that the ledger's tests share."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import fs

from rocket_sink.errors import LedgerError, Outcome
from rocket_sink.ledger.append.table import ensure_table
from rocket_sink.ledger.path import folder_part, resolve_path
from rocket_sink.ledger.records import (
    RunContext,
    confirmed_row,
    dead_letter_rows,
    epoch_row,
    resolution_rows,
    send_rows,
)
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.transport.stream import read_batches
from rocket_sink.producer.engine.attempt import AttemptRecord


def context(**changes):
    values = {
        "query_id": "query", "run_id": "run-1", "epoch": 0, "partition": 0, "stage_id": 1,
        "task_attempt_id": 10, "attempt_number": 0, "worker": "host:1",
        "lane": "foreach",
    }  # fmt: skip
    return RunContext(**{**values, **changes})


def attempt(**changes):
    values = {
        "attempt": 1, "topic": "t", "broker_name": "broker-a", "broker_address": "10.0.0.1:10911",
        "queue_id": 3, "queue_offset": 42, "started_ms": 1_700_000_000_123, "queue_wait_ms": 0.5,
        "connect_ms": 0.0, "rtt_ms": 1.25, "message_count": 7, "body_bytes": 700,
        "wire_bytes": 900, "outcome": Outcome.ACKED, "response_code": 0,
    }  # fmt: skip
    return AttemptRecord(**{**values, **changes})


def failure(code, **changes):
    """Return an attempt that got no answer."""
    values = {"outcome": Outcome.NOT_SENT, "response_code": None, "error_code": code}
    return attempt(**values | changes)


def sends(ctx, count=1, **changes):
    return send_rows([attempt(queue_offset=i, **changes) for i in range(count)], ctx)


def accounts(ctx, *, complete=True, first_error="", **counts):
    values = {"rows_in": sum(counts.values()), **counts, "first_error": first_error}
    return epoch_row(values, ctx, complete=complete, duration_ms=1.0)


def letter(ctx, body=b"body", **columns):
    values = {"body": pa.array([body]), "topic": "t", "reason": "transport", **columns}
    return dead_letter_rows(values, ctx)[0]


def resolved(letter, way):
    """Return the rows of a resolution of these letters, by a query `by hand`."""
    values = {"letter_id": letter["letter_id"], "resolution": way}
    return resolution_rows(values, context(query_id="by hand"))


def confirmed(ctx, rows, *, rows_in=None):
    driver = context(
        query_id=ctx.query_id, run_id=ctx.run_id, epoch=ctx.epoch, partition=None, stage_id=None,
        task_attempt_id=None, attempt_number=None,
    )  # fmt: skip
    return confirmed_row(driver, num_input_rows=rows, rows_in=rows_in)


def write_manifest(root, files, **changes):
    """Write the manifest of a fold that has begun, and return its path."""
    values = {"ledger_id": "gone", "number": 7, "files": files, "bytes": 1, "rows": 2}
    values |= {"token": "t", "table_version": 0, **changes}
    path = root / "_notes" / "folds" / f"{values['number']}-t.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


@contextlib.contextmanager
def refusal(path, match):
    """Expect a LedgerError of this text that names the path."""
    with pytest.raises(LedgerError, match=match) as caught:
        yield
    assert caught.value.path == str(path)


def forge(root, path, kind="send", size=900):
    """Write a commit by hand, like anybody who may write to the ledger's folder."""
    add = {"path": path, "partitionValues": {"kind": kind}, "size": size, "modificationTime": 0,
           "dataChange": True}  # fmt: skip
    log = Path(root, "_delta_log")
    number = len(list(log.glob("*.json")))
    (log / f"{number:020}.json").write_text(json.dumps({"add": add}))


def write_spool(place, ctx, *rows):
    """Write the rows of a task as a sealed spool file; return its path."""
    writer = SpoolWriter(place, ctx)
    writer.append(*rows)
    return writer.seal()


def spool_rows(*paths):
    """Return the rows of spool files, as a fold takes them in."""
    files = fs.LocalFileSystem()
    batches = (batch for path in paths for batch in read_batches(str(path), files))
    return [row for batch in batches for row in batch.to_pylist()]


def claimant(ledger, app_id):
    """Return the id of the streaming query that has claimed an `appId` in a ledger."""
    note = Path(resolve_path(ledger).root, "_notes", "queries", f"{folder_part(app_id)}.json")
    return json.loads(note.read_text())["query_id"]


def session(*runs, is_stopped=False):
    """Return the stand-in of a session with these running queries: delta-rs and DuckDB write and
    read its ledgers without Java."""
    queries = SimpleNamespace(active=[SimpleNamespace(runId=run) for run in runs])
    java = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: is_stopped))
    context = SimpleNamespace(master="local[2]", applicationId="app", _jsc=java)
    settings = {"spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension"}
    conf = SimpleNamespace(get=settings.get, set=settings.__setitem__, unset=settings.pop)
    return SimpleNamespace(
        _jsparkSession=1, streams=queries, sparkContext=context, conf=conf, range=_Frame
    )  # fmt: skip


class _Frame:
    """The stand-in of a frame of numbers, whose `mapInArrow` runs in this process."""

    def __init__(self, *bounds):
        self._rows = pa.RecordBatch.from_pydict({"id": list(range(*bounds[:3]))})

    def mapInArrow(self, make, ddl):
        """Return an object whose `collect` makes the rows, as Spark's lazy frame does."""

        def collect():
            batches = make(iter([self._rows]))
            return [SimpleNamespace(**row) for batch in batches for row in batch.to_pylist()]

        return SimpleNamespace(collect=collect)


def leave_to_spark(spark, root):
    """Make a table that only Spark's Delta may commit to, as after somebody's ALTER TABLE."""
    ensure_table(spark, resolve_path(root))
    feature = "'delta.enableDeletionVectors' = 'true'"
    spark.sql(f"ALTER TABLE delta.`{root}` SET TBLPROPERTIES ({feature})")


def one_batch(batches):
    """Join batches as `pyarrow.concat_batches` does, which version 18 lacks."""
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
