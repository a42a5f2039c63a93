"""Retention: old rows are removed, and rows that are still needed stay."""

import dataclasses
import datetime as dt
import logging
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from rocket_sink.errors import LedgerError, OptionError
from rocket_sink.ledger.append.delta_rs import commit, open_table
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.backfill_marks import about_to_send
from rocket_sink.ledger.records import build_rows, in_flight_rows, in_order, replaced
from rocket_sink.ledger.schema import KINDS
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.ledger.upkeep import expire as expire_module
from rocket_sink.ledger.upkeep.expire import Expired, Retention, expire, expire_daily
from rocket_sink.ledger.upkeep.growth import merge
from rocket_sink.ledger.views import reader
from rocket_sink.options import LEDGER_KINDS, SinkOptions
from tests.growth import SPARK, TASKS, Growth
from tests.ledger.views import quick_ledger
from tests.run_command import run_command

from ..night import at, store
from ..values import accounts, confirmed, context, letter, resolved, sends

NOW = dt.datetime.now(tz=dt.timezone.utc)
DAY_MS = 86_400_000
HALF_DAY = 0.5
"""In days."""
BODY = b"name: N14228"


def days_ago(days):
    return NOW - dt.timedelta(days=days)


def letter_id(batch):
    return str(batch["letter_id"][0])


def resolved_ago(letter, resolution, days):
    return at(resolved(letter, resolution), days_ago(days))


class Rows:
    """The ledger of a query with six epochs, one every ten days; the last epoch was today. Each
    epoch was confirmed an hour after its accounts."""

    def __init__(self, folder):
        self.letters = {}
        batches = []
        for epoch in range(6):
            ctx = context(epoch=epoch, task_attempt_id=epoch)
            dead = letter(ctx, BODY)
            self.letters[epoch] = dead
            age = 10 * (5 - epoch)
            rows = [sends(ctx, 2), accounts(ctx, acked=13, dead=1), dead]
            batches += [at(batch, days_ago(age + HALF_DAY)) for batch in rows]
            batches += [at(confirmed(ctx, 14, rows_in=14), days_ago(age))]
        # Epoch 0: resent; 1: pending; 2: parked; 3: dropped; 4: resent; 5: pending.
        ends = {0: ("resent", 45), 2: ("parked", 25), 3: ("dropped", 15), 4: ("resent", 5)}
        batches += [resolved_ago(self.letters[epoch], *end) for epoch, end in ends.items()]
        half = len(batches) // 2
        for number, part in enumerate((batches[:half], batches[half:]), 1):  # two files of a kind
            store(folder, in_order(part, number << 32))
        self.place = resolve_path(folder)

    def expire(self, retention, table=None, **more):
        query = quick_ledger(self.place.root).query
        return expire(self.place, table or open_table(self.place), query, retention, **more)

    def epochs(self, kind):
        """Return the epochs of a kind's rows, read by delta-rs."""
        rows = DeltaTable(self.place.root).to_pyarrow_table(columns=["kind", "epoch"]).to_pylist()
        return sorted({row["epoch"] for row in rows if row["kind"] == kind})

    def query(self, select):
        return quick_ledger(self.place.root).query(select).to_pylist()


@pytest.fixture
def rows(tmp_path):
    return Rows(tmp_path / "ledger")


def test_old_rows_go_and_a_trial_tells_which(rows):
    retention = Retention({"send": 25 * DAY_MS, "isolation": DAY_MS})
    trial = rows.expire(retention, dry_run=True)
    assert rows.epochs("send") == [0, 1, 2, 3, 4, 5]
    of_ledger = Ledger(rows.place.root).expire(SPARK, {"send": dt.timedelta(25)}, dry_run=True)
    assert (of_ledger.rows, of_ledger.bodies) == (trial.rows, 2)
    assert rows.expire(retention) == trial
    assert trial.rows == {"send": 6}
    assert rows.epochs("send") == [3, 4, 5]
    assert rows.epochs("epoch") == [0, 1, 2, 3, 4, 5]
    [sums] = rows.query("SELECT bool_and(adds_up) AS ok, count(*) AS n FROM epochs")
    assert sums == {"ok": True, "n": 6}
    # Now the older file has old rows only, so it goes as a whole. Then nothing is left to do.
    retention = Retention({"send": 15 * DAY_MS})
    assert rows.expire(retention) == Expired({"send": 2}, {"send": 0}, 0, 1, False)
    version = DeltaTable(rows.place.root).version()
    assert rows.expire(retention) == Expired({}, {}, 0, 0, False)
    assert DeltaTable(rows.place.root).version() == version
    with pytest.raises(ValueError, match="'letters' is no kind of ledger row"):
        rows.expire(Retention({"letters": DAY_MS}))
    with pytest.raises(LedgerError, match="there is no ledger at"):
        Ledger(f"{rows.place.root}-none").expire(SPARK)


