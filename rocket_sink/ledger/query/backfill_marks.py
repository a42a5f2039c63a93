"""The claim and the marks by which backfills of one ledger know of each other.

Marks: a backfill writes a row per dead letter before it sends a chunk, and another row for each
dead letter that was not stored. A stored dead letter gets a resolution instead. If a dead letter
has only the first mark, a killed backfill may have sent it, so the next backfill asks the brokers
about it. The marks also count failed tries: a backfill can leave out a dead letter that fails again
and again.

Claim: two backfills at once would both send the same dead letters. So a driver holds the ledger's
lock `backfill` from before its plan to its end. If the driver dies, the lock is free at once (local
folder) or when its lease ends (store). A driver that was wrongly taken for dead must stop sending,
and so must tasks that outlive a killed driver. So tasks compare their token with the claim's note
before they send, and stop if another backfill has written its token there.

A task may begin hours after the plan, when somebody has parked some of its dead letters. So the
task reads which dead letters were settled after the plan's version, and which tasks were about to
send since (`noted_since`)."""

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
"""Shortest time between two checks of the token."""


class BackfillClaim:
    """A driver's exclusive right to run a backfill on a ledger; not for two threads at once. All
    methods raise LedgerError if the ledger's folder cannot be read or written."""

    def __init__(self, place: LedgerPath) -> None:
        self._place = place
        self._lock = LedgerLock(place, _NAME)
        self.token = uuid.uuid4().hex
        """The text by which the tasks of this backfill recognise its claim."""

    def acquire(
        self, wait_s: float | None, *, on_wait: Callable[[str], None] = lambda holder: None
    ) -> None:
        """Take the claim, and write its token for the tasks. Raise a LedgerError that names the
        other process if another backfill still has the claim.

        Args:
            wait_s: longest wait for the end of another backfill; None: no limit.
            on_wait: called once, before the first wait, with a text that names the other process.
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
        except BaseException:  # After Ctrl-C a notebook goes on, and may begin a backfill again.
            self._lock.release()
            raise

    def release(self) -> None:
        """Release the claim, if it is held."""
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
        """Check the claim before a chunk of dead letters is sent, at most once a second. Raise
        LedgerError if another backfill has the claim, so this one must send nothing more."""
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
    """Return the marks before a send; `letters` has arrays letter_id, topic and message_id."""
    values = {**letters, "outcome": IN_FLIGHT}
    return build_rows(BACKFILL, len(letters["letter_id"]), values, ctx)


def not_stored(
    letters: Mapping[str, Any], ctx: RunContext, *, outcome: list[str], error_code: list[str]
) -> pa.RecordBatch:
    """Return the marks after a send that failed; an outcome is rejected, not_sent or unknown."""
    values = {**letters, "outcome": outcome, "error_code": error_code}
    return build_rows(BACKFILL, len(outcome), values, ctx)


def noted_since(place: LedgerPath, version: int) -> tuple[set[str], set[tuple[str, int]]]:
    """Return what commits after this version have noted. Raise LedgerError if the table's log or
    one of its files cannot be read.

    Returns:
        The ids of the dead letters that were settled, without letters that were parked or dropped,
        and then unparked; and (query id, partition) of the backfill tasks that were about to send.
    """
    last: dict[str, str] = {}
    tasks: set[tuple[str, int]] = set()
    kinds = {RESOLUTION: ("letter_id", "resolution"), BACKFILL: ("query_id", "partition")}
    with failing(
        f"cannot read what was settled in the ledger {place} since version {version}",
        place.uri, kinds=(OSError, pa.ArrowException, ValueError, KeyError),
    ):  # fmt: skip
        for kind, rows in LedgerFollower(place, kinds, version).new_rows():
            pairs = zip(*(column.to_pylist() for column in rows.columns), strict=True)
            if kind == BACKFILL:
                tasks.update(pairs)
                continue
            for letter, way in pairs:
                # A resent letter stays resent; otherwise the last resolution counts.
                if last.get(letter) != "resent":
                    last[letter] = way
    return {letter for letter, way in last.items() if way != UNPARKED}, tasks
