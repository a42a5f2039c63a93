"""Log lines about queries and writes, for a user's console. The lines about start and end are shown
even if logging is not set up; in notebooks the counts are a table. A query's counts are those of
the ledger rows that arrived since its start, so a task that ran twice counts twice."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import pyarrow.compute as pc

from rocket_sink.ledger.append.follower import LedgerFollower
from rocket_sink.ledger.path import LedgerPath, plain_path
from rocket_sink.ledger.schema import EPOCH
from rocket_sink.ledger.transport.files import spooled_epochs, spooled_rows
from rocket_sink.ledger.views import OUTCOMES
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.tables import html_table
from rocket_sink.text import clean, counted

LOG: Final = log.logger(__name__)
_COUNTS: Final = ("rows_in", *OUTCOMES)
_COLUMNS: Final = ("query_id", "run_id", "epoch", "complete", "first_error", *_COUNTS)
_WORDS: Final = {
    "acked": "acknowledged", "degraded": "less durable", "unknown": "of unknown outcome",
    "filtered": "filtered",
}  # fmt: skip


def say_start(options: SinkOptions, lane: str, query: str) -> None:
    log.tell(
        LOG, "the query %s sends to %s by %s, delivery %s, ledger %s", query,
        f"the topic {options.topic}" if options.topic else "the topics of its rows", lane,
        options.delivery, plain_path(options.ledger) or "none",
    )  # fmt: skip


def say_end(what: str, counts: Mapping[str, Any], ledger: str, more: str = "") -> None:
    """Log the row counts of a query or write that ended."""
    shown = [f"{counted(counts['rows_in'], 'row')} in"]
    shown += [f"{counts[name]:,} {word}" for name, word in _WORDS.items() if counts[name]]
    shown += [counted(counts["dead"], "dead letter")] if counts["dead"] else []
    ledger = plain_path(ledger) or "none"
    cells = [text.partition(" ")[::-2] for text in shown]
    log.tell(
        LOG, "%s ended: %s%s; ledger %s", what, ", ".join(shown), more, ledger,
        html=html_table(f"{what} ended{more}", [*cells, ("ledger", ledger)]),
    )  # fmt: skip


def say_no_rows(query: str, ledger: str, *, is_early: bool) -> None:
    """Log the end of a query without rows; with `is_early` warn that no epoch was done."""
    if not is_early:
        say_end(f"the query {query}", Counter(), ledger)
        return
    LOG.warning(
        "the query %s ended before its first epoch was done: the ledger %s has no row of this run. "
        "Call query.awaitTermination() before the end of the script", query, plain_path(ledger),
    )  # fmt: skip


def warn_of_losses(what: str, counts: Mapping[str, Any], ledger: str) -> None:
    if lost := counts["dead"] + counts["unknown"]:
        LOG.warning(
            "%s of %s were not delivered: %s, %d of unknown outcome%s. See: rocket-sink ledger "
            "show dead-letters --ledger %s",
            f"{lost:,} of {counts['rows_in']:,} rows", what,
            counted(counts["dead"], "dead letter"), counts["unknown"],
            f", the first for: {error}" if (error := counts["first_error"]) else "",
            shlex.quote(clean(plain_path(ledger))),
        )  # fmt: skip


class Accounts:
    """Row counts by query run, of the rows that a ledger's table got since this object was made."""

    def __init__(self, place: LedgerPath) -> None:
        self._place = place
        self._sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._follower = LedgerFollower(place, {EPOCH: _COLUMNS}, skips_gone=True)

    def read(self, runs: Mapping[str, str], *, is_last: bool = False) -> None:
        """Add the table's new rows, with `is_last` also the spool's. Warn of undelivered rows of
        `runs` ({run: query}). Raise OSError or ValueError if the table cannot be read."""
        epochs: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        errors: dict[tuple[str, int], str] = {}
        parts = [rows for _, rows in self._follower.new_rows()]
        if is_last:
            rows = spooled_rows(self._place.spools).filter(pc.field("kind") == EPOCH)
            parts.append(rows.select(_COLUMNS))
        for rows in parts:
            for row in rows.filter(pc.field("complete")).to_pylist():
                run, key = row["run_id"], (row["run_id"], row["epoch"])
                counts = {name: row[name] or 0 for name in _COUNTS}
                self._sums[run].update(counts)
                epochs[key].update(counts)
                errors[key] = errors.get(key) or row["first_error"] or ""
        for (run, epoch), sums in epochs.items():
            if run in runs:
                facts = {**sums, "first_error": errors[run, epoch]}
                warn_of_losses(f"epoch {epoch} of the query {runs[run]}", facts, self._place.uri)

    def say_end(self, run: str, query: str, *, is_cut: bool) -> Counter[str]:
        """Log and return the row counts of a run. The run has ended, or, if `is_cut`, the program's
        end cuts it off. Log nothing if the ledger has no rows of the run."""
        counts = self._sums.pop(run, Counter())
        if counts["rows_in"]:
            waits = spooled_epochs(self._place)
            more = "; the last epochs wait for `rocket-sink ledger fold`" if waits else ""
            more += "; a start with the same checkpoint goes on from here" if is_cut else ""
            say_end(f"the query {query}", counts, self._place.uri, more)
        return counts
