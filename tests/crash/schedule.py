"""Schedules of the crash harness: what is sent how, and what breaks when.

A schedule is a value. The ones of `CI` and `MOMENTS` are chosen: together they have every event and
moment, every lane and every delivery mode. `draw` makes the others, each from a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

STREAMS: Final = ("foreach", "source_stream", "foreach_batch")
BATCHES: Final = ("write", "source_batch")
BACKFILL: Final = "backfill"
TRANSACTIONAL: Final = "transactional"
DELIVERIES: Final = ("at_least_once", "effectively_once", TRANSACTIONAL)
HALVES: Final = ("foreach_batch", "write")
"""Lanes that take `transactional`; the others refuse it (`rocket_sink.task.transaction_marker`)."""
ORDERINGS: Final = ("none", "best_effort", "strict")

EPOCHS: Final = 2
FILES: Final = 2
"""Files, and so tasks, of an epoch; a key's rows are in one of them."""
KEYS: Final = 8
ROWS: Final = 160
"""Rows of a file."""
REQUEST_ROWS: Final = 10

REQUEST: Final = "request"
"""A worker is about to hand the n-th request to the engine; at the first nothing is sent yet."""
ANSWERED: Final = "answered"
"""A task has all its answers; its accounts are not in the spool."""
SPOOLED: Final = "spooled"
"""A task has sealed its spool file; Spark does not know that it is done, nothing is folded."""
COMMITTED: Final = "committed"
"""The epoch is in Delta (of `source_stream`: its commit message is sealed), not in Spark's log."""
FOLDS: Final = tuple(
    f"fold:{step}" for step in ("listed", "manifest", "append", "appended", "delete", "deleted")
)
"""A fold stands before its manifest (between spool and fold), its append, its deletes, its end."""
ENDING: Final = "ending"
"""A driver is about to commit the n-th half message, of an epoch that Delta has."""
ENDED: Final = "ended"
"""All half messages of an epoch are committed; the ledger does not know."""
LETTERS: Final = "letters"
"""A backfill has marked its n-th chunk as about to be sent."""


@dataclass(frozen=True)
class Schedule:
    """One row of the matrix.

    Attributes:
        event: what happens, `EVENTS`.
        moment, count: when: a point of `hooks/crash_points.py` and how often it was passed.
        ids: "own": the rows bring a `message_id`; "made": the sink makes them.
        seed: of the draw that made it; 0 of a chosen one.
    """

    lane: str
    ordering: str
    delivery: str
    event: str
    moment: str = ""
    count: int = 1
    ids: str = "made"
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [self.lane, self.ordering, self.delivery, self.event, self.moment, self.count]
        parts += [self.ids, self.seed] if self.seed else [self.ids]
        return "-".join(str(part).replace(":", "_") for part in parts if part != "")

    @property
    def is_made_again(self) -> bool:
        """Whether the rows of a batch are another write's when its driver was killed.

        Effectively once they are the same write's until that has ended.
        """
        if self.lane not in BATCHES or self.event != "driver_killed":
            return False
        return self.delivery != "effectively_once" or self.moment in FOLDS


@dataclass(frozen=True)
class Event:
    """Where an event is played, and what it fits.

    Attributes:
        group: the driver process: "local", "killed" (and started again), or "executors".
    """

    group: str
    lanes: tuple[str, ...]
    moments: tuple[str, ...]


_TASK: Final = (REQUEST, ANSWERED, SPOOLED)
_ALL: Final = (*STREAMS, *BATCHES)
EVENTS: Final = {
    "worker_killed": Event("local", (*_ALL, BACKFILL), (*_TASK, LETTERS)),
    "task_failed": Event("local", _ALL, (REQUEST, ANSWERED, SPOOLED)),
    "broker_killed": Event("local", _ALL, (REQUEST,)),
    "broker_frozen": Event("local", _ALL, (REQUEST,)),
    "queues_changed": Event("local", STREAMS, (REQUEST,)),
    "topic_deleted": Event("local", STREAMS, ("",)),
    "checkpoint_deleted": Event("local", STREAMS, ("",)),
    "two_drivers": Event("local", STREAMS, (REQUEST,)),
    "driver_killed": Event(
        "killed", (*_ALL, BACKFILL), (*_TASK, COMMITTED, ENDING, ENDED, *FOLDS, LETTERS)
    ),
    "executor_killed": Event("executors", ("foreach", "foreach_batch", "write"), _TASK),
}
_SPOOLING: Final = ("foreach", "source_stream", "source_batch")
_LANES_OF: Final = {
    SPOOLED: _SPOOLING,
    COMMITTED: ("foreach_batch", "write", "source_stream", "source_batch"),
    ENDING: HALVES,
    ENDED: HALVES,
    LETTERS: (BACKFILL,),
    **dict.fromkeys(FOLDS, _SPOOLING),
}

