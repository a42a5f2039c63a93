"""Records of a backfill for other processes: its claim, its marks, and dead letters that were
settled after its plan.

A backfill writes a mark for each dead letter before it sends a chunk, and another afterwards; a
dead letter that was stored gets a resolution instead of the second mark. So the next backfill knows
which dead letters a killed one may have sent, and asks brokers about these only. It can also leave
alone a dead letter that fails again and again.

Two backfills at once would both send the same dead letters. A driver takes the ledger's lock
`backfill` before it plans and keeps the lock to its end. A dead driver's lock is free at once
(local), or when its lease has ended without a heartbeat. A driver that was wrongly taken for dead
must send nothing more, nor must workers that outlive a killed driver. So tasks read a note with the
claim's token before they send, and stop if the token is not theirs.

A task may begin hours after its backfill was planned, and somebody may have parked dead letters
since. So the task reads the files of the few commits after the plan's version (`follower`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.follower import LedgerFollower
from rocket_sink.ledger.lock import LedgerLock
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath, failing
from rocket_sink.ledger.records import RunContext, build_rows
from rocket_sink.ledger.schema import BACKFILL, IN_FLIGHT, RESOLUTION, UNPARKED

_NAME: Final = "backfill"
_TOKEN: Final = "token"  # noqa: S105 (the name of a note)
_CHECK_S: Final = 1.0
"""Shortest time between two looks at the token."""


class BackfillClaim:
    """The driver's claim on the ledger's backfill; not for two threads at once.

    Raises from all methods:
        LedgerError: the ledger's folder cannot be read or written.
    """

    def __init__(self, place: LedgerPath) -> None:
        self._place = place
        self._lock = LedgerLock(place, _NAME)
        self.token = uuid.uuid4().hex
        """The name by which the tasks of this backfill recognise its claim."""

    def acquire(
        self, wait_s: float | None, *, on_wait: Callable[[str], None] = lambda holder: None
    ) -> None:
        """Take the claim.

        Args:
            wait_s: longest wait for a running backfill; None: no limit.
            on_wait: called once with the holder, before the first wait.

        Raises:
            LedgerError: another backfill had it all the time; the text says which process.
        """
        if not self._lock.acquire(wait_s, on_wait=on_wait):
            path = self._place.uri
            raise LedgerError(
                f"another backfill of the ledger {path} is at work ({self._lock.holder()}): both "
                "would send the same dead letters. Wait for its end, or stop it",
                path=path,
            )
        try:
            notes = NoteStore(self._place, _NAME)
            with failing(f"cannot write {notes.where(_TOKEN)}", notes.where(_TOKEN)):
                notes.write(_TOKEN, self.token)
        except LedgerError:
            self._lock.release()
            raise

    def release(self) -> None:
        """Give the claim up, if it is held."""
        self._lock.release()


class ClaimCheck:
    """A task's check that its driver still has the claim."""

    def __init__(
        self, place: LedgerPath, token: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place = place
        self._token = token
        self._clock = clock
        self._looked_s: float | None = None

    def __call__(self) -> None:
        """Check the claim before a chunk of dead letters is sent, at most once a second.

        Raises:
            LedgerError: another backfill has the claim; this one must send nothing more.
        """
        now_s = self._clock()
        if self._looked_s is not None and now_s - self._looked_s < _CHECK_S:
            return
        self._looked_s = now_s
        notes = NoteStore(self._place, _NAME)
        path = notes.where(_TOKEN)
        with failing(f"cannot read {path}", path, kinds=(OSError, ValueError)):
            current_token = notes.read(_TOKEN)
        if current_token != self._token:
            raise LedgerError(
                f"another backfill of the ledger {self._place} has taken over: the driver of "
                "this one was killed, or taken for dead. This one sends nothing more",
                path=path,
            )


def about_to_send(letters: Mapping[str, Any], ctx: RunContext) -> pa.RecordBatch:
    """Return a row per dead letter; `letters` has arrays `letter_id`, `topic` and `message_id`."""
    values = {**letters, "outcome": IN_FLIGHT}
    return build_rows(BACKFILL, len(letters["letter_id"]), values, ctx)


def not_stored(
    letters: Mapping[str, Any], ctx: RunContext, *, outcome: list[str], error_code: list[str]
) -> pa.RecordBatch:
    """Return a row per dead letter that was not stored: rejected, not_sent or unknown."""
    values = {**letters, "outcome": outcome, "error_code": error_code}
    return build_rows(BACKFILL, len(outcome), values, ctx)


def settled_since(place: LedgerPath, version: int) -> set[str]:
    """Return `letter_id` of the dead letters that commits after this version settled and did not
    take back.

    Raises:
        LedgerError: the table's log or a file of it cannot be read.
    """
    last: dict[str, str] = {}
    with failing(
        f"cannot read what was settled in the ledger {place} since version {version}",
        place.uri, kinds=(OSError, pa.ArrowException, ValueError, KeyError),
    ):  # fmt: skip
        follower = LedgerFollower(place, ("letter_id", "resolution"), (RESOLUTION,), version)
        for _, rows in follower.new_rows():
            for letter, way in zip(*(column.to_pylist() for column in rows.columns), strict=True):
                # A resent letter stays resent; otherwise the last resolution counts.
                if last.get(letter) != "resent":
                    last[letter] = way
    return {letter for letter, way in last.items() if way != UNPARKED}
