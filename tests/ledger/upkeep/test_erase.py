"""Erasure: not a byte of the contents is left in the folder, and the account stays."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from rocket_sink import Ledger
from rocket_sink.ledger.append import table as table_module
from rocket_sink.ledger.append.delta_rs import open_table
from rocket_sink.ledger.append.table import PROPERTIES
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.query.pending_keys import PendingKeys
from rocket_sink.ledger.records import in_order
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.ledger.upkeep.erase import Erased, erase_letters
from rocket_sink.ledger.upkeep.growth import merge
from rocket_sink.ledger.upkeep.rewrite import rewrite
from rocket_sink.spark.backfill import parking
from tests.growth import SPARK, Growth
from tests.ledger.values import write_spool
from tests.run_command import run_command

from ..values import accounts, confirmed, context, letter, refusal

SECRET = "N14228"
OTHER = "N668DN"


def letters_of(key, epoch):
    ctx = context(epoch=epoch, task_attempt_id=epoch)
    columns = {
        "sharding_key": key, "keys": pa.array([[f"key {key}"]]), "tags": f"tag-{key}",
        "lite_topic": f"lite-{key}",
        "properties": pa.array([[("plane", key)]], pa.map_(pa.string(), pa.string())),
        "last_error": f"no route for {key}", "last_error_code": "NO_ROUTE",
    }  # fmt: skip
    error = f"the key '{key}' is empty or holds a blank"
    account = accounts(ctx, acked=5, dead=1, first_error=error)
    return [letter(ctx, f"body of {key}".encode(), **columns), account]


def holding(folder, text):
    """Return the files below the folder that hold this text, compressed or not.

    Snappy leaves values of less than a block unchanged.
    """
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return [path.name for path in files if text.encode() in path.read_bytes()]


def rows_of(place):
    return DeltaTable(place.root).to_pyarrow_table().to_pylist()


def secret_ids(place):
    return [row["letter_id"] for row in rows_of(place) if row["sharding_key"] == SECRET]


@pytest.fixture
def place(tmp_path):
    return Growth(str(tmp_path / "ledger"), 600.0).place


@pytest.fixture
def ledger(place):
    ledger = Ledger(place.root)
    for epoch, key in enumerate((SECRET, OTHER, SECRET)):
        ledger.append(SPARK, *letters_of(key, epoch))
    merge(
        place, open_table(place), everything=True
    )  # the older versions have files with the contents, too
    return ledger


def test_contents_go_from_every_version(ledger, place):
    assert len(holding(ledger.path, f"body of {SECRET}")) == 3
    assert len(holding(ledger.path, f"the key '{SECRET}'")) == 3
    rows, ids = rows_of(place), secret_ids(place)
    assert erase_letters(SPARK, place, ids, "request 7") == Erased(2, 0, 6, 0)
    assert holding(ledger.path, SECRET) == []
    assert holding(ledger.path, f"body of {OTHER}")
    after = rows_of(place)
    assert len(after) == len(rows)
    gone = [row for row in after if row["letter_id"] in ids]
    assert {(row["body"], row["keys"], row["properties"]) for row in gone} == {(None, None, None)}
    assert {row["last_error"] for row in gone} == {"erased: request 7"}
    assert {row["last_error_code"] for row in gone} == {"NO_ROUTE"}
    stays = [row for row in after if row["kind"] == "dead_letter" and row["letter_id"] not in ids]
    assert stays == [row for row in rows if row["sharding_key"] == OTHER]
    texts = {row["epoch"]: row["first_error"] for row in after if row["kind"] == "epoch"}
    assert (texts[0], texts[2]) == ("erased: request 7",) * 2
    assert OTHER in texts[1]
    numbers = [
        [(row["epoch"], row["acked"], row["dead"]) for row in each] for each in (rows, after)
    ]
    assert sorted(numbers[0], key=str) == sorted(numbers[1], key=str)


def test_accounts_without_an_error_stay_as_they_are(tmp_path, place):
    ctx, dead = context(), letter(context(), b"body")
    letters = Ledger(tmp_path / "letters")
    letters.append(SPARK, dead)
    assert erase_letters(SPARK, letters._place, [], "none") == Erased(0, 0, 0, 0)
    Ledger(place.root).append(SPARK, dead, accounts(ctx, acked=5, dead=1), confirmed(ctx, 6))
    ids = dead["letter_id"].to_pylist()
    assert erase_letters(SPARK, place, ids, "request 7") == Erased(1, 0, 1, 0)
    texts = [row["first_error"] for row in rows_of(place) if row["kind"] == "epoch"]
    assert texts == [None, None]


def test_an_erasure_that_was_killed_is_finished(ledger, place, monkeypatch):
    """Delete the files by the next erasure, which finds no letters by their keys any more."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("rocket_sink.ledger.upkeep.erase._delete_old", _killed)
        erase_letters(SPARK, place, secret_ids(place), "request 7")
    assert holding(ledger.path, SECRET)
    assert erase_letters(SPARK, place, [], "another one").deleted_files == 6
    assert holding(ledger.path, SECRET) == []