def test_rows_without_a_time_and_files_without_statistics_are_read(rows):
    ctx, table = context(query_id="batch", lane="batch"), open_table(rows.place)
    for batch in (at(sends(ctx), None), at(sends(ctx), days_ago(40))):
        [file] = write_data_files(rows.place, in_order([batch], 2 << 32))
        commit(rows.place, table, [dataclasses.replace(file, stats="")], "", 0)
    retention = Retention({"send": 35 * DAY_MS})
    assert rows.expire(retention) == Expired({"send": 5}, {"send": 0}, 0, 2, False)
    assert rows.epochs("send") == [0, 2, 3, 4, 5]


def test_an_expiry_by_hand_deletes_what_was_replaced_long_ago(tmp_path):
    growth = Growth(str(tmp_path / "ledger"), 0.001)
    growth.grow_by(3)
    ledger = Ledger(growth.place.root)
    ledger.optimize(SPARK)

    def files():
        return len([*Path(ledger.path).glob("kind=*/*")])

    assert files() == 8
    ledger.expire(SPARK, dry_run=True)
    assert files() == 8
    ledger.expire(SPARK)
    assert files() == 2


def test_pending_letters_stay_with_their_accounts(rows):
    """Keep the account: without it a letter would not count, and never be sent. Keep the resolution
    of a letter that stays: without it the letter would be pending, and be sent again."""
    before = rows.query("SELECT letter_id FROM pending_letters ORDER BY letter_id")
    everything = dict.fromkeys(("send", "epoch", "dead_letter", "resolution"), DAY_MS)
    expired = rows.expire(Retention(everything))
    assert expired.kept["dead_letter"] == 2  # pending, and of the last two epochs
    assert rows.query("SELECT letter_id FROM pending_letters ORDER BY letter_id") == before
    assert rows.epochs("dead_letter") == rows.epochs("epoch") == [1, 4, 5]
    assert rows.epochs("send") == [4, 5]
    [resolution] = rows.query("SELECT letter_id FROM resolutions")
    assert resolution == {"letter_id": letter_id(rows.letters[4])}


def test_a_resolution_stays_as_long_as_its_letter(rows):
    """Keep the resolution: without it the letter would be pending, and be sent again."""
    rows.expire(Retention({"resolution": DAY_MS}))
    assert rows.query("SELECT count(*) AS n FROM resolutions") == [{"n": 4}]
    rows.expire(Retention({"resolution": DAY_MS, "dead_letter": 35 * DAY_MS}))
    assert rows.epochs("dead_letter") == [1, 2, 3, 4, 5]
    assert rows.query("SELECT count(*) AS n FROM resolutions") == [{"n": 3}]


def test_letters_that_were_put_aside_can_be_taken_back(rows):
    """Keep accounts and marks of parked and dropped letters: without the account an unparked letter
    would not count, and without the mark a backfill would not ask whether it is stored."""
    aside = [letter_id(rows.letters[epoch]) for epoch in (2, 3)]
    values = {name: rows.letters[2][name] for name in ("letter_id", "topic", "message_id")}
    mark = at(about_to_send(values, context(query_id="backfill")), days_ago(26))
    store(rows.place.root, in_order([mark], 2 << 32))
    for _ in range(2):
        rows.expire(Retention({"epoch": DAY_MS, "backfill": DAY_MS}, 7 * DAY_MS))
    assert rows.epochs("epoch") == [1, 2, 3, 4, 5]
    taken_back = [resolved_ago(rows.letters[epoch], "unparked", 0) for epoch in (2, 3)]
    store(rows.place.root, in_order(taken_back, 3 << 32))
    pending = "SELECT letter_id, body FROM pending_letters WHERE epoch IN (2, 3) ORDER BY epoch"
    bodies = [tuple(row.values()) for row in rows.query(pending)]
    assert bodies == [(aside[0], BODY), (aside[1], None)]
    assert rows.query("SELECT letter_id FROM backfills WHERE open") == [{"letter_id": aside[0]}]


@pytest.mark.parametrize("kind", ["epoch", "send"])
def test_no_epoch_goes_in_part(rows, kind):
    """Keep an epoch with rows on both sides of the border: a part of them would not add up."""
    later = at(sends(context(task_attempt_id=0)), days_ago(50))
    store(rows.place.root, in_order([later], 2 << 32))
    border_ms = int((50 + HALF_DAY / 2) * DAY_MS)
    assert rows.expire(Retention({kind: border_ms})).files == 0
    assert rows.query("SELECT sum(missing_rows) AS n FROM epochs") == [{"n": 0}]
    rows.expire(Retention({kind: 49 * DAY_MS}))
    assert rows.epochs(kind) == [1, 2, 3, 4, 5]


