"""The demo's verification and summary: a comparison of stored messages, input and ledger.

A sharding key is in order if the first copies of its rows have the rows' order in each queue. Later
copies of a row are duplicates, which a retry after an unknown outcome cannot avoid. A key in
several queues (ordering=best_effort) is counted as moved.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet

from rocket_sink.commands.common.output import program, table
from rocket_sink.commands.demo.flights import Flights, Settings
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.report import Report
from rocket_sink.ledger.report.tables import console_table, tables
from rocket_sink.ledger.views import OUTCOMES
from rocket_sink.wire.stored import StoredMessage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import RenderableType


_COMPARED: Final = ("sharding_key", "carrier", "flight", "dest", "distance")
"""Columns of the input that are compared with each stored message."""


@dataclass(frozen=True)
class Verdict:
    """The result of the verification; `missing` has the numbers of rows that no broker has."""

    stored: int
    distinct: int
    duplicates: int
    altered: int
    foreign: int
    new_ids: int
    keys: int
    disordered_keys: int
    moved_keys: int
    missing: frozenset[int]


class Verifier:
    """Compares stored messages with the input. Pass each queue's messages in order to `feed`."""

    def __init__(self, flights: Path) -> None:
        table = pyarrow.parquet.read_table(flights, columns=["row", *_COMPARED]).sort_by("row")
        self._rows = list(zip(*(table[name].to_pylist() for name in _COMPARED), strict=True))
        self._ids: dict[int, str] = {}
        """{row: id of its first copy}"""
        self._last_seq: dict[tuple[str, str, int], int] = {}
        """{(sharding key, broker, queue id): highest `seq` of its first copies}"""
        self._disordered: set[str] = set()
        self._stored = self._altered = self._foreign = self._new_ids = 0

    def feed(self, broker_name: str, message: StoredMessage) -> None:
        """Add one stored message of the broker's queue `message.queue_id`."""
        properties = message.properties
        number = properties.get("row", "")
        row = int(number) if number.isdigit() else -1
        if not 0 <= row < len(self._rows):
            self._foreign += 1
            return
        self._stored += 1
        key = properties.get("__SHARDINGKEY", "")
        self._altered += not self._is_unaltered(row, key, message.body)
        queue, message_id = (key, broker_name, message.queue_id), properties.get("UNIQ_KEY", "")
        seq, last_seq = int(properties["seq"]), self._last_seq.setdefault(queue, -1)
        if row in self._ids:
            self._new_ids += message_id != self._ids[row]
            return
        self._ids[row] = message_id
        if seq < last_seq:
            self._disordered.add(key)
        self._last_seq[queue] = max(last_seq, seq)

    def verdict(self) -> Verdict:
        queues = Counter(key for key, *_ in self._last_seq)
        return Verdict(
            stored=self._stored,
            distinct=len(self._ids),
            duplicates=self._stored - len(self._ids),
            altered=self._altered,
            foreign=self._foreign,
            new_ids=self._new_ids,
            keys=len(queues),
            disordered_keys=len(self._disordered),
            moved_keys=sum(count > 1 for count in queues.values()),
            missing=frozenset(range(len(self._rows))).difference(self._ids),
        )

    def _is_unaltered(self, row: int, key: str, body: Any) -> bool:
        try:
            flight = json.loads(bytes(body))
        except ValueError:
            return False
        return self._rows[row] == (key, *(flight.get(name) for name in _COMPARED[1:]))


_ISOLATIONS_SHOWN = 8


