"""The soak's part of docs/clusters.md."""

import json
from collections import Counter
from pathlib import Path

from tests.hosts import tables

RESULTS = Path("conf/soak.json")
PAGE = Path("docs/clusters.md")

_HEAD = """{duration}, {rate:.0f} rows/s in all, RocketMQ {version}, seed {seed}, {ended}.
Faults: {faults}.
The lanes were up to date again {back} after a fault's end. {verdict}

"""


def write_page():
    """Write the part of the page from the stored results, without a run."""
    tables.write_parts(PAGE, {"soak": section(json.loads(RESULTS.read_text()))})


def section(results):
    """Return the results as Markdown."""
    faults = Counter(fault["kind"] for fault in results["faults"])
    backs = [fault["back_s"] for fault in results["faults"] if fault["back_s"] is not None]
    head = _HEAD.format(
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
        + f"\nMemory, threads and files, sampled every {results['sample_s']:g} s:\n\n"
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
