"""The lock of the folds of one ledger: one fold at a time, and a dead one's lock is taken over.

On a local file system the kernel holds it (`flock`), and drops it when its holder dies. Object
stores have no such thing. There Fischer's algorithm is used ("A fast mutual exclusion algorithm",
Lamport 1987, credits it): write the own name where none is, wait for longer than any writer can
need between its look and its write, and go on only if the name is still there. It rests on that
wait; behind it stands Delta, which commits one of two folds with the same number.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.owner import Owner, this_process
from rocket_sink.ledger.place import Place
from rocket_sink.ledger.spool_files import STALE_AFTER_S

LOCK_NAME: Final = "lock"
_POLL_S: Final = 0.1
_SETTLE_S: Final = 3.0
"""Longest time that a remote writer may take between finding no lock and having written its own."""


@contextlib.contextmanager
def fold_lock(
    place: Place, filesystem: fs.FileSystem, wait_s: float, *, name: str = LOCK_NAME
) -> Iterator[bool]:
    """Hold the ledger's fold lock; gives False when another live fold had it all the time.

    Args:
        name: another lock of the ledger, held in the same way.
    """
    deadline_s = time.monotonic() + wait_s
    if place.is_local:
        held = _local(place, name, deadline_s)
    else:
        held = _remote(place, name, filesystem, deadline_s)
    with held as got:
        yield got


@contextlib.contextmanager
def _local(place: Place, lock_name: str, deadline_s: float) -> Iterator[bool]:
    import fcntl

    folder = Path(place.folds)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / lock_name, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise LedgerError(
            f"cannot write the spool folder {folder}: {error}", path=str(folder)
        ) from error
    try:
        # The file stays: were it removed, two folds could lock two files of one name.
        while not _try_flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.monotonic() >= deadline_s:
                yield False
                return
            time.sleep(_POLL_S)
        os.truncate(handle, 0)
        os.pwrite(handle, f"{this_process()}\n".encode(), 0)
        yield True
    finally:
        os.close(handle)


def _try_flock(handle: int, operation: int) -> bool:
    import fcntl

    try:
        fcntl.flock(handle, operation)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _remote(
    place: Place, lock_name: str, filesystem: fs.FileSystem, deadline_s: float
) -> Iterator[bool]:
    path = f"{place.folds}/{lock_name}"
    name = f"{this_process()} {uuid.uuid4().hex}"
    filesystem.create_dir(place.folds, recursive=True)
    while not _claim(path, name, filesystem):
        if time.monotonic() >= deadline_s:
            yield False
            return
        time.sleep(_SETTLE_S / 3)
    try:
        yield True
    finally:
        if _holder(path, filesystem) == name:
            filesystem.delete_file(path)


def _claim(path: str, name: str, filesystem: fs.FileSystem) -> bool:
    holder = _holder(path, filesystem)
    if holder and not _is_dead(holder, path, filesystem):
        return False
    with filesystem.open_output_stream(path) as out:
        out.write(name.encode())
    time.sleep(_SETTLE_S)
    return _holder(path, filesystem) == name


def _holder(path: str, filesystem: fs.FileSystem) -> str:
    try:
        with filesystem.open_input_stream(path) as stream:
            return bytes(stream.read()).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _is_dead(holder: str, path: str, filesystem: fs.FileSystem) -> bool:
    owner = Owner.parse(holder.partition(" ")[0])
    alive = owner.is_alive() if owner else None
    if alive is not None:
        return not alive
    changed_ns = filesystem.get_file_info(path).mtime_ns or time.time_ns()
    return time.time() - changed_ns / 1e9 > STALE_AFTER_S
