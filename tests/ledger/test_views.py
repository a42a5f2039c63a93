"""The views of drawn ledgers, in which tasks and queries die and run again."""

from random import Random
from typing import Any, Final

import pyarrow as pa

from rocket_sink.ledger.records import in_flight_rows, in_order
from rocket_sink.ledger.views import SPARK_VIEWS, VIEWS, views_of
from tests.ledger.views import quick_ledger

from .night import store
from .values import accounts, confirmed, context, letter, sends

EPOCHS: Final = 80
READ: Final = ("accounts", "counted_letters", "epochs", "superseded")


def drawn_epoch(random: Random, epoch: int) -> list[pa.RecordBatch]:
    """Return an epoch of one or two runs, with up to three attempts at each of their partitions."""
    rows = []
    runs = random.choice([("run-1",), ("run-1", "run-2")])
    for run in runs:
        first = random.choice([0, 3])
        for partition in range(first, first + random.randint(1, 3)):
            for number in range(random.choice([0, *[1] * 8, 2, 3])):
                ctx = context(
                    epoch=epoch, run_id=run, partition=partition, attempt_number=number,
                    task_attempt_id=random.randint(1, 1000), lane="foreach",
                )  # fmt: skip
                rows.append(in_flight_rows([1], ctx, topic="t", message_count=[9], body_bytes=[9]))
                rows += [sends(ctx)] * (random.random() < 0.5) + [letter(ctx)]
                is_complete = random.random() < 0.8
                for _ in range(random.choice([0, *[1] * 8, 2])):
                    rows.append(
                        accounts(ctx, complete=is_complete, acked=random.randint(0, 9), dead=1)
                    )
    if random.random() < 0.7:
        rows.append(confirmed(context(epoch=epoch, run_id=random.choice(runs)), 10))
    if random.random() < 0.2:
        send = context(query_id="table", epoch=epoch, partition=None, lane="table")
        rows.append(accounts(send, complete=random.random() < 0.5, acked=1))
    random.shuffle(rows)
    return rows


def rows_of_views(path: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the views, without columns that other views need."""
    quick = quick_ledger(path)
    rows = {}
    for name in READ:
        table = quick.query(f"SELECT * FROM {name}")
        table = table.select([name for name in table.column_names if not name.startswith("_")])
        rows[name] = sorted(table.to_pylist(), key=repr)
    return rows


def test_epochs_without_a_repetition_need_no_comparison(tmp_path, monkeypatch):
    """Read accounts of most epochs as they are, and still give the rows of the full comparison."""
    random = Random(1)
    batches = [batch for epoch in range(EPOCHS) for batch in drawn_epoch(random, epoch)]
    path = store(tmp_path, in_order(batches, 1 << 32))
    short = rows_of_views(path)
    assert {row["counts"] for row in short["accounts"]} == {True, False}
    for name in VIEWS:
        monkeypatch.setitem(VIEWS, name, SPARK_VIEWS[name])
    assert short == rows_of_views(path)


def test_an_epoch_has_the_partitions_of_its_current_attempts(tmp_path):
    """Count a partition without a complete attempt, too: its epoch does not add up."""
    attempts = [("run-1", 0, True), ("run-1", 1, False), ("run-2", 1, False), ("run-2", 2, True)]
    rows = [
        accounts(context(run_id=run, partition=partition), complete=is_complete, acked=1)
        for run, partition, is_complete in attempts
    ]
    rows.append(confirmed(context(run_id="run-1"), 2))
    quick = quick_ledger(store(tmp_path, in_order(rows, 1 << 32)))
    (epoch,) = quick.query("SELECT * FROM epochs").to_pylist()
    assert (epoch["partitions"], epoch["adds_up"]) == (2, False)


def test_spark_does_not_look_for_repeated_epochs():
    """Spark reads the table again for each use of a view: for `epochs` 17 times instead of 29."""
    assert "repeated_epochs" not in views_of("SELECT * FROM epochs", SPARK_VIEWS)
