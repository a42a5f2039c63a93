"""The ledger, read from its files (Delta's log and Parquet) without Spark and the product."""

import json
from urllib.parse import unquote

import pyarrow.parquet as pq

from .judge import Accounts, Epoch, Sent

_ATTEMPT = ("query_id", "run_id", "epoch", "partition", "task_attempt_id", "worker", "request")
_SENT = (*_ATTEMPT, "outcome", "broker_address", "queue_id", "queue_offset", "message_count")


def accounts(ledger, epochs):
    """Return the accounts of a query; `epochs` are rows of the view, which a driver has read."""
    by_epoch = [Epoch.of(row) for row in epochs]
    return Accounts(sent(ledger), letters(ledger), by_epoch, halves(ledger))


def rows_of(ledger, kind, columns):
    """Return the rows of files in the log; files that a killed writer left are not in the log."""
    rows = []
    for name in _files(ledger):
        if name.startswith(f"kind={kind}/"):
            rows += pq.ParquetFile(ledger / name).read(columns=list(columns)).to_pylist()
    return rows


def _files(ledger):
    files = set()
    for commit in sorted((ledger / "_delta_log").glob("*.json")):
        for action in map(json.loads, commit.read_text().splitlines()):
            if "add" in action:
                files.add(unquote(action["add"]["path"]))
            if "remove" in action:
                files.discard(unquote(action["remove"]["path"]))
    return files


def sent(ledger):
    """Return the requests. The row before the answer does not count for an answered request."""
    rows = rows_of(ledger, "send", _SENT)
    answered = {_request(row) for row in rows if row["outcome"] != "in_flight"}
    rows = [row for row in rows if row["outcome"] != "in_flight" or _request(row) not in answered]
    return [_sent(row) for row in rows]


def _request(row):
    return tuple(row[name] for name in _ATTEMPT)


def _sent(row):
    stored = row["outcome"] in ("acked", "acked_degraded") and row["queue_offset"] is not None
    queue = (row["broker_address"], row["queue_id"]) if stored else None
    return Sent(row["outcome"], row["message_count"], queue, row["queue_offset"] if stored else -1)


def halves(ledger):
    """Return brokers' ids of the half messages of counted requests; one text holds a group's."""
    rows = rows_of(ledger, "send", ("half", "outcome", "offset_message_id", "half_messages"))
    stored = [row for row in rows if row["half"] and row["outcome"].startswith("acked")]
    singles = {row["offset_message_id"] for row in stored}
    groups = [row["half_messages"] for row in stored if row["half_messages"]]
    return singles | {half.split(":")[0] for group in groups for half in group.split("\x02")}


def letters(ledger):
    """Return the rows that are dead letters."""
    return {row_of(row["body"]) for row in rows_of(ledger, "dead_letter", ("body",))}


def row_of(body):
    key, _, number = body.decode().partition(":")
    return key, int(number)
