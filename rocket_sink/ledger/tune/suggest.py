"""Suggestions of options, by a replay of a ledger's sends under other settings. A setting is
suggested only if it is clearly better than the default. Isolations have a cost that recorded
latencies do not show: the other brokers must take the load."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from rocket_sink.ledger.sql import Query, Scope, Scoped, with_full_id
from rocket_sink.ledger.tune.replay import Attempts, read_attempts, replay
from rocket_sink.message_rules import BATCH_MAX_MESSAGES
from rocket_sink.options import SinkOptions, find_option
from rocket_sink.routing.fault import PROFILES, FaultProfile
from rocket_sink.tables import table
from rocket_sink.text import counted

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

FEWEST: Final = 1000
"""Least number of attempts: with fewer, p99.9 depends on less than one attempt."""
NOTHING_TO_GAIN: Final = "Nothing to gain: the options fit these sends."
LIMIT: Final = 200_000
"""Number of the newest attempts that are replayed; a candidate takes some seconds."""
_VARIANTS_MS: Final = (100, 250, 1000, 2000)
"""Further candidates: variants of the profile 5.x that isolate brokers from these latencies on."""
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
_MANY: Final = 0.5
"""Share of the requests that must wait, and of the waiting ones that must find a full window."""
_SLOW_BATCH_MS: Final = 500.0

RECORDED: Final = "as recorded"
DEFAULT: Final = "5.x (default)"


@dataclass(frozen=True)
class Candidate:
    """A value of `faultTable`, and its result for the recorded sends. Times in ms. `isolated_s` is
    the sum over hosts and brokers. `moved` counts messages that would have gone to another broker.
    Percentiles are of acknowledged messages, from submit to answer, with their earlier attempts."""

    name: str
    table: str
    isolations: int
    isolated_s: float
    moved: int
    p50_ms: float | None
    p99_ms: float | None
    p999_ms: float | None
    max_ms: float | None
    suggested: bool = False


@dataclass(frozen=True)
class SuspicionFigures:
    """A value of `suspectAfterMs`, and its result for the recorded sends. `late_share` is the share
    of usual requests that took longer than the value: false alarms. `troubles` counts failures and
    unusually slow requests that took longer than the value. `sooner_s` is the sum of the times from
    the suspicions to the ends of these troubles."""

    suspect_after_ms: int
    late_share: float
    troubles: int
    sooner_s: float
    suggested: bool = False


@dataclass(frozen=True)
class Suggestion:
    """An option to set, and why."""

    option: str
    value: str
    reason: str


class Comparison(NamedTuple):
    """A table of settings, one per row; the last column marks the suggested one."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`."""

    path: str
    scope: Scope
    attempts: int
    first_at: dt.datetime | None
    last_at: dt.datetime | None
    limited: bool
    """Only the newest attempts were read, because the ledger has more than the limit."""
    candidates: list[Candidate] = field(default_factory=list)
    suspicion: list[SuspicionFigures] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Options that need no change, with the reason."""
    note: str = ""
    """A warning that there are few figures; empty if there are enough."""

    @property
    def options(self) -> dict[str, str]:
        """{option: value} to paste."""
        return {suggestion.option: suggestion.value for suggestion in self.suggestions}

    @property
    def comparisons(self) -> tuple[Comparison, Comparison]:
        """The tables that terminals and pages show."""
        return (
            Comparison(
                "Latency classes: what each table would have made of these sends",
                ("table", "isolations", "isolated s", "messages moved", "p50 ms", "p99 ms",
                 "p99.9 ms", "max ms", ""),
                [
                    (row.name, row.isolations, round(row.isolated_s, 1), row.moved,
                     row.p50_ms, row.p99_ms, row.p999_ms, row.max_ms, _mark(row.suggested))
                    for row in self.candidates
                ],
            ),
            Comparison(
                "suspectAfterMs: false alarms, and trouble noticed before its end",
                ("suspectAfterMs", "false alarms %", "troubles", "sooner s", ""),
                [
                    (row.suspect_after_ms, round(100 * row.late_share, 3), row.troubles,
                     round(row.sooner_s, 1), _mark(row.suggested))
                    for row in self.suspicion
                ],
            ),
        )  # fmt: skip

    @property
    def reasons(self) -> list[tuple[str, str, str]]:
        """Rows ("keep", options, why) and ("set", option=value, why)."""
        kept = [advice.partition(": ")[::2] for advice in self.kept]
        set_to = [(f"{item.option}={item.value}", item.reason) for item in self.suggestions]
        return [("keep", *pair) for pair in kept] + [("set", *pair) for pair in set_to]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "options": self.options}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.first_at is None or self.last_at is None:
            yield "No sends in this part of the ledger: nothing to learn from."
            return
        newest = "the newest " if self.limited else ""
        yield (
            f"{newest}{counted(self.attempts, 'attempt')} from "
            f"{self.first_at:%Y-%m-%d %H:%M:%S} to {self.last_at:%Y-%m-%d %H:%M:%S} UTC"
        )
        yield f"{self.note}\n"
        for comparison in self.comparisons:
            yield table(*comparison)
        yield table("", ("", "option", "why"), self.reasons)
        yield "Options to paste:" if self.options else NOTHING_TO_GAIN
        for name, value in self.options.items():
            yield f"  {name}={value}"


def _mark(suggested: bool) -> str:
    return "<- suggested" if suggested else ""


def tune(
    query: Query, path: str, scope: Scope, *, options: SinkOptions | None = None,
    limit: int = LIMIT, fewest: int = 1, progress: Callable[[int], object] = lambda done: None,
) -> Tuning:  # fmt: skip
    """Suggest options from a replay of the newest `limit` attempts of the scope. Raise LedgerError
    if no query, or several queries, have an id that begins with the scope's `query_id`.

    Args:
        query: runs SQL over the ledger's views.
        options: the options of the query that sent; None: the defaults. The ledger has no options.
        fewest: least number of attempts for a replay, at least 1.
        progress: gets the number of finished candidates, of those in `profiles`.
    """
    scope, options = with_full_id(scope, query, path), options or SinkOptions()
    attempts = read_attempts(Scoped(query, scope), limit)
    if len(attempts) < fewest:
        return Tuning(path, scope, len(attempts), None, None, limited=False)
    candidates: list[Candidate] = []
    for name, profile in profiles().items():
        result = replay(attempts, profile)
        candidates.append(Candidate(
            name, profile.table if profile else "", result.isolations, result.isolated_s,
            result.moved, result.percentile(0.5), result.percentile(0.99),
            result.percentile(0.999), result.percentile(1.0),
        ))  # fmt: skip
        progress(len(candidates))
    best, suspicion = _best(candidates), suspicions(attempts)
    least = next((row for row in suspicion if row.late_share <= _LATE_SHARE), suspicion[-1])
    advice = [
        *_table_option(candidates, best), *_suspicion_option(suspicion, least, options),
        *_batches(attempts, options), *_window(attempts, options),
    ]  # fmt: skip
    advice = [_unless_set(item, options) for item in advice]
    note = ""
    if len(attempts) < _FEW:
        rests = max(1, len(attempts) // 1000)
        note = f"p99.9 depends on only {rests} of these attempts: a longer record is more reliable"
    return Tuning(
        path, scope, len(attempts), _moment(attempts.start_s[0]), _moment(attempts.start_s[-1]),
        limited=len(attempts) >= limit,
        candidates=[replace(candidate, suggested=candidate is best) for candidate in candidates],
        suspicion=[replace(row, suggested=row is least) for row in suspicion],
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
    first_ms = default.isolates_from_ms
    for wanted_ms in _VARIANTS_MS:
        classes = tuple((round(ms * wanted_ms / first_ms), span) for ms, span in default.classes)
        variants[f"from {wanted_ms:,} ms"] = replace(default, classes=classes)
    return variants


def suspicions(attempts: Attempts) -> list[SuspicionFigures]:
    """Return how many suspicions each value of `suspectAfterMs` would have raised, right or false.

    A suspicion is right if the attempt's failure isolates the broker, or if its answer is both slow
    enough to isolate the broker and unusually slow for it. Otherwise it is a false alarm."""
    stored_ms = (
        attempts.rtt_ms[attempts.stored & (attempts.broker == number)]
        for number in range(len(attempts.brokers))
    )
    usual_ms = np.array([np.quantile(ms, 0.95) if len(ms) else 0.0 for ms in stored_ms])
    slow_ms = np.maximum(PROFILES["5.x"].isolates_from_ms, _UNUSUAL * usual_ms)
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


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate to suggest: another one if its p99.9 is clearly lower, else the default.
    Return None if the default has no latencies."""
    tails = {c: c.p999_ms for c in candidates if c.name != RECORDED and c.p999_ms is not None}
    default = next((candidate for candidate in tails if candidate.name == DEFAULT), None)
    if default is None or min(tails.values()) >= _BETTER * tails[default]:
        return default
    good_ms = _AS_GOOD * min(tails.values())
    good = [candidate for candidate, tail_ms in tails.items() if tail_ms <= good_ms]
    return min(good, key=lambda candidate: (candidate.isolated_s, tails[candidate]))


