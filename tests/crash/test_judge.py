"""The judge's invariants: each catches a planted defect, and accepts a right world."""

from dataclasses import dataclass, field, replace

import pytest

from . import schedule as schedules
from .judge import Accounts, Copy, Epoch, Row, Sent, judge

ROWS = [(key, number) for key in ("a", "b") for number in range(4)]
HOME = {"a": ("10.0.0.1:1", 0), "b": ("10.0.0.1:1", 1)}


@dataclass
class World:
    """Eight rows, all stored in order by two requests that the ledger knows."""

    copies: list[Copy] = field(
        default_factory=lambda: [Copy(row, f"{row}", HOME[row[0]], row[1]) for row in ROWS]
    )
    sent: list[Sent] = field(
        default_factory=lambda: [Sent("acked", 4, queue, 0) for queue in HOME.values()]
    )
    letters: set[Row] = field(default_factory=set)
    epochs: list[Epoch] = field(default_factory=lambda: [Epoch("q", True, 8, 8)])
    halves: set[str] = field(default_factory=set)

    def faults(self, ordering="strict", delivery="effectively_once"):
        accounts = Accounts(self.sent, self.letters, self.epochs, self.halves)
        verdict = judge(ROWS, self.copies, accounts)
        return set(verdict.faults(ordering=ordering, delivery=delivery))

    def again(self, *numbers):
        """Store rows of `a` once more."""
        for place, number in enumerate(numbers):
            self.copies.append(replace(self.copies[number], offset=4 + place))


def lose(world):
    del world.copies[3]


def invent(world):
    world.copies.append(Copy(("c", 0), "x", HOME["b"], 4))


def swap(world):
    first, second = world.copies[1:3]
    world.copies[1:3] = [replace(first, offset=2), replace(second, offset=1)]


def move(world):
    world.copies[3] = replace(world.copies[3], queue=("10.0.0.2:1", 0), offset=0)


def double(world):
    world.again(1)
    world.sent.append(Sent("acked", 1, HOME["a"], 4))


def double_with_another_id(world):
    double(world)
    world.copies[-1] = replace(world.copies[-1], message_id="another")


def double_unseen(world):
    world.again(1)


def double_more_than_doubted(world):
    world.again(1, 2, 3)
    world.sent.append(Sent("unknown", 2))


def unbalance(world):
    world.epochs.append(Epoch("q", True, 3, 2))


def leave_open(world):
    world.epochs.append(Epoch("q", False, 0, 0))


def forget_rows(world):
    world.epochs[:] = [Epoch("q", True, 7, 7), Epoch("other", True, 1, 1)]


def tear(world):
    """Tear the only copy of a row."""
    world.copies[6] = replace(world.copies[6], torn=True)


def tear_a_double(world):
    world.again(3)
    world.copies[-1] = replace(world.copies[-1], torn=True, message_id="")


def bury(world):
    """Let a row become a dead letter."""
    lose(world)
    world.letters.add(("a", 3))


def replay_prefix(world):
    """Send the first rows of a key again, which disorders nothing."""
    world.again(0, 1)
    world.sent.append(Sent("acked", 2, HOME["a"], 4))


PLANTED = [
    (lose, {"lost"}, {"lost"}),
    (invent, {"unknown"}, {"unknown"}),
    (swap, {"disordered"}, set()),
    (move, {"disordered"}, set()),
    (double, {"duplicates"}, set()),
    (double_with_another_id, {"duplicates", "unlike_ids"}, {"unlike_ids"}),
    (double_unseen, {"duplicates", "unaccounted"}, {"unaccounted"}),
    (double_more_than_doubted, {"duplicates", "unaccounted"}, {"unaccounted"}),
    (unbalance, {"wrong_epochs"}, {"wrong_epochs"}),
    (leave_open, {"wrong_epochs"}, {"wrong_epochs"}),
    (forget_rows, {"missing_rows"}, {"missing_rows"}),
    (tear, {"lost"}, {"lost"}),
    (tear_a_double, set(), set()),
    (bury, set(), set()),
    (replay_prefix, {"duplicates"}, set()),
]


def transactional():
    """Return the same rows, each from a half message that the ledger has decided on."""
    world = World()
    world.copies = [replace(copy, half=f"half {copy.row}") for copy in world.copies]
    world.halves = {copy.half for copy in world.copies}
    world.sent = [Sent("acked", 1) for _ in ROWS]
    return world


