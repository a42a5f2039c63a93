"""The result of `tune`: candidates, suggestions, and options to paste."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rocket_sink.ledger.sql import Scope
from rocket_sink.tables import table
from rocket_sink.text import counted

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

FEWEST: Final = 1000
"""Least number of attempts: with fewer, p99.9 depends on less than one attempt."""
DEFAULTS_FIT: Final = "The defaults fit these sends."


@dataclass(frozen=True)
class Candidate:
    """A latency table, and its result for the recorded sends. Times in ms.

    `isolated_s` is the sum over hosts and brokers. `moved` counts messages that would have gone to
    another broker. Percentiles are of acknowledged messages, from submit to answer, including their
    earlier attempts.
    """

    name: str
    latency_max_ms: tuple[int, ...]
    not_available_ms: tuple[int, ...]
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
    """A value of `suspectAfterMs`, and its result for the recorded sends.

    `late_share` is the share of usual requests that took longer than the value: false alarms.
    `troubles` counts failures and unusually slow requests that took longer than the value.
    `sooner_s` is the sum of the times from the suspicions to the ends of these troubles.
    """

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
                     _ms(row.p50_ms), _ms(row.p99_ms), _ms(row.p999_ms), _ms(row.max_ms),
                     _mark(row.suggested))
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
        yield "Options to paste:" if self.options else DEFAULTS_FIT
        for name, value in self.options.items():
            yield f"  {name}={value}"


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _mark(suggested: bool) -> str:
    return "<- suggested" if suggested else ""
