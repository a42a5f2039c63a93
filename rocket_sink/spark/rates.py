"""How the limits per second of a write are divided: evenly over the tasks that run at once.

    a task's limit = maxMessagesPerSecond / rateTasks (bytes alike)

`rateTasks` not given is the number of task slots that Spark has when the write starts, which is
what its barrier stages go by. So the limits are never passed, and a write with fewer tasks than
slots stays below them: give `rateTasks` for it, and also where executors come and go (dynamic
allocation, where it must be the most slots there will be) or where no slots can be seen (Spark
Connect).
"""

from __future__ import annotations

from typing import Any

from rocket_sink.errors import OptionError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.pace import share
from rocket_sink.spark.host import active_session, is_classic


def divided(
    options: SinkOptions, session: Any = None, *, slots: int | None = None, tasks: int | None = None
) -> SinkOptions:
    """The options with `rateTasks` set where a limit needs it; called on the driver.

    Args:
        slots: task slots, where somebody has counted them; None: those of the session.
        tasks: how many tasks the write has, where that is known.

    Raises:
        OptionError: a limit without `rateTasks`, and no slots can be seen.
    """
    if not is_limited(options) or options.rate_tasks:
        return options
    slots = task_slots(session or active_session()) if slots is None else slots
    if not slots:
        raise OptionError(
            "options maxMessagesPerSecond and maxBytesPerSecond are divided over the tasks that "
            "run at once, and Spark's task slots cannot be seen from here: set rateTasks to their "
            "number",
            option="rateTasks",
        )
    return options.with_(rateTasks=min(slots, max(1, tasks)) if tasks is not None else slots)


def task_slots(session: Any) -> int:
    """Tasks that the session's application runs at once; 0: cannot be seen from here."""
    if not is_classic(session):
        return 0
    context = session.sparkContext
    scala = context._jsc.sc()
    try:
        profile = scala.resourceProfileManager().defaultResourceProfile()
        slots = int(scala.maxNumConcurrentTasks(profile))
    except Exception:
        # Not a public method: without it, the public number that comes closest.
        slots = 0
    return max(1, slots or context.defaultParallelism)


def by_the_second(options: SinkOptions) -> SinkOptions:
    """Batch requests that hold no more than a task may send in a second."""
    if not is_limited(options):
        return options
    changes = {}
    if options.max_messages_per_second:
        most = max(1, int(share(options.max_messages_per_second, options)))
        changes["requestMaxMessages"] = min(options.request_max_messages, most)
    if options.max_bytes_per_second:
        largest = max(1024, int(share(options.max_bytes_per_second, options)))
        changes["requestMaxBytes"] = min(options.request_max_bytes, largest)
    return options.with_(**changes)


def is_limited(options: SinkOptions) -> bool:
    """A limit per second is set."""
    return bool(options.max_messages_per_second or options.max_bytes_per_second)
