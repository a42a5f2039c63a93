"""The death of a process at a step of its work, as tests play it."""

from collections import Counter


class Killed(BaseException):
    """The process dies as if by SIGKILL: no handler sees it."""


def kill_at(wanted, times=1):
    """Return a function of steps that raises Killed at a step's `times`th time."""
    counts = Counter()

    def on_step(step):
        counts[step] += 1
        if step == wanted and counts[step] == times:
            raise Killed(step)

    return on_step
