"""Notes of begun work: by drivers, and by task attempts of runs that follow each other."""

import itertools
from pathlib import Path

import pytest

from rocket_sink.errors import CheckpointError
from rocket_sink.ledger.epoch_starts import (
    EpochStarts,
    begin_epoch,
    begin_named_write,
    begin_write,
    end_named_write,
    end_write,
)
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import RunContext
from rocket_sink.options import SinkOptions


def test_an_epoch_that_was_begun_before_is_known(tmp_path):
    place = resolve_path(tmp_path)
    had_begun = [begin_epoch(place, "q", epoch) for epoch in (0, 1, 1, 0, 2)]
    assert had_begun == [False, False, True, True, False]
    assert not begin_epoch(place, "another", 0)


def test_a_note_that_cannot_be_read_or_written_stops_nobody(tmp_path):
    place = resolve_path(tmp_path)
    begin_epoch(place, "q", 5)
    (tmp_path / "_notes" / "epochs" / "q-q.json").write_text("{")
    assert not begin_epoch(place, "q", 5)
    (tmp_path / "file").write_text("")
    assert not begin_epoch(resolve_path(tmp_path / "file"), "q", 0)


def test_a_write_that_did_not_end_is_known(tmp_path):
    place = resolve_path(tmp_path)
    previous = [begin_write(place, app, write) for app, write in ("a1", "a2", "b3")]
    assert previous == [("1", False), ("1", True), ("3", False)]
    end_write(place, "a")
    previous = [begin_write(place, app, write) for app, write in ("a4", "b5")]
    assert previous == [("4", False), ("3", True)]


def test_a_write_whose_note_names_none_is_taken_for_one_that_did_not_end(tmp_path):
    place = resolve_path(tmp_path)
    begin_write(place, "a", "1")
    (tmp_path / "_notes" / "writes" / "q-a.json").write_text('{"at_ms": 1}')
    assert begin_write(place, "a", "2") == ("2", True)


class Run:
    """A run of the query `q` with task attempts, each minutes after the one before."""

    def __init__(self, ledger: Path, run: str) -> None:
        self._place = resolve_path(ledger)
        self._ctx = RunContext("q", run, 7, 0, worker="w:1")

    def begin(self) -> EpochStarts:
        starts = EpochStarts(self._place, self._ctx, clock=itertools.count(1.0, 60.0).__next__)
        starts.begin({"t": frozenset("a")})
        return starts


def test_a_run_that_another_one_followed_goes_no_further(tmp_path):
    """The run that began last goes on, independent of the order of names."""
    for first, second in (("r1", "r2"), ("s2", "s1")):
        zombie = Run(tmp_path / first, first).begin()
        zombie.check()
        follower = Run(tmp_path / first, second).begin()
        with pytest.raises(CheckpointError, match="taken the query q over"):
            zombie.check()
        with pytest.raises(CheckpointError):
            Run(tmp_path / first, first).begin()
        follower.check()
        Run(tmp_path / first, second).begin().check()


def test_it_looks_once_a_second(tmp_path):
    times = iter([1.0, 1.5, 2.1, 2.2])
    ctx = RunContext("q", "r1", 7, 0, worker="w:1")
    starts = EpochStarts(resolve_path(tmp_path), ctx, clock=times.__next__)
    starts.begin({"t": frozenset("a")})
    Run(tmp_path, "r2").begin()
    starts.check()
    for _ in range(2):  # A thread that goes on after the error is refused, too.
        with pytest.raises(CheckpointError):
            starts.check()


def test_earlier_attempts_are_those_of_the_partition_and_of_other_stages(tmp_path):
    place = resolve_path(tmp_path)

    def begin(partition: int, stage_id: int, task: int) -> bool:
        ctx = RunContext("q", "r", 7, partition, stage_id, task_attempt_id=task, worker="w:1")
        return EpochStarts(place, ctx).begin({"t": frozenset("a")}) is not None

    assert [begin(partition, 1, partition) for partition in (0, 1)] == [False, False]
    # Spark runs the stage again, and counts the partition's attempts from 0 again.
    assert begin(1, 1, 2)
    # Another job of the epoch may have other partitions.
    assert begin(2, 5, 3)


def test_each_batch_write_of_an_app_id_is_a_query_of_its_own(tmp_path):
    """With a common id, a later write's accounts would replace the earlier ones and letters."""
    for delivery in ("at_least_once", "effectively_once"):
        options = SinkOptions.parse(
            nameServer="n:1", topic="t", ledger=str(tmp_path), delivery=delivery, appId="nightly"
        )
        writes = [begin_named_write(options, run) for run in ("one", "two")]
        # The first write has not ended, and effectively once continues it.
        second = "nightly/one" if delivery == "effectively_once" else "nightly/two"
        assert writes == [("nightly/one", False), (second, True)]
        end_named_write(resolve_path(tmp_path), options, second, is_done=False)
        assert begin_named_write(options, "three")[1]
        end_named_write(resolve_path(tmp_path), options, second, is_done=True)
    assert begin_named_write(options.with_(appId=""), "one") == ("one", False)
