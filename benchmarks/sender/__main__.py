"""Our producer as a separate process, with the arguments of the Java sender.

    python -m benchmarks.sender nameServer=... topic=... mode=sync messages=100000

Modes: sync, hash (a sharding key per message), async, autobatch, nothing (asynchronous, but each
message has its result at once and is not sent), batch; arrow (rows of a record batch through the
task body of the Spark lanes, without Spark); replay (frames encoded beforehand: the brokers'
ceiling). Others: messages or seconds, size, threads, inflight, batch, warmup, keys, ordering, delay
(a level), rows (arrow: rows of a record batch), ledger=yes (arrow: ledger rows go to a spool),
numbers=FILE (acknowledged messages and possible duplicates). It prints READY after the warm-up,
continues when it reads a line (or the end of its input), then prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.sender.arrow import send_arrow, send_tables
from benchmarks.sender.modes import MODES, Job
from benchmarks.sender.replay import replay
from benchmarks.sender.tally import Tally

ALL_MODES: Final = {**MODES, "arrow": send_arrow, "table": send_tables, "replay": replay}
_FOREVER: Final = 1 << 62


def main(arguments: list[str]) -> None:
    """Warm up, say so, send, print the figures."""
    options = dict(argument.split("=", 1) for argument in arguments)
    job, tally = _job(options)
    sending = ALL_MODES[options["mode"]](job)
    with sending as send:
        warm_up = int(options.get("warmup", "0"))
        if warm_up:
            send(range(-warm_up, 0), None)
        print("READY", flush=True)  # noqa: T201
        sys.stdin.readline()
        tally.restart(time.monotonic())
        cpu_s, began_s = time.process_time(), time.monotonic()
        seconds = float(options.get("seconds", "0"))
        until_s = began_s + seconds if seconds else None
        send(range(_FOREVER if seconds else int(options.get("messages", "10000"))), until_s)
        took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    figures = {"seconds": took_s, "cpu_s": cpu_s}
    if options.get("numbers"):
        _write_numbers(Path(options["numbers"]), tally)
    print(json.dumps({**tally.as_dict(), **figures}), flush=True)  # noqa: T201


def _job(given: dict[str, str]) -> tuple[Job, Tally]:
    tally = Tally(time.monotonic(), keep=bool(given.get("numbers")))
    options: dict[str, Any] = {"nameServer": given["nameServer"], "producerGroup": "benchmark"}
    return Job(
        given["topic"],
        options,
        tally,
        size=int(given.get("size", "256")),
        threads=int(given.get("threads", "1")),
        inflight=int(given.get("inflight", "400")),
        batch=int(given.get("batch", "1000")),
        keys=int(given.get("keys", "0")),
        ordering=given.get("ordering", "none"),
        rows=int(given.get("rows", "0")),
        ledger=given.get("ledger") == "yes",
        delay=int(given.get("delay", "0")),
    ), tally


def _write_numbers(path: Path, tally: Tally) -> None:
    path.write_text("".join(_lines("acked", tally.acked)) + "".join(
        _lines("announced", tally.announced)))  # fmt: skip


def _lines(kind: str, numbers: list[int]) -> Iterator[str]:
    return (f"{kind} {number}\n" for number in numbers)


if __name__ == "__main__":
    main(sys.argv[1:])
