"""The soak's part of docs/clusters.md."""

from collections import Counter
from pathlib import Path

from tests.hosts import tables

RESULTS = Path("conf/soak.json")

_SECTION = """
## Hours under random faults

Streams of three lanes for {duration}, {rate:.0f} rows/s in all, on hosts of their own; Spark with
two executors and RocketMQ {version} with two brokers. Faults are drawn from a seed, with quiet
between them: brokers killed and frozen, packets dropped, delayed and lost, Python workers,
executors and drivers killed; a driver is started again from its checkpoint. Half way through,
`rocket-sink ledger optimize` and `vacuum` run beside the streams. All that is stored is read by the
official Java client. Made by `python -m tests.soak` (seed {seed}, {ended}).

Faults: {faults}. The lanes were up to date again {back} after a fault's end.

{verdict}

**announced**: rows that the ledger says may be stored twice. Of an epoch that was sent again it
names the places of both copies; **in silence** are copies that it neither names nor announces.

"""
_FLAT = """
Memory, threads and files, sampled every {every:g} s; **first** and **last** are means of the first
and last fifth. Growth is the rise over the run of a line through the lives of a kind's processes,
their first three minutes left out; it may be 15 % of the mean, or a floor. The table's own files
may grow: the ledger keeps all rows, and keeps files that were merged for two days.

"""


def section(results):
    """Return the section as Markdown."""
    faults = Counter(fault["kind"] for fault in results["faults"])
    backs = [fault["back_s"] for fault in results["faults"] if fault["back_s"] is not None]
    head = _SECTION.format(
        duration=_duration(results["elapsed_s"]), rate=results["rate"],
        version=results["version"], seed=results["seed"], ended=results["ended"],
        faults=", ".join(f"{kind} {count}" for kind, count in sorted(faults.items())) or "none",
        back=f"{min(backs):.0f} to {max(backs):.0f} s" if backs else "at once",
        verdict="; ".join(results["broken"]) or "Every promise was held.",
    )  # fmt: skip
    columns = {
        "rows": "rows", "epochs": "epochs", "failures": "streams failed", "lost": "lost",
        "letters": "dead letters", "announced": "announced", "duplicates": "doubled",
        "unaccounted": "in silence", "disordered": "out of order",
        "wrong_epochs": "accounts wrong",
    }  # fmt: skip
    lanes = [
        [
            name, f"{row['delivery']}, order {row['ordering']}",
            *(str(row.get(key, "")) for key in columns),
        ]
        for name, row in results["lanes"].items()
    ]  # fmt: skip
    flat = [
        [row["what"], row["measure"], _number(row["first"]), _number(row["last"]),
         _number(row["growth"]) if row["judged"] else "", _held(row)]
        for row in results["flat"]
    ]  # fmt: skip
    return (
        head
        + tables.lines(["lane", "promise", *columns.values()], lanes)
        + _failures(results["lanes"])
        + _FLAT.format(every=results["sample_s"])
        + tables.lines(["what", "measure", "first", "last", "growth", "flat"], flat)
    )


def _held(row):
    if row["grows"]:
        return "GROWS"
    return "flat" if row["judged"] else "by design" if row["samples"] else "too short"


def _number(value):
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}".removesuffix(".0")


def _failures(lanes):
    """Return the first line of each error that ended a stream."""
    lines = [
        f"- {name}: `{error.splitlines()[0]}`"
        for name, row in lanes.items() for error in row.get("errors", ())
    ]  # fmt: skip
    if not lines:
        return ""
    head = "Streams that failed, which the soak's driver started again from their checkpoints:"
    return "\n".join(["", head, "", *lines, ""])


def _duration(seconds):
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"
