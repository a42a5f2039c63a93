"""The figures of a report: plain values, read from a ledger by `ledger.report.queries`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rocket_sink.ledger.query.consumption import Consumption
from rocket_sink.ledger.report.series import Series
from rocket_sink.ledger.sql import Scope
from rocket_sink.ledger.tune.suggest import Tuning


@dataclass(frozen=True)
class BrokerFigures:
    """The send attempts to one broker; the broker "-" stands for attempts that reached no broker.

    `messages` and `body_bytes` count stored messages. Latencies (ms) are from a request's last byte
    to its answer; they are None without answers. Percentiles come from a histogram with classes of
    1 %, so they are off by 0.5 % at most. `last_at` and `last_stored_at` are the starts of the last
    attempt and of the last stored one; the broker may have left the route since."""

    broker: str
    requests: int
    messages: int
    body_bytes: int
    retries: int
    outcomes: dict[str, int]
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    wait_p99_ms: float | None
    last_at: dt.datetime
    last_stored_at: dt.datetime | None = None
    p999_ms: float | None = None

    @property
    def degraded(self) -> int:
        """Attempts whose messages are stored, but less durably than asked for."""
        return self.outcomes.get("acked_degraded", 0)

    @property
    def not_acked(self) -> int:
        """Attempts with neither a full nor a degraded acknowledgement."""
        return self.requests - self.outcomes.get("acked", 0) - self.degraded


@dataclass(frozen=True, kw_only=True)
class RowSums:
    """Columns of the view `epochs` that are summed over epochs; see `Ledger.epochs`."""

    rows_in: int = 0
    acked: int = 0
    degraded: int = 0
    dead: int = 0
    unknown: int = 0
    filtered: int = 0
    duplicates_possible: int = 0
    superseded_attempts: int = 0
    superseded_rows: int = 0
    missing_rows: int = 0


@dataclass(frozen=True)
class EpochFigures(RowSums):
    """An epoch of a query."""

    query_id: str
    epoch: int
    at: dt.datetime
    adds_up: bool
    confirmed: bool


@dataclass(frozen=True)
class Totals(RowSums):
    """Sums over all epochs within the scope."""

    epochs: int = 0
    not_adding_up: int = 0
    unconfirmed: int = 0
    unfinished: int = 0
    """Epochs whose tasks failed or were cut off, and have not run again; no row is missing."""
    failed_sends: int = 0
    """Sends of a `TableProducer` that ended with an error to their callers."""


@dataclass(frozen=True)
class IsolationFigures:
    """An isolation of a broker; `workers` counts the workers that noted it."""

    broker: str
    topic: str | None
    cause: str
    latency_ms: float
    start: dt.datetime
    length_ms: float
    reachable: bool | None
    workers: int


@dataclass(frozen=True)
class IsolationSums:
    """The isolations of one broker, from folded and unfolded rows. Overlapping isolations count as
    one in `times`; `length_ms` is the time that all of them cover."""

    broker: str
    times: int
    length_ms: float
    first_start: dt.datetime
    last_start: dt.datetime
    last_end: dt.datetime
    cause: str


@dataclass(frozen=True)
class DeadLetterFigures:
    """The dead letters of one reason and error. `pending` letters wait for a backfill, the oldest
    one since `oldest`. `resolved` letters were stored by a backfill, or put aside. All others
    belong to task attempts that do not count."""

    reason: str
    error_code: str
    letters: int
    pending: int
    example: str
    resolved: int = 0
    oldest: dt.datetime | None = None


@dataclass(frozen=True)
class ErrorFigures:
    """Attempts that failed with one error. `messages` counts the messages of a request once, even
    if the request failed several times. `example` is the remark of one attempt."""

    error_code: str
    response_code: int | None
    brokers: int
    attempts: int
    messages: int
    first_at: dt.datetime
    last_at: dt.datetime
    example: str


@dataclass(frozen=True)
class Cause:
    """A failure that still holds: since `last_at`, the broker has stored nothing of the topic. An
    empty `broker` stands for attempts that reached none. `remark` is the last one."""

    error_code: str
    topic: str
    broker: str
    attempts: int
    last_at: dt.datetime
    remark: str


@dataclass(frozen=True)
class Absence:
    """An outage of a broker, from folded and unfolded rows. The first and the last attempt failed
    at `since` and `last_failed_at`. The broker stored a message again at `back_at`; None: not yet.
    `stored_elsewhere` counts requests that other brokers stored meanwhile. `cause` is the most
    frequent error code."""

    broker: str
    since: dt.datetime
    last_failed_at: dt.datetime
    back_at: dt.datetime | None
    stored_elsewhere: int
    left_route: bool
    cause: str


@dataclass(frozen=True)
class WaitFigures:
    """Pending dead letters with a sharding key; later rows of the keys wait, too. `broker` is the
    broker that did not take the letters, if it is recorded. `forbidden` counts rows of topics that
    the account may not write to."""

    broker: str | None
    rows: int
    keys: int
    oldest: dt.datetime
    forbidden: int = 0


@dataclass(frozen=True)
class ResentFigures:
    """Dead letters that a backfill has stored. `late_rows` of `late_keys` have a sharding key, and
    their query had stored a later epoch before the backfill."""

    rows: int = 0
    late_rows: int = 0
    late_keys: int = 0


@dataclass(frozen=True)
class Successor:
    """A streaming query without `appId` that began a topic from epoch 0 after another query had
    stopped writing to it. Both may be one query whose checkpoint was deleted."""

    query_id: str
    earlier: str
    topic: str
    began: dt.datetime


@dataclass(frozen=True)
class Finding:
    """A statement of the report's verdict, with the name of its rule. `level` is "problem",
    "warning", "note" or "well". `next` is the command or action that mends the fault, if any."""

    name: str
    level: str
    text: str
    next: str = ""

    def __str__(self) -> str:
        return f"{self.text}; next: {self.next}" if self.next else self.text


def plain(value: Any) -> Any:
    """Return a value for JSON: times as ISO 8601 text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.isoformat() if isinstance(value, dt.datetime) else value


