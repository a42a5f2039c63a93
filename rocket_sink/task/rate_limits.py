"""How the limits per second of a write are divided: evenly over the tasks that run at once.

    a task's limit = maxMessagesPerSecond / rateTasks (bytes alike)

`rateTasks` not given is the number of task slots that Spark has when the write starts, which is
what its barrier stages go by. So the limits are never passed, and a write with fewer tasks than
slots stays below them: give `rateTasks` for it, and also where executors come and go (dynamic
allocation, where it must be the most slots there will be) or where no slots can be seen (Spark
Connect).
"""

from __future__ import annotations

from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.limits import per_task_rate


def by_the_second(options: SinkOptions) -> SinkOptions:
    """Batch requests that hold no more than a task may send in a second."""
    if not is_limited(options):
        return options
    changes = {}
    if options.max_messages_per_second:
        most = max(1, int(per_task_rate(options.max_messages_per_second, options)))
        changes["requestMaxMessages"] = min(options.request_max_messages, most)
    if options.max_bytes_per_second:
        largest = max(1024, int(per_task_rate(options.max_bytes_per_second, options)))
        changes["requestMaxBytes"] = min(options.request_max_bytes, largest)
    return options.with_(**changes)


def is_limited(options: SinkOptions) -> bool:
    """A limit per second is set."""
    return bool(options.max_messages_per_second or options.max_bytes_per_second)
