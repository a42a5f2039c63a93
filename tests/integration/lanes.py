"""The lanes behind a common interface, so that each runs the same cases."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocket_sink import RocketSink, register
from rocket_sink.ledger.path import LOG_FOLDER
from tests.ledger.values import leave_to_spark
from tests.spark.streams import run


@dataclass(frozen=True)
class Lane:
    """A lane. `run(spark, source folder, checkpoint folder, options)` sends all source rows."""

    name: str
    run: Callable[[Any, Path, Path, dict[str, Any]], None]
    streams: bool = True


def read(spark, source):
    return spark.read.parquet(str(source))


READING = {}
"""Options of the file source, which processes of harnesses set."""


def read_stream(spark, source):
    reader = spark.readStream.schema(read(spark, source).schema).options(**READING)
    return reader.parquet(str(source))


def stream_writer(lane, frame, options):
    """Return the writer by which this lane sends a stream."""
    if lane.startswith("source"):
        register(frame.sparkSession)
        return frame.writeStream.format("rocketmq").options(**_texts(options))
    sink = RocketSink(**options)
    if lane == "packs":
        return sink.stream(frame)
    if lane == "foreach_batch":
        return frame.writeStream.foreachBatch(sink.write_batch)
    return frame.writeStream.foreach(sink)


def write(lane, frame, options):
    """Send a batch by this lane."""
    if lane == "source_batch":
        register(frame.sparkSession)
        frame.write.format("rocketmq").mode("append").options(**_texts(options)).save()
    else:
        RocketSink(**options).write(frame)


def _texts(options):
    return {name: str(value) for name, value in options.items()}


def _lane(name, *, streams=True):
    def send(spark, source, checkpoint, options):
        if streams:
            run(stream_writer(name, read_stream(spark, source), options), checkpoint)
        else:
            write(name, read(spark, source), options)

    return Lane(name, send, streams)


def _by_spark(lane):
    """Return the lane, with a ledger that only Spark's Delta may commit to."""

    def send(spark, source, checkpoint, options):
        if not Path(options["ledger"], LOG_FOLDER).exists():
            leave_to_spark(spark, options["ledger"])
        lane.run(spark, source, checkpoint, options)

    return Lane(f"{lane.name} by Spark's Delta", send, lane.streams)


LANES = (
    _lane("foreach"), _lane("foreach_batch"), _lane("write", streams=False),
    _lane("source_stream"), _lane("source_batch", streams=False), _lane("packs"),
)  # fmt: skip
BY_SPARK = tuple(map(_by_spark, LANES))
