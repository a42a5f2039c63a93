"""Records of a backfill for other processes: its claim, marks, and letters settled since.

Marks are written around each chunk of dead letters, before and after; a dead letter that was stored
has a resolution instead of the second one. So the next backfill knows what a killed one may have
sent, and asks the brokers about just these. It can also leave a dead letter alone that fails again
and again.

Two backfills at once would both send the same dead letters. A driver takes the ledger's lock
`backfill` before it plans and keeps it to its end. A dead driver's lock is free at once (local), or
when its heartbeats stop. A driver that was wrongly taken for dead, and workers that outlive a
killed driver, learn of a new claim from a note with its token: tasks read the note before they
send, and then send nothing more.

A task may begin hours after its backfill was planned, and dead letters may have been parked since.
The commits after the plan's version are few: their files are read (`follower`). Rewrites of files
settle nothing, and are passed over.
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
        """The name of this claim for its tasks."""

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
        """Called before each chunk of dead letters; looks once a second.

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
                f"another backfill of the ledger {self._place.uri} has taken over: the driver of "
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
        f"cannot read what was settled in the ledger {place.uri} since version {version}",
        place.uri, kinds=(OSError, pa.ArrowException, ValueError, KeyError),
    ):  # fmt: skip
        follower = LedgerFollower(place, ("letter_id", "resolution"), (RESOLUTION,), version)
        for _, rows in follower.new_rows():
            for letter, way in zip(*(column.to_pylist() for column in rows.columns), strict=True):
                # A resent letter stays resent; otherwise the last resolution counts.
                if last.get(letter) != "resent":
                    last[letter] = way
    return {letter for letter, way in last.items() if way != UNPARKED}