_SAME_ROWS: Final = ("worker_killed", "task_failed", "driver_killed", "executor_killed")
"""Events after which a task gets the rows that it got before, and holds none of them back: then
the ids that `at_least_once` makes are the same (`rocket_sink.task.message_ids`)."""


def lanes_of(event: str, moment: str) -> tuple[str, ...]:
    """The lanes in which an event can come at that moment."""
    lanes = _LANES_OF.get(moment, _ALL)
    return tuple(lane for lane in EVENTS[event].lanes if lane in lanes)


def deliveries_of(lane: str, moment: str) -> tuple[str, ...]:
    """The delivery modes in which a lane passes the moment."""
    if moment in (ENDING, ENDED):
        return (TRANSACTIONAL,)
    return DELIVERIES if lane in HALVES else DELIVERIES[:2]


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    event = rng.choice(sorted(EVENTS))
    moment = rng.choice([m for m in EVENTS[event].moments if lanes_of(event, m)])
    lane = rng.choice(lanes_of(event, moment))
    tasks = EPOCHS * FILES if lane in STREAMS else FILES
    epochs = 1 if lane in BATCHES else EPOCHS
    most = {
        REQUEST: 3 * tasks, ANSWERED: tasks // 2, SPOOLED: tasks // 2, COMMITTED: epochs,
        ENDING: ROWS * tasks, ENDED: epochs,
    }  # fmt: skip
    delivery = rng.choice(deliveries_of(lane, moment))
    if delivery == TRANSACTIONAL:
        # A half message is a request of its own.
        most[REQUEST] *= REQUEST_ROWS
    drawn = Schedule(
        lane, rng.choice(ORDERINGS), delivery, event, moment,
        rng.randint(1, most.get(moment, 1)), seed=seed,
    )  # fmt: skip
    if lane == BACKFILL:
        return replace(drawn, ordering="strict", delivery="at_least_once", ids="own")
    other_rows = drawn.delivery == "at_least_once" and event not in _SAME_ROWS
    if other_rows or drawn.is_made_again:
        return replace(drawn, ids="own")
    return replace(drawn, ids=rng.choice(("own", "made")))


CI: Final = (
    Schedule("foreach", "strict", "at_least_once", "worker_killed", REQUEST, 1),
    Schedule("source_batch", "strict", "at_least_once", "task_failed", SPOOLED, 1),
    Schedule("foreach_batch", "strict", "effectively_once", "broker_killed", REQUEST, 11),
    Schedule("foreach", "best_effort", "at_least_once", "broker_frozen", REQUEST, 11),
    Schedule("foreach", "strict", "effectively_once", "queues_changed", REQUEST, 5),
    Schedule("source_stream", "none", "at_least_once", "topic_deleted"),
    Schedule("foreach_batch", "none", "effectively_once", "checkpoint_deleted"),
    Schedule("foreach", "none", "effectively_once", "two_drivers", REQUEST, 7),
    Schedule("write", "strict", "transactional", "driver_killed", ENDING, 100),
    Schedule("foreach_batch", "strict", "effectively_once", "driver_killed", COMMITTED, 2),
    Schedule("foreach", "none", "at_least_once", "driver_killed", "fold:appended"),
    Schedule("backfill", "strict", "at_least_once", "driver_killed", LETTERS, 1, "own"),
    Schedule("foreach", "none", "at_least_once", "executor_killed", ANSWERED, 1, "own"),
)
"""Each event once, and each place once at which something can die: a request, the answers, the
spool, the commit, the half messages, the letters, and of a fold the one step after which its rows
are in Delta and in the spool (`tests/ledger/test_fold.py` dies at each)."""

MOMENTS: Final = (
    Schedule("source_batch", "strict", "at_least_once", "task_failed", REQUEST, 12),
    Schedule("source_stream", "none", "effectively_once", "worker_killed", ANSWERED),
    Schedule("foreach_batch", "none", "at_least_once", "worker_killed", REQUEST, 9, "own"),
    Schedule("foreach", "none", "effectively_once", "driver_killed", REQUEST, 1),
    Schedule("source_stream", "strict", "at_least_once", "driver_killed", ANSWERED, 1, "own"),
    Schedule("foreach", "strict", "effectively_once", "driver_killed", SPOOLED, 1),
    Schedule("source_stream", "none", "effectively_once", "driver_killed", "fold:listed"),
    Schedule("foreach_batch", "none", "transactional", "executor_killed", REQUEST, 90),
)
"""The other moments of drivers and workers."""
