"""The counts of a task's rows. Every row must be counted in exactly one column:

    rows_in = acked + degraded + dead + unknown + filtered

`dead` counts rows that this attempt of the task has certainly not stored (refused, never sent, held
back). `unknown` counts rows whose last request got no valid answer, so they may be stored. Each of
these rows has a dead letter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from rocket_sink.errors import DeliveryError, Outcome
from rocket_sink.options import SinkOptions
from rocket_sink.tables import html_table
from rocket_sink.text import clean

_WORDS: Final = {
    "rows_in": "rows in",
    "acked": "acknowledged",
    "degraded": "degraded (stored, less durable)",
    "dead": "dead letters",
    "unknown": "dead letters, outcome unknown",
    "filtered": "filtered",
    "invalid": "dead letters: refused rows",
    "held_back": "dead letters: held back",
    "duplicates_possible": "possible duplicates",
    "found_stored": "acknowledged: found stored",
    "requests": "requests",
    "attempts": "attempts",
}
COUNTS: Final = tuple(_WORDS)
"""The counts in the ledger's epoch rows."""
_ALWAYS: Final = ("rows_in", "acked", "dead", "unknown")


def exceeds(given_up: int, budget: str, rows: int) -> bool:
    """Return whether more rows were given up than `budget` allows, which is a value of
    `maxFailures`. Use fractions: with floats, 29 > 0.29 * 100."""
    if budget.endswith("%"):
        return given_up > Fraction(budget[:-1]) * rows / 100
    return bool(budget) and given_up > int(budget)


@dataclass
class RowCounts:
    """Numbers of rows by their end, except where the name says otherwise."""

    rows_in: int = 0
    acked: int = 0
    degraded: int = 0
    dead: int = 0
    unknown: int = 0
    filtered: int = 0
    invalid: int = 0
    """Rows of `dead` that were refused before they were sent."""
    held_back: int = 0
    """Rows of `dead` held back: an earlier row of the key was given up, or the queue was closed."""
    duplicates_possible: int = 0
    """Delivered rows that an earlier attempt may have stored, too."""
    found_stored: int = 0
    """Rows of `acked` that were found by id: an earlier attempt stored them, or no answer came."""
    requests: int = 0
    attempts: int = 0
    first_error: str = ""

    @property
    def accounted(self) -> int:
        return self.acked + self.degraded + self.dead + self.unknown + self.filtered

    @property
    def given_up(self) -> int:
        return self.dead + self.unknown


@dataclass
class TaskSummary(RowCounts):
    """The counts of a task."""

    body_bytes: int = 0
    moved_keys: int = 0


@dataclass(kw_only=True)
class WriteSummary(RowCounts):
    """The result of a batch write, with the sums of its tasks' counts.

    `is_repeated`: an earlier write with the `batchId` was complete, and has this summary. The
    repetition has sent nothing."""

    query_id: str
    ledger: str
    duration_s: float
    is_repeated: bool = False

    @classmethod
    def of(cls, counts: Mapping[str, Any], **facts: Any) -> WriteSummary:
        """Return the summary of these sums (`sums_of`); `facts` are the fields above."""
        sums: dict[str, Any] = {name: int(counts[name]) for name in COUNTS}
        return cls(**sums, first_error=counts["first_error"], **facts)

    @property
    def adds_up(self) -> bool:
        """Whether every row is counted in one of the columns."""
        return self.rows_in == self.accounted

    @property
    def all_delivered(self) -> bool:
        """Whether brokers have stored every row."""
        return self.rows_in == self.acked + self.degraded + self.filtered

    def lines(self) -> list[tuple[str, str]]:
        """Return (label, value) for printing, without most of the counts that are 0."""
        counts = [(name, getattr(self, name)) for name in COUNTS]
        shown = [(_WORDS[n], f"{v:,}") for n, v in counts if v or n in _ALWAYS]
        per_s = self.rows_in / self.duration_s if self.duration_s else 0
        rate = f"{per_s:,.0f} rows/s" if per_s >= 1 else ""
        shown.append(("time", f"{self.duration_s:.1f} s  {rate}".rstrip()))
        if self.first_error:
            shown.append(("first error", clean(self.first_error)))
        shown.append(("ledger", self.ledger or "none"))
        if self.is_repeated:
            shown.append(("repeated", "nothing was sent again: an earlier write was complete"))
        return shown

    @property
    def title(self) -> str:
        if self.all_delivered:
            return "All rows delivered"
        return f"{self.given_up:,} of {self.rows_in:,} rows not delivered"

    def __str__(self) -> str:
        lines = self.lines()
        width = max(len(label) for label, _ in lines)
        return "\n".join([self.title, *(f"  {label:<{width}}  {value}" for label, value in lines)])

    def _repr_html_(self) -> str:
        return html_table(self.title, self.lines())


def sums_of(accounts: Sequence[Any]) -> dict[str, Any]:
    """Return the sums of several tasks' counts, and the first error, as {name: value}."""
    sums: dict[str, Any] = {n: sum(account[n] or 0 for account in accounts) for n in COUNTS}
    errors = (account["first_error"] for account in accounts)
    return {**sums, "first_error": next(filter(None, errors), "")}