def _table_option(
    candidates: Sequence[Candidate], best: Candidate | None
) -> Iterator[Suggestion | str]:
    if best is None:
        return
    default = next(candidate for candidate in candidates if candidate.name == DEFAULT)
    if best is default:
        yield "faultTable: no other table has a clearly shorter tail"
        return
    reason = (
        f"p99.9 {best.p999_ms:,.0f} ms instead of {default.p999_ms:,.0f}, "
        f"{best.isolations:,} isolations instead of {default.isolations:,}"
    )
    table = best.name if best.name in PROFILES else best.table
    yield Suggestion("faultTable", table, reason)


def _unless_set(advice: Suggestion | str, options: SinkOptions) -> Suggestion | str:
    """Return the advice; if the options have the suggested value, the advice to keep it."""
    if isinstance(advice, str):
        return advice
    attribute = find_option(advice.option).attribute
    wanted = SinkOptions.parse({advice.option: advice.value})
    if getattr(wanted, attribute) != getattr(options, attribute):
        return advice
    return f"{advice.option}: {advice.value} is set, nothing to gain"


def _suspicion_option(
    figures: Sequence[SuspicionFigures], best: SuspicionFigures, options: SinkOptions
) -> Iterator[Suggestion | str]:
    now_ms = options.suspect_after_ms
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


