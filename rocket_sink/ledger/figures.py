"""The values of a report; `rocket_sink.ledger.report` reads them from a ledger."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Scope:
    """Which rows a report is of; None: all. `query_id` may be the beginning of an id, as reports
    show it. `since` is included, `until` is not."""

    query_id: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None


@dataclass(frozen=True)
class BrokerFigures:
    """The send attempts to one broker. `messages` and `body_bytes` are what it stored (a failed
    attempt's messages are those of its retry, too). Latencies are from the last byte to the answer,
    in ms, of answered attempts; None when there were none. `last_at` is when the last attempt
    began: a broker that left the route gets none any more. `broker` is "-" for what reached no
    broker."""

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

    @property
    def degraded(self) -> int:
        """Attempts whose messages are stored, but less durably than asked for."""
        return self.outcomes.get("acked_degraded", 0)

    @property
    def not_acked(self) -> int:
        """Attempts without an acknowledgement, degraded or not."""
        return self.requests - self.outcomes.get("acked", 0) - self.degraded


@dataclass(frozen=True)
class EpochFigures:
    """One epoch of one query; see `Ledger.epochs`."""

    query_id: str
    epoch: int
    at: dt.datetime
    rows_in: int
    acked: int
    degraded: int
    dead: int
    unknown: int
    filtered: int
    duplicates_possible: int
    superseded_attempts: int
    superseded_rows: int
    adds_up: bool
    confirmed: bool
    missing_rows: int = 0


@dataclass(frozen=True)
class Totals:
    """Sums over all epochs within the scope."""

    epochs: int = 0
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
    not_adding_up: int = 0
    unconfirmed: int = 0


@dataclass(frozen=True)
class IsolationFigures:
    """One isolation; the same one noted by several workers is there once, with their number."""

    broker: str
    topic: str | None
    cause: str
    latency_ms: float
    start: dt.datetime
    length_ms: float
    reachable: bool | None
    workers: int


@dataclass(frozen=True)
class DeadLetterFigures:
    """The dead letters of one reason and error; `pending` of them wait to be sent again."""

    reason: str
    error_code: str
    letters: int
    pending: int
    example: str


@dataclass(frozen=True)
class ErrorFigures:
    """Attempts that failed alike; `messages` counts those of a request once, however often it
    was tried. `example` is one of the remarks."""

    error_code: str
    response_code: int | None
    brokers: int
    attempts: int
    messages: int
    first_at: dt.datetime
    last_at: dt.datetime
    example: str


@dataclass(frozen=True)
class Report:
    """All figures; the lists of epochs and isolations hold the last ones.

    `unfolded_epochs` have rows that are not in the figures yet (read without Spark nothing is
    folded). `quarantined_files` were damaged, and their rows are in no figure.

    `as_dict` is for JSON; rich consoles and notebooks show the tables of `ledger.render`.
    """

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
    quarantined_files: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values; times as ISO 8601 text in UTC."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    def __rich__(self) -> RenderableType:
        from rocket_sink.ledger.render import render_report

        return render_report(self)

    def _repr_html_(self) -> str:
        from rocket_sink.ledger.render import to_html

        return to_html(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, dt.datetime) else value
