"""A Spark driver that reads a topic as a stream, to Parquet. Tests kill it.

The argument is a plan (JSON): folder, read (options of readStream), last. With `last` the query
ends when it has read everything, and the rows of the Parquet files go to one file more, `rows`,
because files of killed epochs are not part of them."""

import json
import sys
from pathlib import Path

from rocket_sink import register
from rocket_sink.spark.session import build_session
from tests.jvms import SMALL_PLANS


def main(plan):
    spark = build_session(master="local[2]", conf=SMALL_PLANS)
    register(spark)
    folder = Path(plan["folder"])
    rows = spark.readStream.format("rocketmq").options(**plan["read"]).load()
    rows = rows.select("broker_name", "queue_id", "queue_offset")
    writer = rows.writeStream.format("parquet").option("path", str(folder / "out"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    if plan["last"]:
        writer = writer.trigger(availableNow=True)
    writer.start().awaitTermination()
    if plan["last"]:
        spark.read.parquet(str(folder / "out")).coalesce(1).write.parquet(str(folder / "rows"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
