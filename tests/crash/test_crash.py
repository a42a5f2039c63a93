"""The crash harness: real processes, a real cluster, and a judge who reads all of the topic.

By default the chosen schedules of `schedule.CI`, one test for each, played in one round. With
`-m slow` those of `schedule.MOMENTS`, in one round as well, and the nightly form, which draws
others:

    pytest tests/crash -m slow -k drawn --crash-seed 7 --crash-schedules 200

A failure names its schedule's seed; `--crash-seed SEED --crash-schedules 1` plays that one alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rocket_sink.cluster import LocalCluster

from .cell import Cell
from .conductor import Round
from .schedule import BACKFILL, BATCHES, CI, MOMENTS, STREAMS, Schedule, draw

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(3600)]

TOGETHER = 25
"""Schedules of a nightly round: its JVMs start once, its slowest schedule is waited for once."""


@pytest.fixture(scope="module")
def played(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Round:
    round_ = Round(CI, cluster, tmp_path_factory.mktemp("ci"))
    round_.play()
    return round_


def faults(cell: Cell) -> dict[str, object]:
    """What is wrong with a cell that was played; empty when nothing is."""
    one = cell.schedule
    found: dict[str, object] = dict(
        cell.verdict().faults(ordering=one.ordering, delivery=one.delivery, batch=cell.batch)
    )
    if not cell.result["ended"] and not refused(cell):
        found["not ended"] = cell.result["errors"]
    return found


def refused(cell: Cell) -> bool:
    """A deleted checkpoint: the query does not start again under its `appId`.

    In the foreach lane Spark asks its commit coordinator before the rows reach Python. A task that
    tries again before the coordinator has heard of the refusal is denied there (seen).
    """
    one = cell.schedule
    errors = [error for error in cell.result["errors"] if "Commit denied" not in error]
    return (
        one.event == "checkpoint_deleted"
        and bool(errors)
        and all("CheckpointError" in error for error in errors)
    )


@pytest.mark.parametrize("number", range(len(CI)), ids=[one.name for one in CI])
def test_nothing_is_lost_disordered_or_doubled_unseen(played: Round, number: int) -> None:
    cell = played.cells[number]
    assert faults(cell) == {}, (cell.verdict(), cell.result)


def missed(played: Round) -> list[str]:
    """Schedules whose moment did not come."""
    return [
        cell.schedule.name for cell in played.cells if cell.schedule.moment and not cell.reached
    ]


def test_every_moment_was_hit(played: Round) -> None:
    assert missed(played) == []


def test_a_deleted_checkpoint_is_refused(played: Round) -> None:
    (cell,) = [cell for cell in played.cells if cell.schedule.event == "checkpoint_deleted"]
    assert refused(cell), cell.result


@pytest.mark.parametrize("lane", [*STREAMS, *BATCHES, BACKFILL])
def test_speculation_is_refused(played: Round, lane: str) -> None:
    assert "ConfigurationError: spark.speculation is on" in played.refusals[lane]


@pytest.mark.slow
def test_other_moments(cluster: LocalCluster, tmp_path: Path) -> None:
    round_ = Round(MOMENTS, cluster, tmp_path)
    round_.play()
    assert missed(round_) == []
    wrong = {cell.schedule.name: faults(cell) for cell in round_.cells}
    assert not {name: found for name, found in wrong.items() if found}


@pytest.mark.slow
@pytest.mark.timeout(8 * 3600)
def test_drawn_schedules(
    cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> None:
    first = pytestconfig.getoption("--crash-seed")
    seeds = range(first, first + pytestconfig.getoption("--crash-schedules"))
    found: list[str] = []
    for start in range(0, len(seeds), TOGETHER):
        share = [draw(seed) for seed in seeds[start : start + TOGETHER]]
        found += _played(share, cluster, tmp_path_factory.mktemp("drawn"))
        print(f"{start + len(share)} of {len(seeds)} schedules from seed {first}, {len(found)} bad")
    assert not found, "\n".join(found)


def _played(schedules: Sequence[Schedule], cluster: LocalCluster, folder: Path) -> list[str]:
    """Lines about what went wrong, each with its seed."""
    round_ = Round(schedules, cluster, folder)
    round_.play()
    lines = []
    print(f"schedules whose moment did not come: {missed(round_)}")
    for cell in round_.cells:
        wrong = faults(cell)
        if wrong:
            print(f"seed {cell.schedule.seed}: {cell.schedule} {json.dumps(wrong)}")
            lines.append(f"--crash-seed {cell.schedule.seed}: {cell.schedule.name}: {wrong}")
    return lines
