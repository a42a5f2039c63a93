"""Sums of the rows that come into a ledger, for a terminal that shows a run, and for metrics.

`LiveFigures` sums messages and failures, and tracks isolated brokers. `observe` makes OpenTelemetry
metrics of the sums, for the ledgers that this driver folds. The rows are read when an OpenTelemetry
SDK collects the metrics, so never without an SDK. The metrics cover the tasks of all hosts, and are
as old as the last fold (`foldIntervalMs`)."""

from __future__ import annotations

import bisect
import datetime as dt
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.errors import Outcome
from rocket_sink.forks import ForkLock
from rocket_sink.ledger.append.follower import LedgerFollower
from rocket_sink.ledger.path import LedgerPath, first_line
from rocket_sink.ledger.query.duckdb_reader import reader_of
from rocket_sink.ledger.schema import DEAD_LETTER, EPOCH, IN_FLIGHT, ISOLATION, RESOLUTION, SEND
from rocket_sink.ledger.sql import GROUP_SHARES, Query, latency_class, middle_ms
from rocket_sink.ledger.storage import active_session
from rocket_sink.ledger.views import OUTCOMES
from rocket_sink.net import log

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

_LOG: Final = log.logger(__name__)


_COLUMNS: Final = {
    SEND: (
        "run_id", "broker_name", "outcome", "error_code", "attempt", "frames", "message_count",
        "body_bytes", "wire_bytes", "response_code", "rtt_ms", "rtt_p50_ms", "rtt_p95_ms",
        "rtt_p99_ms",
    ),
    ISOLATION: ("run_id", "broker_name", "cause", "isolated_until"),
    EPOCH: ("run_id", *OUTCOMES, "duplicates_possible"),
    DEAD_LETTER: ("run_id",),
    RESOLUTION: ("run_id",),
}  # fmt: skip
_NO_BROKER: Final = "-"
_STORED: Final = (Outcome.ACKED.value, Outcome.ACKED_DEGRADED.value)
_MOST_OFTEN_S: Final = 1.0
"""Shortest time between two readings; metrics that are collected together share one."""

BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, math.inf
)  # fmt: skip
"""The upper bounds of the buckets of `rocket_sink.send.duration.bucket`."""


class Standing(NamedTuple):
    """Figures that need a query over the whole ledger, because new rows alone do not tell them:
    pending dead letters by reason, and the sum of the view `superseded`."""

    pending: Mapping[str, int]
    superseded_rows: int


@dataclass
class BrokerSums:
    """The sums of one broker's new rows. The broker `-` stands for attempts that reached no
    broker."""

    messages: int = 0
    body_bytes: int = 0
    requests: int = 0
    retries: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    isolations: Counter[str] = field(default_factory=Counter)
    isolated_until: dt.datetime | None = None
    cause: str = ""
    durations: Counter[float] = field(default_factory=Counter)
    """{upper bound of a bucket (s): number of answers in this bucket alone}."""

    def is_isolated(self) -> bool:
        until = self.isolated_until
        return until is not None and until > dt.datetime.now(dt.timezone.utc)


