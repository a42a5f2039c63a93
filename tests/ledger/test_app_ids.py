"""An `appId` names one query of Spark's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocket_sink.errors import CheckpointError, LedgerError
from rocket_sink.ledger.epoch_starts import claim_app_id
from rocket_sink.ledger.path import resolve_path


def test_it_names_the_query_that_had_it_first(tmp_path: Path) -> None:
    place = resolve_path(tmp_path)
    for _ in range(2):
        claim_app_id.cache_clear()
        claim_app_id(place, "jobs/a", "q1")
    claim_app_id(place, "another", "q2")
    claim_app_id(resolve_path(tmp_path / "ledger"), "jobs/a", "q2")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"names the streaming query q1, and this .* q2"):
            claim_app_id(place, "jobs/a", "q2")


def test_a_note_that_says_nothing_is_no_leave(tmp_path: Path) -> None:
    claim_app_id(resolve_path(tmp_path), "a", "q1")
    (tmp_path / "_notes" / "queries" / "q-a.json").write_text("{")
    with pytest.raises(LedgerError, match=r"queries/q-a\.json"):
        claim_app_id(resolve_path(tmp_path), "a", "q2")


@pytest.mark.parametrize("other", ["jobs_a", "jobs a", "jobs-a"])
def test_two_names_with_the_same_files_are_not_taken_for_one(tmp_path: Path, other: str) -> None:
    place = resolve_path(tmp_path)
    claim_app_id(place, "jobs/a", "q1")
    with pytest.raises(CheckpointError, match=f"'jobs/a' has the same files as '{other}'"):
        claim_app_id(place, other, "q2")
    with pytest.raises(CheckpointError, match="another appId"):
        claim_app_id(place, other, "q1")
