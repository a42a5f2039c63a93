"""The fault table, the route cache and the absences of brokers (`task.ordering`) that all
workers of an executor share in a mapped file.

PySpark forks one worker per task slot. When one worker learns that a broker is slow, all workers
know at once, and new workers from the start. The file is in the executor's own local directory
(`SPARK_LOCAL_DIRS`), else in a directory for this user and parent process. The file's name hashes
the name servers, `namespaceV2` and the boot id: broker names are unique only within a cluster,
names of topics only within a namespace, and the times in the file count from the boot. If the
directory cannot be written, each process has its own state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Final

import psutil

from rocket_sink.errors import ConfigurationError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.mapped_table import MappedFile, MappedTable
from rocket_sink.routing.fault import FaultItem
from rocket_sink.routing.topic_publish_info import TopicCache

_LAYOUT: Final = 5
_FAULTS: Final = 512
_TABLES: Final = ((_FAULTS, 512), (32, 65_536), (128, 512))
"""(number of slots, bytes of a slot) for faults, routes and absences. Each worker itself fetches a
route that is larger than a slot (some hundred brokers)."""
_VALUES: Final = attrgetter(*(field.name for field in fields(FaultItem)[1:]))
_ORPHAN_S: Final = 3600.0
_TIME: Final = struct.Struct("<d")
_ABSENCE: Final = struct.Struct("<dd")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class _MemoryTable(TopicCache[str, bytes]):
    """A table like `MappedTable` in the memory of this process."""

    def put(self, key: str, value: bytes) -> bool:
        self[key] = value
        if not value:
            del self[key]
        return True


class SharedBrokerState:
    """A `routing.fault.FaultStore`, a cache of route bodies, and the absences of brokers."""

    def __init__(self, file: MappedFile | None) -> None:
        self._file = file
        self._faults, self._routes, self._absences = self._tables(file)

    @staticmethod
    def _tables(file: MappedFile | None) -> Iterator[MappedTable | _MemoryTable]:
        offset = 0
        for count, size in _TABLES:
            yield _MemoryTable() if file is None else MappedTable(file, offset, count, size)
            offset += count * size

    @classmethod
    def open(cls, options: SinkOptions, *, directory: str | None = None) -> SharedBrokerState:
        """Return the executor's state for these name servers and this `namespaceV2`; without a
        file, the process's own."""
        with contextlib.suppress(OSError, ConfigurationError):
            folder = Path(directory) if directory is not None else local_directory()
            size = sum(count * slot_bytes for count, slot_bytes in _TABLES)
            return cls(MappedFile.shared(folder / _file_name(options), size))
        return cls.in_process()

    @classmethod
    def in_process(cls) -> SharedBrokerState:
        return cls(None)

    def get(self, name: str) -> FaultItem | None:
        value = self._faults.get(name)
        return _item(name, value) if value else None

    def __setitem__(self, name: str, item: FaultItem) -> None:
        """Store the item. If the table is full, drop the item whose isolation ends first, but items
        of unreachable brokers last: an attempt at such a broker costs most."""
        value = json.dumps(_VALUES(item)).encode()
        if self._faults.put(name, value):
            return
        items = self.values()
        if len(items) == _FAULTS:
            self.pop(min(items, key=lambda i: (not i.reachable, i.until_s)).broker_name)
            self._faults.put(name, value)

    def pop(self, name: str, default: None = None) -> None:
        self._faults.put(name, b"")

    def values(self) -> list[FaultItem]:
        fault_items = (_item(name, value) for name, value in self._faults.items())
        return [item for item in fault_items if item is not None]

    def route(self, topic: str) -> tuple[bytes, float] | None:
        """Return the topic's route body and the monotonic time (s) at which it was fetched."""
        value = self._routes.get(topic)
        if not value or len(value) < _TIME.size:
            return None
        return value[_TIME.size :], _TIME.unpack_from(value)[0]

    def put_route(self, topic: str, body: bytes, now_s: float) -> None:
        """Share a route with other workers. Do nothing if it is too long, or the table is full."""
        self._routes.put(topic, _TIME.pack(now_s) + body)

    def note_new_topic(self, topic: str, now_s: float, longest_s: float) -> bool:
        """Share that a worker is about to create a topic. Return whether no other worker has noted
        it, or put its route, in the last `longest_s` seconds."""
        shared_route = self.route(topic)
        if shared_route is not None and 0 <= now_s - shared_route[1] < longest_s:
            return False
        self.put_route(topic, b"", now_s)
        return True

    def absence(self, name: str) -> tuple[float, float] | None:
        """Return since when a broker is absent, and the time (s) of the last failure; or None."""
        value = self._absences.get(name)
        return _ABSENCE.unpack(value) if value and len(value) == _ABSENCE.size else None

    def put_absence(self, name: str, since_s: float, last_s: float) -> None:
        """Share an absence with other workers. Do nothing if the table is full."""
        self._absences.put(name, _ABSENCE.pack(since_s, last_s))

    def end_absence(self, name: str) -> None:
        self._absences.put(name, b"")

    def close(self) -> None:
        """Close the file. It stays on disk for other workers until its directory is removed."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._faults, self._routes, self._absences = self._tables(None)


@lru_cache(2 * _FAULTS)
def _item(name: str, value: bytes) -> FaultItem | None:
    try:
        return FaultItem(name, *json.loads(value))
    except (ValueError, TypeError):
        return None


def local_directory() -> Path:
    """Return the executor's own directory, else a directory of this user and parent process. Raise
    OSError if the directory cannot be made, or belongs to another user."""
    spark_folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0].strip()
    if spark_folder and Path(spark_folder).is_dir():
        return Path(spark_folder)
    folder = Path(tempfile.gettempdir()) / f"rocket-sink-{os.getuid()}-{os.getppid()}"
    if not folder.exists():
        _remove_orphans(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _remove_orphans(like: Path) -> None:
    """Remove old directories of processes that no longer exist. Young directories stay, because
    their processes may be in another container, where this process cannot see them."""
    prefix = like.name.rpartition("-")[0]
    for folder in like.parent.glob(f"{prefix}-*"):
        pid = folder.name.rpartition("-")[2]
        with contextlib.suppress(OSError, OverflowError):
            status = folder.lstat()
            own = status.st_uid == os.getuid() and time.time() - status.st_mtime > _ORPHAN_S
            if own and pid.isdecimal() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(folder)


def _file_name(options: SinkOptions) -> str:
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    servers = ";".join(sorted(options.name_servers))
    text = f"{_LAYOUT}|{boot}|{servers}|{options.namespace_v2}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"rocket-sink-{digest[:24]}.health"
