"""A driver process of the crash harness: runs the queries of some cells side by side.

Arguments: a plan (JSON), see `main`. For each cell a thread runs its lane over its source until it
has ended well; each failure is a line of `errors.jsonl`, after which it waits for `again` when the
plan says so. At the end `done.<role>.json` has what the ledger's views say.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from integration import lanes

from crash.files import WAIT_S, await_file, write_whole
from rocket_sink import Ledger, register
from rocket_sink.ledger.duckdb_reader import open_quick
from rocket_sink.options import SinkOptions
from rocket_sink.spark.backfill.backfill import Backfill
from rocket_sink.spark.backfill.sources import Table
from rocket_sink.spark.session import build_session
from rocket_sink.spark.transactions import TransactionCommitter, check_ended

_LANES = {lane.name: lane for lane in lanes.LANES}
_COUNTS = ("rows_in", "acked", "degraded", "dead", "unknown", "filtered", "duplicates_possible")


def _in_small_epochs(spark: Any, source: Path) -> Any:
    reader = spark.readStream.schema(lanes.read(spark, source).schema)
    return reader.option("maxFilesPerTrigger", 2).parquet(str(source))


lanes.read_stream = _in_small_epochs


def _backfill(spark: Any, source: Path, checkpoint: Path, options: dict[str, Any]) -> None:
    given = SinkOptions.parse(options)
    table = Table(lanes.read(spark, source), str(source), given.with_(order_by="number"))
    work = Backfill(spark, given, source=table)
    selected = work.plan(sample=0).selected
    resent = work.run(selected)
    if resent.settled < selected:
        # Brokers that are out of reach fail no backfill: it says what is left.
        raise RuntimeError(f"{resent.settled} of {selected} rows are sent: {resent}")


def _settled(spark: Any, options: dict[str, Any]) -> bool:
    """Whether a write that died had been decided; `rocket-sink transactions settle` in short.

    One that died after its last commit is decided, too: nothing of it is open, and it is in the
    ledger.
    """
    given = SinkOptions.parse(options)
    quick = open_quick(given.ledger)
    if quick is None:
        return False
    is_in = bool(quick.query("SELECT epoch FROM epochs").num_rows)
    endings = TransactionCommitter(spark, given)
    rows = endings.open_epochs()
    for row in rows:
        check_ended(endings.end(row.query_id, row.epoch, wait_s=WAIT_S))
    return is_in or bool(rows)


def _run(spark: Any, cell: dict[str, Any], folder: Path) -> None:
    if cell["settles"] and _settled(spark, cell["options"]):
        return
    run = _backfill if cell["lane"] == "backfill" else _LANES[cell["lane"]].run
    run(spark, folder / "source", folder / "checkpoint", cell["options"])


def _until_done(spark: Any, cell: dict[str, Any], role: str) -> None:
    folder = Path(cell["folder"])
    errors: list[str] = []
    ended = _tried(spark, cell, role, errors, waits=not cell["staged"])
    if cell["staged"]:
        write_whole(folder / "stage.1", "")
        await_file(folder / "stage.2")
        ended = _tried(spark, cell, role, errors, waits=True)
    ledger = Ledger(cell["options"]["ledger"])
    while ledger.sync(spark).busy:
        pass
    # By DuckDB: as Spark's, the view costs as much as the rest of a cell.
    quick = open_quick(ledger.path)
    rows = quick.query("SELECT * FROM epochs").to_pylist() if quick else []
    assert quick or not ledger.exists()
    epochs = [
        {"query": r["query_id"], "epoch": r["epoch"], "adds_up": r["adds_up"],
         "superseded": r["superseded_rows"], **{name: r[name] for name in _COUNTS}}
        for r in rows
    ]  # fmt: skip
    _report(folder, role, {"ended": ended, "errors": errors, "epochs": epochs})


def _tried(spark: Any, cell: dict[str, Any], role: str, errors: list[str], *, waits: bool) -> bool:
    """Whether the query ended well, at last."""
    folder = Path(cell["folder"])
    for _ in range(cell["tries"]):
        try:
            _run(spark, cell, folder)
            return True
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            write_whole(folder / f"failed.{role}.{len(errors)}", errors[-1])
            if waits and cell["waits_after_failure"]:
                await_file(folder / f"again.{role}.{len(errors)}")
    return False


def _report(folder: Path, role: str, result: dict[str, Any]) -> None:
    write_whole(folder / f"done.{role}.json", json.dumps(result))


def _cell(spark: Any, cell: dict[str, Any], role: str, *, later: bool) -> None:
    # Where Spark looks a data source up, only the thread's own session counts.
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)
    try:
        if later:
            await_file(Path(cell["folder"]) / f"begin.{role}")
        _until_done(spark, cell, role)
    except Exception:
        broken = {"ended": False, "errors": [traceback.format_exc()], "epochs": []}
        _report(Path(cell["folder"]), role, broken)


def _refusals(spark: Any, cell: dict[str, Any]) -> dict[str, str]:
    """What each lane without `allowSpeculation` says to this session; "": it has sent the rows."""
    folder = Path(cell["folder"])
    options = {**cell["options"], "ledger": str(folder / "speculation")}
    del options["allowSpeculation"]
    said = {}
    for lane in (*_LANES, "backfill"):
        run = _backfill if lane == "backfill" else _LANES[lane].run
        try:
            run(spark, folder / "source", folder / "speculation-checkpoint", options)
            said[lane] = ""
        except Exception as error:
            said[lane] = f"{type(error).__name__}: {error}"
    return said


def main(plan: dict[str, Any]) -> None:
    """`plan`: role, master, conf, report (a file for the process's ids), cells, later."""
    spark = build_session("rocket-sink-crash", master=plan["master"], conf=plan["conf"])
    ids = {"driver": os.getpid(), "jvm": spark.sparkContext._gateway.proc.pid}
    speculates = plan["conf"].get("spark.speculation") == "true"
    refusals = _refusals(spark, plan["cells"][0]) if speculates else {}
    write_whole(Path(plan["report"]), json.dumps({**ids, "refusals": refusals}))
    cells = [(cell, False) for cell in plan["cells"]] + [(cell, True) for cell in plan["later"]]
    if any(cell["lane"].startswith("source") for cell, _ in cells):
        register(spark)
        # Once: two threads that register at the same time disturb each other.
        lanes.register = lambda session: None
    threads = [
        threading.Thread(target=_cell, args=(spark, cell, plan["role"]), kwargs={"later": later})
        for cell, later in cells
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Not stopped cleanly, which takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
