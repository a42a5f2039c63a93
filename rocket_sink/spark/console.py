"""Log lines about queries and writes, for a user's console. The lines about start and end are shown
even if logging is not set up; in notebooks the counts are a table. A query's counts are those of
the ledger rows that arrived since its start, so a task that ran twice counts twice."""

from __future__ import annotations

import functools
import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from rocket_sink.ledger.path import plain_path
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import DELAY_COLUMNS, ColumnPlan
from rocket_sink.tables import html_table
from rocket_sink.text import clean, counted

LOG: Final = log.logger(__name__)
_WORDS: Final = {
    "acked": "acknowledged", "degraded": "less durable", "unknown": "of unknown outcome",
    "filtered": "filtered",
}  # fmt: skip


def label_of(name: str, query: str) -> str:
    """Return the query on consoles: its `queryName` or `appId` with the start of the id, or the
    id if it has no name."""
    return f"{name} ({query[:8]})" if name and name != query else query


def say_start(options: SinkOptions, lane: str, query: str) -> None:
    log.tell(
        LOG, "the query %s sends to %s by %s, delivery %s, ledger %s", query,
        f"the topic {options.topic}" if options.topic else "the topics of its rows", lane,
        options.delivery, plain_path(options.ledger) or "none",
    )  # fmt: skip


def warn_of_delays(options: SinkOptions, plan: ColumnPlan) -> None:
    """Warn once if ordered rows may have delays, because the order cannot be kept for them."""
    columns = [name for name in DELAY_COLUMNS if plan.source(name) is not None]
    if columns and options.ordering != "none":
        _warn_of_delays(options.ordering, " and ".join(columns))


@functools.cache
def _warn_of_delays(ordering: str, columns: str) -> None:
    LOG.warning(
        "ordering=%s does not hold for rows with a delay (%s): consumers get such a row at its "
        "time, perhaps behind later rows of its key, so it is sent outside of the key's order. See "
        "docs/guarantees/order.md", ordering, columns,
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


def say_repeated(options: SinkOptions) -> None:
    """Log that a batch write repeats a complete one, so that nothing is sent."""
    text = "the batchId %s is complete in the ledger %s: nothing is sent"
    log.tell(LOG, text, options.batch_id, plain_path(options.ledger))


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
