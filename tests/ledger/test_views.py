"""The views: which rows count when tasks and queries die and run again."""

from unittest.mock import MagicMock

import pyarrow as pa
import pytest

from rocket_sink import errors
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.records import (
    build_rows,
    in_flight_rows,
    in_order,
    isolation_rows,
    replaced,
    send_rows,
)
from rocket_sink.ledger.views import SPARK_VIEWS, VIEWS, queried, reader, rows_of, views_of
from rocket_sink.routing.fault import Isolation
from tests.ledger.views import quick_ledger

from .night import at_second as at
from .night import store
from .values import accounts, attempt, confirmed, context, letter, resolved

FIRST = context()
AGAIN = context(task_attempt_id=20, attempt_number=1)
"""The second attempt of the same task."""
OTHER = context(partition=1, task_attempt_id=11)
RUN_2 = context(run_id="run-2", partition=0, task_attempt_id=1)
TABLE = {"partition": None, "task_attempt_id": None, "lane": "table"}
BY_HAND = context(partition=None, task_attempt_id=None, lane="export")

SUM = [accounts(FIRST, acked=5, degraded=1, dead=2), accounts(OTHER, unknown=1, filtered=3)]
SUMS = {"rows_in": 12, "acked": 5, "degraded": 1, "dead": 2, "unknown": 1, "filtered": 3,
        "partitions": 2, "adds_up": True, "superseded_attempts": 0}  # fmt: skip
ONCE = [accounts(FIRST, acked=2, dead=1), letter(FIRST, b"first")]
EARLIER = context(partition=4)
REPLAY = [
    at(accounts(EARLIER, acked=2, dead=1), 1), at(letter(EARLIER, b"old"), 1),
    at(accounts(RUN_2, acked=2, dead=1), 2), at(letter(RUN_2, b"new"), 2),
]  # fmt: skip
CLOCKS = [
    at(letter(FIRST, b"old"), 50), at(accounts(FIRST, dead=1), 50),
    at(letter(RUN_2, b"new"), 10), at(accounts(RUN_2, dead=1), 10),
]  # fmt: skip


def retried(*, is_complete):
    """Clocks differ, so the later attempt's time is not later."""
    return [
        at(accounts(FIRST, complete=is_complete, acked=3, dead=1), 10),
        at(letter(FIRST, b"first"), 10),
        at(accounts(AGAIN, acked=7, dead=1), 10), at(letter(AGAIN, b"again"), 10),
    ]  # fmt: skip


RETRIED = {"rows_in": 8, "acked": 7, "dead": 1, "partitions": 1, "superseded_attempts": 1,
           "superseded_rows": 3, "adds_up": True}  # fmt: skip


def settled(*ways):
    """Return two letters, and resolutions of the first one by a clock that is set back."""
    first, second = letter(FIRST, b"one"), letter(FIRST, b"two")
    resolutions = [at(resolved(first, way), 100 - turn) for turn, way in enumerate(ways)]
    return [first, *resolutions, second, accounts(FIRST, dead=2)]


