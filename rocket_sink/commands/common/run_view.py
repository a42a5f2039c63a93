"""What a running query does: a table that changes in a terminal, else a line per event."""

from __future__ import annotations

import datetime as dt
import sys
import time
from typing import TYPE_CHECKING, Any

from rocket_sink.commands.common.output import note, stderr_console, table
from rocket_sink.text import clean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rocket_sink.ledger.live.figures import BrokerSums, LiveFigures


class RunView:
    """A context manager; not thread-safe.

    Args:
        figures: what comes into the ledger; None: only what Spark tells is shown.
    """

    def __init__(self, figures: LiveFigures | None) -> None:
        self._figures = figures
        self._live: Any = None
        self._rows = 0
        self._epoch = ""
        self._began_s = time.monotonic()
        self._isolated: dict[str, dt.datetime] = {}
        self._pending = 0
        self._rates: dict[str, float] = {}
        self._read_s = time.monotonic()
        self._messages: dict[str, int] = {}

    def __enter__(self) -> RunView:
        if sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(console=stderr_console(), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the table."""
        if self._live is not None:
            self._live.console.print(clean(text))
        else:
            note(text)

    def epoch(self, epoch: int, rows: int, took_s: float) -> None:
        """A micro-batch ended."""
        self._rows += rows
        self._epoch = f"epoch {epoch}: {rows:,} rows in {took_s:.1f} s"
        self._event(self._epoch)

    def refresh(self) -> None:
        """Show what has come since."""
        if self._figures is not None and self._figures.refresh():
            self._add(self._figures)
        if self._live is not None:
            self._live.update(self.as_table(), refresh=True)

    def as_table(self) -> RenderableType:
        """The whole picture."""
        from rich.console import Group
        from rich.text import Text

        seconds = time.monotonic() - self._began_s
        rate = f"{self._rows / seconds:,.0f} rows/s" if seconds else "-"
        head = f"{self._rows:,} rows read in {seconds:,.0f} s, {rate}"
        lines: list[RenderableType] = [Text(f"{head}; {self._epoch}" if self._epoch else head)]
        if self._figures is not None:
            lines += self._of_ledger(self._figures)
        return Group(*lines)

    def _of_ledger(self, figures: LiveFigures) -> list[RenderableType]:
        from rich.text import Text

        counts = ", ".join(f"{name} {n:,}" for name, n in figures.rows.items())
        doubled = figures.duplicates_possible
        counts += f", perhaps doubled {doubled:,}" if doubled else ""
        lines: list[RenderableType] = [Text(f"rows: {counts or 'none folded yet'}")]
        if figures.pending:
            waiting = ", ".join(f"{reason} {n:,}" for reason, n in figures.pending.items())
            lines.append(Text(f"dead letters pending: {waiting}", style="yellow"))
        if figures.brokers:
            lines.append(table(
                "",
                ("broker", "messages", "per s", "p50 ms", "p99 ms", "failed", "retries",
                 "isolated"),
                [self._broker(name, sums) for name, sums in sorted(figures.brokers.items())],
            ))  # fmt: skip
        return lines

    def _broker(self, name: str, sums: BrokerSums) -> tuple[Any, ...]:
        isolated = ""
        if sums.is_isolated() and sums.isolated_until is not None:
            until = sums.isolated_until.astimezone().strftime("%H:%M:%S")
            isolated = f"until {until} ({sums.cause})"
        return (
            name, sums.messages, round(self._rates.get(name, 0.0)), sums.latency_ms(0.5),
            sums.latency_ms(0.99), sums.failures.total(), sums.retries, isolated,
        )  # fmt: skip

    def _add(self, figures: LiveFigures) -> None:
        """Rates since the last reading; lines for brokers newly isolated and new dead letters."""
        now_s = time.monotonic()
        passed_s = max(now_s - self._read_s, 1e-3)
        self._read_s = now_s
        for name, sums in figures.brokers.items():
            self._rates[name] = (sums.messages - self._messages.get(name, 0)) / passed_s
            self._messages[name] = sums.messages
            until = sums.isolated_until
            if until is not None and sums.is_isolated():
                if name not in self._isolated or self._isolated[name] < until:
                    self._event(f"{name} is isolated until {until:%H:%M:%S} UTC ({sums.cause})")
                self._isolated[name] = until
        pending = sum(figures.pending.values())
        if pending > self._pending:
            self._event(f"{pending:,} dead letters are pending")
        self._pending = pending

    def _event(self, text: str) -> None:
        """A line where there is no table to show it."""
        if self._live is None:
            note(text)
