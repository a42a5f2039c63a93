"""An `appId` names one query of Spark's."""

import functools
import shutil

import pytest

from rocket_sink.errors import CheckpointError, LedgerError
from rocket_sink.ledger.epoch_starts import (
    begin_epoch,
    begin_write,
    claim_app_id,
    query_of,
    unrecorded_epoch,
)
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.token import LedgerToken


def test_it_names_the_query_that_had_it_first(tmp_path):
    place = resolve_path(tmp_path)
    for _ in range(2):
        claim_app_id.cache_clear()
        claim_app_id(place, "jobs/a", "q1")
    claim_app_id(place, "another", "q2")
    claim_app_id(resolve_path(tmp_path / "ledger"), "jobs/a", "q2")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"names the streaming query q1, and this .* q2"):
            claim_app_id(place, "jobs/a", "q2")


def test_an_epoch_that_is_pending_at_the_first_start_stays_unrecorded(tmp_path):
    start = functools.partial(unrecorded_epoch, resolve_path(tmp_path))
    assert start("new", "run 1", "x", "") == ""
    assert start("new", "run 2", "x", "4") == ""
    # The first start of a copy may be refused before it sends, so later starts know the epoch too.
    assert [start("copy", run, "x", epoch) for run, epoch in enumerate("779")] == ["7"] * 3
    (tmp_path / "_notes" / "queries" / "q-new=7Eways.json").write_text("{")
    assert start("new", "run 3", "x", "4") == "4"


def test_a_way_that_the_last_run_did_not_take_is_new(tmp_path):
    """A run with another `appId` may have sent rows of the pending epoch in between."""
    start = functools.partial(unrecorded_epoch, resolve_path(tmp_path), "q")
    starts = [("1", "x", ""), ("2", "y", "5"), ("3", "x", "5"), ("4", "x", "5"), ("5", "x", "6")]
    assert [start(*each) for each in starts] == ["", "5", "5", "5", "5"]
    # A run with two sinks has two ways.
    starts = [(run, way, "6") for run in "678" for way in "xz"]
    assert [start(*each) for each in starts] == ["5", "6"] * 3


def test_a_note_that_says_nothing_is_no_leave(tmp_path):
    claim_app_id(resolve_path(tmp_path), "a", "q1")
    (tmp_path / "_notes" / "queries" / "q-a.json").write_text("{")
    with pytest.raises(LedgerError, match=r"queries/q-a\.json"):
        claim_app_id(resolve_path(tmp_path), "a", "q2")


NAMES = [
    "jobs/a",
    "jobs-a",
    "jobs_a",
    "jobs a",
    "jobs=2Fa",
    "订单",
    "物流",
    40 * "订",
    40 * "订" + "a",
]


def test_each_name_has_notes_of_its_own(tmp_path):
    place = resolve_path(tmp_path)
    for number, name in enumerate(NAMES):
        claim_app_id(place, name, f"q{number}")
        assert begin_write(place, name, f"w{number}") == (f"w{number}", False)
        assert not begin_epoch(place, name, number)
    for number, name in enumerate(NAMES):
        assert query_of(place, name) == f"q{number}"
        assert begin_write(place, name, "again") == (f"w{number}", True)
        assert begin_epoch(place, name, number)


def test_names_that_the_file_system_does_not_tell_apart_are_refused(tmp_path):
    """The file system of a Mac has one file for `Jobs` and `jobs`."""
    place = resolve_path(tmp_path)
    begin_write(place, "Jobs", "w")
    begin_epoch(place, "Jobs", 5)
    claim_app_id(place, "Jobs", "q")
    for kind in ("writes", "epochs", "queries"):
        (tmp_path / "_notes" / kind / "q-Jobs.json").rename(
            tmp_path / "_notes" / kind / "q-jobs.json"
        )
    assert query_of(place, "jobs") is None
    for call in (begin_write, begin_epoch, claim_app_id):
        with pytest.raises(CheckpointError, match="notes of 'Jobs' are in the files of 'jobs'"):
            call(place, "jobs", 5 if call is begin_epoch else "q")  # type: ignore[operator]


def test_a_new_ledger_at_the_path_of_a_deleted_one_is_claimed_again(tmp_path):
    place = resolve_path(tmp_path / "ledger")
    for name in ("first", "second"):
        claim_app_id(place, "a", "q1", LedgerToken(place.uri, name, spools=True))
        assert query_of(place, "a") == "q1"
        shutil.rmtree(place.root)