def test_epochs_tell_of_killed_attempts_as_long_as_they_stay(rows):
    """Keep sends of a killed attempt: they are all that tells of rows that may be stored twice."""
    died = context(task_attempt_id=99)
    killed = in_flight_rows([1], died, topic="t", message_count=[7], body_bytes=[700])
    store(rows.place.root, in_order([at(killed, days_ago(50))], 2 << 32))
    perhaps_stored = "SELECT sum(superseded_rows) AS n FROM epochs"
    assert rows.expire(Retention({"send": 25 * DAY_MS})).rows == {"send": 6}
    assert rows.epochs("send") == [0, 3, 4, 5]
    assert rows.query(perhaps_stored) == [{"n": 7}]
    rows.expire(Retention({"send": 25 * DAY_MS, "epoch": 25 * DAY_MS}))
    assert rows.epochs("send") == [3, 4, 5]


def test_an_open_transaction_stays_whole(rows):
    epochs = [context(query_id="half", epoch=epoch, lane="batch") for epoch in (0, 1)]
    halves = [replaced(sends(ctx), {"half": pa.array([True])}) for ctx in epochs]
    ends = {"committed": 7, "refused": 1, "found_stored": 2}
    end_rows = build_rows("transaction", 1, ends, epochs[0])
    dead = letter(epochs[1])
    batches = [at(batch, days_ago(30)) for batch in (*halves, end_rows, dead)]
    batches.append(resolved_ago(dead, "resent", 29))
    store(rows.place.root, in_order(batches, 2 << 32))
    select = "SELECT committed, refused, found_stored FROM transactions WHERE NOT open"
    assert rows.query(select) == [ends]
    rows.expire(Retention({"transaction": DAY_MS}))
    assert rows.epochs("transaction") == [0]
    rows.expire(Retention(dict.fromkeys(KINDS, DAY_MS)))
    assert rows.epochs("transaction") == []
    settled = {row["letter_id"] for row in rows.query("SELECT letter_id FROM settled")}
    assert letter_id(dead) in settled
    [transaction] = rows.query("SELECT query_id, epoch, open FROM transactions")
    assert transaction == {"query_id": "half", "epoch": 1, "open": True}


def test_bodies_of_settled_letters_go(rows):
    expired = rows.expire(Retention({}, 7 * DAY_MS))
    assert expired.bodies == 2
    letters = rows.query("SELECT epoch, body, body_sha256 FROM letters")
    assert {row["epoch"] for row in letters if row["body"] is None} == {0, 3}
    assert {row["epoch"] for row in letters if row["body_sha256"] is None} == {1, 2, 4, 5}
    assert rows.expire(Retention({}, 7 * DAY_MS)).files == 0


@pytest.mark.spark
def test_spark_drops_the_same_rows(spark, rows):
    """Judge by Spark, which reads ledgers on stores."""
    table, retention = open_table(rows.place), Retention(dict.fromkeys(KINDS, DAY_MS), DAY_MS)
    frame = spark.read.format("delta").load(rows.place.uri)
    by_spark = expire(rows.place, table, reader(frame), retention, dry_run=True)
    assert by_spark == rows.expire(retention)


def test_an_expiry_beside_a_merge_brings_nothing_back(rows):
    table, retention = open_table(rows.place), Retention({"send": 25 * DAY_MS})
    expired = rows.expire(retention)
    assert expired.rows == {"send": 6}
    assert rows.expire(retention, table) == dataclasses.replace(expired, busy=True)
    for _ in range(2):
        store(rows.place.root, in_order([sends(context(epoch=5))], 3 << 32))
    assert merge(rows.place, table, everything=True) == (0, 0)
    assert rows.epochs("send") == [3, 4, 5]


def test_what_a_query_asks_for_is_done_once_a_day(rows, monkeypatch, caplog):
    """Expire once a day, by the first driver that asks. A new ledger waits for a day."""
    caplog.set_level(logging.INFO, "rocket_sink.ledger.upkeep")
    for passed_ms, days, epochs, lines in (
        (0, 25, [0, 1, 2, 3, 4, 5], 0), (DAY_MS - 1, 25, [0, 1, 2, 3, 4, 5], 0),
        (DAY_MS, 25, [3, 4, 5], 1), (2 * DAY_MS - 1, 15, [3, 4, 5], 1),
        (2 * DAY_MS, 15, [4, 5], 2), (3 * DAY_MS, 15, [4, 5], 2),
    ):  # fmt: skip
        monkeypatch.setattr(expire_module, "now_ms", lambda now_ms=passed_ms: now_ms)
        expire_daily(SPARK, rows.place, Retention({"send": days * DAY_MS}))
        assert rows.epochs("send") == epochs
        assert len([text for text in caplog.messages if "have expired: Expired(" in text]) == lines


