"""What one run of the demo was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

TOPIC: Final = "flights"
QUEUES_PER_BROKER: Final = 4
FAULT_AT: Final = 0.35
"""Share of the rows after which the broker is broken."""


@dataclass(frozen=True)
class Settings:
    """`fault` is freeze, kill or none; `out` holds input, checkpoint, ledger and brokers."""

    out: Path
    rows: int
    ordering: str
    brokers: int
    fault: str
    fault_s: float

    @property
    def flights(self) -> Path:
        """The files that the stream reads."""
        return self.out / "flights"

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint of the query."""
        return self.out / "checkpoint"

    @property
    def ledger(self) -> Path:
        """The Delta ledger."""
        return self.out / "ledger"

    @property
    def cluster(self) -> Path:
        """Stores and logs of the brokers."""
        return self.out / "cluster"
