"""The files that a message and a row pass, of docs/architecture.md, as they run.

    python docs/ways.py             how many, and which

From the call of `Producer.send`, on an open connection with a known route, to its result; and from
a row that Spark's foreach gives to a task until the answer for it is accounted for. Both against a
scripted cluster. What a timer happens to do meanwhile belongs to neither, so each is counted more
than once, and the shortest way is shown.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from pyspark.sql import Row

import rocket_sink
from rocket_sink import Message, Producer, RocketSink
from rocket_sink.testing import FakeCluster

PACKAGE = Path(rocket_sink.__file__).parent
ROWS = 20_000
"""Several batches of rows, so that requests go out and answers come in."""
PATIENT = {"sendMsgTimeout": "5m", "deliveryTimeoutMs": "10m"}
"""The cluster is in this process, and waits while its functions are counted."""


_called: set[str] = set()
"""The files whose functions were called by the threads that `_note` watches."""


def _note(frame: FrameType, event: str, _: Any) -> None:
    if event == "call":
        _called.add(frame.f_code.co_filename)


def passed(action: Callable[[], Any]) -> set[str]:
    """Return the files of the package whose functions are called in `action`, by this thread or by
    threads that were started under `threading.setprofile(_note)`."""
    _called.clear()
    before = sys.getprofile()
    sys.setprofile(_note)
    try:
        action()
    finally:
        sys.setprofile(before)
    files = (Path(name) for name in _called.copy())
    return {str(one.relative_to(PACKAGE)) for one in files if one.is_relative_to(PACKAGE)}


def shortest(ways: Iterable[set[str]]) -> set[str]:
    """Of those that go out and back; another thread may have read the answer."""
    both = {"wire/send_header.py", "wire/responses.py"}
    return min((way for way in ways if both <= way), key=len)


def of_a_message() -> set[str]:
    """From `Producer.send` to its result."""
    with (
        FakeCluster() as cluster,
        Producer(nameServer=cluster.name_server, **PATIENT) as producer,
    ):
        message = Message("t", b"body", tags="tag", keys="key")
        threading.setprofile(_note)  # Watch the producer's thread, which starts now.
        producer.send(message)
        threading.setprofile(None)  # type: ignore[arg-type]
        return shortest(passed(lambda: producer.send(message)) for _ in range(10))


def of_a_row() -> set[str]:
    """From `RocketSink.process` to the accounts, in a task that has sent before."""
    with FakeCluster() as cluster:
        # all in this thread: none that sends what has waited
        sink = RocketSink(
            nameServer=cluster.name_server, topic="t", gatherMaxDelayMs=0, **PATIENT
        )  # fmt: skip
        sink.open(0, 0)
        rows = [Row(body=f"row {number}") for number in range(ROWS)]

        def process() -> None:
            for row in rows:
                sink.process(row)

        process()
        ways = [passed(process) for _ in range(8)]
        sink.close(None)
    return shortest(ways)


def main() -> None:
    for name, files in (("Producer.send", of_a_message()), ("a row of foreach", of_a_row())):
        lines = [f"{name}: {len(files)} files", *(f"  {file}" for file in sorted(files))]
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