def uncounted_duplicates(sums: Mapping[str, int]) -> int:
    """Return how many stored rows the tasks have not counted as possible duplicates."""
    sent = sums["acked"] + sums["degraded"] - sums["found_stored"]
    return max(0, sent - sums["duplicates_possible"])


class RowTotals:
    """Counts rows. Methods that count dead letters raise DeliveryError if the options say that such
    a row, or so many rows, must fail the task. `is_source` is False if the caller keeps rows that
    are not sent, so that they are not consumed."""

    def __init__(self, options: SinkOptions, *, is_source: bool) -> None:
        self._options = options
        self._is_source = is_source
        self._failed_at: set[str | None] = set()
        """The brokers at which rows failed for reasons of transport."""
        self._has_other_failures = False
        self.summary = TaskSummary()

    def add_delivered(self, outcome: Outcome, rows: int, *, maybe_duplicate: bool) -> None:
        if outcome is Outcome.ACKED:
            self.summary.acked += rows
        else:
            self.summary.degraded += rows
        if maybe_duplicate:
            self.summary.duplicates_possible += rows

    def add_found_stored(self, rows: int) -> None:
        """Count rows that an earlier attempt has stored, so they are not sent again."""
        self.summary.acked += rows
        self.summary.found_stored += rows

    def add_torn(self, rows: int) -> None:
        """Count rows that a broker may have stored in part, and that are sent again."""
        self.summary.duplicates_possible += rows

    def count_all_as_duplicates(self) -> None:
        """Count each stored row as a possible duplicate: an earlier attempt may have stored it
        under another id."""
        self.summary.duplicates_possible = self.summary.acked + self.summary.degraded

    def add_invalid(self, rows: int, example: str) -> None:
        self.summary.dead += rows
        self.summary.invalid += rows
        self._give_up(rows, example)
        if rows and self._options.on_invalid == "fail":
            raise self._error(f"onInvalid=fail: {example}")

    def add_failed(self, outcome: Outcome, code: str, rows: int, example: str) -> None:
        if outcome is Outcome.UNKNOWN:
            self.summary.unknown += rows
        else:
            self.summary.dead += rows
        if code == "HELD_BACK":
            self.summary.held_back += rows
        self._give_up(rows, example)

    def add_cut_off(self, outcome: Outcome, rows: int, *, maybe_duplicate: bool) -> None:
        """Count rows of a request that was in flight when the task failed. No limits apply."""
        if outcome.delivered:
            self.add_delivered(outcome, rows, maybe_duplicate=maybe_duplicate)
        elif outcome is Outcome.UNKNOWN:
            self.summary.unknown += rows

    def note_unreachable(self, broker: str | None) -> None:
        """Note that a row failed for reasons of transport at the only broker to which it may go;
        None: at all brokers of its topic."""
        self._failed_at.add(broker)

    def note_other_failure(self) -> None:
        """Note that a row failed for another reason, so nothing says that all brokers are down."""
        self._has_other_failures = True

    def check_balance(self, brokers: Collection[str] = ()) -> None:
        """Raise if a row is not accounted for, if the share of dead letters is too large, or if
        none of the `brokers` of the task's topics took a row: the query would go on, and turn its
        whole source into dead letters."""
        summary, options = self.summary, self._options
        if summary.rows_in != summary.accounted:
            raise self._error(
                f"{summary.rows_in} rows came in and {summary.accounted} are accounted for; the "
                "task fails so that none is lost silently"
            )
        if exceeds(summary.given_up, options.max_failures, summary.rows_in):
            raise self._error(
                f"{summary.given_up} of {summary.rows_in} rows could not be sent, more than "
                f"maxFailures={options.max_failures} allows: {summary.first_error}"
            )
        was_useful = summary.acked or summary.degraded or summary.filtered
        is_down = None in self._failed_at or (bool(brokers) and self._failed_at >= {*brokers})
        if self._is_source and is_down and not (was_useful or self._has_other_failures):
            raise self._error(
                f"no broker took any of {summary.given_up - summary.invalid} rows. The task fails, "
                "because the query would turn its whole source into dead letters: mend the brokers "
                f"({', '.join(sorted(brokers)[:8])}), and start the query again. The first error: "
                f"{summary.first_error}"
            )

    def _give_up(self, rows: int, example: str) -> None:
        summary, options = self.summary, self._options
        summary.first_error = summary.first_error or example
        if not rows:
            return
        if self._is_source and not options.ledger:
            raise self._error(
                "a row cannot be sent and there is no ledger for dead letters (give the option "
                f"ledger=PATH): {example}"
            )
        # The rows of a task are known at its end, so `check_balance` judges a percentage.
        if not options.max_failures.endswith("%") and exceeds(
            summary.given_up, options.max_failures, 0
        ):
            raise self._error(
                f"{summary.given_up} rows could not be sent, more than "
                f"maxFailures={options.max_failures} allows: {example}"
            )

    def _error(self, text: str) -> DeliveryError:
        counts = {name: getattr(self.summary, name) for name in COUNTS[:6]}
        return DeliveryError(text, counts=counts, first_error=self.summary.first_error)
