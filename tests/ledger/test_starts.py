"""The driver's note of the epoch that it began last."""

from __future__ import annotations

from pathlib import Path

from rocket_sink.ledger.place import locate
from rocket_sink.ledger.starts import begin_epoch


def test_an_epoch_that_was_begun_before_is_known(tmp_path: Path) -> None:
    place = locate(tmp_path)
    begun = [begin_epoch(place, "q", epoch) for epoch in (0, 1, 1, 0, 2)]
    assert begun == [False, False, True, True, False]
    assert not begin_epoch(place, "another", 0)


def test_a_note_that_cannot_be_read_or_written_stops_nobody(tmp_path: Path) -> None:
    place = locate(tmp_path)
    begin_epoch(place, "q", 5)
    (tmp_path / "_started" / "q-q.json").write_text("{")
    assert not begin_epoch(place, "q", 5)
    (tmp_path / "file").write_text("")
    assert not begin_epoch(locate(tmp_path / "file"), "q", 0)
