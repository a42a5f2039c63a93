"""Held keys are released when the ledger has no pending dead letters of them."""

from pathlib import Path

import pytest

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query import duckdb_reader
from rocket_sink.ledger.query.duckdb_reader import reader_of
from rocket_sink.ledger.query.pending_keys import (
    PendingKeys,
    _known,
    _notes,
    _pending,
    release,
    withdraw,
)
from rocket_sink.ledger.views import reader
from tests.ledger.values import write_spool

from .values import accounts, confirmed, context, letter, refusal, resolved, session

JAVALESS = session()


def readers(spark, ledger):
    """DuckDB reads a local ledger; Spark reads the others by the same queries."""
    by_duckdb = reader_of(spark, resolve_path(ledger.path))
    return [by_duckdb, reader(ledger.rows(spark))]


@pytest.fixture
def ledger(tmp_path):
    """Return a ledger without rows."""
    ledger = Ledger(tmp_path)
    ledger.create(JAVALESS)
    return ledger


@pytest.fixture
def keys(place):
    return PendingKeys(place)


def test_keys_are_held_until_their_last_letter_is_resolved(place, keys, monkeypatch):
    ledger, later = Ledger(place.root), context(epoch=9)
    for query in ("query", "batch"):
        keys.note(context(query_id=query), {"t": {"z"}})
    assert release(JAVALESS, place) == 0, "there is no table yet"
    withdraw(place, "query")
    assert keys.held_for(context(query_id="other")) == {"t": {"z"}}
    withdraw(place, "batch")
    assert keys.held_for(later) == {}
    ledger.create(JAVALESS)
    assert release(JAVALESS, place) == 0

    ctx = context(epoch=2)
    keys.note(ctx, {"t": {"a", "b"}})
    assert release(JAVALESS, place) == 0, "its letters are still on their way"

    letters = [letter(ctx, sharding_key=key) for key in "ab"]
    ledger.append(JAVALESS, *letters, accounts(ctx, dead=2))
    assert release(JAVALESS, place) == 0
    ledger.append(JAVALESS, resolved(letters[0], "resent"))
    assert release(JAVALESS, place) == 1, "b is pending, a is not"
    assert keys.held_for(later) == {"t": {"b"}}

    superseded = context(epoch=2, partition=1, task_attempt_id=11)
    keys.note(superseded, {"t": {"c"}})
    ledger.append(JAVALESS, resolved(letters[1], "parked"))
    assert release(JAVALESS, place) == 1
    assert keys.held_for(later) == {"t": {"c"}}, "its attempt is not known yet"
    with monkeypatch.context() as gone:  # Another process may remove a note after its listing.
        gone.setattr(NoteStore, "read", lambda *_: None)
        assert keys.held_for(later) == {}

    ledger.append(JAVALESS, accounts(context(epoch=3), acked=1))
    assert release(JAVALESS, place) == 1, "a later epoch: the attempt never counted"
    assert keys.held_for(later) == {} and NoteStore(place, "pending").names() == []


def test_a_key_of_a_dropped_letter_does_not_wait_for_the_other_keys_of_its_task(
    ledger, place, keys
):
    """Otherwise its next row would be held back, and would hold the key from then on."""
    ctx = context(epoch=2)
    keys.note(ctx, {"t": {"a", "b"}, "u": {"c"}})
    letters = [
        letter(ctx, sharding_key=key, topic=topic)
        for topic, key in (("t", "a"), ("t", "b"), ("u", "c"))
    ]
    ledger.append(JAVALESS, *letters, accounts(ctx, dead=3))
    ledger.append(JAVALESS, *(resolved(letters[number], "dropped") for number in (0, 2)))
    assert release(JAVALESS, place) == 2
    assert keys.held_for(context(epoch=3)) == {"t": {"b"}}


@pytest.mark.spark
def test_a_row_that_the_broker_refused_holds_its_key_for_those_behind_it(
    spark, ledger, place, keys
):
    """Hold the key of a row that a broker refused, but not of a row that the sink refused."""
    ctx = context(epoch=2)
    keys.note(ctx, {"t": {"refused", "illegal", "delayed"}})
    behind = {"reason": "held_back", "outcome": "not_sent"}
    refused = {"reason": "data", "outcome": "rejected"}
    ledger.append(
        spark,
        letter(ctx, **refused, attempts=1, sharding_key="refused"),
        letter(ctx, **behind, sharding_key="refused"),
        letter(ctx, **refused, attempts=0, sharding_key="illegal"),
        letter(ctx, **behind, sharding_key="illegal"),
        letter(ctx, sharding_key="delayed", delay_ms=1000),
        accounts(ctx, dead=5),
    )
    assert release(spark, place) == 2
    assert keys.held_for(context(epoch=9)) == {"t": {"refused"}}
    for query in readers(spark, ledger):
        assert _pending(query) == {"t": {"refused"}}


def test_keys_of_an_attempt_that_does_not_count_are_let_go(ledger, place, keys):
    """Release keys whose rows another run sent in other partitions.

    Rows that were held back behind those keys hold nothing by themselves.
    """
    first = context(epoch=2, partition=3)
    keys.note(first, {"t": {"a", "b"}})
    letters = [letter(first, sharding_key=key) for key in "ab"]
    ledger.append(JAVALESS, *letters, accounts(first, dead=2))
    assert release(JAVALESS, place) == 0, "it counts as long as no other run is there"

    replay = context(epoch=2, partition=0, run_id="run-2", task_attempt_id=1)
    ledger.append(JAVALESS, accounts(replay, acked=1), confirmed(replay, 1))
    replay_later = context(epoch=3, run_id="run-2", task_attempt_id=2)
    assert keys.held_for(replay_later) == {"t": {"a", "b"}}
    keys.note(replay_later, {"t": {"a", "b"}})
    back = letter(replay_later, sharding_key="a", reason="held_back")
    other = letter(replay_later, sharding_key="b")
    ledger.append(JAVALESS, back, other, accounts(replay_later, dead=2))
    assert release(JAVALESS, place) == 3, "a twice: it is held back behind nothing that counts"
    assert keys.held_for(context(epoch=9)) == {"t": {"b"}}, "b has a letter of its own"

    ledger.append(JAVALESS, resolved(other, "resent"))
    assert release(JAVALESS, place) == 1
    assert keys.held_for(context(epoch=9)) == {}


