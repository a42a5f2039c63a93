"""The part of docs/clusters.md about standalone clusters, made from the results."""

from pathlib import Path

from tests.hosts import tables
from tests.hosts.standalone.play import CASES

RESULTS = Path("conf/standalone.json")

COLUMNS = {
    "rows": "rows", "repeated": "tasks sent again", "repeated_elsewhere": "on the other host",
    "lost": "lost", "announced": "announced", "duplicates": "doubled",
    "unaccounted": "in silence", "disordered": "out of order", "wrong_epochs": "accounts wrong",
}  # fmt: skip


def section(results):
    """Return the part of docs/clusters.md."""
    rows = []
    by_name = {case["name"]: case for case in results["cases"]}
    for case in (by_name[case.name] for case in CASES if case.name in by_name):
        lanes = case["rows"]
        broken = [f"{lane}: {text}" for lane, row in lanes.items() for text in row["broken"]]
        totals = [str(sum(row[name] for row in lanes.values())) for name in COLUMNS]
        rows.append([
            case["title"], f"{case['delivery']}, order {case['ordering']}",
            "; ".join(broken) or "held", str(case["executors"]), *totals,
        ])  # fmt: skip
    head = ["case", "promise", "held", "executors", *COLUMNS.values()]
    text = _SECTION + tables.lines(head, rows)
    if shipped := by_name.get("ship"):
        text += _SHIP + tables.lines(
            ["way", "lane", "rows", "stored", "hosts that sent", "held"],
            [
                [row["way"], row["lane"], *(str(row[name]) for name in ("rows", "stored", "hosts")),
                 "; ".join(row["broken"]) or "held"]
                for row in list(shipped["rows"].values())[1:]
            ],
        )  # fmt: skip
    if canary := by_name.get("canary"):
        text += _CANARY.format(**canary["rows"]["all lanes"]) + "\n"
    return text


_SECTION = """
## Spark on several hosts

A standalone master, two workers, drivers and two brokers, each on a host with a disk of its own;
sources, checkpoints and, but for one case, ledgers on a folder that all share. The lanes foreach,
foreachBatch, `sink.write` and `format("rocketmq")` as stream and as batch run side by side, in
client deploy mode: Spark refuses cluster deploy mode for Python on standalone clusters. The case
with ledgers on the driver's own disk has foreach and the data source. Faults come again until they
have met each lane in the middle of its rows. Figures are of all lanes; what is stored is what the
official Java client reads. Order is counted whether or not it was promised. Made by
`python -m tests.hosts.standalone`.

- **executors**: how many the workers have started. **tasks sent again**: tasks that were run more
  than once; **on the other host**: of which the ledger has rows of both hosts.
- **announced**, **doubled**, **in silence**: as in [bad networks](networks.md).

"""
_SHIP = """
### The package on executors that lack it

`jobs/stream.py` under spark-submit, as [Executors](deploy/executors.md) has it; Spark's processes
on the workers find nothing of rocket-sink but what the way brings. Without any of the ways the job
fails with `No module named 'rocket_sink'`.

"""
_CANARY = """
### Secrets

Brokers ask for credentials, and all lanes get an access key and a secret key as plain options, once
the right ones and once wrong ones, so that errors are written, too. Afterwards everything that the
master, the workers, the executors and the driver have left on any host is searched for the keys: as
they are, in UTF-16, hexadecimal and Base64, in archives and in Parquet. {files} files, {megabytes}
MB: {held}.
"""
