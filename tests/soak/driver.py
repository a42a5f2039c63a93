"""The Spark driver of a soak: a stream for each lane, started again after each failure.

The argument is a plan (JSON): folder, master, host, conf, trigger, options, lanes as {name, topic,
options}. The driver writes `status.json` every few seconds. When the file `end` appears, it ends
the streams and writes the ledgers' epochs to `done.json`.
"""

import json
import os
import sys
import time
from pathlib import Path

from rocket_sink import Ledger, register
from rocket_sink.spark.session import build_session
from tests.crash.files import write_whole
from tests.crash.judge import EPOCH_COLUMNS
from tests.integration import lanes
from tests.ledger.views import quick_ledger
from tests.soak.feed import TOGETHER

_LOOK_S = 1.0
_HEAP_EVERY = 20


class Lane:
    """A stream that is kept running."""

    def __init__(self, spark, plan, lane):
        self.name = lane["name"]
        self._spark, self._trigger = spark, plan["trigger"]
        self._folder = Path(plan["folder"], self.name)
        self._options = {
            **plan["options"], **lane["options"], "topic": lane["topic"],
            "ledger": str(self._folder / "ledger"),
        }  # fmt: skip
        self.errors = []
        self.query = self._start()

    def _start(self):
        rows = lanes.read_stream(self._spark, self._folder / "source")
        writer = lanes.stream_writer(self.name, rows, self._options)
        writer = writer.option("checkpointLocation", str(self._folder / "checkpoint"))
        return writer.trigger(processingTime=self._trigger).start()

    def look(self):
        """Start the stream again if it has failed."""
        if self.query is not None and self.query.isActive:
            return
        if self.query is not None:
            self.errors.append(str(self.query.exception())[:800])
        try:
            self.query = self._start()
        except Exception as error:
            self.query = None
            self.errors.append(f"{type(error).__name__}: {error}"[:800])

    def end(self):
        """Stop the stream and return its epochs."""
        if self.query is not None:
            self.query.stop()
        ledger = Ledger(self._options["ledger"])
        ledger.sync_fully(self._spark)
        select = f"SELECT {', '.join(EPOCH_COLUMNS)} FROM epochs"
        return quick_ledger(ledger.path).query(select).to_pylist()


def live_heap(spark):
    """Return the bytes of the JVM's heap in use after a collection."""
    runtime = spark._jvm.java.lang.Runtime.getRuntime()
    runtime.gc()
    return int(runtime.totalMemory() - runtime.freeMemory())


def main(plan):
    conf = {"spark.driver.host": plan["host"], "spark.driver.bindAddress": plan["host"]}
    spark = build_session("rocket-sink-soak", master=plan["master"], conf={**plan["conf"], **conf})
    register(spark, ledger=str(Path(plan["folder"], "source", "ledger")))
    lanes.register = lambda session: None
    lanes.READING["maxFilesPerTrigger"] = TOGETHER
    streams = [Lane(spark, plan, lane) for lane in plan["lanes"]]
    folder, parent, looks, heap = Path(plan["folder"]), os.getppid(), 0, 0
    while not (folder / "end").exists():
        time.sleep(_LOOK_S)
        if os.getppid() != parent:
            os._exit(1)
        for stream in streams:
            stream.look()
        if looks % _HEAP_EVERY == 0:
            heap = live_heap(spark)
        looks += 1
        status = {"pid": os.getpid(), "jvm": spark.sparkContext._gateway.proc.pid, "heap": heap,
                  "errors": {stream.name: stream.errors for stream in streams}}  # fmt: skip
        write_whole(folder / "status.json", json.dumps(status))
    write_whole(folder / "done.json", json.dumps({stream.name: stream.end() for stream in streams}))
    # A clean stop would take seconds.
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
