"""The ledger's locks. If a lock's holder dies, another process takes the lock.

On a local file system a lock is a kernel lock (`private_file.FileLock`). Elsewhere it is a file
with the holder's name and a heartbeat (`Lease`).

A process takes a lease by Fischer's algorithm (Lamport credits it in "A fast mutual exclusion
algorithm", 1987). If the file names no live holder, the process writes its own name and waits for
`_SETTLE_S`. If its name is still there, it has the lock. Two processes may hold the lock if one of
them needs more than `_SETTLE_S` between its read and its write. Folds tolerate this, because Delta
commits each fold's number only once.

A thread of the holder rewrites the file regularly, with a growing number. The file also names the
lease time. If the text stays the same for that time, the holder is dead. Each reader measures the
time on its own monotonic clock, so no two clocks are compared."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from rocket_sink.errors import LedgerError
from rocket_sink.forks import ForkLock
from rocket_sink.ledger.notes import read_bytes
from rocket_sink.ledger.path import SHARE, LedgerPath, failing, make_folder_of
from rocket_sink.owner import Owner, this_process
from rocket_sink.private_file import FileLock, check_folder, describe_holder, wait_for

if TYPE_CHECKING:
    from pyarrow import fs


LEASE_S: Final = 30.0
"""Time for which a killed holder on another host blocks the lock after a waiter's first read."""
_BEATS: Final = 3
"""Heartbeats per lease."""
_SETTLE_S: Final = 3.0
"""Longest time that a writer may need to write its name, after it has seen no holder."""
_POLL_S: Final = 1.0
_LONGEST_LEASE_S: Final = 3600


class Lease:
    """A lock file with a heartbeat; not for two threads at once. `acquire` raises OSError if the
    file system cannot be read or written."""

    _seen: ClassVar[dict[str, tuple[str, float]]] = {}
    """{path: (text, time at which this process first saw it)}. All `Lease` objects share it, so
    that the waiting times of several short tries add up to the lease time."""
    _guard: ClassVar[ForkLock] = ForkLock()

    def __init__(self, filesystem: fs.FileSystem, path: str, *, lease_s: float = LEASE_S) -> None:
        self._fs = filesystem
        self._path = path
        self._lease_s = lease_s
        self._name = f"{this_process()} {uuid.uuid4().hex}"
        self._pid = os.getpid()
        self._beat = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._renewed_s = 0.0
        self._lost = False

    def acquire(
        self, wait_s: float | None = None, *, on_wait: Callable[[str], None] = lambda holder: None
    ) -> bool:
        """Take the lock, as `LedgerLock.acquire`."""
        make_folder_of(self._fs, self._path)
        poll_s = min(_POLL_S, self._lease_s / _BEATS)
        self._lost = False
        if not wait_for(self._claim, wait_s, poll_s, lambda: on_wait(self.holder())):
            return False
        self._stop.clear()
        self._thread = threading.Thread(target=self._keep, name="rocket-sink-lease", daemon=True)
        self._thread.start()
        return True

    def release(self) -> None:
        """Give the lock up if this process holds it; do nothing in a forked child."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._stop.set()
        thread.join()
        if not self._lost and self._is_ours():
            self._fs.delete_file(self._path)

    def holder(self) -> str:
        """Return the holder, as text for a message."""
        return describe_holder(self._text() or "")

    def check(self, ahead_s: float = 0.0) -> None:
        """Raise LedgerError if the lock was not renewed in time, because another process may hold
        it. Call this before work that only one process may do. `ahead_s` is the longest time that
        the work takes; the lock must be held for this time from now."""
        if self._lost or self._is_over(ahead_s):
            raise LedgerError(
                f"the lock {self._path} could not be renewed for {self._lease_s:g} s, and another "
                "process may hold it now. The work that needs the lock is stopped; try again",
                path=self._path,
            )

    def _claim(self) -> bool:
        text = self._text()
        if text is not None and not self._is_dead(text):
            return False
        self._renewed_s = time.monotonic()
        self._write()
        time.sleep(_SETTLE_S)
        return self._is_ours()

    def _is_over(self, ahead_s: float = 0.0) -> bool:
        """Return whether the lease, which began with the last write, ends within `ahead_s`."""
        return time.monotonic() + ahead_s - self._renewed_s > self._lease_s

    def _is_dead(self, text: str) -> bool:
        words = text.split(" ")
        owner = Owner.parse(words[0])
        alive = owner.is_alive() if owner else None
        if alive is False:
            return True
        # Even a live owner loses its lease if its store is out of reach: measure the text's age.
        now_s = time.monotonic()
        with self._guard:
            before = self._seen.get(self._path)
            if before is None or before[0] != text:
                self._seen[self._path] = text, now_s
                return False
        is_lease = len(words) == 4 and words[2].isascii() and words[2].isdigit()
        # A writer that died while it wrote leaves an empty text, or one that is no lease.
        lease_s = min(int(words[2]) / 1000, _LONGEST_LEASE_S) if is_lease else self._lease_s
        return now_s - before[1] > lease_s

    def _keep(self) -> None:
        while not (self._lost or self._stop.wait(self._lease_s / _BEATS)):
            with contextlib.suppress(OSError):
                begun_s = time.monotonic()
                if not self._is_ours():
                    self._lost = True
                    return
                self._write()
                # If this process was suspended before the write, the lease may have ended
                # meanwhile, and the write may have replaced the next holder's name.
                self._lost = self._is_over()
                self._renewed_s = begun_s
            self._lost = self._lost or self._is_over()

    def _write(self) -> None:
        self._beat += 1
        text = f"{self._name} {self._lease_s * 1000:.0f} {self._beat}"
        with self._fs.open_output_stream(self._path) as out:
            out.write(text.encode())

    def _is_ours(self) -> bool:
        return (self._text() or "").startswith(f"{self._name} ")

    def _text(self) -> str | None:
        """Return the file's text; None if there is no file. The text is empty during a write."""
        data = read_bytes(self._fs, self._path)
        return None if data is None else data.decode(errors="replace")