class LiveFigures:
    """The sums of the rows that a ledger got since this object was made. Several threads may read
    them. Set `run_id` to leave out the rows of other runs and queries. The function `standing`
    queries the views; it is called when new rows may have changed the result. If it is None, the
    attribute `standing` stays empty."""

    def __init__(self, place: LedgerPath, standing: Callable[[], Standing] | None = None) -> None:
        self.place = place
        self.run_id: str | None = None
        self.rows: Counter[str] = Counter()
        """{outcome: rows of ended task attempts}. The rows of a task that ran again count again."""
        self.duplicates_possible = 0
        self.brokers: dict[str, BrokerSums] = {}
        self.standing = Standing({}, 0)
        self._ask = standing
        self._is_old = standing is not None
        self._follower = LedgerFollower(place, _COLUMNS, skips_gone=True)
        self._lock = ForkLock()
        self._read_s = -_MOST_OFTEN_S

    def reach(self, place: LedgerPath) -> None:
        """Read by the store's keys of a new session from now on."""
        self._follower.reach(place)

    def refresh(self) -> bool:
        """Add the rows of the commits since the last call; return whether there were any. Do
        nothing within a second of the last reading. Log a failed reading; a later call retries."""
        with self._lock:
            if time.monotonic() - self._read_s < _MOST_OFTEN_S:
                return False
            has_new_rows = False
            before = self._follower.state
            try:
                for kind, rows in self._follower.new_rows():
                    has_new_rows = True
                    self._add(kind, rows)
                # Letters of a table that is gone are not pending any more.
                self._is_old |= before.has_table and self._follower.state != before
                if self._ask is not None and self._is_old:
                    self.standing = self._ask()
                    self._is_old = False
            except Exception as error:  # Spark may fail: its session may have ended.
                _LOG.warning(
                    "the ledger %s cannot be followed now: %s", self.place, first_line(error)
                )
            self._read_s = time.monotonic()
            return has_new_rows

    def _add(self, kind: str, rows: pa.Table) -> None:
        if self.run_id is not None:
            rows = rows.filter(pc.field("run_id") == self.run_id)
        if kind == EPOCH:
            for outcome in OUTCOMES:
                self.rows[outcome] += _sum(rows[outcome])
            # A confirmation has the duplicates that no task has counted.
            self.duplicates_possible += _sum(rows["duplicates_possible"])
        elif kind == SEND:
            answered = rows.filter(pc.field("outcome") != IN_FLIGHT)
            # Unanswered requests may belong to a killed attempt, which `superseded_rows` counts.
            self._is_old |= len(answered) < len(rows)
            self._add_sends(answered)
        elif kind == ISOLATION:
            names = ("broker_name", "cause", "isolated_until")
            for values in zip(*(rows[name].to_pylist() for name in names), strict=True):
                self._add_isolation(*values)
        # Accounts (EPOCH) tell which attempts count, and so which dead letters are pending.
        self._is_old |= kind in (DEAD_LETTER, RESOLUTION, EPOCH)

    def _add_sends(self, rows: pa.Table) -> None:
        names = rows["broker_name"].fill_null(_NO_BROKER)
        is_stored = pc.field("outcome").isin(_STORED)
        for name in pc.unique(names).to_pylist():
            broker_rows = rows.filter(pc.equal(names, name))
            sums = self.brokers.setdefault(name, BrokerSums())
            sent = broker_rows.filter(pc.field("wire_bytes") != 0)  # A row without bytes is a wait.
            stored, failed = sent.filter(is_stored), broker_rows.filter(~is_stored)
            sums.requests += _sum(sent["frames"].fill_null(1))
            sums.retries += _sum(pc.greater(sent["attempt"], 1))
            sums.messages += _sum(stored["message_count"])
            sums.body_bytes += _sum(stored["body_bytes"])
            sums.failures.update(failed["error_code"].fill_null("UNKNOWN").to_pylist())
            answers = _latencies(sent.filter(pc.field("response_code").is_valid()))
            for class_, weight in answers.items():
                at = bisect.bisect_left(BOUNDS_S, middle_ms(class_) / 1000)
                sums.durations[BOUNDS_S[at]] += weight

    def _add_isolation(self, broker: str, cause: str, until: dt.datetime) -> None:
        sums = self.brokers.setdefault(broker or _NO_BROKER, BrokerSums())
        sums.isolations[cause] += 1
        if sums.isolated_until is None or until > sums.isolated_until:
            sums.isolated_until, sums.cause = until, cause


def follow(place: LedgerPath) -> LiveFigures:
    """Return sums of the rows that a ledger gets from now on; `reader_of` queries their `standing`
    in the session that is active then. Raise LedgerError or OSError if pyarrow cannot reach the
    ledger's files."""
    return LiveFigures(place, lambda: standing_of(reader_of(active_session(), place)))


def standing_of(query: Query | None) -> Standing:
    """Return the standing of a ledger by a query over its views; None: there is no ledger yet."""
    if query is None:
        return Standing({}, 0)
    superseded = query("SELECT sum(superseded_rows) AS n FROM superseded")["n"][0].as_py()
    return Standing(pending_by_reason(query), int(superseded or 0))


def pending_by_reason(query: Query) -> dict[str, int]:
    """Count the pending dead letters by reason."""
    rows = query("SELECT reason, count(*) AS letters FROM pending_letters GROUP BY reason")
    return {row["reason"]: row["letters"] for row in rows.to_pylist()}


def _latencies(rows: pa.Table) -> Counter[int]:
    """Return {latency class: messages} of the answers, as reports count them. A group of frames has
    only percentiles; each of them counts for a share of the group's messages (`GROUP_SHARES`)."""
    is_alone = pc.field("frames").is_null()
    alone, groups = rows.filter(is_alone)["rtt_ms"], rows.filter(~is_alone)
    answers = [(alone, np.ones(len(alone)))]
    for column, share in GROUP_SHARES:
        ms = pc.coalesce(groups[column], groups["rtt_ms"])
        answers.append((ms, groups["frames"].to_numpy() * share))
    counts: Counter[int] = Counter()
    for ms, weights in answers:
        classes = latency_class(ms.to_numpy())
        for class_, weight in zip(classes.tolist(), weights.tolist(), strict=True):
            counts[class_] += weight
    return counts


def _sum(column: pa.ChunkedArray) -> int:
    return pc.sum(column).as_py() or 0


Values = Iterable[tuple[float, dict[str, str | float]]]
"""A metric's values with their attributes."""


