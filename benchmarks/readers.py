"""Readers of a topic: Spark's batch and stream, the same tasks without Spark, Java's pull consumer.

    python -m benchmarks.readers nameServer=... topic=... messages=...

runs the tasks of a batch read in a process of its own, as a sender of `benchmarks.processes`. This
process and Java's consumer read all messages once to be warm, because after a short warm-up Java's
compiler is at work in the measured run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.figures import Case, Figures
from benchmarks.lanes.runs import SparkBench, run_batch, run_stream, spark_figures
from benchmarks.processes import Launcher, ProcessRun, Starter, python_path
from rocket_sink.errors import RocketSinkError
from rocket_sink.spark.reading.batch import MessageReader
from rocket_sink.spark.reading.options import ReadOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

GROUP: Final = "Readers"
COMPRESSED_BYTES: Final = 16 * 1024


@dataclass(frozen=True)
class Topic:
    """A topic of equal messages. `mode`: how `benchmarks.sender` sends them; the asynchronous mode
    compresses bodies of `COMPRESSED_BYTES`."""

    body_bytes: int
    mode: str
    messages: int

    @property
    def name(self) -> str:
        return f"read-{self.body_bytes}"

    def case(self, reader: str, *against: str) -> Case:
        beside = tuple(self.title(name) for name in against)
        return Case(self.title(reader), GROUP, beside, body_bytes=self.body_bytes)

    def title(self, reader: str) -> str:
        compressed = " compressed" if self.mode == "async" else ""
        return f"{reader} {self.body_bytes} B{compressed}"


def topics(rows: int) -> list[Topic]:
    """Return the topics to read: fewer messages of larger bodies."""
    return [
        Topic(256, "table", rows),
        Topic(4096, "table", rows // 4),
        Topic(COMPRESSED_BYTES, "async", rows // 20),
    ]


JAVA: Final = "Java pull"
TASKS: Final = "tasks of read"
NOTHING: Final = "read-nothing"
BATCH: Final = "read"
STREAM: Final = "readStream"


def process_subjects(
    topic: Topic, starters: dict[str, Starter], name_server: str, brokers_s: Callable[[], float]
) -> Iterator[ProcessRun]:
    """Yield the readers without Spark. `starters`: {JAVA or TASKS: how to start it}."""
    for reader, against in ((JAVA, ()), (TASKS, (JAVA,))):
        if reader in starters:
            yield ProcessRun(
                topic.case(reader, *against), starters[reader],
                {"nameServer": name_server, "topic": topic.name}, messages=topic.messages,
                brokers_s=brokers_s, count=None,
            )  # fmt: skip


def spark_subjects(topic: Topic, bench: SparkBench) -> Iterator[SparkRead]:
    """Yield a source that does nothing, the batch reader and the stream reader."""
    from benchmarks.lanes.twins import FORMAT, NothingSource
    from rocket_sink.spark.datasource import register

    spark = bench.spark
    register(spark)
    spark.dataSource.register(NothingSource)
    options = {"nameServer": bench.brokers.name_server, "topic": topic.name}
    options["startingOffsets"] = "earliest"
    sizes = {"rows": topic.messages, "bytes": topic.body_bytes}
    frames: dict[str, Callable[[], DataFrame]] = {
        NOTHING: lambda: spark.read.format(FORMAT).options(**sizes).load(),
        BATCH: lambda: spark.read.format("rocketmq").options(**options).load(),
        STREAM: lambda: spark.readStream.format("rocketmq").options(**options).load(),
    }
    for reader, frame in frames.items():
        against = () if reader == NOTHING else (NOTHING, JAVA)
        yield SparkRead(bench, topic.case(reader, *against), topic.messages, frame)


class SparkRead:
    """A `Subject`: all columns of a frame go to a sink of Spark's that does nothing."""

    def __init__(
        self, bench: SparkBench, case: Case, messages: int, frame: Callable[[], DataFrame]
    ) -> None:
        self._bench = bench
        self._case = case
        self._messages = messages
        self._frame = frame

    @property
    def case(self) -> Case:
        return self._case

    def warm_up(self) -> None:
        self.run()

    def run(self) -> Figures:
        """Raise a RocketSinkError if messages are missing, or read twice."""
        frame, meter = self._frame(), self._bench.meter()
        if frame.isStreaming:
            writer = frame.writeStream.format("noop")
            rows, seconds, cost = run_stream(meter, writer, self._bench.scratch("checkpoint"))
            if rows != self._messages:
                raise RocketSinkError(f"{self._case.name}: {rows} of {self._messages} messages")
        else:
            write = frame.write.format("noop").mode("append")
            rows, seconds, cost = run_batch(meter, write.save, self._messages)
        return spark_figures(self._case.name, rows, seconds, cost)


def fill(topic: Topic, sender: Launcher, name_server: str) -> None:
    """Send the topic's messages. Raise a RocketSinkError if one is not stored."""
    arguments = {
        "nameServer": name_server, "topic": topic.name, "mode": topic.mode, "batch": 4000,
        "messages": topic.messages, "size": topic.body_bytes,
    }  # fmt: skip
    printed = sender.run(arguments, lambda: 0.0).printed
    if printed["ok"] != topic.messages:
        raise RocketSinkError(f"{topic.name}: {printed['ok']} of {topic.messages} are stored")


def task_launcher() -> Launcher:
    """The tasks of a batch read, in one process."""
    command = (sys.executable, "-m", "benchmarks.readers")
    return Launcher(command, {**os.environ, "PYTHONPATH": python_path()})


def _read(reader: MessageReader, most: int) -> int:
    rows: int = 0
    for part in reader.partitions():
        for batch in reader.read(part):
            rows += batch.num_rows
            if rows >= most:
                return rows
    return rows


def main(arguments: list[str]) -> None:
    """Warm up, say so, read, print the figures."""
    options = dict(argument.split("=", 1) for argument in arguments)
    place = {name: options[name] for name in ("nameServer", "topic")}
    reader = MessageReader(*ReadOptions.parse(place))
    messages = int(options["messages"])
    _read(reader, messages)
    print("READY", flush=True)  # noqa: T201
    sys.stdin.readline()
    cpu_s, began_s = time.process_time(), time.monotonic()
    rows = _read(reader, messages)
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    figures = {"ok": rows, "failed": 0, "seconds": took_s, "cpu_s": cpu_s}
    print(json.dumps(figures), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