def commit_of_failed_attempt(world):
    """Hide the half message that counts, and show the one of an earlier attempt."""
    world.copies[5] = replace(world.copies[5], half="half of an attempt that failed")


def commit_undecided_too(world):
    world.again(3)
    world.copies[-1] = replace(world.copies[-1], half="half of an attempt that failed")


def send_plainly(world):
    world.copies[0] = replace(world.copies[0], half="")


HALF_PLANTED = [
    (lose, {"lost"}),  # A half message stays uncommitted.
    (swap, {"disordered"}),
    (double_unseen, {"duplicates", "unaccounted"}),
    (commit_of_failed_attempt, {"undecided"}),
    (commit_undecided_too, {"duplicates", "unaccounted", "undecided"}),
    (send_plainly, {"undecided"}),
]


def _name(value):
    return str(getattr(value, "__name__", "")) or "+".join(sorted(value)) or "nothing"


@pytest.mark.parametrize(("plant", "strict_once", "unordered"), PLANTED, ids=_name)
def test_the_judge_catches(plant, strict_once, unordered):
    world = World()
    assert world.faults() == set(), "the judge finds fault with what is right"
    plant(world)
    assert world.faults() == strict_once
    assert world.faults("none", "at_least_once") == unordered


@pytest.mark.parametrize(("plant", "found"), HALF_PLANTED, ids=_name)
def test_the_judge_of_half_messages_catches(plant, found):
    world = transactional()
    assert world.faults("strict", "transactional") == set()
    plant(world)
    assert world.faults("strict", "transactional") == found


def test_what_the_ledger_doubts_is_accounted_for():
    for doubt in (Sent("unknown", 2), Sent("in_flight", 2), Epoch("q", True, 0, 0, 2)):
        world = World()
        world.again(1, 2)
        (world.epochs if isinstance(doubt, Epoch) else world.sent).append(doubt)
        assert world.faults("strict", "at_least_once") == set()


@pytest.mark.parametrize(("counted", "found"), [(2, set()), (1, {"unaccounted"})])
def test_a_row_that_three_attempts_sent_is_counted_once(counted, found):
    world = World()
    for _ in range(2):
        world.again(1, 2)
    world.epochs.append(Epoch("q", True, 0, 0, counted))
    assert world.faults("strict", "at_least_once") == found


def test_a_topic_that_is_made_again_begins_with_its_first_offset():
    world = World()
    assert world.copies[3].row == ("a", 3)
    world.copies[3] = replace(world.copies[3], life=1, offset=0)
    assert world.faults() == set()
    world.copies = [replace(copy, life=1 - copy.life) for copy in world.copies]
    assert world.faults() == {"disordered"}


def test_the_chosen_schedules_have_everything():
    assert {schedule.event for schedule in schedules.CI} == set(schedules.EVENTS)
    chosen = (*schedules.CI, *schedules.MOMENTS)
    lanes = {*schedules.STREAMS, *schedules.BATCHES, schedules.BACKFILL}
    assert {schedule.lane for schedule in chosen} == lanes
    assert {schedule.delivery for schedule in schedules.CI} == set(schedules.DELIVERIES)
    moments = {schedule.moment for schedule in schedules.CI}
    assert moments >= {"request", "answered", "spooled", "committed", "ending", "letters"}
    assert moments & set(schedules.FOLDS)
    killed = {schedule.moment for schedule in chosen if schedule.event == "driver_killed"}
    assert {"request", "answered", "spooled", "committed", "letters"} <= killed
    assert killed & set(schedules.FOLDS[:2]) and killed & set(schedules.FOLDS[2:])
    assert len({schedule.name for schedule in chosen}) == len(chosen) == 23


def test_a_drawn_schedule_is_possible_and_its_seeds_own():
    drawn = [schedules.draw(seed) for seed in range(2000)]
    assert drawn == [schedules.draw(seed) for seed in range(2000)]
    assert {schedule.event for schedule in drawn} == set(schedules.EVENTS)
    for schedule in drawn:
        assert schedule.lane in schedules.lanes_of(schedule.event, schedule.moment)
        assert schedule.delivery in schedules.deliveries_of(schedule.lane, schedule.moment)
    halves = {schedule.moment for schedule in drawn if schedule.delivery == "transactional"}
    assert halves >= {"ending", "ended"}
