"""Schedules of the crash harness: the way of sending, the failure and its moment.

A schedule is a value. The schedules of `CI` and `MOMENTS` are chosen: together they have every
event and moment, every lane and every delivery mode. `draw` makes others, each from a seed.
"""

import random
from dataclasses import dataclass, replace

STREAMS = ("foreach", "packs", "source_stream", "foreach_batch")
BATCHES = ("write", "source_batch")
BACKFILL = "backfill"
TRANSACTIONAL = "transactional"
DELIVERIES = ("at_least_once", "effectively_once", TRANSACTIONAL)
HALVES = ("foreach_batch", "write")
"""Lanes that take `transactional`; the others refuse it (`rocket_sink.task.transaction_marker`)."""
ORDERINGS = ("none", "best_effort", "strict")

EPOCHS = 2
FILES = 2
"""The number of files, and so of tasks, of an epoch. A key's rows are in one file."""
KEYS = 8
ROWS = 160
"""The number of rows of a file."""
REQUEST_ROWS = 10

REQUEST = "request"
"""A worker is about to pass the n-th request to the engine. Before the first, nothing is sent."""
ANSWERED = "answered"
"""A task has all its answers, but its accounts are not in the spool yet."""
SPOOLED = "spooled"
"""A task has sealed its spool file. Spark does not know of its end, and nothing is folded."""
COMMITTED = "committed"
"""The epoch is in Delta but not in Spark's log. (In `source_stream` its message is sealed.)"""
FOLDS = tuple(
    f"fold:{step}" for step in ("listed", "manifest", "append", "appended", "delete", "deleted")
)
"""A fold is about to write its manifest, append to Delta, delete spool files, or end."""
ENDING = "ending"
"""A driver is about to commit the n-th half message of an epoch that Delta has."""
ENDED = "ended"
"""The half messages of an epoch are all committed, but the ledger does not have that yet."""
LETTERS = "letters"
"""A backfill has marked its n-th chunk as about to be sent."""


@dataclass(frozen=True)
class Schedule:
    """A schedule: a row of the matrix.

    Attributes:
        event: the failure, a name of `EVENTS`.
        moment, count: the time of the event: a point of `hooks/crash_points.py` and its n-th pass.
        ids: "own" if the rows bring a `message_id`, "made" if the sink makes the ids.
        seed: the seed of a drawn schedule; 0 for a chosen one.
        committer: "spark" if Spark's Delta commits to the ledger; empty: delta-rs.
    """

    lane: str
    ordering: str
    delivery: str
    event: str
    moment: str = ""
    count: int = 1
    ids: str = "made"
    seed: int = 0
    committer: str = ""

    @property
    def name(self):
        parts = [self.lane, self.ordering, self.delivery, self.event, self.moment, self.count]
        parts += [self.ids, self.seed or "", self.committer]
        return "-".join(str(part).replace(":", "_") for part in parts if part != "")

    @property
    def is_made_again(self):
        """Whether a batch whose driver was killed becomes a new write at the next start.

        With `effectively_once` it stays the same write until that write has ended.
        """
        if self.lane not in BATCHES or self.event != "driver_killed":
            return False
        return self.delivery != "effectively_once" or self.moment in FOLDS


@dataclass(frozen=True)
class Event:
    """The driver process of an event, and the lanes and modes that it fits.

    Attributes:
        group: the driver process: "local", "killed" (and started again), or "executors".
    """

    group: str
    lanes: tuple[str, ...]
    moments: tuple[str, ...]


_TASK = (REQUEST, ANSWERED, SPOOLED)
_ALL = (*STREAMS, *BATCHES)
EVENTS = {
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
    "executor_killed": Event("executors", ("foreach", "packs", "foreach_batch", "write"), _TASK),
}
_SPOOLING = ("foreach", "packs", "source_stream", "source_batch")
_LANES_OF = {
    SPOOLED: _SPOOLING,
    COMMITTED: ("foreach_batch", "write", "source_stream", "source_batch"),
    ENDING: HALVES,
    ENDED: HALVES,
    LETTERS: (BACKFILL,),
    **dict.fromkeys(FOLDS, _SPOOLING),
}

