"""The driver's thread that folds, and counts what queries say that they have handed to tasks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocket_sink.ledger.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.spool.writer import SpoolWriter
from rocket_sink.spark import listener
from rocket_sink.spark.listener import FoldThread
from tests.ledger.values import accounts, context

pytestmark = pytest.mark.spark

QUERY = "5b2f11aa-0c4d-4f5e-9a6b-7c8d9e0f1a2b"
DEADLINE_S = 120.0


def done(epoch: int, rows: int) -> Any:
    """What Spark tells of an epoch."""
    return SimpleNamespace(
        id=QUERY, runId="run-1", batchId=epoch, numInputRows=rows, batchDuration=5,
        sink=SimpleNamespace(numOutputRows=rows),
    )  # fmt: skip


def write(folder: Path, epoch: int, rows: int) -> None:
    """What a task leaves in the spool."""
    one = context(query_id=QUERY, epoch=epoch, task_attempt_id=10 + epoch)
    spool = SpoolWriter(resolve_path(folder), one)
    spool.append(accounts(one, acked=rows))
    spool.seal()


def wait_for(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_deleted_ledger_is_told_of_once(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_COUNT_S", 1e9)
    folder = tmp_path / "ledger"
    ledger, thread = Ledger(folder), FoldThread(spark)
    thread.add(resolve_path(folder), interval_s=0.0)
    for epoch in range(2):
        # The second is folded, and waits for the next count.
        write(folder, epoch, 5)
        thread.progressed(done(epoch, 5))
        wait_for(lambda: ledger.exists() and not ledger.unfolded_epochs())
        wait_for(lambda count=epoch: confirmed(ledger, spark) == count + 1)  # type: ignore[misc]
    shutil.rmtree(folder)
    thread.ended()
    wait_for(lambda: told(caplog))
    other = tmp_path / "other"
    thread.add(resolve_path(other), interval_s=0.0)
    for epoch in range(3):
        write(other, epoch, 7)
        thread.ended()
        wait_for(lambda: not Ledger(other).unfolded_epochs())
    (said,) = told(caplog)
    assert f"the ledger {ledger.uri} was deleted while its query ran" in said
    assert "stop the queries" in said
    assert not folder.exists()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of counts; a fold that the deletion met may have said something, too."""
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "deleted while" in text or "cannot count" in text]


def confirmed(ledger: Ledger, spark: Any) -> int:
    return int(ledger.epochs(spark).where("confirmed").count())
