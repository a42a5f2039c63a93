"""Retention: old rows are removed, and rows that are still needed stay."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from rocket_sink.errors import OptionError
from rocket_sink.ledger.append.delta_rs import open_table
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.records import build_rows, in_order, resolution_rows
from rocket_sink.ledger.schema import KINDS
from rocket_sink.ledger.upkeep.expire import Expired, Retention, expire, expire_daily
from rocket_sink.ledger.upkeep.growth import merge
from rocket_sink.options import LEDGER_KINDS, SinkOptions
from tests.growth import SPARK
from tests.run_command import Done, run_command

from ..night import at, store
from ..values import accounts, confirmed, context, letter, sends

NOW = dt.datetime.now(tz=dt.timezone.utc)
DAY_MS = 86_400_000
BODY = b"name: N14228"


def days_ago(days: float) -> dt.datetime:
    return NOW - dt.timedelta(days=days)


def letter_id(batch: pa.RecordBatch) -> str:
    return str(batch["letter_id"][0])


def resolved(letter: pa.RecordBatch, resolution: str, days: float) -> pa.RecordBatch:
    values = {"letter_id": letter["letter_id"], "topic": letter["topic"], "resolution": resolution}
    return at(resolution_rows(values, context(query_id="resolve")), days_ago(days))


class Rows:
    """The ledger of a query with six epochs, one every ten days; the last epoch was today."""

    def __init__(self, folder: Path) -> None:
        self.letters: dict[int, pa.RecordBatch] = {}
        batches: list[pa.RecordBatch] = []
        for epoch in range(6):
            ctx = context(epoch=epoch, task_attempt_id=epoch)
            dead = letter(ctx, BODY)
            self.letters[epoch] = dead
            age = 10 * (5 - epoch)
            rows = [sends(ctx, 2), accounts(ctx, acked=13, dead=1), confirmed(ctx, 14), dead]
            batches += [at(batch, days_ago(age)) for batch in rows]
        # Epoch 0: resent; 1: pending; 2: parked; 3: dropped.
        batches += [
            resolved(self.letters[0], "resent", 45),
            resolved(self.letters[2], "parked", 25),
        ]
        batches += [resolved(self.letters[3], "dropped", 15)]
        store(folder, in_order(batches, 1 << 32))
        self.place: LedgerPath = resolve_path(folder)

    def expire(self, retention: Retention, **more: Any) -> Expired:
        table, quick = open_table(self.place), open_quick(self.place.root)
        assert table is not None
        assert quick is not None
        return expire(self.place, table, quick.query, retention, **more)

    def epochs(self, kind: str) -> list[int]:
        """Return the epochs of a kind's rows, read by delta-rs."""
        rows = DeltaTable(self.place.root).to_pyarrow_table(columns=["kind", "epoch"]).to_pylist()
        return sorted({row["epoch"] for row in rows if row["kind"] == kind})

    def query(self, select: str) -> list[dict[str, Any]]:
        quick = open_quick(self.place.root)
        assert quick is not None
        return list(quick.query(select).to_pylist())


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path / "ledger")


def test_old_rows_go_and_a_trial_tells_which(rows: Rows) -> None:
    retention = Retention({"send": 25 * DAY_MS})
    trial = rows.expire(retention, dry_run=True)
    assert rows.epochs("send") == [0, 1, 2, 3, 4, 5]
    assert rows.expire(retention) == trial
    assert trial.rows == {"send": 6}
    assert rows.epochs("send") == [3, 4, 5]
    assert rows.epochs("epoch") == [0, 1, 2, 3, 4, 5]
    assert rows.query("SELECT bool_and(adds_up) AS ok, count(*) AS n FROM epochs") == [
        {"ok": True, "n": 6}
    ]


def test_pending_letters_stay_with_their_accounts(rows: Rows) -> None:
    """Keep the account: without it a letter would not count, and never be sent."""
    before = rows.query("SELECT letter_id FROM pending_letters ORDER BY letter_id")
    everything = dict.fromkeys(("send", "epoch", "dead_letter", "resolution"), DAY_MS)
    expired = rows.expire(Retention(everything))
    assert expired.kept["dead_letter"] == 2  # pending, and of the last two epochs
    assert rows.query("SELECT letter_id FROM pending_letters ORDER BY letter_id") == before
    assert rows.epochs("dead_letter") == rows.epochs("epoch") == [1, 4, 5]
    assert rows.query("SELECT count(*) AS n FROM resolutions") == [{"n": 0}]


def test_a_resolution_stays_as_long_as_its_letter(rows: Rows) -> None:
    """Keep the resolution: without it the letter would be pending, and be sent again."""
    rows.expire(Retention({"resolution": DAY_MS}))
    assert rows.query("SELECT count(*) AS n FROM resolutions") == [{"n": 3}]
    rows.expire(Retention({"resolution": DAY_MS, "dead_letter": 35 * DAY_MS}))
    assert rows.epochs("dead_letter") == [1, 2, 3, 4, 5]
    assert rows.query("SELECT count(*) AS n FROM resolutions") == [{"n": 2}]


