"""The lanes behind a common interface, so that each runs the same cases."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocket_sink import RocketSink, register
from rocket_sink.ledger.path import LOG_FOLDER
from tests.ledger.values import leave_to_spark
from tests.spark import streams


@dataclass(frozen=True)
class Lane:
    """A lane. `run(spark, source folder, checkpoint folder, options)` sends all source rows."""

    name: str
    run: Callable[[Any, Path, Path, dict[str, Any]], None]
    streams: bool = True


def read(spark, source):
    return spark.read.parquet(str(source))


def read_stream(spark, source):
    return spark.readStream.schema(read(spark, source).schema).parquet(str(source))


def _foreach(spark, source, checkpoint, options):
    streams.run(read_stream(spark, source).writeStream.foreach(RocketSink(**options)), checkpoint)


def _packs(spark, source, checkpoint, options):
    streams.run(RocketSink(**options).stream(read_stream(spark, source)), checkpoint)


def _foreach_batch(spark, source, checkpoint, options):
    sink = RocketSink(**options)
    streams.run(read_stream(spark, source).writeStream.foreachBatch(sink.write_batch), checkpoint)


def _write(spark, source, checkpoint, options):
    RocketSink(**options).write(read(spark, source))


def _texts(options):
    return {name: str(value) for name, value in options.items()}


def _source_stream(spark, source, checkpoint, options):
    register(spark)
    writer = read_stream(spark, source).writeStream.format("rocketmq").options(**_texts(options))
    streams.run(writer, checkpoint)


def _source_batch(spark, source, checkpoint, options):
    register(spark)
    writer = read(spark, source).write.format("rocketmq").mode("append")
    writer.options(**_texts(options)).save()


def _by_spark(lane):
    """Return the lane, with a ledger that only Spark's Delta may commit to."""

    def run(spark, source, checkpoint, options):
        if not Path(options["ledger"], LOG_FOLDER).exists():
            leave_to_spark(spark, options["ledger"])
        lane.run(spark, source, checkpoint, options)

    return Lane(f"{lane.name} by Spark's Delta", run, lane.streams)


LANES = (
    Lane("foreach", _foreach), Lane("foreach_batch", _foreach_batch),
    Lane("write", _write, streams=False), Lane("source_stream", _source_stream),
    Lane("source_batch", _source_batch, streams=False), Lane("packs", _packs),
)  # fmt: skip
BY_SPARK = tuple(map(_by_spark, LANES))