LOCK_NAME: Final = "lock"
ENDS_LOCK: Final = "transactions.lock"
"""Name of the lock for the commit of half messages."""


class LedgerLock:
    """A lock of the ledger, by name; not for two threads at once. All methods raise LedgerError if
    the ledger's folder cannot be read or written, or is not safe to write in."""

    def __init__(self, place: LedgerPath, name: str = LOCK_NAME) -> None:
        self._place = place
        self._path = f"{place.locks}/{name}"
        self._lock: FileLock | Lease = (
            FileLock(Path(self._path)) if place.is_local else Lease(place.filesystem(), self._path)
        )

    def acquire(
        self, wait_s: float | None = None, *, on_wait: Callable[[str], None] = lambda holder: None
    ) -> bool:
        """Take the lock; return False if another live process had it all the time.

        Args:
            wait_s: longest wait; None: no limit.
            on_wait: called once with the holder's description before the first wait.
        """
        with self._errors():
            if self._place.is_local:
                locks = Path(self._place.locks)
                for folder in (locks.parent, locks):
                    check_folder(folder)  # Refuse a link that another user has put there.
                make_folder_of(self._place.filesystem(), self._path)
            return self._lock.acquire(wait_s, on_wait=on_wait)

    def release(self) -> None:
        """Give the lock up if this process holds it."""
        with self._errors():
            self._lock.release()

    def holder(self) -> str:
        """Return the holder, as text for a message: `process 12 on host-a`."""
        with self._errors():
            return self._lock.holder()

    def check(self, ahead_s: float = 0.0) -> None:
        """Raise unless the lock is held for `ahead_s` from now (see `Lease.check`). Always return
        on a local ledger: there the kernel holds the lock until this process ends."""
        if isinstance(self._lock, Lease):
            self._lock.check(ahead_s)

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return failing(
            f"cannot use the lock {self._path} of the ledger {self._place}", self._path,
            ". Users who fold or start queries must be able to write below the ledger's folder: "
            f"{SHARE}",
        )  # fmt: skip


@contextlib.contextmanager
def ledger_lock(
    place: LedgerPath, wait_s: float, *, name: str = LOCK_NAME
) -> Iterator[LedgerLock | None]:
    """Hold a lock of the ledger; yield None if another live process had it all the time."""
    lock = LedgerLock(place, name)
    if not lock.acquire(wait_s):
        yield None
        return
    try:
        yield lock
    finally:
        lock.release()
