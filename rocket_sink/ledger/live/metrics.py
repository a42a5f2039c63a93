"""Metrics of the ledgers that this driver folds, by OpenTelemetry.

Without an SDK nothing is read: OpenTelemetry asks for values when a reader collects them, and only
then are the ledger's new rows read. So they tell of all tasks, whichever host they ran on, and are
as old as the last fold at most (`foldIntervalMs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rocket_sink.forks import ForkLock
from rocket_sink.ledger.live.figures import LiveFigures
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.views import OUTCOMES

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

SCOPE: Final = "rocket_sink"
"""Name of the meter."""
_SHARES: Final = (0.5, 0.95, 0.99)

Attributes = dict[str, str | float]
Values = Iterator[tuple[float, Attributes]]


class Metric(NamedTuple):
    """One metric: its name and unit in OpenTelemetry's terms, and where its values come from."""

    name: str
    is_counter: bool
    unit: str
    text: str
    values: Callable[[LiveFigures], Values]


def _rows(found: LiveFigures) -> Values:
    # From 0 on: Prometheus sees no increase in a series that begins with it.
    for outcome in OUTCOMES:
        yield found.rows[outcome], {"outcome": outcome}


def _duplicates(found: LiveFigures) -> Values:
    yield found.duplicates_possible, {}


def _of_brokers(name: str) -> Callable[[LiveFigures], Values]:
    def values(found: LiveFigures) -> Values:
        for broker, sums in list(found.brokers.items()):
            yield getattr(sums, name), {"broker": broker}

    return values


def _counted(name: str, attribute: str) -> Callable[[LiveFigures], Values]:
    def values(found: LiveFigures) -> Values:
        for broker, sums in list(found.brokers.items()):
            for what, count in list(getattr(sums, name).items()):
                yield count, {"broker": broker, attribute: what}

    return values


def _latency(found: LiveFigures) -> Values:
    for broker, sums in list(found.brokers.items()):
        for share in _SHARES:
            ms = sums.latency_ms(share)
            if ms is not None:
                yield ms / 1000, {"broker": broker, "quantile": share}


def _isolated(found: LiveFigures) -> Values:
    for broker, sums in list(found.brokers.items()):
        yield int(sums.is_isolated()), {"broker": broker}


def _pending(found: LiveFigures) -> Values:
    for reason, count in found.pending.items():
        yield count, {"reason": reason}


METRICS: Final = (
    Metric("rocket_sink.rows", True, "{row}",
           "Rows of task attempts that ended, by outcome: acked, degraded, dead, unknown, filtered",
           _rows),
    Metric("rocket_sink.rows.duplicates_possible", True, "{row}",
           "Rows stored that an earlier attempt may have stored too", _duplicates),
    Metric("rocket_sink.messages", True, "{message}", "Messages stored, by broker",
           _of_brokers("messages")),
    Metric("rocket_sink.body.size", True, "By", "Bytes of the bodies stored, by broker",
           _of_brokers("body_bytes")),
    Metric("rocket_sink.requests", True, "{request}", "Send attempts, by broker",
           _of_brokers("requests")),
    Metric("rocket_sink.retries", True, "{request}", "Send attempts that were not the first",
           _of_brokers("retries")),
    Metric("rocket_sink.failures", True, "{request}",
           "Send attempts that were not acknowledged, and waits for a broker, by broker and error",
           _counted("failures", "error")),
    Metric("rocket_sink.isolations", True, "{isolation}",
           "Isolations that began, by broker and cause", _counted("isolations", "cause")),
    Metric("rocket_sink.broker.isolated", False, "", "1 while a broker is isolated, else 0",
           _isolated),
    Metric("rocket_sink.send.latency", False, "s",
           "Time from a request's last byte to its answer, of the newest answers, by broker and "
           "quantile (0.5, 0.95, 0.99)", _latency),
    Metric("rocket_sink.dead_letters.pending", False, "{message}",
           "Dead letters that wait for a backfill, by reason", _pending),
)  # fmt: skip

_followed: dict[LedgerPath, LiveFigures] = {}
_lock: Final = ForkLock()


def observe(place: LedgerPath, make: Callable[[], LiveFigures]) -> None:
    """Tell OpenTelemetry of a ledger from now on; nothing without its API, or when it is known.

    Raises:
        LedgerError, OSError: as `LiveFigures`.
    """
    try:
        import opentelemetry.metrics
    except ImportError:
        return
    with _lock:
        if place in _followed:
            return
        is_first = not _followed
        _followed[place] = make()
    if is_first:
        from rocket_sink import __version__

        register(opentelemetry.metrics.get_meter(SCOPE, __version__), _followed)


def register(meter: Meter, followed: Mapping[LedgerPath, LiveFigures]) -> None:
    """Make all metrics; each tells of what `followed` has when a reader collects it."""
    for metric in METRICS:
        create: Any = (
            meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
        )
        create(
            metric.name, [_callback(metric, followed)], unit=metric.unit, description=metric.text
        )


def _callback(
    metric: Metric, followed: Mapping[LedgerPath, LiveFigures]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    def observed(_: CallbackOptions) -> Iterable[Observation]:
        for place, found in list(followed.items()):
            found.refresh()
            for value, attributes in metric.values(found):
                yield Observation(value, {"ledger": place.uri, **attributes})

    return observed
