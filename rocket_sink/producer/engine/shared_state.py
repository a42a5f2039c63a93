"""The fault table, the route cache and the absences of brokers (`task.ordering`) that all
workers of an executor share in a mapped file.

PySpark forks one worker per task slot. When one worker learns that a broker is slow, all workers
know at once, and new workers from the start. The file is in the executor's own local directory
(`SPARK_LOCAL_DIRS`), else in a directory for this user and parent process. The file's name hashes
the name servers and the boot id: broker names are unique only within a cluster, and the times in
the file count from the boot. If the directory cannot be written, each process has its own state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
from dataclasses import astuple
from functools import lru_cache
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
_FAULT_BYTES: Final = 512
_ROUTES: Final = 32
_ROUTE_BYTES: Final = 65_536
"""Size of a slot. Each worker itself fetches a route that is larger (some hundred brokers)."""
_ABSENCES: Final = 128
_ABSENCE_BYTES: Final = 512
_ORPHAN_S: Final = 3600.0
_TIME: Final = struct.Struct("<d")
_ABSENCE: Final = struct.Struct("<dd")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class SharedBrokerState:
    """A `routing.fault.FaultStore`, a cache of route bodies, and the absences of brokers."""

    def __init__(self, file: MappedFile | None) -> None:
        self._file = file
        self._memory: dict[str, FaultItem] = {}
        self._memory_routes: TopicCache[str, tuple[bytes, float]] = TopicCache()
        self._memory_absences: TopicCache[str, tuple[float, float]] = TopicCache()
        if file is not None:
            self._faults = MappedTable(file, 0, _FAULTS, _FAULT_BYTES)
            self._routes = MappedTable(file, _FAULTS * _FAULT_BYTES, _ROUTES, _ROUTE_BYTES)
            offset = _FAULTS * _FAULT_BYTES + _ROUTES * _ROUTE_BYTES
            self._absences = MappedTable(file, offset, _ABSENCES, _ABSENCE_BYTES)

    @classmethod
    def open(cls, options: SinkOptions, *, directory: str | None = None) -> SharedBrokerState:
        """Return the executor's state for the name servers; without a file, the process's own."""
        with contextlib.suppress(OSError, ConfigurationError):
            folder = Path(directory) if directory is not None else local_directory()
            size = _FAULTS * _FAULT_BYTES + _ROUTES * _ROUTE_BYTES + _ABSENCES * _ABSENCE_BYTES
            return cls(MappedFile.shared(folder / _file_name(options), size))
        return cls.in_process()

    @classmethod
    def in_process(cls) -> SharedBrokerState:
        return cls(None)

    def get(self, name: str) -> FaultItem | None:
        if self._file is None:
            return self._memory.get(name)
        value = self._faults.get(name)
        return _item(name, value) if value else None

    def __setitem__(self, name: str, item: FaultItem) -> None:
        """Store the item. If the table is full, drop the item whose isolation ends first, but items
        of unreachable brokers last: an attempt at such a broker costs most."""
        if self._file is None:
            self._memory[name] = item
            return
        value = json.dumps(astuple(item)[1:]).encode()
        if self._faults.put(name, value):
            return
        items = self.values()
        if len(items) == _FAULTS:
            self.pop(min(items, key=lambda i: (not i.reachable, i.until_s)).broker_name)
            self._faults.put(name, value)

    def pop(self, name: str, default: None = None) -> None:
        if self._file is None:
            self._memory.pop(name, default)
        else:
            self._faults.put(name, b"")

    def values(self) -> list[FaultItem]:
        if self._file is None:
            return list(self._memory.values())
        fault_items = (_item(name, value) for name, value in self._faults.items())
        return [item for item in fault_items if item is not None]

    def route(self, topic: str) -> tuple[bytes, float] | None:
        """Return the topic's route body and the monotonic time (s) at which it was fetched."""
        if self._file is None:
            return self._memory_routes.get(topic)
        value = self._routes.get(topic)
        if not value or len(value) < _TIME.size:
            return None
        return value[_TIME.size :], _TIME.unpack_from(value)[0]

    def put_route(self, topic: str, body: bytes, now_s: float) -> None:
        """Share a route with other workers. Do nothing if it is too long, or the table is full."""
        if self._file is None:
            self._memory_routes[topic] = (body, now_s)
        else:
            self._routes.put(topic, _TIME.pack(now_s) + body)

    def absence(self, name: str) -> tuple[float, float] | None:
        """Return since when a broker is absent, and the time (s) of the last failure; or None."""
        if self._file is None:
            return self._memory_absences.get(name)
        value = self._absences.get(name)
        return _ABSENCE.unpack(value) if value and len(value) == _ABSENCE.size else None

    def put_absence(self, name: str, since_s: float, last_s: float) -> None:
        """Share an absence with other workers. Do nothing if the table is full."""
        if self._file is None:
            self._memory_absences[name] = since_s, last_s
        else:
            self._absences.put(name, _ABSENCE.pack(since_s, last_s))

    def end_absence(self, name: str) -> None:
        if self._file is None:
            self._memory_absences.pop(name, None)
        else:
            self._absences.put(name, b"")

    def close(self) -> None:
        """Close the file. It stays on disk for other workers until its directory is removed."""
        if self._file is not None:
            self._file.close()
            self._file = None


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
    digest = hashlib.sha256(f"{_LAYOUT}|{boot}|{servers}".encode()).hexdigest()
    return f"rocket-sink-{digest[:24]}.health"
