"""What a batch write tells its caller, in a terminal and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rocket_sink.text import clean

COUNTS: Final = (
    "rows_in", "acked", "degraded", "dead", "unknown", "filtered", "invalid", "held_back",
    "duplicates_possible", "found_stored", "requests", "attempts",
)  # fmt: skip
"""Columns of the ledger's epoch rows."""

_WORDS: Final = {
    "rows_in": "rows in",
    "acked": "acknowledged",
    "degraded": "degraded (stored, less durable)",
    "dead": "dead letters",
    "unknown": "dead letters, outcome unknown",
    "filtered": "filtered",
    "invalid": "of the dead: refused rows",
    "held_back": "of the dead: held back",
    "duplicates_possible": "possible duplicates",
    "found_stored": "of the acknowledged: found stored",
    "requests": "requests",
    "attempts": "attempts",
}
_ALWAYS: Final = ("rows_in", "acked", "dead", "unknown")


@dataclass(frozen=True)
class WriteSummary:
    """The accounts of a batch write: rows_in = acked + degraded + dead + unknown + filtered."""

    query_id: str
    ledger: str
    duration_s: float
    rows_in: int
    acked: int
    degraded: int
    dead: int
    unknown: int
    filtered: int
    invalid: int
    held_back: int
    duplicates_possible: int
    found_stored: int
    requests: int
    attempts: int
    first_error: str = ""

    @classmethod
    def of(
        cls, counts: Mapping[str, Any], *, query_id: str, ledger: str, duration_s: float
    ) -> WriteSummary:
        known = {name: int(counts[name]) for name in COUNTS}
        return cls(query_id, ledger, duration_s, first_error=counts["first_error"], **known)

    @property
    def adds_up(self) -> bool:
        """Every row is accounted for."""
        parts = self.acked + self.degraded + self.dead + self.unknown + self.filtered
        return self.rows_in == parts

    @property
    def all_delivered(self) -> bool:
        """Every row is stored on a broker."""
        return self.rows_in == self.acked + self.degraded + self.filtered

    def lines(self) -> list[tuple[str, str]]:
        """(what, value) for printing; zeros that mean "nothing happened" are left out."""
        found = [(name, getattr(self, name)) for name in COUNTS]
        shown = [(_WORDS[n], f"{v:,}") for n, v in found if v or n in _ALWAYS]
        rate = f"{self.rows_in / self.duration_s:,.0f} rows/s" if self.duration_s else ""
        shown.append(("time", f"{self.duration_s:.1f} s  {rate}".rstrip()))
        if self.first_error:
            shown.append(("first error", clean(self.first_error)))
        shown.append(("ledger", self.ledger or "none"))
        return shown

    @property
    def title(self) -> str:
        if self.all_delivered:
            return "All rows delivered"
        return f"{self.dead + self.unknown:,} of {self.rows_in:,} rows not delivered"

    def __str__(self) -> str:
        lines = self.lines()
        width = max(len(what) for what, _ in lines)
        return "\n".join([self.title, *(f"  {what:<{width}}  {value}" for what, value in lines)])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(what)}</th>"
            f"<td style='text-align:right'>{html.escape(value)}</td></tr>"
            for what, value in self.lines()
        )
        return f"<table><caption>{html.escape(self.title)}</caption>{rows}</table>"
