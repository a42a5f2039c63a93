"""Judges what the brokers hold: every row there, once or more often, unaltered, in order.

Order is that of first storing: of a sharding key's rows, each first copy stands behind the first
copies of all earlier ones, in one queue. A later second copy is a duplicate and is counted, not
called disorder: a re-send after an unknown outcome cannot avoid it. Rows of a key that moved to
another queue (ordering=best_effort) are judged within each queue, and the key is counted as moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.parquet

if TYPE_CHECKING:
    from rocket_sink.wire.stored import StoredMessage

_WITNESSES: Final = ("sharding_key", "carrier", "flight", "dest", "distance")
"""Columns of the input that each stored message is compared with."""


@dataclass(frozen=True)
class Verdict:
    """What was read back; the row numbers in `missing` were found on no broker."""

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


@dataclass
class _Key:
    last_seq: dict[tuple[str, int], int] = field(default_factory=dict)
    disordered: bool = False


class Verifier:
    """Feed it all stored messages, each queue in its order; then ask for the verdict."""

    def __init__(self, flights: Path) -> None:
        table = pyarrow.parquet.read_table(flights, columns=["row", *_WITNESSES]).sort_by("row")
        self._witness = list(zip(*(table[name].to_pylist() for name in _WITNESSES), strict=True))
        self._copies = np.zeros(table.num_rows, dtype=np.int32)
        self._ids: dict[int, str] = {}
        self._keys: dict[str, _Key] = {}
        self._altered = self._foreign = self._new_ids = 0

    def feed(self, broker_name: str, message: StoredMessage) -> None:
        """Take one stored message of the queue `broker_name`, `message.queue_id`."""
        properties = message.properties
        row = _number(properties.get("row"))
        if row is None or not 0 <= row < len(self._copies):
            self._foreign += 1
            return
        key = properties.get("__SHARDINGKEY", "")
        self._altered += not self._is_unaltered(row, key, message.body)
        message_id = properties.get("UNIQ_KEY", "")
        if self._copies[row]:
            self._new_ids += message_id != self._ids[row]
        else:
            self._ids[row] = message_id
        self._note_order(
            key, int(properties["seq"]), (broker_name, message.queue_id),
            repeated=bool(self._copies[row]),
        )  # fmt: skip
        self._copies[row] += 1

    def verdict(self) -> Verdict:
        """The judgement over everything fed so far."""
        found = int(np.count_nonzero(self._copies))
        stored = int(self._copies.sum())
        keys = self._keys.values()
        return Verdict(
            stored=stored,
            distinct=found,
            duplicates=stored - found,
            altered=self._altered,
            foreign=self._foreign,
            new_ids=self._new_ids,
            keys=len(self._keys),
            disordered_keys=sum(key.disordered for key in keys),
            moved_keys=sum(len(key.last_seq) > 1 for key in keys),
            missing=frozenset(np.flatnonzero(self._copies == 0).tolist()),
        )

    def _is_unaltered(self, row: int, key: str, body: Any) -> bool:
        try:
            flight = json.loads(bytes(body))
        except ValueError:
            return False
        return self._witness[row] == (key, *(flight.get(name) for name in _WITNESSES[1:]))

    def _note_order(self, name: str, seq: int, queue: tuple[str, int], *, repeated: bool) -> None:
        key = self._keys.setdefault(name, _Key())
        last_seq = key.last_seq.setdefault(queue, -1)
        if not repeated:
            key.disordered = key.disordered or seq < last_seq
            key.last_seq[queue] = max(last_seq, seq)


def lost_rows(verdict: Verdict, letters: Iterable[int]) -> frozenset[int]:
    """Rows that are neither on a broker nor among the ledger's dead letters."""
    return verdict.missing - frozenset(letters)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