def test_an_open_transaction_stays_whole(tmp_path: Path) -> None:
    rows, batches = Rows(tmp_path / "ledger"), []
    for epoch in (0, 1):
        ctx = context(query_id="half", epoch=epoch, lane="batch")
        half = sends(ctx)
        place = half.schema.get_field_index("half")
        batches += [half.set_column(place, half.schema.field(place), pa.array([True]))]
    end_rows = build_rows(
        "transaction", 1, {"committed": 7}, context(query_id="half", epoch=0, lane="batch")
    )
    batches = [at(batch, days_ago(30)) for batch in (*batches, end_rows)]
    store(tmp_path / "ledger", in_order(batches, 2 << 32))
    rows.expire(Retention({"transaction": DAY_MS}))
    assert rows.epochs("transaction") == [0]
    rows.expire(Retention({"transaction": DAY_MS, "send": DAY_MS}))
    assert rows.epochs("transaction") == []
    assert rows.query("SELECT query_id, epoch, open FROM transactions") == [
        {"query_id": "half", "epoch": 1, "open": True}
    ]


def test_bodies_of_settled_letters_go(rows: Rows) -> None:
    expired = rows.expire(Retention({}, 7 * DAY_MS))
    assert expired.bodies == 2
    bodies = {
        row["epoch"]: (row["body"], row["body_sha256"] is None)
        for row in rows.query("SELECT epoch, body, body_sha256 FROM letters")
    }
    assert {epoch for epoch, (body, _) in bodies.items() if body is None} == {0, 3}
    assert {epoch for epoch, (_, no_digest) in bodies.items() if no_digest} == {1, 2, 4, 5}
    assert rows.expire(Retention({}, 7 * DAY_MS)).files == 0


def test_an_expiry_beside_a_merge_brings_nothing_back(rows: Rows) -> None:
    table = open_table(rows.place)
    assert table is not None
    assert rows.expire(Retention({"send": 25 * DAY_MS})).rows == {"send": 6}
    for _ in range(2):
        store(rows.place.root, in_order([sends(context(epoch=5))], 3 << 32))
    assert merge(rows.place, table, everything=True) == (0, 0)
    assert rows.epochs("send") == [3, 4, 5]


def test_what_a_query_asks_for_is_done_once_a_day(rows: Rows) -> None:
    """Expire once a day, by the first driver that asks. A new ledger waits for a day."""
    notes, day = NoteStore(rows.place, "upkeep"), Retention({"send": 25 * DAY_MS})
    expire_daily(SPARK, rows.place, day)
    assert rows.epochs("send") == [0, 1, 2, 3, 4, 5]
    [name] = notes.names()
    notes.write(name, int(days_ago(1.1).timestamp() * 1000))
    expire_daily(SPARK, rows.place, day)
    assert rows.epochs("send") == [3, 4, 5]
    expire_daily(SPARK, rows.place, Retention({"send": 15 * DAY_MS}))
    assert rows.epochs("send") == [3, 4, 5]


def test_expire_as_a_user_does(rows: Rows) -> None:
    """Judge the command by delta-rs, and by the bytes of the files that the table names."""

    def expire(*more: str) -> Done:
        arguments = ("ledger", "expire", "--ledger", rows.place.root, "--older-than", "25d")
        session = SimpleNamespace(**vars(SPARK), stop=None)
        return run_command(*arguments, "--kind", "send", *more, spark=session)

    def bodies() -> int:
        files = map(Path, DeltaTable(rows.place.root).file_uris())
        return sum(file.read_bytes().count(BODY) for file in files)

    before = bodies()
    trial = expire("--dry-run", "--json")
    assert (trial.code, trial.json()["rows"], trial.json()["bodies"]) == (0, {"send": 6}, 2)
    assert (rows.epochs("send"), bodies()) == ([0, 1, 2, 3, 4, 5], before)
    done = expire()
    assert done.code == 0 and "send: 6 rows of that age; 0 more stay" in done.err
    assert rows.epochs("send") == [3, 4, 5]
    letters = rows.query("SELECT count(body) AS n FROM letters")
    assert letters == [{"n": 4}] and 0 < bodies() <= before
    assert expire("--json").json()["files"] == 0


def test_two_queries_of_a_ledger_have_the_longer_time() -> None:
    first = Retention({"send": 1, "epoch": 5}, None)
    second = Retention({"send": 3, "isolation": 4}, 7)
    assert first.or_longer(second) == Retention({"send": 3, "epoch": 5, "isolation": 4}, None)
    assert Retention(bodies_ms=3).or_longer(second).bodies_ms == 7


def test_the_options_know_the_ledgers_kinds() -> None:
    assert LEDGER_KINDS == KINDS
    assert SinkOptions.parse({"ledgerRetention": "send=7d, epoch=400d"}).ledger_retention_ms == (
        ("send", 7 * DAY_MS), ("epoch", 400 * DAY_MS),
    )  # fmt: skip
    for wrong in ("send", "send=soon", "send=0", "letters=3d"):
        with pytest.raises(OptionError, match="ledgerRetention"):
            SinkOptions.parse({"ledgerRetention": wrong})