CASES = {
    "an epoch": (SUM, {**SUMS, "confirmed": False}, []),
    "a confirmed epoch": (
        [*SUM, confirmed(FIRST, 12)], {**SUMS, "confirmed": True, "num_input_rows": 12}, [],
    ),
    "foreachBatch": ([accounts(context(lane="foreach_batch"), acked=1)], {"confirmed": True}, []),
    # The sums agree, because one partition lacks what the other has too much.
    "accounts that do not add up": (
        [accounts(FIRST, rows_in=5, acked=4), accounts(OTHER, rows_in=5, acked=6)],
        {"rows_in": 10, "acked": 10, "adds_up": False}, [],
    ),
    "no complete attempt": (
        [accounts(FIRST, complete=False, acked=4)],
        {"adds_up": False, "rows_in": 0, "superseded_attempts": 1, "superseded_rows": 4}, [],
    ),
    # foreach may end a first attempt without an error (close(None)).
    "retried": (retried(is_complete=True), RETRIED, [b"again"]),
    "retried after a failure": (retried(is_complete=False), RETRIED, [b"again"]),
    "failed after a complete attempt": (
        [*ONCE, accounts(AGAIN, complete=False, acked=1)], {"rows_in": 3}, [b"first"],
    ),
    # Run 1 died before Spark noted it, and run 2 uses fewer partitions. Both runs' letters stay
    # visible until Spark confirms, because the second run could still die.
    "replayed": (REPLAY, {}, [b"new", b"old"]),
    "replayed and confirmed": (
        [*REPLAY, at(confirmed(RUN_2, 3), 3)],
        {"rows_in": 3, "adds_up": True, "run_id": "run-2", "superseded_attempts": 1}, [b"new"],
    ),
    # An epoch does not add up if a partition has no complete attempt.
    "a partition without a complete attempt": (
        [accounts(context(run_id=run, partition=partition), complete=is_complete, acked=1)
         for run, partition, is_complete in (("run-1", 0, True), ("run-1", 1, False),
                                             ("run-2", 1, False), ("run-2", 2, True))]
        + [confirmed(FIRST, 2)],
        {"partitions": 2, "adds_up": False}, [],
    ),
    "skipped by Delta": (
        [*ONCE, confirmed(RUN_2, 3)], {"rows_in": 3, "adds_up": True, "confirmed": True},
        [b"first"],
    ),
    "the last run counts": (CLOCKS, {}, [b"new"]),
    "the confirmed run counts": ([*CLOCKS, at(confirmed(FIRST, 1), 60)], {}, [b"old"]),
    # The second run is confirmed last, by a clock that is behind.
    "the run that was confirmed last counts": (
        [*CLOCKS, at(confirmed(FIRST, 1), 60), at(confirmed(RUN_2, 1), 20)], {}, [b"new"],
    ),
    "a letter of no task": ([letter(BY_HAND, b"x")], None, [b"x"]),
    "a letter of a killed attempt": ([letter(FIRST, b"x")], None, []),
    # The whole table is sent again.
    "a failed send of a table": (
        [letter(context(**TABLE)), accounts(context(**TABLE), complete=False, dead=1)], {}, [],
    ),
    "a send of a table": ([letter(context(**TABLE), b"x"), accounts(context(**TABLE), dead=1)],
                          {}, [b"x"]),
    "no resolution": (settled(), {"dead": 2}, [b"one", b"two"]),
    "resent": (settled("resent"), {}, [b"two"]),
    "parked": (settled("parked"), {}, [b"two"]),
    "dropped": (settled("dropped"), {}, [b"two"]),
    "unparked": (settled("parked", "unparked"), {}, [b"one", b"two"]),
    "parked again": (settled("parked", "unparked", "parked"), {}, [b"two"]),
    "dropped in the end": (settled("parked", "unparked", "dropped"), {}, [b"two"]),
    # A letter that is stored stays settled.
    "unparked after it was resent": (settled("resent", "unparked"), {}, [b"two"]),
}  # fmt: skip


SENDS = [
    in_flight_rows([1, 2], FIRST, topic="t", message_count=[3, 4], body_bytes=[1, 1]),
    send_rows([attempt(), attempt(attempt=2)], FIRST, requests=[1, 1]),
    # Equal numbers of another attempt are other requests.
    in_flight_rows([1], AGAIN, topic="t", message_count=[9], body_bytes=[1]),
    isolation_rows([Isolation("b", "latency", 600.0, 1.0, 3.5)], FIRST),
]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """Return a ledger in which each case is a query; resolutions are of another one."""
    rows = [
        replaced(batch, {"query_id": pa.array([name] * batch.num_rows)})
        if batch["kind"][0].as_py() != "resolution"
        else batch
        for name, (batches, *_) in {**CASES, "sends": (SENDS,)}.items()
        for batch in batches
    ]
    return store(tmp_path_factory.mktemp("views"), in_order(rows, 1 << 32))


def rows_by_duckdb(ledger, query, view, order):
    select = f"SELECT * FROM {view} WHERE query_id = '{query}' ORDER BY {order}"
    return quick_ledger(ledger).query(select).to_pylist()


@pytest.mark.parametrize("name", CASES)
def test_which_rows_count(ledger, name):
    batches, values, bodies = CASES[name]
    epochs = rows_by_duckdb(ledger, name, "epochs", "epoch")
    assert [epoch.items() >= values.items() for epoch in epochs] == [True] * (values is not None)
    letters = rows_by_duckdb(ledger, name, "pending_letters", "partition, ordinal, body")
    assert [letter["body"] for letter in letters] == bodies
    kinds = [batch["kind"][0].as_py() for batch in batches]
    assert len(rows_by_duckdb(ledger, name, "letters", "body")) == kinds.count("dead_letter")


