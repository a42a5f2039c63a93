"""The part of docs/clusters.md about standalone clusters, made from the results."""

import json
from pathlib import Path

from tests.hosts import tables
from tests.hosts.standalone.play import CASES

RESULTS = Path("conf/standalone.json")
PAGE = Path("docs/clusters.md")

COLUMNS = {
    "rows": "rows", "repeated": "tasks sent again", "repeated_elsewhere": "on the other host",
    "lost": "lost", "announced": "announced", "duplicates": "doubled",
    "unaccounted": "in silence", "disordered": "out of order", "wrong_epochs": "accounts wrong",
}  # fmt: skip


def write_page():
    """Write the tables of the page from the stored results, without a run."""
    by_name = {case["name"]: case for case in json.loads(RESULTS.read_text())["cases"]}
    rows = []
    for case in (by_name[case.name] for case in CASES if case.name in by_name):
        lanes = case["rows"]
        broken = [f"{lane}: {text}" for lane, row in lanes.items() for text in row["broken"]]
        totals = [str(sum(row[name] for row in lanes.values())) for name in COLUMNS]
        rows.append([
            case["title"], f"{case['delivery']}, order {case['ordering']}",
            "; ".join(broken) or "held", str(case["executors"]), *totals,
        ])  # fmt: skip
    head = ["case", "promise", "held", "executors", *COLUMNS.values()]
    parts = {"standalone": tables.lines(head, rows)}
    if shipped := by_name.get("ship"):
        parts["ship"] = tables.lines(
            ["way", "lane", "rows", "stored", "hosts that sent", "held"],
            [
                [row["way"], row["lane"], *(str(row[name]) for name in ("rows", "stored", "hosts")),
                 "; ".join(row["broken"]) or "held"]
                for row in list(shipped["rows"].values())[1:]
            ],
        )  # fmt: skip
    if canary := by_name.get("canary"):
        searched = "{files} files, {megabytes} MB: {held}.\n"
        parts["canary"] = searched.format(**canary["rows"]["all lanes"])
    tables.write_parts(PAGE, parts)