def _batches(attempts: Attempts, options: SinkOptions) -> Iterator[Suggestion | str]:
    """Suggest sizes of batches."""
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


def _window(attempts: Attempts, options: SinkOptions) -> Iterator[Suggestion | str]:
    """Suggest a larger window if requests waited while it was full. Other waits are for a turn in
    an ordered queue, a rate limit or a busy broker, and no window shortens these."""
    names = "backPressureForAsyncSendNum, -Size"
    waits = attempts.stored & (attempts.wait_ms > np.maximum(2 * attempts.rtt_ms, 1.0))
    if waits.sum() < _MANY * attempts.stored.sum() or not waits.any():
        yield f"{names}: requests do not wait for a place in the window"
        return
    in_flight, window = attempts.bytes_in_flight(), options.max_in_flight_bytes
    while window < in_flight.max():
        window *= 2  # The query has a larger window than `options` says.
    wait_ms = float(np.quantile(attempts.wait_ms[waits], 0.5))
    if (in_flight[waits] >= _FULL * window).mean() < _MANY:
        yield (
            f"{names}: {waits.sum():,} requests waited, half of them {wait_ms:,.1f} ms or more, "
            "but for a turn in their queue, a rate limit or a busy broker: nothing to gain"
        )
        return
    yield Suggestion(
        "backPressureForAsyncSendSize", str(2 * window),
        f"{waits.sum():,} requests waited while the window was full, half of them "
        f"{wait_ms:,.1f} ms or more; if memory allows",
    )  # fmt: skip


def _moment(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(float(seconds), dt.timezone.utc)
