"""The crash harness: real processes, a real cluster, and a judge that reads the whole topic.

By default one round plays the chosen schedules of `schedule.CI`, with a test for each. With
`-m slow` another round plays those of `schedule.MOMENTS`, and the nightly form draws others:

    pytest tests/crash -m slow -k drawn --crash-seed 7 --crash-schedules 200
    pytest tests/crash -m slow -k drawn --crash-only foreach-strict --crash-schedules 100

A failure names its schedule's seed; `--crash-seed SEED --crash-schedules 1` plays it alone.
"""

import itertools
import json

import pytest

from .conductor import Round
from .schedule import BACKFILL, BATCHES, CI, MOMENTS, STREAMS, draw

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(3600)]

TOGETHER = 25
"""The number of schedules of a nightly round. A round starts its JVMs once and waits for its
slowest schedule once."""


@pytest.fixture(scope="module")
def played(request, cluster, tmp_path_factory):
    """The schedules that this run's tests look at; all of them if one test needs all."""
    wanted = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in wanted if hasattr(item, "callspec")]
    numbers = {case.get("number") for case in cases}
    of_any = (test_nothing_is_lost_disordered_or_doubled_unseen, test_every_moment_was_hit)
    others = {getattr(item, "originalname", "") for item in wanted}
    others -= {test.__name__ for test in of_any}
    some = [schedule for number, schedule in enumerate(CI) if number in numbers]
    round_ = Round(some if some and not others else CI, cluster, tmp_path_factory.mktemp("ci"))
    round_.play()
    return round_


def faults(cell):
    """Return the faults of a played cell; empty if all is well."""
    modes = {"ordering": cell.schedule.ordering, "delivery": cell.schedule.delivery}
    wrong = {**cell.verdict().faults(**modes, batch=cell.batch)}
    if not cell.result["ended"] and not refused(cell):
        wrong["not ended"] = cell.result["errors"]
    return wrong


def refused(cell):
    """Return whether a query with a deleted checkpoint refused to start again under its `appId`.

    In the foreach lane Spark asks its commit coordinator before the rows reach Python. A second
    attempt is denied there if the coordinator does not know of the refusal yet (observed). A worker
    that refuses leaves rows unread in its socket, so the JVM may see the connection's reset before
    the error (observed on a busy machine).
    """
    others = ("Commit denied", "Connection reset")
    errors = [e for e in cell.result["errors"] if not any(text in e for text in others)]
    is_refusal = bool(errors) and all("CheckpointError" in error for error in errors)
    return is_refusal and cell.schedule.event == "checkpoint_deleted"


@pytest.mark.parametrize("number", range(len(CI)), ids=[schedule.name for schedule in CI])
def test_nothing_is_lost_disordered_or_doubled_unseen(played, number):
    (cell,) = [cell for cell in played.cells if cell.schedule == CI[number]]
    assert faults(cell) == {}, (cell.verdict(), cell.result)


def missed(played):
    """Return the schedules whose moment did not come."""
    cells = (cell for cell in played.cells if not cell.reached)
    return [cell.schedule.name for cell in cells if cell.schedule.moment]


def test_every_moment_was_hit(played):
    assert missed(played) == []


def test_a_deleted_checkpoint_is_refused(played):
    (cell,) = [cell for cell in played.cells if cell.schedule.event == "checkpoint_deleted"]
    assert refused(cell), cell.result


@pytest.mark.parametrize("lane", [*STREAMS, *BATCHES, BACKFILL])
def test_speculation_is_refused(played, lane):
    assert "ConfigurationError: spark.speculation is on" in played.refusals[lane]


@pytest.mark.slow
def test_other_moments(cluster, tmp_path):
    round_ = Round(MOMENTS, cluster, tmp_path)
    round_.play()
    assert missed(round_) == []
    wrong = {cell.schedule.name: faults(cell) for cell in round_.cells}
    assert not {name: cell_faults for name, cell_faults in wrong.items() if cell_faults}


@pytest.mark.slow
@pytest.mark.timeout(8 * 3600)
def test_drawn_schedules(cluster, tmp_path_factory, pytestconfig):
    first, count = (pytestconfig.getoption(f"--crash-{name}") for name in ("seed", "schedules"))
    only = pytestconfig.getoption("--crash-only")
    every = (schedule for schedule in map(draw, itertools.count(first)))
    fitting = (schedule for schedule in every if schedule.name.startswith(only))
    drawn = list(itertools.islice(fitting, count))
    failures = []
    for start in range(0, count, TOGETHER):
        share = drawn[start : start + TOGETHER]
        failures += _played(share, cluster, tmp_path_factory.mktemp("drawn"))
        print(f"{start + len(share)} of {count} schedules from seed {first}, {len(failures)} bad")
    assert not failures, "\n".join(failures)


def _played(schedules, cluster, folder):
    """Play a round and return lines about its faults, each with its seed."""
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