def test_sends_in_flight_show_up_only_without_an_answer(ledger):
    rows = rows_by_duckdb(ledger, "sends", "sends", "task_attempt_id, request")
    assert [(row["task_attempt_id"], row["request"], row["outcome"]) for row in rows] == [
        (10, 1, "acked"), (10, 1, "acked"), (10, 2, "in_flight"), (20, 1, "in_flight"),
    ]  # fmt: skip
    _, row = rows_by_duckdb(ledger, "sends", "attempts", "task_attempt_id")
    assert (row["in_flight"], row["rows_in"], row["counts"]) == (9, None, False)
    [isolation] = rows_by_duckdb(ledger, "sends", "isolations", "at")
    assert isolation["isolated_ms"] == pytest.approx(2500.0)


def test_a_failure_before_a_broker_looked_at_a_letter_is_no_try(tmp_path):
    """Such failures are not the letter's fault, so a backfill may send it again and again."""
    codes = {each.code for each in vars(errors).values() if hasattr(each, "code")} | {"HELD_BACK"}
    values = {"outcome": "not_sent", "letter_id": sorted(codes), "error_code": sorted(codes)}
    rows = build_rows("backfill", len(codes), values, context())
    quick = quick_ledger(store(tmp_path, in_order([rows], 1 << 32)))
    no_try = quick.query("SELECT letter_id FROM backfills WHERE tries = 0 ORDER BY letter_id")
    assert no_try["letter_id"].to_pylist() == [
        "CONNECT", "CONNECTION_LOST", "HELD_BACK", "LOCAL_RESOURCES", "NAME_SERVER_UNAVAILABLE",
        "NO_ROUTE", "REQUEST_TIMEOUT", "TLS", "TLS_REFUSED", "UNKNOWN_HOST", "UNWRITTEN",
    ]  # fmt: skip


@pytest.mark.spark
def test_spark_says_the_same(spark, ledger):
    quick, rows = quick_ledger(ledger), Ledger(ledger).rows(spark)
    for view in (
        "sends", "letters", "pending_letters", "resolutions", "isolations", "epochs", "attempts",
    ):  # fmt: skip
        select = f"SELECT * FROM {view}"
        by_duckdb, by_spark = (
            sorted(map(repr, rows_of(table)))
            for table in (quick.query(select), queried(rows, select).toArrow())
        )
        assert by_duckdb == by_spark != []


READ = ("accounts", "counted_letters", "epochs", "superseded")


def rows_of_views(path):
    """Return the rows of the views, without columns that other views need."""
    quick = quick_ledger(path)
    rows = {}
    for name in READ:
        table = quick.query(f"SELECT * FROM {name}")
        table = table.select([name for name in table.column_names if not name.startswith("_")])
        rows[name] = sorted(table.to_pylist(), key=repr)
    return rows


def test_epochs_without_a_repetition_need_no_comparison(ledger, monkeypatch):
    """Read accounts of most epochs as they are, and still give the rows of the full comparison."""
    short = rows_of_views(ledger)
    assert {row["counts"] for row in short["accounts"]} == {True, False}
    for name in VIEWS:
        monkeypatch.setitem(VIEWS, name, SPARK_VIEWS[name])
    assert short == rows_of_views(ledger)


def test_spark_does_not_look_for_repeated_epochs():
    """Spark reads the table again for each use of a view: for `epochs` 17 times instead of 29."""
    assert "repeated_epochs" not in views_of("SELECT * FROM epochs", SPARK_VIEWS)
    rows, select = MagicMock(), "SELECT * FROM parked"
    assert reader(rows)(select) is rows.sparkSession.sql.return_value.toArrow.return_value
    names = ", ".join(f"{name} AS ({VIEWS[name]})" for name in ("resolutions", "parked"))
    query = f"WITH ledger_rows AS (SELECT * FROM {{rows}}), {names} {select}"
    rows.sparkSession.sql.assert_called_once_with(query, rows=rows)