_SAME_ROWS = ("worker_killed", "task_failed", "driver_killed", "executor_killed")
"""Events after which a task gets the same rows again and holds none back.

The ids that `at_least_once` makes are then the same (`rocket_sink.task.message_ids`)."""


def lanes_of(event, moment):
    """Return the lanes in which the event can happen at that moment."""
    lanes = _LANES_OF.get(moment, _ALL)
    return tuple(lane for lane in EVENTS[event].lanes if lane in lanes)


def deliveries_of(lane, moment):
    """Return the delivery modes in which a lane passes the moment."""
    if moment in (ENDING, ENDED):
        return (TRANSACTIONAL,)
    return DELIVERIES if lane in HALVES else DELIVERIES[:2]


def draw(seed):
    """Return the schedule of a seed."""
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
    drawn = Schedule(
        lane, rng.choice(ORDERINGS), delivery, event, moment,
        rng.randint(1, most.get(moment, 1)), seed=seed,
        # Two drivers need delta-rs: commits of Spark's Delta in a local folder exclude nobody.
        committer="spark" if event != "two_drivers" and rng.random() < 0.25 else "",
    )  # fmt: skip
    if lane == BACKFILL:
        return replace(drawn, ordering="strict", delivery="at_least_once", ids="own")
    other_rows = drawn.delivery == "at_least_once" and event not in _SAME_ROWS
    if other_rows or drawn.is_made_again:
        return replace(drawn, ids="own")
    return replace(drawn, ids=rng.choice(("own", "made")))


CI = (
    Schedule("foreach", "strict", "at_least_once", "worker_killed", REQUEST, 1),
    Schedule("source_batch", "strict", "at_least_once", "task_failed", SPOOLED, 1),
    Schedule("foreach_batch", "strict", "effectively_once", "broker_killed", REQUEST, 11),
    Schedule("packs", "best_effort", "at_least_once", "broker_frozen", REQUEST, 11),
    Schedule("foreach", "strict", "effectively_once", "queues_changed", REQUEST, 5),
    Schedule("source_stream", "none", "at_least_once", "topic_deleted"),
    Schedule("foreach_batch", "none", "effectively_once", "checkpoint_deleted"),
    Schedule("foreach", "none", "effectively_once", "two_drivers", REQUEST, 7),
    Schedule("write", "strict", "transactional", "driver_killed", ENDING, 100),
    Schedule("foreach_batch", "strict", "effectively_once", "driver_killed", COMMITTED, 2),
    Schedule(
        "foreach", "none", "at_least_once", "driver_killed", "fold:appended", committer="spark"
    ),
    Schedule("backfill", "strict", "at_least_once", "driver_killed", LETTERS, 1, "own"),
    Schedule("foreach", "none", "at_least_once", "executor_killed", ANSWERED, 1, "own"),
)
"""Schedules with each event once, and each moment once at which a process can die.

Moments are a request, the answers, the spool, the commit, the half messages, and the letters. A
fold dies once only, after the step that leaves its rows in both Delta and the spool
(`tests/ledger/test_fold.py` dies at each step)."""

MOMENTS = (
    Schedule("source_batch", "strict", "at_least_once", "task_failed", REQUEST, 12),
    Schedule("source_stream", "none", "effectively_once", "worker_killed", ANSWERED),
    Schedule("foreach_batch", "none", "at_least_once", "worker_killed", REQUEST, 9, "own"),
    Schedule("packs", "none", "effectively_once", "driver_killed", REQUEST, 1),
    Schedule("source_stream", "strict", "at_least_once", "driver_killed", ANSWERED, 1, "own"),
    Schedule("foreach", "strict", "effectively_once", "driver_killed", SPOOLED, 1),
    Schedule("source_stream", "none", "effectively_once", "driver_killed", "fold:listed"),
    Schedule("foreach", "none", "at_least_once", "driver_killed", "fold:appended"),
    Schedule(
        "foreach_batch", "none", "at_least_once", "driver_killed", COMMITTED, committer="spark"
    ),
    Schedule("foreach_batch", "none", "transactional", "executor_killed", REQUEST, 9),
)
"""Schedules with the other moments of drivers and workers."""
