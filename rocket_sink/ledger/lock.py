"""The ledger's locks: one holder at a time, and a dead one's is taken over.

On a local file system the kernel holds them (`private_file.FileLock`), elsewhere a file with a
heartbeat (`lease`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.lease import LEASE_S, Lease
from rocket_sink.ledger.place import Place
from rocket_sink.private_file import FileLock, check_folder

LOCK_NAME: Final = "lock"
ENDS_LOCK: Final = "transactions.lock"
"""Held by the only one that ends epochs of the ledger."""


class LedgerLock:
    """One of the ledger's locks, by name; not for two threads at once.

    Args:
        lease_s: on an object store, how long a killed holder on another host blocks others.

    Raises from all methods:
        LedgerError: the ledger's folder cannot be read or written, or is not safe to write in.
    """

    def __init__(self, place: Place, name: str = LOCK_NAME, *, lease_s: float = LEASE_S) -> None:
        self._place = place
        self._path = f"{place.folds}/{name}"
        self._lock: FileLock | Lease
        if place.is_local:
            self._lock = FileLock(Path(self._path))
        else:
            self._lock = Lease(place.filesystem(), self._path, lease_s=lease_s)

    def acquire(
        self, wait_s: float | None = None, *, on_wait: Callable[[str], None] = lambda holder: None
    ) -> bool:
        """Take it; False when another live process had it all the time.

        Args:
            wait_s: longest wait; None: as long as it takes.
            on_wait: called once, with who has it, before the first wait.
        """
        with self._errors():
            if self._place.is_local:
                make_folder(self._place)
            return self._lock.acquire(wait_s, on_wait=on_wait)

    def release(self) -> None:
        """Give it up; nothing when it is not held."""
        with self._errors():
            self._lock.release()

    def holder(self) -> str:
        """Who has it, as text for a message: `process 12 on host-a`."""
        with self._errors():
            return self._lock.holder()

    def check(self) -> None:
        """Make sure that it is still held, before something that no two processes may do."""
        if isinstance(self._lock, Lease):
            self._lock.check()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LedgerError(
                f"cannot use the lock {self._path} of the ledger {self._place.uri}: {error}. Who "
                "folds or starts queries needs to write below the ledger's folder, and to own the "
                "locks there",
                path=self._path,
            ) from error


def make_folder(place: Place) -> None:
    """The folder of a local ledger's locks and manifests.

    Raises:
        OSError: it cannot be made, or another user's link stands in its place.
    """
    for folder in (Path(place.spool), Path(place.folds)):
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def ledger_lock(
    place: Place, wait_s: float, *, name: str = LOCK_NAME
) -> Iterator[LedgerLock | None]:
    """Hold a lock of the ledger; gives None when another live process had it all the time."""
    lock = LedgerLock(place, name)
    if not lock.acquire(wait_s):
        yield None
        return
    try:
        yield lock
    finally:
        lock.release()
