"""Parts of queries over a ledger, in SQL that Spark and DuckDB both know, and percentiles."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocket_sink.errors import LedgerError
from rocket_sink.ledger import views
from rocket_sink.text import clean

Query = Callable[[str], pa.Table]
"""A function that runs a query over the views of one ledger."""

REQUESTS: Final = views.REQUESTS
STORED: Final = "outcome IN ('acked', 'acked_degraded')"
BROKER: Final = "coalesce(nullif(broker_name, ''), '-')"
_CLASSES: Final = 100
"""Number of histogram classes between x and e * x: each class is 1 % wide."""
_LEAST_MS: Final = 0.001
_IDS_SHOWN: Final = 5
GROUP_SHARES: Final = (("rtt_p50_ms", 0.5), ("rtt_p95_ms", 0.45), ("rtt_p99_ms", 0.04),
                        ("rtt_ms", 0.01))  # fmt: skip
"""(column, share of a group's messages whose latency the column stands for)."""


@dataclass(frozen=True)
class Scope:
    """The selection of rows for a report; None selects all. `query_id` may be the beginning of an
    id. `since` is included, `until` is not."""

    query_id: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None


class Scoped:
    """Runs queries; `where` is the condition that a row is in the scope."""

    def __init__(self, query: Query, scope: Scope) -> None:
        self._query = query
        conditions = ["true"]
        if scope.query_id is not None:
            conditions.append(is_text("query_id", scope.query_id))
        if scope.since is not None:
            conditions.append(f"at >= {timestamp(scope.since)}")
        if scope.until is not None:
            conditions.append(f"at < {timestamp(scope.until)}")
        self.where = " AND ".join(conditions)

    def __call__(self, select: str) -> list[dict[str, Any]]:
        return views.rows_of(self._query(select))

    def table(self, select: str) -> pa.Table:
        """Return the result of a query as a table."""
        return self._query(select)


def is_text(column: str, text: str) -> str:
    """Return the condition that a column, or a term, is this text. A text with special characters
    is compared in hexadecimal digits."""
    if re.fullmatch(r"[\w.-]+", text, re.ASCII):
        return f"{column} = '{text}'"
    return f"hex({column}) = '{text.encode().hex().upper()}'"


def with_full_id(scope: Scope, query: Query, path: str) -> Scope:
    """Return the scope with the full id of the query whose id begins with its `query_id`. Raise
    LedgerError if no query has such an id, or if several have."""
    start = scope.query_id
    if start is None:
        return scope
    begins = is_text(f"substr(query_id, 1, {len(start)})", start)
    rows = query(f"SELECT DISTINCT query_id FROM ledger_rows WHERE {begins}")  # noqa: S608
    ids = sorted(rows.column("query_id").to_pylist())
    if start in ids or len(ids) == 1:
        return replace(scope, query_id=start if start in ids else ids[0])
    if ids:
        shown = ", ".join(clean(query_id, 60) for query_id in ids[:_IDS_SHOWN])
        raise LedgerError(
            f"{len(ids)} queries of the ledger have ids that begin with {start!r}: {shown}"
            f"{', ...' if len(ids) > _IDS_SHOWN else ''}; give more of the id",
            path=path,
        )
    raise LedgerError(
        f"the ledger {path} has no rows of a query {start!r}; `rocket-sink ledger show epochs "
        "--json` lists whole ids",
        path=path,
    )


def micros(moment: dt.datetime) -> int:
    """Return microseconds since 1970."""
    return (moment - dt.datetime.fromtimestamp(0, dt.timezone.utc)) // dt.timedelta(microseconds=1)


def timestamp(moment: dt.datetime) -> str:
    return f"timestamp_micros({micros(moment)})"


def latencies(where: str, *columns: str) -> str:
    """Return a query for a table (columns, ms, weight) of the latencies of answers."""
    names = ", ".join(columns)
    rows = f"FROM answered WHERE response_code IS NOT NULL AND {where}"
    parts = [f"SELECT {names}, rtt_ms AS ms, CAST(1 AS DOUBLE) AS weight {rows} AND frames IS NULL"]
    parts += [
        f"SELECT {names}, coalesce({column}, rtt_ms) AS ms, frames * {share} AS weight "
        f"{rows} AND frames IS NOT NULL"
        for column, share in GROUP_SHARES
    ]
    return " UNION ALL ".join(parts)


def class_of(column: str) -> str:
    """Return the SQL term for the class of a latency in ms."""
    return f"CAST(floor(ln(greatest({column}, {_LEAST_MS})) * {_CLASSES}) AS INT)"


def latency_class(ms: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the classes of latencies, as `class_of` does in SQL."""
    classes: npt.NDArray[Any] = np.floor(np.log(np.maximum(ms, _LEAST_MS)) * _CLASSES).astype(int)
    return classes


def middle_ms(class_: int) -> float:
    """Return the latency in the middle of a class."""
    return math.exp((class_ + 0.5) / _CLASSES)


def percentile(
    counts: Sequence[tuple[int, float]], share: float, longest: float | None = None
) -> float | None:
    """Return the latency (ms) that a share of the answers did not exceed; None without answers.

    Args:
        counts: (class, weight), sorted by class.
        longest: the longest latency of all answers.
    """
    remaining = share * sum(weight for _, weight in counts) * (1 - 1e-9)
    for class_, weight in counts:
        remaining -= weight
        if remaining <= 0:
            middle = round(middle_ms(class_), 4)
            return middle if longest is None else min(middle, longest)
    return None
