"""Run by `test_spark_only.py` in a process of its own: a ledger in a store that pyarrow lacks.

Arguments: name server, folder. A view of Hadoop's gives local files the scheme `oss`. Prints a
JSON line: {what was tried: "" or its error}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rocket_sink import Ledger
from rocket_sink.options import SinkOptions
from rocket_sink.spark.backfill import Backfill
from rocket_sink.spark.session import build_session
from tests.integration.lanes import LANES

_VIEWS = "org.apache.hadoop.fs.viewfs"
_VIEWED = "spark.hadoop.fs.viewfs"


def main(name_server: str, folder: Path) -> None:
    ledger = "oss://bucket/data/ledger"
    spark = build_session(
        "rocket-sink-spark-only",
        master="local[2]",
        conf={
            "spark.hadoop.fs.oss.impl": f"{_VIEWS}.ViewFileSystemOverloadScheme",
            f"{_VIEWED}.overload.scheme.target.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
            f"{_VIEWED}.mounttable.bucket.link./data": f"file://{folder}",
            "spark.delta.logStore.oss.impl": "io.delta.storage.LocalLogStore",
        },
    )
    source = folder / "source"
    source.mkdir()
    bodies = [None if number % 4 == 0 else str(number) for number in range(100)]
    keys = [f"k{number}" for number in range(100)]
    pq.write_table(pa.table({"body": bodies, "sharding_key": keys}), source / "rows.parquet")
    lanes, found = {lane.name: lane for lane in LANES}, {}

    def attempt(what: str, lane: str, **more: Any) -> None:
        options = {"nameServer": name_server, "topic": what, "ledger": ledger,
                   "sendMsgTimeout": 60_000, **more}  # fmt: skip
        found[what] = ""
        try:
            if lane == "backfill":
                with Backfill(spark, SinkOptions.parse(options)) as work:
                    work.plan()
            else:
                lanes[lane].run(spark, source, folder / f"checkpoint-{what}", options)
        except Exception as error:
            found[what] = str(error)

    for lane in (*lanes, "backfill"):
        attempt(lane, lane)
    attempt("strict", "foreach_batch", ordering="strict")
    attempt("strict-write", "write", ordering="strict")
    attempt("hold", "write", ordering="best_effort", onPendingKey="hold")
    attempt("once", "foreach_batch", delivery="effectively_once")
    attempt("named", "foreach_batch", appId="a")
    try:
        Ledger(ledger).sync(spark)
        found["dead"] = str(Ledger(ledger).dead_letters(spark).count())
    except Exception as error:
        found["dead"] = str(error)
    print(json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
