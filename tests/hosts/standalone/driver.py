"""A Spark driver on a host: runs lanes over their sources until they have ended well.

Standard input: a plan (JSON): master, host (address of this driver), conf, options, lanes as {name,
folder, topic}, report (a file), tries (of a lane, 6 by default). Each lane has a thread; after a
failure it begins again. At the end the report has for each lane its errors and what the ledger's
views say.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from rocket_sink import Ledger, register
from rocket_sink.spark.session import build_session
from tests.crash.files import write_whole
from tests.integration import lanes

FILES_PER_EPOCH = 4
_TRIES = 6
_COUNTS = ("rows_in", "acked", "degraded", "dead", "unknown", "filtered", "duplicates_possible")


def _in_epochs(spark: Any, source: Path) -> Any:
    reader = spark.readStream.schema(lanes.read(spark, source).schema)
    return reader.option("maxFilesPerTrigger", FILES_PER_EPOCH).parquet(str(source))


lanes.read_stream = _in_epochs


def _run(
    spark: Any, lane: dict[str, Any], plan: dict[str, Any], found: dict[str, dict[str, Any]]
) -> None:
    # Where Spark looks a data source up, only the thread's own session counts.
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)
    run = next(one.run for one in lanes.LANES if one.name == lane["name"])
    folder, errors = Path(lane["folder"]), list[str]()
    # A driver that goes on for a dead one leaves alone what that one has brought to an end.
    mark = folder / "ended"
    ended = mark.exists()
    # The ledger is beside the source: on what all hosts share.
    mine = {**plan["options"], "topic": lane["topic"], "ledger": str(folder / "ledger"),
            "appId": lane["topic"]}  # fmt: skip
    while not ended and len(errors) < plan.get("tries", _TRIES):
        try:
            run(spark, folder / "source", folder / "checkpoint", mine)
            ended = True
            write_whole(mark, "")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:600])
    ledger = Ledger(mine["ledger"])
    while ledger.sync(spark).busy:
        pass
    rows = ledger.epochs(spark).collect() if ledger.exists() else []
    epochs = [
        {"query": row.query_id, "adds_up": row.adds_up, **{name: row[name] for name in _COUNTS}}
        for row in rows
    ]
    found[lane["name"]] = {"ended": ended, "errors": errors, "epochs": epochs}


def main(plan: dict[str, Any]) -> None:
    conf = {"spark.driver.host": plan["host"], "spark.driver.bindAddress": plan["host"]}
    spark = build_session("rocket-sink-hosts", master=plan["master"], conf={**plan["conf"], **conf})
    register(spark)
    # Once: two threads that register at the same time disturb each other.
    lanes.register = lambda session: None
    found: dict[str, dict[str, Any]] = {}
    threads = [
        threading.Thread(target=_run, args=(spark, lane, plan, found)) for lane in plan["lanes"]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    write_whole(Path(plan["report"]), json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(json.load(sys.stdin))
