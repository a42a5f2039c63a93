"""Suggests options by a replay of a ledger's sends under other settings.

A setting is suggested only if it is clearly better than the default. Isolations have a cost that
recorded latencies do not show: the other brokers must take the load.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rocket_sink.ledger.sql import Query, Scope, Scoped, full_id
from rocket_sink.ledger.tune.replay import Attempts, Replayed, read_attempts, replay
from rocket_sink.ledger.tune.values import Candidate, Suggestion, SuspicionFigures, Tuning
from rocket_sink.message_rules import BATCH_MAX_MESSAGES
from rocket_sink.options import SinkOptions
from rocket_sink.routing.fault import PROFILES, FaultProfile

LIMIT: Final = 200_000
"""Number of the newest attempts that are replayed; a candidate takes some seconds."""
_VARIANTS_MS: Final = (100, 250, 1000, 2000)
"""Latencies at which variants of the profile 5.x isolate; each variant is a further candidate."""
_BETTER: Final = 0.8
"""A candidate replaces the default if its p99.9 is below this share of the default's p99.9."""
_AS_GOOD: Final = 1.05
"""The winner is the least isolating candidate whose p99.9 is within this factor of the best."""
_SUSPECT_MS: Final = (50, 100, 250, 500, 1000, 2000)
_LATE_SHARE: Final = 0.001
"""Share of the requests to healthy brokers that may take longer than `suspectAfterMs`."""
_UNUSUAL: Final = 4.0
"""Multiple of a broker's p95 from which on an answer is unusually slow."""
_FEW: Final = 10_000
"""Number of attempts below which p99.9 depends on fewer than ten of them."""
_FULL: Final = 0.9
_SLOW_BATCH_MS: Final = 500.0

RECORDED: Final = "as recorded"
DEFAULT: Final = "5.x (default)"


