"""The claim of one backfill on a ledger: two at once would both send the same letters.

A driver takes the lock `backfill` of the ledger before it plans and keeps it to its end; of a dead
one it is free at once (local), or when its heartbeats stop. A driver that was only taken for dead,
and the workers that outlive a killed one, learn from a token beside the lock that another one has
the claim: tasks look at it before they send, and send nothing more.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Final

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.lock import LedgerLock
from rocket_sink.ledger.notes import write_bytes
from rocket_sink.ledger.place import Place

_NAME: Final = "backfill"
_TOKEN: Final = "backfill.token"  # noqa: S105 (the name of a file)
_CHECK_S: Final = 1.0
"""Shortest time between two looks at the token."""


class BackfillClaim:
    """The driver's side; not for two threads at once.

    Raises from all methods:
        LedgerError: the ledger's folder cannot be read or written.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = LedgerLock(place, _NAME)
        self.token = uuid.uuid4().hex
        """Names this claim for its tasks."""

    def acquire(
        self, wait_s: float | None, *, on_wait: Callable[[str], None] = lambda holder: None
    ) -> None:
        """Take the claim.

        Args:
            wait_s: longest wait for a backfill that lives; None: as long as it takes.
            on_wait: called once, with who has it, before the first wait.

        Raises:
            LedgerError: another backfill had it all the time; the text says which process.
        """
        if not self._lock.acquire(wait_s, on_wait=on_wait):
            path = self._place.uri
            raise LedgerError(
                f"another backfill of the ledger {path} is at work ({self._lock.holder()}): both "
                "would send the same letters. Wait for its end, or stop it",
                path=path,
            )
        try:
            data = self.token.encode()
            path = f"{self._place.folds}/{_TOKEN}"
            write_bytes(self._place.filesystem(), path, data, is_local=self._place.is_local)
        except OSError as error:
            self._lock.release()
            raise LedgerError(f"cannot write {path}: {error}", path=path) from error

    def release(self) -> None:
        """Give it up; nothing when it is not held."""
        self._lock.release()


class ClaimCheck:
    """A task's side: whether its driver's claim still holds."""

    def __init__(
        self, place: Place, token: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place = place
        self._token = token
        self._clock = clock
        self._looked_s: float | None = None

    def __call__(self) -> None:
        """Called before each chunk of letters; looks once a second.

        Raises:
            LedgerError: another backfill has the claim; this one must send nothing more.
        """
        now_s = self._clock()
        if self._looked_s is not None and now_s - self._looked_s < _CHECK_S:
            return
        self._looked_s = now_s
        path = f"{self._place.folds}/{_TOKEN}"
        try:
            with self._place.filesystem().open_input_stream(path) as stream:
                found = bytes(stream.read()).decode(errors="replace")
        except OSError as error:
            raise LedgerError(f"cannot read {path}: {error}", path=path) from error
        if found != self._token:
            raise LedgerError(
                f"another backfill of the ledger {self._place.uri} has taken over: the driver of "
                "this one was killed, or taken for dead. This one sends nothing more",
                path=path,
            )
