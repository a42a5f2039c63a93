"""A small hash table in a memory-mapped file, shared by the processes of one machine.

The table has slots of a fixed size, open addressing, and a checksum per slot. A writer that is
killed half-way leaves a slot with a wrong checksum. Readers skip the slot, and a later write uses
it again. Writers take a POSIX lock, which the kernel releases when a process dies. A stopped
process keeps the lock, so other writers give up after some milliseconds. Such a lost write does no
harm, because the table contains only hints."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from rocket_sink.forks import ForkLock
from rocket_sink.private_file import open_private

_SLOT: Final = struct.Struct("<IHI")  # crc of the rest, key length, value length
_READS: Final = 3
"""Attempts to read a slot that another process is writing."""
_LOCK_TRIES: Final = 20
_LOCK_PAUSE_S: Final = 0.000_2


class MappedTable:
    """A table of `count` slots of `slot_bytes`, which begins at `offset` in the file."""

    def __init__(self, file: MappedFile, offset: int, count: int, slot_bytes: int) -> None:
        self._file = file
        self._offset = offset
        self._count = count
        self._slot_bytes = slot_bytes
        self._seen = np.zeros(count * slot_bytes, np.uint8)
        self._items: dict[int, tuple[str, bytes]] = {}

    def get(self, key: str) -> bytes | None:
        wanted = key.encode()
        for slot in self._chain(wanted):
            entry = self._read(slot)
            if entry is None:
                continue
            if entry[0] == wanted:
                return entry[1]
            if not entry[0]:
                return None
        return None

    def put(self, key: str, value: bytes) -> bool:
        """Store a value; return False if it is too long, the table full, or locked for too long."""
        wanted = key.encode()
        is_too_long = _SLOT.size + len(wanted) + len(value) > self._slot_bytes
        if is_too_long or not self._file.lock():
            return False
        try:
            slot = self._place(wanted)
            if slot is not None:
                self._write(slot, wanted, value)
        finally:
            self._file.unlock()
        return slot is not None

    def items(self) -> list[tuple[str, bytes]]:
        """Return the keys that have a value, with their values."""
        # Read changed slots only: 50 reads of all slots a second took 5 % of a busy task's CPU.
        size = self._count * self._slot_bytes
        now = np.frombuffer(self._file.data, np.uint8, size, self._offset).copy()
        changed = (now != self._seen).reshape(self._count, self._slot_bytes).any(axis=1)
        self._seen = now
        for slot in np.flatnonzero(changed).tolist():
            entry = self._read(slot)
            self._items.pop(slot, None)
            if entry is not None and entry[1]:
                self._items[slot] = entry[0].decode(), entry[1]
        return list(self._items.values())

    def _chain(self, key: bytes) -> Iterator[int]:
        start = zlib.crc32(key) % self._count
        return ((start + step) % self._count for step in range(self._count))

    def _place(self, key: bytes) -> int | None:
        """Return the key's slot, else the first unused, broken or valueless slot of its chain. Only
        an unused slot ends the search, because the key may be stored behind the others."""
        free = None
        for slot in self._chain(key):
            entry = self._read(slot)
            if entry is not None and entry[0] == key:
                return slot
            if entry is None or not entry[1]:
                free = slot if free is None else free
                if entry is not None and not entry[0]:
                    break
        return free

    def _read(self, slot: int) -> tuple[bytes, bytes] | None:
        """Return (key, value); two empty values if the slot is unused; None if it is broken."""
        start = self._offset + slot * self._slot_bytes
        for _ in range(_READS):
            crc, key_length, length = _SLOT.unpack_from(self._file.data, start)
            if crc == 0 and key_length == 0:
                return b"", b""
            end = start + _SLOT.size + key_length + length
            if end > start + self._slot_bytes:
                continue
            checked_bytes = self._file.data[start + 4 : end]
            if zlib.crc32(checked_bytes) == crc:
                body = checked_bytes[_SLOT.size - 4 :]
                return body[:key_length], body[key_length:]
        return None

    def _write(self, slot: int, key: bytes, value: bytes) -> None:
        start = self._offset + slot * self._slot_bytes
        record = _SLOT.pack(0, len(key), len(value)) + key + value
        record = zlib.crc32(record[4:]).to_bytes(4, "little") + record[4:]
        self._file.data[start : start + len(record)] = record


class MappedFile:
    """A file of a fixed size, mapped for reading and writing, with one lock for writers."""

    _opened: ClassVar[dict[Path, MappedFile]] = {}
    _guard: ClassVar = ForkLock()

    @classmethod
    def shared(cls, path: Path, size: int) -> MappedFile:
        """Return the mapping of the file that all users in this process share. Each closes it once.
        Raise OSError as `__init__` does. A second descriptor would be dangerous: if either is
        closed, the process loses its locks on the file (fcntl). A second mapping would also count
        as memory of the process."""
        with cls._guard:
            mapped_file = cls._opened.get(path)
            if mapped_file is None or not mapped_file.is_at(path):
                mapped_file = cls._opened[path] = cls(path, size)
            mapped_file.users += 1
            return mapped_file

    def __init__(self, path: Path, size: int) -> None:
        """Open or create the file, and map it. Raise OSError if the directory is not writable, the
        disk is full, or another user has the file."""
        self.users = 0
        self._path = path
        self._number = open_private(path)
        self._thread_lock = ForkLock()
        try:
            status = os.fstat(self._number)
            if status.st_uid != os.geteuid():
                raise PermissionError(f"{path} belongs to another user")
            if status.st_size < size:
                # Allocate blocks: on a full disk, a write to a hole in the mapping is a SIGBUS.
                os.pwrite(self._number, bytes(size - status.st_size), status.st_size)
            self._inode = status.st_dev, status.st_ino
            self.data = mmap.mmap(self._number, size)
        except BaseException:
            os.close(self._number)
            raise

    def lock(self) -> bool:
        """Take the writers' lock; return False if another writer holds it for too long."""
        if not self._thread_lock.acquire(_LOCK_TRIES * _LOCK_PAUSE_S):
            return False
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.lockf(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                return True
            except OSError:
                time.sleep(_LOCK_PAUSE_S)
        self._thread_lock.release()
        return False

    def unlock(self) -> None:
        fcntl.lockf(self._number, fcntl.LOCK_UN, 1)
        self._thread_lock.release()

    def close(self) -> None:
        """Close the file for one user; the last user unmaps it."""
        with self._guard:
            self.users -= 1
            if self.users > 0:
                return
            if self._opened.get(self._path) is self:
                del self._opened[self._path]
        self.data.close()
        os.close(self._number)

    def is_at(self, path: Path) -> bool:
        """Return whether the path still names this file; Spark may have removed its directory."""
        try:
            status = path.lstat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._inode