@dataclass(frozen=True)
class DemoSummary:
    """The ledger's report, the verification, and the checks on both."""

    settings: Settings
    flights: Flights
    seconds: float
    report: Report
    verdict: Verdict
    lost: int
    events: Sequence[str]
    """The demo's actions on brokers, with their times."""

    @property
    def announced(self) -> int:
        """The number of possible duplicates that the ledger reports."""
        totals = self.report.totals
        return totals.duplicates_possible + totals.superseded_rows + totals.unknown

    @property
    def failures(self) -> list[str]:
        totals, verdict = self.report.totals, self.verdict
        ordering = self.settings.ordering
        accounted = sum(getattr(totals, outcome) for outcome in OUTCOMES)
        checks = {
            f"{totals.not_adding_up:,} epochs of the ledger do not add up": totals.not_adding_up,
            f"the ledger has {totals.rows_in:,} rows, the input {self.flights.rows:,}":
                totals.rows_in != self.flights.rows,
            f"{accounted:,} of {totals.rows_in:,} rows are accounted for":
                accounted != totals.rows_in,
            f"{self.lost:,} rows are lost": self.lost,
            f"{verdict.altered:,} messages differ from their rows": verdict.altered,
            f"{verdict.foreign:,} messages are not the demo's": verdict.foreign,
            f"{verdict.new_ids:,} duplicates have a message id of their own": verdict.new_ids,
            f"{verdict.duplicates:,} duplicates, but only {self.announced:,} were announced":
                verdict.duplicates > self.announced,
            f"{verdict.disordered_keys:,} keys are out of order":
                verdict.disordered_keys and ordering != "none",
            f"{verdict.moved_keys:,} keys are in several queues":
                verdict.moved_keys and ordering == "strict",
        }  # fmt: skip
        return [text for text, wrong in checks.items() if wrong]

    @property
    def passed(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        verdict = asdict(self.verdict)
        missing = len(verdict.pop("missing"))
        return {
            "passed": self.passed,
            "failures": self.failures,
            "rows": self.flights.rows,
            "seconds": round(self.seconds, 1),
            "stored": {**verdict, "missing": missing, "lost": self.lost},
            "ledger": self.report.as_dict(),
        }

    def tables(self) -> list[RenderableType]:
        isolations = self.report.isolations[-_ISOLATIONS_SHOWN:]
        accounts, brokers, isolated, *_ = (
            console_table(each, narrow=True)
            for each in tables(replace(self.report, isolations=isolations))
        )
        return [accounts, self._stored(), brokers, isolated, self._explained(), self._closing()]

    def _stored(self) -> RenderableType:
        verdict = self.verdict
        order = f"{verdict.keys - verdict.disordered_keys:,} of {verdict.keys:,}"
        if self.settings.ordering == "none":
            order = "not asked for"
        rows = [
            ("messages stored", verdict.stored, "read back from every queue"),
            ("distinct rows", verdict.distinct, "compared with the input"),
            ("duplicates", verdict.duplicates, f"announced as possible: {self.announced:,}"),
            ("lost", self.lost, ""),
            ("keys in order", order, f"{verdict.moved_keys:,} moved to another queue"),
        ]
        return table("Read back (brokers)", ("", "messages", "note"), rows, numbers="messages")

    def _explained(self) -> RenderableType:
        failed = [f"{e.attempts:,} {e.error_code}" for e in self.report.errors]
        shown = f" ({', '.join(failed)})" if failed else ""
        advice = (
            f"Requests that failed{shown} are not acked, and only those with an answer have a "
            "latency. A broker is isolated after a failure, or after a slow answer (LATENCY) "
            "or a refusal because it is overloaded (BROKER_BUSY). A busy machine causes both, too."
            "\n"
        )
        return "\n".join((*self.events, advice))

    def _closing(self) -> RenderableType:
        from rich.text import Text

        path = str(self.settings.out / "ledger")
        ledger = f"ledger: {path}\n  {program()} report --ledger {shlex.quote(path)}"
        if self.passed:
            return Text.assemble(
                f"{ledger}\n", ("PASSED", "bold green"),
                ": the accounts add up and nothing is lost",
            )  # fmt: skip
        wrong = "\n".join(f"  - {text}" for text in self.failures)
        return Text.assemble(f"{ledger}\n", ("FAILED", "bold red"), f":\n{wrong}")


def lost_rows(spark: SparkSession, ledger: Ledger, verdict: Verdict) -> int:
    """Return the number of rows that neither a broker nor a pending dead letter has."""
    dead_letters = ledger.dead_letters(spark).selectExpr("cast(properties['row'] AS int) AS row")
    dead_rows = [row.row for row in dead_letters.where("row IS NOT NULL").collect()]
    return len(verdict.missing.difference(dead_rows))