class Metric(NamedTuple):
    name: str
    is_counter: bool
    unit: str
    text: str
    values: Callable[[LiveFigures], Values]


def _by_broker(values_of: Callable[[BrokerSums], Values]) -> Callable[[LiveFigures], Values]:
    """Return a function for the values of all brokers, with the broker's name as an attribute."""
    return lambda figures: [
        (value, {"broker": broker, **attributes})
        for broker, sums in list(figures.brokers.items())
        for value, attributes in values_of(sums)
    ]


def _sums(name: str) -> Callable[[LiveFigures], Values]:
    return _by_broker(lambda sums: [(getattr(sums, name), {})])


def _counts(name: str, attribute: str) -> Callable[[LiveFigures], Values]:
    return _by_broker(
        lambda sums: [(count, {attribute: of}) for of, count in list(getattr(sums, name).items())]
    )


def _durations(sums: BrokerSums) -> Values:
    counts = itertools.accumulate(sums.durations[bound] for bound in BOUNDS_S)
    for bound, count in zip(BOUNDS_S, counts, strict=True):
        yield count, {"le": f"{bound:g}".replace("inf", "+Inf")}


METRICS: Final = (
    Metric("rocket_sink.rows", True, "{row}",
           "Rows of task attempts that ended, by outcome: acked, degraded, dead, unknown, filtered",
           # Give outcomes with 0 rows, too: Prometheus sees no increase in a series' first value.
           lambda figures: [(figures.rows[name], {"outcome": name}) for name in OUTCOMES]),
    Metric("rocket_sink.rows.duplicates_possible", True, "{row}",
           "Rows stored that an earlier attempt may have stored too",
           lambda figures: [(figures.duplicates_possible, {})]),
    Metric("rocket_sink.rows.superseded", False, "{row}",
           "Rows that brokers may have stored of task attempts that do not count, killed ones "
           "included: the ledger's superseded_rows",
           lambda figures: [(figures.standing.superseded_rows, {})]),
    Metric("rocket_sink.messages", True, "{message}", "Messages stored, by broker",
           _sums("messages")),
    Metric("rocket_sink.body.size", True, "By", "Bytes of the bodies stored, by broker",
           _sums("body_bytes")),
    Metric("rocket_sink.requests", True, "{request}", "Send attempts, by broker",
           _sums("requests")),
    Metric("rocket_sink.retries", True, "{request}", "Send attempts that were not the first",
           _sums("retries")),
    Metric("rocket_sink.failures", True, "{request}",
           "Send attempts that were not acknowledged, and waits for a broker, by broker and error",
           _counts("failures", "error")),
    Metric("rocket_sink.isolations", True, "{isolation}",
           "Isolations that began, by broker and cause", _counts("isolations", "cause")),
    Metric("rocket_sink.broker.isolated", False, "", "1 while a broker is isolated, else 0",
           _by_broker(lambda sums: [(int(sums.is_isolated()), {})])),
    Metric("rocket_sink.send.duration.bucket", True, "",
           "Answers that came within `le` seconds of their request's last byte, by broker: a "
           "histogram, for histogram_quantile, that adds up over brokers and drivers",
           _by_broker(_durations)),
    Metric("rocket_sink.dead_letters.pending", False, "{message}",
           "Dead letters that wait for a backfill, by reason",
           lambda figures: [(n, {"reason": of}) for of, n in figures.standing.pending.items()]),
)  # fmt: skip

_followed: dict[LedgerPath, LiveFigures] = {}
"""The sums of ledgers by path, whichever table is there. They outlive a session, as metrics do."""
_lock: Final = ForkLock()


def observe(place: LedgerPath) -> None:
    """Make metrics of a ledger from now on. Do nothing if OpenTelemetry's API is not installed, or
    if the ledger has metrics already. `follow` may raise LedgerError or OSError."""
    try:
        import opentelemetry.metrics
    except ImportError:
        return
    with _lock:
        if place in _followed:
            _followed[place].reach(place)
            return
        is_first = not _followed
        _followed[place] = follow(place)
    if is_first:
        from rocket_sink import __version__

        register(opentelemetry.metrics.get_meter("rocket_sink", __version__), _followed)


def register(meter: Meter, followed: Mapping[LedgerPath, LiveFigures]) -> None:
    """Make all metrics. On collection each gives the values of the ledgers in `followed`."""
    for metric in METRICS:
        create: Any = (
            meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
        )
        callback = partial(_observations, metric, followed)
        create(metric.name, [callback], unit=metric.unit, description=metric.text)


def _observations(
    metric: Metric, followed: Mapping[LedgerPath, LiveFigures], _: CallbackOptions
) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    for place, figures in list(followed.items()):
        figures.refresh()
        for value, attributes in metric.values(figures):
            yield Observation(value, {"ledger": place.uri, **attributes})