def tune(
    query: Query, path: str, scope: Scope, *, limit: int = LIMIT, fewest: int = 1,
    progress: Callable[[int], object] = lambda done: None,
) -> Tuning:  # fmt: skip
    """Suggest options from a replay of the newest `limit` attempts of the scope.

    Args:
        query: runs SQL over the ledger's views.
        fewest: least number of attempts for a replay.
        progress: gets the number of finished candidates, of those in `profiles`.

    Raises:
        LedgerError: no query's id begins with the scope's `query_id`, or several do.
    """
    if scope.query_id is not None:
        scope = replace(scope, query_id=full_id(query, scope.query_id, path))
    attempts = read_attempts(Scoped(query, scope), limit)
    if len(attempts) < max(1, fewest):
        return Tuning(path, scope, len(attempts), None, None, limited=False)
    results: list[Candidate] = []
    for name, profile in profiles().items():
        results.append(_candidate(name, profile, replay(attempts, profile)))
        progress(len(results))
    candidates = _with_best(results)
    suspicion = _with_least(suspicions(attempts))
    advice = [*_table_option(candidates), *_suspicion_option(suspicion), *_batches(attempts)]
    note = ""
    if len(attempts) < _FEW:
        rests = max(1, len(attempts) // 1000)
        note = f"p99.9 depends on only {rests} of these attempts: a longer record is more reliable"
    return Tuning(
        path, scope, len(attempts), _moment(attempts.start_s[0]), _moment(attempts.start_s[-1]),
        limited=len(attempts) >= limit, candidates=candidates, suspicion=suspicion,
        suggestions=[item for item in advice if isinstance(item, Suggestion)],
        kept=[item for item in advice if isinstance(item, str)], note=note,
    )  # fmt: skip


def profiles() -> dict[str, FaultProfile | None]:
    """Return the candidates: no profile (as recorded), the profiles, and variants of 5.x that begin
    to isolate at other latencies."""
    default = PROFILES["5.x"]
    variants: dict[str, FaultProfile | None] = {
        RECORDED: None, DEFAULT: default, "4.x": PROFILES["4.x"]
    }  # fmt: skip
    first_ms = _first_isolating_ms(default)
    for wanted_ms in _VARIANTS_MS:
        classes = tuple(round(ms * wanted_ms / first_ms) for ms in default.latency_max_ms)
        variants[f"from {wanted_ms:,} ms"] = replace(default, latency_max_ms=classes)
    return variants


def suspicions(attempts: Attempts) -> list[SuspicionFigures]:
    """Return how many suspicions each value of `suspectAfterMs` would have raised, right or false.

    A suspicion is right if the attempt's failure isolates the broker, or if its answer is both slow
    enough to isolate the broker and unusually slow for it. Otherwise it is a false alarm.
    """
    usual_ms = np.array(
        [_p95(attempts.rtt_ms[attempts.stored & (attempts.broker == number)])
         for number in range(len(attempts.brokers))]
    )  # fmt: skip
    slow_ms = np.maximum(_first_isolating_ms(PROFILES["5.x"]), _UNUSUAL * usual_ms)
    trouble = attempts.isolates | (attempts.stored & (attempts.rtt_ms > slow_ms[attempts.broker]))
    well = attempts.rtt_ms[attempts.stored & ~trouble]
    figures = []
    for after_ms in _SUSPECT_MS:
        late_ms = attempts.rtt_ms[trouble] - after_ms
        figures.append(
            SuspicionFigures(
                after_ms,
                float((well > after_ms).mean()) if len(well) else 0.0,
                int((late_ms > 0).sum()),
                float(late_ms.clip(0).sum() / 1000),
            )
        )
    return figures


def _p95(latencies_ms: Any) -> float:
    return float(np.quantile(latencies_ms, 0.95)) if len(latencies_ms) else 0.0


def _first_isolating_ms(profile: FaultProfile) -> int:
    pairs = zip(profile.latency_max_ms, profile.not_available_ms, strict=True)
    return next(limit for limit, duration in pairs if duration)


def _candidate(name: str, profile: FaultProfile | None, result: Replayed) -> Candidate:
    return Candidate(
        name,
        profile.latency_max_ms if profile else (),
        profile.not_available_ms if profile else (),
        result.isolations, result.isolated_s, result.moved,
        result.percentile(0.5), result.percentile(0.99), result.percentile(0.999),
        float(result.latency_ms[-1]) if len(result.latency_ms) else None,
    )  # fmt: skip


def _with_best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Mark the suggested candidate: another one if its p99.9 is clearly lower, else the default."""
    tried = {candidate.name: candidate for candidate in candidates if candidate.p999_ms is not None}
    default = tried.pop(DEFAULT, None)
    tried.pop(RECORDED, None)
    best = default
    if default is not None and tried:
        shortest = min(candidate.p999_ms or 0.0 for candidate in tried.values())
        if shortest < _BETTER * (default.p999_ms or 0.0):
            good = [
                candidate
                for candidate in tried.values()
                if (candidate.p999_ms or 0.0) <= _AS_GOOD * shortest
            ]
            best = min(good, key=lambda candidate: (candidate.isolated_s, candidate.p999_ms))
    return [replace(candidate, suggested=candidate is best) for candidate in candidates]


def _with_least(figures: Sequence[SuspicionFigures]) -> list[SuspicionFigures]:
    """Mark the smallest value that few usual requests exceed (`_LATE_SHARE`)."""
    best = next((row for row in figures if row.late_share <= _LATE_SHARE), figures[-1])
    return [replace(row, suggested=row is best) for row in figures]


def _table_option(candidates: Sequence[Candidate]) -> Iterator[Suggestion | str]:
    best = next((candidate for candidate in candidates if candidate.suggested), None)
    default = next((candidate for candidate in candidates if candidate.name == DEFAULT), None)
    if best is None or default is None:
        return
    if best is default:
        yield "latencyMax, notAvailableDuration: no other table has a clearly shorter tail"
        return
    reason = (
        f"p99.9 {best.p999_ms:,.0f} ms instead of {default.p999_ms:,.0f}, "
        f"{best.isolations:,} isolations instead of {default.isolations:,}"
    )
    if best.name in PROFILES:
        yield Suggestion("faultProfile", best.name, reason)
    else:
        yield Suggestion("latencyMax", ",".join(map(str, best.latency_max_ms)), reason)
        yield Suggestion(
            "notAvailableDuration", ",".join(map(str, best.not_available_ms)), "goes with it"
        )


def _suspicion_option(figures: Sequence[SuspicionFigures]) -> Iterator[Suggestion | str]:
    now_ms = SinkOptions().suspect_after_ms
    best = next(row for row in figures if row.suggested)
    now = next((row for row in figures if row.suspect_after_ms == now_ms), best)
    if best.suspect_after_ms == now_ms:
        yield f"suspectAfterMs: {now.late_share:.2%} of the usual requests took longer than it"
    elif best.suspect_after_ms > now_ms:
        yield Suggestion(
            "suspectAfterMs", str(best.suspect_after_ms),
            f"{now.late_share:.2%} of the usual requests took longer than {now_ms} ms, "
            f"{best.late_share:.2%} longer than this",
        )  # fmt: skip
    elif best.troubles:
        yield Suggestion(
            "suspectAfterMs", str(best.suspect_after_ms),
            f"{best.late_share:.2%} of the usual requests took longer; {best.troubles:,} failures "
            f"and delays are noticed {now_ms - best.suspect_after_ms} ms sooner",
        )  # fmt: skip
    else:
        yield "suspectAfterMs: no broker was in trouble, so there is nothing to notice sooner"


def _batches(attempts: Attempts) -> Iterator[Suggestion | str]:
    """Suggest sizes of batches, and of the window if requests waited for it."""
    options = SinkOptions()
    batches = attempts.stored & (attempts.frames == 1) & (attempts.messages > 1)
    if batches.any():
        largest = float(np.quantile(attempts.bytes[batches], 0.9))
        slow_ms = float(np.quantile(attempts.rtt_ms[batches], 0.95))
        if slow_ms > _SLOW_BATCH_MS and largest > options.request_max_bytes / 4:
            yield Suggestion(
                "requestMaxBytes", str(max(65_536, int(largest) // 2)),
                f"5 % of the batches took longer than {slow_ms:,.0f} ms, at {largest:,.0f} bytes",
            )  # fmt: skip
        elif (
            np.quantile(attempts.messages[batches], 0.5) >= _FULL * options.request_max_messages
            and largest < options.request_max_bytes / 4
        ):
            most = min(BATCH_MAX_MESSAGES, 4 * options.request_max_messages)
            yield Suggestion(
                "requestMaxMessages", str(most),
                f"half of the batches are full with {options.request_max_messages:,} messages, and "
                f"have {largest:,.0f} bytes of {options.request_max_bytes:,}",
            )  # fmt: skip
        else:
            yield "requestMaxMessages, requestMaxBytes: batches are neither slow nor cut short"
    wait_ms, rtt_ms = np.quantile(attempts.wait_ms, 0.5), np.quantile(attempts.rtt_ms, 0.5)
    if attempts.stored.any() and wait_ms > 2 * rtt_ms and wait_ms > 1.0:
        yield Suggestion(
            "backPressureForAsyncSendSize", str(2 * options.max_in_flight_bytes),
            f"half of the requests wait {wait_ms:,.1f} ms before they are sent, and "
            f"{rtt_ms:,.1f} ms for their answer; if memory allows",
        )  # fmt: skip
    else:
        yield "backPressureForAsyncSendNum, -Size: requests do not wait for a place in the window"


def _moment(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(float(seconds), dt.timezone.utc)