def _killed(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.usefixtures("ledger")
def test_a_file_of_a_running_attempt_is_left(place):
    write_data_files(place, in_order(letters_of(SECRET, 9)[:1], 9 << 32))
    for kind in ("dead_letter", "epoch"):
        Path(place.root, f"kind={kind}", "cut.parquet").touch()
        Path(place.root, f"kind={kind}", "folder").mkdir()
    before, version = sorted(Path(place.root).glob("kind=*/*")), open_table(place).version()
    assert erase_letters(SPARK, place, [], "none") == Erased(0, 0, 0, 3)
    assert sorted(Path(place.root).glob("kind=*/*")) == before
    assert open_table(place).version() == version


@pytest.mark.parametrize("others", [4, 5])
@pytest.mark.usefixtures("ledger")
def test_an_erasure_is_tried_again_if_others_rewrite_the_ledger(place, monkeypatch, others):
    ids, results = secret_ids(place), [False] * others

    def rewrite_or_not(*arguments):
        return results.pop() if results else rewrite(*arguments)

    monkeypatch.setattr("rocket_sink.ledger.upkeep.erase.rewrite", rewrite_or_not)
    failing = refusal(place.uri, "all the time: nothing was erased; try again")
    with contextlib.nullcontext() if others < 5 else failing:
        assert erase_letters(SPARK, place, ids, "request 7").letters == 2
    assert not results


def test_where_sparks_delta_commits_no_letter_is_dropped(monkeypatch):
    """Refuse before anything is written: the fake ledger has no method to append."""
    place = LedgerPath("s3a://b/k", "b/k", is_local=False)
    ledger = SimpleNamespace(uri=place, sync_fully=lambda spark: None, rows=lambda spark: None)
    monkeypatch.setattr(parking, "spooled_epochs", lambda place: set())
    monkeypatch.setattr(table_module, "_allowed", {("growth", place): False})
    with refusal("s3a://b/k", "s3a://b/k cannot be removed: Spark's Delta commits"):
        parking.erase(SPARK, ledger, where="true", reason="request 7")


@pytest.mark.spark
def test_erase_as_a_user_does(spark, ledger, place):
    """Erase rows that are not folded yet, and keys that are held for pending letters, too."""
    ctx = context(epoch=3, task_attempt_id=3)
    write_spool(place, ctx, *letters_of(SECRET, 3))
    PendingKeys(place).note(ctx, {"t": [SECRET]})
    PendingKeys(place).note(context(epoch=1, task_attempt_id=1), {"t": [SECRET, OTHER]})
    assert holding(ledger.path, f"body of {SECRET}")
    done = run_command(
        "ledger", "erase", "--ledger", ledger.path, "--where", f"sharding_key = '{SECRET}'",
        "--reason", "request 7", "--json", spark=spark,
    )  # fmt: skip
    assert (done.code, done.json()["letters"], done.json()["dropped"]) == (0, 3, 3), done.err
    assert holding(ledger.path, SECRET) == []
    rows = rows_of(place)
    letters = [row for row in rows if row["kind"] == "dead_letter"]
    assert [row["body"] is None for row in letters].count(True) == 3
    assert len(letters) == 4 and sum(row["dead"] or 0 for row in rows) == 4
    assert [row.sharding_key for row in ledger.dead_letters(spark).collect()] == [OTHER]
    assert ledger.epochs(spark).where("adds_up").count() == 4
    assert {row.note for row in ledger.resolutions(spark).collect()} == {"request 7"}
    assert PROPERTIES["delta.appendOnly"] == "true"


@pytest.mark.spark
def test_the_next_erasure_forgets_the_keys_of_one_that_was_killed_at_its_last_step(
    spark, ledger, place, monkeypatch
):
    """The letters have lost their keys by then, so that no condition matches them any more."""
    for ctx in (context(epoch=1, task_attempt_id=1), context(epoch=2, task_attempt_id=2)):
        PendingKeys(place).note(ctx, {"t": [SECRET, OTHER]})
    with monkeypatch.context() as patch:
        patch.setattr(parking, "release", _killed)
        with pytest.raises(KeyboardInterrupt):
            parking.erase(spark, ledger, where=f"sharding_key = '{SECRET}'", reason="request 7")
    assert holding(ledger.path, SECRET)
    parking.erase(spark, ledger, where="false", reason="request 8")
    assert holding(ledger.path, SECRET) == []
    assert PendingKeys(place).held_for(context(epoch=9)) == {"t": {OTHER}}


@pytest.mark.spark
def test_letters_that_arrive_meanwhile_are_named_and_stay(spark, ledger, place, monkeypatch):
    """Drop the letters that are erased, and no others."""
    sync_fully = Ledger.sync_fully

    def sync_and_spool(self, spark):
        summary = sync_fully(self, spark)
        write_spool(place, context(epoch=3, task_attempt_id=3), *letters_of(SECRET, 3))
        return summary

    arguments = "--where", f"sharding_key = '{SECRET}'", "--reason", "request 7"
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "sync_fully", sync_and_spool)
        done = run_command("ledger", "erase", "--ledger", ledger.path, *arguments, spark=spark)
    assert "run this again when they are folded: query/3" in done.err
    ledger.sync(spark)
    pending = ledger.dead_letters(spark).where(f"sharding_key = '{SECRET}'").collect()
    assert [(row.epoch, bytes(row.body)) for row in pending] == [(3, f"body of {SECRET}".encode())]
    assert ledger.resolutions(spark).count() == 2
    again = run_command(
        "ledger", "erase", "--ledger", ledger.path, *arguments, "--json", spark=spark
    )
    assert (again.json()["letters"], again.json()["unfolded"]) == (1, [])
    assert holding(ledger.path, SECRET) == []
