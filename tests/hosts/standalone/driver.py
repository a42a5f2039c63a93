"""A Spark driver on a host, which runs lanes over their sources until they have ended well.

Standard input is a plan (JSON): master, host (address of this driver), conf, options, lanes as
{name, folder, topic, ledger}, report (a file), tries (of a lane, 6 by default). Each lane has a
thread that begins again after a failure. At the end the report has the errors and the ledger's
views of each lane.
"""

import json
import sys
import threading
from pathlib import Path

from rocket_sink import Ledger, register
from rocket_sink.spark.session import build_session
from tests.crash.files import write_whole
from tests.crash.judge import EPOCH_COLUMNS
from tests.integration import lanes
from tests.ledger.views import view_rows

FILES_PER_EPOCH = 4
_TRIES = 6


def _in_epochs(spark, source):
    reader = spark.readStream.schema(lanes.read(spark, source).schema)
    return reader.option("maxFilesPerTrigger", FILES_PER_EPOCH).parquet(str(source))


lanes.read_stream = _in_epochs


def _run(spark, lane, plan, found):
    # Spark looks a data source up in the thread's own session only.
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)
    run = next(known_lane.run for known_lane in lanes.LANES if known_lane.name == lane["name"])
    folder, errors = Path(lane["folder"]), list[str]()
    # A driver that goes on for a dead one skips the lanes that the dead driver has ended.
    mark = folder / "ended"
    has_ended = mark.exists()
    options = {**plan["options"], "topic": lane["topic"], "ledger": lane["ledger"]}
    if options.get("ledgerVia") != "spark":  # Tasks keep notes of an `appId` in the ledger.
        options["appId"] = lane["topic"]
    while not has_ended and len(errors) < plan.get("tries", _TRIES):
        try:
            run(spark, folder / "source", folder / "checkpoint", options)
            has_ended = True
            write_whole(mark, "")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:600])
    ledger = Ledger(options["ledger"])
    while ledger.sync(spark).busy:
        pass
    # Spark would read the ledger on the executors, which may not see it.
    rows = view_rows(options["ledger"], "SELECT * FROM epochs") if ledger.exists() else []
    epochs = [{name: getattr(row, name) for name in EPOCH_COLUMNS} for row in rows]
    found[lane["name"]] = {"ended": has_ended, "errors": errors, "epochs": epochs}


def main(plan):
    conf = {"spark.driver.host": plan["host"], "spark.driver.bindAddress": plan["host"]}
    spark = build_session("rocket-sink-hosts", master=plan["master"], conf={**plan["conf"], **conf})
    register(spark)
    # Register once: two threads that register at the same time disturb each other.
    lanes.register = lambda session: None
    found = {}
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