@dataclass(frozen=True)
class Figures:
    """The figures of a report. The lists of epochs and isolations have only the last ones.

    `unfolded_epochs` counts epochs with rows that are not in the figures yet, because a reader
    without Spark does not fold, and `unfolded_letters` the dead letters among these rows. Only
    `causes`, `absences`, `isolated` and `last_at` include them.
    `quarantined_files` are damaged, and their rows are in no figure."""

    ledger: str
    scope: Scope
    totals: Totals
    brokers: list[BrokerFigures] = field(default_factory=list)
    epochs: list[EpochFigures] = field(default_factory=list)
    isolations: list[IsolationFigures] = field(default_factory=list)
    isolation_count: int = 0
    dead_letters: list[DeadLetterFigures] = field(default_factory=list)
    errors: list[ErrorFigures] = field(default_factory=list)
    unfolded_epochs: int = 0
    unfolded_letters: int = 0
    quarantined_files: int = 0
    causes: list[Cause] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    waiting: list[WaitFigures] = field(default_factory=list)
    resent: ResentFigures = ResentFigures()
    successors: list[Successor] = field(default_factory=list)
    isolated: list[IsolationSums] = field(default_factory=list)
    last_at: dt.datetime | None = None
    """Start of the last attempt at any broker, folded or not."""
    series: Series | None = None
    """The figures of the page's charts, on request."""
    tuning: Tuning | None = None
    """The sends under other settings, on request."""
    consumption: Consumption | None = None
    """The progress of a consumer group, on request."""

    @property
    def in_flight(self) -> int:
        """Requests of task attempts that died before an answer."""
        return sum(broker.outcomes.get("in_flight", 0) for broker in self.brokers)


class Column(NamedTuple):
    """A column of a report's table. `value` is an attribute of the rows, or a function of a row.
    Kinds: n number, t time, x long text, q id of a query, f flag that should be true. Narrow
    consoles leave out a column that `is_wide`."""

    name: str
    value: str | Callable[[Any], Any]
    kind: str = ""
    is_wide: bool = False

    def of(self, row: Any) -> Any:
        return getattr(row, self.value) if isinstance(self.value, str) else self.value(row)


class Table(NamedTuple):
    """A table of a report, for consoles, notebooks and the page, where `name` is part of its id.
    The sentence `empty` stands for a table without rows."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    empty: str = ""
