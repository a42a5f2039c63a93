"""Streams of Spark lanes on a host, one case after the other in one session.

The process reads a JSON line per command and answers with a line. `begin` {nameServer, topic,
folder, lanes, options} starts a stream per lane, whose rows come in at a steady rate. `end` waits
until all rows are sent, and returns the ledger's records of each lane. Row N of lane L has the key
L.N.
"""

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rocket_sink import Ledger
from rocket_sink.spark.session import build_session
from tests.integration import lanes
from tests.jvms import SMALL_PLANS

LANES = ("foreach", "source")
_RATE = (40, 0.5)
"""The rows of a file, and the seconds between two files."""
_STRICT_RATE = (120, 1.5)
"""Rate in strict order: an epoch is one file, so its tasks do not wait for each other."""
_CONF = {
    **SMALL_PLANS, "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN", "spark.driver.memory": "1g",
}  # fmt: skip


class Stream:
    """The stream of a lane in a case."""

    def __init__(self, spark, lane, plan):
        folder = Path(plan["folder"], lane)
        self._source, self._ledger, self.lane = folder / "source", folder / "ledger", lane
        self._source.mkdir(parents=True)
        self._spark = spark
        self._strict = plan["options"].get("ordering") == "strict"
        self._rows, self._period_s = _STRICT_RATE if self._strict else _RATE
        self.written = 0
        self.errors = []
        self._write()
        options = {
            "nameServer": plan["nameServer"], "topic": plan["topic"],
            "ledger": str(self._ledger), "foldIntervalMs": 5000, **plan["options"],
        }  # fmt: skip
        lanes.READING = {"maxFilesPerTrigger": 1} if self._strict else {}
        rows = lanes.read_stream(spark, self._source)
        writer = lanes.stream_writer(lane, rows, options)
        self._query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _write(self):
        numbers = range(self.written, self.written + self._rows)
        columns = {
            "body": [b"x" * 300] * self._rows,
            "keys": [f"{self.lane}.{number}" for number in numbers],
        }
        if self._strict:
            columns["sharding_key"] = [f"k{number % 8}" for number in numbers]
        part = self._source / f".{self.written}.part"
        pq.write_table(pa.table(columns), part)
        part.rename(self._source / f"{self.written:08d}.parquet")
        self.written += self._rows

    def _feed(self):
        while not self._stop.wait(self._period_s):
            self._write()

    @property
    def sends(self):
        """Return whether an epoch has ended."""
        return self._query.lastProgress is not None or self._query.exception() is not None

    def stop(self):
        self._stop.set()
        self._thread.join()

    def finish(self, ended_ms):
        try:
            self._query.processAllAvailable()
            self._query.stop()
        except Exception as error:
            self.errors.append(str(error)[:500])
        ledger = Ledger(self._ledger)
        ledger.sync_fully(self._spark)
        rows = [row.asDict() for row in ledger.epochs(self._spark).collect()]
        degraded = sum(row["degraded"] for row in rows)
        if degraded:
            report = ledger.report(self._spark)
            reported = (report.totals.degraded, any(broker.degraded for broker in report.brokers))
            if reported != (degraded, True):
                self.errors.append(f"{degraded} rows are degraded, the report says {reported}")
        letters = ledger.dead_letters(self._spark, pending=False)
        outcomes = [
            (row["keys"][0], row["outcome"], row["last_error_code"])
            for row in letters.select("keys", "outcome", "last_error_code").collect()
        ]
        return {
            "written": self.written, "errors": self.errors, "ended_ms": ended_ms,
            "letters": [(key, outcome) for key, outcome, _ in outcomes],
            "causes": Counter(code for _, _, code in outcomes),
            "possible": sum(row["duplicates_possible"] for row in rows),
            "degraded": degraded,
            "accounted": all(row["adds_up"] for row in rows)
            and sum(row["rows_in"] for row in rows) == self.written,
        }  # fmt: skip


def main():
    spark = build_session("rocket-sink-hosts", master="local[2]", conf=_CONF)
    print(json.dumps("ready"), flush=True)
    streams = []
    for line in sys.stdin:
        plan = json.loads(line)
        if plan["do"] == "begin":
            streams = [Stream(spark, lane, plan) for lane in plan["lanes"]]
            while not all(stream.sends for stream in streams):
                time.sleep(0.1)
            answer = "begun"
        else:
            for stream in streams:
                stream.stop()
            ended_ms = time.time_ns() // 1_000_000
            answer = {stream.lane: stream.finish(ended_ms) for stream in streams}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
