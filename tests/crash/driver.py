"""A driver process of a harness, which runs the queries of some cells side by side.

The argument is a file with a plan (JSON), see `main`. A thread per cell runs its lane over its
source until the query ends well. Each failure has a file `failed.<role>.<number>`, after which the
thread waits for `again` if the plan says so. At the end the thread writes the errors and the
ledger's view of epochs to `done.<role>.json`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from pathlib import Path

from rocket_sink import Ledger, register
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.duckdb_reader import reader_of
from rocket_sink.ledger.views import rows_of
from rocket_sink.options import SinkOptions
from rocket_sink.spark.backfill.backfill import Backfill
from rocket_sink.spark.backfill.sources import Table
from rocket_sink.spark.session import build_session
from rocket_sink.spark.transactions import TransactionCommitter, check_ended
from tests.crash.files import WAIT_S, await_file, write_whole
from tests.crash.judge import EPOCH_COLUMNS
from tests.integration import lanes
from tests.ledger.values import leave_to_spark


def _backfill(spark, source, checkpoint, options):
    sink_options = SinkOptions.parse(options)
    table = Table(lanes.read(spark, source), str(source), sink_options.with_(order_by="number"))
    work = Backfill(spark, sink_options, source=table)
    selected = work.plan(sample=0).selected
    resent = work.run(selected)
    if resent.settled < selected:
        # A backfill does not fail if brokers are out of reach; it reports the rows that remain.
        raise RuntimeError(f"{resent.settled} of {selected} rows are sent: {resent}")


_TRIES = 6
_RUNS = {**{lane.name: lane.run for lane in lanes.LANES}, "backfill": _backfill}


def _settled(spark, options):
    """Settle a write that died, as `rocket-sink transactions settle` does.

    Return whether the write had been decided. A write that died after its last commit is decided,
    too: no transaction of it is open, and the ledger has it.
    """
    sink_options = SinkOptions.parse(options)
    if not _epochs(spark, sink_options.ledger):
        return False
    endings = TransactionCommitter(spark, sink_options)
    for row in endings.open_epochs():
        check_ended(endings.end(row.query_id, row.epoch, wait_s=WAIT_S))
    return True


def _epochs(spark, ledger):
    # DuckDB reads the view: Spark would take as long for it as for the rest of a cell.
    read = reader_of(spark, resolve_path(ledger))
    return rows_of(read("SELECT * FROM epochs")) if read is not None else []


def _run(spark, cell, folder):
    if cell.get("settles") and _settled(spark, cell["options"]):
        return
    _RUNS[cell["lane"]](spark, folder / "source", folder / "checkpoint", cell["options"])


def _until_done(spark, cell, role):
    folder = Path(cell["folder"])
    errors = []
    ledger = Ledger(cell["options"]["ledger"])
    if cell.get("committer") == "spark" and not ledger.exists():
        leave_to_spark(spark, ledger.path)
    staged = cell.get("staged")
    has_ended = _tried(spark, cell, role, errors, waits=not staged)
    if staged:
        write_whole(folder / "stage.1", "")
        await_file(folder / "stage.2")
        has_ended = _tried(spark, cell, role, errors, waits=True)
    ledger.sync_fully(spark)
    columns = (*EPOCH_COLUMNS, "epoch", "superseded_rows")
    epochs = [{name: row[name] for name in columns} for row in _epochs(spark, ledger.path)]
    _report(folder, role, {"ended": has_ended, "errors": errors, "epochs": epochs})


def _tried(spark, cell, role, errors, *, waits):
    """Run the query until it ends, and return whether it ended well."""
    folder = Path(cell["folder"])
    for _ in range(cell.get("tries", _TRIES)):
        try:
            _run(spark, cell, folder)
            return True
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            write_whole(folder / f"failed.{role}.{len(errors)}", errors[-1])
            if waits and cell.get("waits_after_failure"):
                await_file(folder / f"again.{role}.{len(errors)}")
    return False


def _report(folder, role, result):
    write_whole(folder / f"done.{role}.json", json.dumps(result))


def _cell(spark, cell, role, *, later):
    # Spark looks a data source up in the thread's own session only.
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)
    try:
        if later:
            await_file(Path(cell["folder"]) / f"begin.{role}")
        _until_done(spark, cell, role)
    except Exception:
        broken = {"ended": False, "errors": [traceback.format_exc()], "epochs": []}
        _report(Path(cell["folder"]), role, broken)


def _refusals(spark, cell):
    """Return the error of each lane without `allowSpeculation`; "" if the lane sent the rows."""
    folder = Path(cell["folder"])
    options = {**cell["options"], "ledger": str(folder / "speculation")}
    del options["allowSpeculation"]
    messages = {}
    for lane in _RUNS:
        try:
            _RUNS[lane](spark, folder / "source", folder / "speculation-checkpoint", options)
            messages[lane] = ""
        except Exception as error:
            messages[lane] = f"{type(error).__name__}: {error}"
    return messages


def main(plan):
    """Run a plan.

    Args:
        plan: role, master, conf, files (of an epoch), report (a file for the process's ids), and
            cells; cells of `later` begin at their file `begin.<role>`. With `refuses` the lanes
            are tried without `allowSpeculation` first.
    """
    lanes.READING["maxFilesPerTrigger"] = plan["files"]
    spark = build_session("rocket-sink-tests", master=plan["master"], conf=plan["conf"])
    ids = {"driver": os.getpid(), "jvm": spark.sparkContext._gateway.proc.pid}
    refusals = _refusals(spark, plan["cells"][0]) if plan.get("refuses") else {}
    write_whole(Path(plan["report"]), json.dumps({**ids, "refusals": refusals}))
    later = plan.get("later", ())
    cells = [(cell, False) for cell in plan["cells"]] + [(cell, True) for cell in later]
    if any(cell["lane"].startswith("source") for cell, _ in cells):
        register(spark)
        # Register once: two threads that register at the same time disturb each other.
        lanes.register = lambda session: None
    threads = [
        threading.Thread(target=_cell, args=(spark, cell, plan["role"]), kwargs={"later": later})
        for cell, later in cells
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A clean stop would take seconds.
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