@pytest.mark.parametrize("uri", ["", "obs://bucket/ledger"])
def test_a_ledger_that_cannot_expire_says_so_once(uri, rows, monkeypatch, caplog):
    """Warn if a query asks for an expiry, but Spark's Delta commits to its ledger."""
    monkeypatch.setattr(expire_module, "open_for_commits", lambda *_: None)
    place = resolve_path(uri) if uri else rows.place
    expire_daily(SPARK, place, Retention({}, DAY_MS))
    to_come = resolve_path(f"{rows.place.root}-none")
    expire_daily(SPARK, to_come, Retention({"send": DAY_MS}))
    assert not caplog.messages and not Path(to_come.root).exists()
    for _ in range(2):
        expire_daily(SPARK, place, Retention({"send": DAY_MS}))
    [text] = caplog.messages
    assert text.startswith("ledgerRetention has no effect") and "Spark's Delta commits" in text
    assert not NoteStore(rows.place, "upkeep").names()


def test_expire_as_a_user_does(rows):
    """Judge the command by delta-rs, and by the bytes of the files that the table names."""

    def expire(*more):
        arguments = ("ledger", "expire", "--ledger", rows.place.root, "--older-than", "25d")
        session = SimpleNamespace(**vars(SPARK), stop=None)
        return run_command(*arguments, "--kind", "send", *more, spark=session)

    def bodies():
        files = map(Path, DeltaTable(rows.place.root).file_uris())
        return sum(file.read_bytes().count(BODY) for file in files)

    before = bodies()
    for age, removed in {"forever": 0, "7d": 2, "0": 3}.items():
        trial = expire("--settled-bodies", age, "--dry-run", "--json")
        assert trial.json()["bodies"] == removed
    trial = expire("--dry-run", "--json")
    assert (trial.code, trial.json()["rows"], trial.json()["bodies"]) == (0, {"send": 6}, 2)
    assert (rows.epochs("send"), bodies()) == ([0, 1, 2, 3, 4, 5], before)
    done = expire()
    assert done.code == 0 and "send: 6 rows of that age; 0 more stay" in done.err
    assert rows.epochs("send") == [3, 4, 5]
    letters = rows.query("SELECT count(body) AS n FROM letters")
    assert letters == [{"n": 4}] and 0 < bodies() <= before
    assert expire("--json").json()["files"] == 0


def test_two_queries_of_a_ledger_have_the_longer_time():
    first = Retention({"send": 1, "epoch": 5}, None)
    second = Retention({"send": 3, "isolation": 4}, 7)
    assert first.or_longer(second) == Retention({"send": 3, "epoch": 5, "isolation": 4}, None)
    assert Retention(bodies_ms=3).or_longer(second).bodies_ms == 7
    # Rows that go at once do not stay for ever because of a second query.
    assert Retention({"send": 0}).or_longer(Retention({"send": 0})).rows_ms == {"send": 0}


def test_the_options_know_the_ledgers_kinds():
    assert LEDGER_KINDS == KINDS
    assert SinkOptions.parse({"ledgerRetention": "send=7d, epoch=400d"}).ledger_retention_ms == (
        ("send", 7 * DAY_MS), ("epoch", 400 * DAY_MS),
    )  # fmt: skip
    for body, kept_ms in (("", 7 * DAY_MS), ("body=0", 0), ("send=1d, body=2d", 2 * DAY_MS)):
        assert SinkOptions.parse({"ledgerRetention": body}).body_retention_ms == kept_ms
    for wrong in ("send", "send=soon", "send=0", "letters=3d", "body=-1"):
        with pytest.raises(OptionError, match="ledgerRetention"):
            SinkOptions.parse({"ledgerRetention": wrong})


@pytest.mark.spark
def test_a_stream_of_the_ledgers_rows_has_each_once(spark, tmp_path):
    """Spark's own reader of a table that is appended to, expired and merged."""
    growth, seen = Growth(str(tmp_path / "ledger"), 600.0), tmp_path / "seen"

    def expire_now():
        query = quick_ledger(growth.place.root).query
        done = expire(growth.place, open_table(growth.place), query, Retention({"send": 1}))
        merge(growth.place, open_table(growth.place), everything=True)
        return not done.busy

    def read_on():
        stream = spark.readStream.format("delta").load(growth.place.uri).where("kind = 'epoch'")
        stream = stream.select("epoch", "partition").writeStream.format("parquet")
        stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        stream.trigger(availableNow=True).start(str(seen)).awaitTermination()
        return spark.read.parquet(str(seen)).toArrow()

    for _ in range(4):
        growth.grow()
    assert len(read_on()) == 4 * (TASKS + 1)
    assert expire_now()
    growth.grow()
    assert expire_now()
    rows = read_on()
    assert len(rows) == 5 * (TASKS + 1)
    assert set(rows["epoch"].to_pylist()) == set(range(5))