def test_rows_held_back_behind_a_letter_that_was_resent_still_hold_their_key(ledger, place, keys):
    """Hold the key for the held-back rows: otherwise later rows would overtake them."""
    ctx = context(epoch=2)
    keys.note(ctx, {"t": {"a"}})
    cause, behind = letter(ctx, sharding_key="a"), letter(ctx, sharding_key="a", reason="held_back")
    ledger.append(JAVALESS, cause, behind, accounts(ctx, dead=2))
    for resent, gone in ((cause, 0), (behind, 1)):
        ledger.append(JAVALESS, resolved(resent, "resent"))
        assert release(JAVALESS, place) == gone


def test_an_erasure_takes_keys_from_notes_of_attempts_that_died(ledger, place, keys):
    ctx = context(epoch=2)
    ledger.append(JAVALESS, letter(ctx, sharding_key="b"), accounts(ctx, dead=1))
    keys.note(context(epoch=3), {"t": {"a", "b"}, "u": {"a"}, "v": set()})
    assert release(JAVALESS, place, erased={"t": {"a", "b"}}) == 1
    assert keys.held_for(context(epoch=9)) == {"t": {"b"}, "u": {"a"}}


def test_names_of_notes(place, keys):
    """Names of the longest ids fit; other names are nobody's; a damaged note is named."""
    store = NoteStore(place, "pending")
    keys.note(context(), {"t": []})
    assert store.names() == []
    most = 2**63 - 1
    longest = {"query_id": "q" * 300, "run_id": "r" * 300, "epoch": most, "task_attempt_id": most}
    keys.note(context(**longest, partition=2**31 - 1), {"t": {"a"}})
    keys.note(context(partition=None), {"t": {"b"}})
    for name in ("q~1~0", "q~1~0~run~10.x", "q~1~x~run.10.x"):
        store.write(name, {"t": ["c"]})
    assert keys.held_for(context(query_id="other")) == {"t": {"a", "b"}}
    store.write("q~1~0~run.10.x", {"t": ["d"]})
    path = store.where("q~1~0~run.10.x")
    Path(path).write_text("{")
    with refusal(path, f"{path} cannot be read .* Delete it when"):
        keys.held_for(context(query_id="other"))


def test_a_newer_attempt_on_its_way_to_the_table_keeps_its_keys(ledger, place, keys):
    ledger.append(JAVALESS, accounts(context(epoch=2), acked=1))
    newer = context(epoch=2, run_id="run-2", task_attempt_id=1)
    keys.note(newer, {"t": {"a"}})
    # The table lacks the new attempt's dead letters, so the key seems to have none.
    assert release(JAVALESS, place) == 0
    assert keys.held_for(context(epoch=9)) == {"t": {"a"}}


def test_keys_of_a_file_that_is_not_folded_yet_are_held(ledger, place, keys, monkeypatch):
    """Hold keys of a file that a fold cannot read now, even after files of later epochs, and if
    another process folds the file as soon as the table is open."""
    ctx, later = context(epoch=2), context(epoch=4)
    keys.note(ctx, {"t": {"a"}})
    write_spool(place, ctx, letter(ctx, sharding_key="a"), accounts(ctx, dead=1))
    ledger.append(JAVALESS, accounts(context(epoch=3), acked=1))
    assert release(JAVALESS, place) == 0
    assert keys.held_for(later) == {"t": {"a"}}

    def query_before_a_fold(*of):
        monkeypatch.undo()
        query = reader_of(*of)
        ledger.sync(JAVALESS)
        return query

    monkeypatch.setattr(duckdb_reader, "reader_of", query_before_a_fold)
    assert release(JAVALESS, place) == 0
    assert keys.held_for(later) == {"t": {"a"}}
    assert not ledger.unfolded_epochs()
    assert release(JAVALESS, place) == 0
    assert keys.held_for(later) == {"t": {"a"}}, "its letter is pending"


@pytest.mark.spark
def test_the_driver_gets_the_attempts_that_hold_keys_alone(spark, ledger, place, keys):
    """Read only attempts that hold keys: others would cost the driver 1.4 KB each per fold."""
    names = ("plain", "of a/team: \u00e9\U0001f600 'x'", "n" * 90, "n" * 90 + "o")
    others = [
        accounts(context(query_id=query, epoch=epoch, partition=partition), acked=1)
        for query in (*names, "other") for epoch in (3, 4, 5) for partition in range(4)
    ]  # fmt: skip
    for query in names:
        keys.note(context(query_id=query, epoch=4, partition=2), {"t": {query}})
    ledger.append(spark, *others)
    notes = list(_notes(NoteStore(place, "pending")))
    for query in readers(spark, ledger):
        read = []

        def counted(select, query=query, read=read):
            rows = query(select)
            read.append(rows.num_rows)
            return rows

        assert _known(counted, notes, set()) == dict.fromkeys(notes, True)
        assert len(notes) == len(names)
        assert read == [len(names) + 1, len(names)], "last epochs of queries, and attempts"
    # The queries have no pending dead letters.
    assert release(spark, place) == len(names)
