"""The death of a process at a step of its work, as tests play it."""

from collections import Counter


class Killed(BaseException):
    """The process dies as if by SIGKILL: no handler sees it."""


FOLD_STEPS = [
    ("locked", 1), ("listed", 1), ("manifest", 1), ("append", 1), ("appended", 1),
    ("delete", 1), ("delete", 2), ("deleted", 1), ("finished", 1),
]  # fmt: skip
"""The steps of a fold of two files, each with its number."""


def kill_at(wanted, times=1):
    """Return a function of steps that raises Killed at a step's `times`th time."""
    counts = Counter()

    def on_step(step):
        counts[step] += 1
        if step == wanted and counts[step] == times:
            raise Killed(step)

    return on_step
