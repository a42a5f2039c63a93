"""Which epochs have been begun before: small files beside the ledger, one per task attempt.

    <ledger>/_started/q-<query>/<epoch>/<run>~<partition>~<stage attempt>~<generation>-<unique>.json

A task attempt writes its file before its first send and then looks at the others' of its epoch. An
epoch may have left messages on the brokers when the file of another run is there (a restart), of
another attempt of the partition (a task's retry) or of another attempt of the stage, or when the
query has begun a later epoch (its checkpoint was cut back). Otherwise nothing of it was sent. Each
run of a query is a generation of its own, one above all that it finds: when a later one shows up, a
second driver has the query, or this worker has outlived its own, and it must not go on. Delta
looks into no folder whose name starts with `_`.

    <ledger>/_started/q-<query>.json

is the driver's note of the epoch that it began last, in the foreachBatch lane: what died there
before Delta's commit has left no rows in the ledger, so who runs the epoch again doubts for it.

    <ledger>/_started/w-<appId>.json

is the same of a batch write, for as long as it runs: only its `appId` tells that two are one.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pyarrow import fs

from rocket_sink.errors import CheckpointError, LedgerError
from rocket_sink.ledger.place import Place, path_part
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.small_file import write_bytes

_KEPT: Final = 3
"""Epochs whose files are kept; the newest alone shows that a checkpoint was cut back."""
_CHECK_S: Final = 1.0
"""Shortest time between two looks for a later run: a listing takes an object store some 50 ms."""

Brokers = Mapping[str, frozenset[str]]
"""Names of brokers, by topic."""


@dataclass(frozen=True)
class Earlier:
    """What earlier attempts at an epoch may have sent, and where to.

    Attributes:
        since_ms: when the first of them began, ms since 1970 on its own clock.
        brokers: by topic, names of the brokers that they may have sent to.
    """

    since_ms: int
    brokers: Brokers


class _Note:
    """What the path of a task attempt's file says."""

    def __init__(self, path: str) -> None:
        self.path = path
        epoch, self.name = path.split("/")[-2:]
        self.epoch = int(epoch) if epoch.isdigit() else -1
        self.run, self.partition, self.stage_attempt, unique = self.name.split("~")
        generation = unique.partition("-")[0]
        # A file of an older rocket-sink has none.
        self.generation = int(generation) if generation.isdigit() and "-" in unique else 0


class EpochStarts:
    """The beginnings of one query's epochs."""

    def __init__(
        self, place: Place, ctx: RunContext, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place = place
        self._ctx = ctx
        self._clock = clock
        self._generation = 0
        self._checked_s = 0.0
        self._own = ""
        self._at_ms = 0
        self._folder = f"{place.root}/_started/q-{path_part(ctx.query_id)}"

    def begin(self, brokers: Brokers) -> Earlier | None:
        """Note durably that this task attempt begins; None when no other one was before it.

        Raises:
            CheckpointError: a later run of the query has begun.
            LedgerError: the ledger's folder cannot be read or written.
        """
        ctx = self._ctx
        filesystem = self._place.filesystem()
        folder = f"{self._folder}/{ctx.epoch}"
        self._generation = self._own_generation(self._notes(filesystem))
        unique = f"{self._generation}-{uuid.uuid4().hex}"
        own = "~".join(map(str, (*self._mine(), unique))) + ".json"
        self._own, self._at_ms = f"{folder}/{own}", time.time_ns() // 1_000_000
        with self._saying(folder):
            filesystem.create_dir(folder, recursive=True)
        self.note_brokers(brokers)
        with self._saying(folder):
            self.check()
            others = self._others(filesystem, own)
            return _earlier(filesystem, others) if others else None

    def note_brokers(self, brokers: Brokers) -> None:
        """Note durably, in place of those of before, which brokers may get what is sent next.

        Raises:
            LedgerError: the ledger's folder cannot be written.
        """
        topics = {topic: sorted(names) for topic, names in brokers.items()}
        note = json.dumps({"at_ms": self._at_ms, "topics": topics}).encode()
        place = self._place
        with self._saying(self._own):
            write_bytes(place.filesystem(), self._own, note, is_local=place.is_local)

    @contextlib.contextmanager
    def _saying(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LedgerError(
                f"cannot note the begin of epoch {self._ctx.epoch} at {path}: {error}. "
                "delivery=effectively_once needs a ledger folder that tasks can write to",
                path=path,
            ) from error

    def check(self) -> None:
        """Called before each request; looks once a second whether a later run has begun.

        Raises:
            CheckpointError: it has; this attempt must send nothing more.
        """
        now_s = self._clock()
        if self._checked_s and now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        mine = (self._generation, self._mine()[0])
        for note in self._notes(self._place.filesystem()):
            if (note.generation, note.run) > mine:
                raise CheckpointError(
                    f"another driver (run {note.run}) has taken the query {self._ctx.query_id} "
                    "over: two drivers use its checkpoint, or this one was taken for dead. This "
                    "run sends nothing more; stop one of the two",
                    query_id=self._ctx.query_id, run_id=note.run,
                )  # fmt: skip

    def _notes(self, filesystem: fs.FileSystem) -> list[_Note]:
        selector = fs.FileSelector(self._folder, recursive=True, allow_not_found=True)
        infos = [info for info in filesystem.get_file_info(selector) if info.is_file]
        return [_Note(info.path) for info in infos if info.path.endswith(".json")]

    def _own_generation(self, notes: list[_Note]) -> int:
        own = [note.generation for note in notes if note.run == self._mine()[0]]
        return max(own) if own else 1 + max((note.generation for note in notes), default=0)

    def _mine(self) -> tuple[str, int | None, int | None]:
        ctx = self._ctx
        return path_part(ctx.run_id), ctx.partition, ctx.stage_attempt

    def _others(self, filesystem: fs.FileSystem, own: str) -> list[str]:
        """Paths of the files of attempts that may have sent what this one is about to send."""
        run, partition, stage_attempt = map(str, self._mine())
        notes = self._notes(filesystem)
        self._prune(filesystem, [note.path for note in notes])
        found = []
        for note in notes:
            if note.name == own or note.epoch < self._ctx.epoch:
                continue
            if (
                note.epoch > self._ctx.epoch
                or note.run != run
                or note.partition == partition
                or note.stage_attempt != stage_attempt
            ):
                found.append(note.path)
        return found

    def _prune(self, filesystem: fs.FileSystem, paths: Iterable[str]) -> None:
        epochs = {path.split("/")[-2] for path in paths}
        old = [epoch for epoch in epochs if epoch.isdigit()]
        old = [epoch for epoch in old if int(epoch) <= self._ctx.epoch - _KEPT]
        for epoch in old:
            # Another task may be at it; what is left is found by the next one.
            with contextlib.suppress(OSError):
                filesystem.delete_dir(f"{self._folder}/{epoch}")


def begin_epoch(place: Place, query_id: str, epoch: int) -> bool:
    """Note that the driver begins an epoch; True when it had begun it, or a later one, before.

    False where the folder cannot be read or written: nothing depends on it but what is counted.
    """
    path = f"{place.root}/_started/q-{path_part(query_id)}.json"
    try:
        filesystem = place.filesystem()
        last = _last_begun(filesystem, path)
        if last is None or last < epoch:
            filesystem.create_dir(path.rpartition("/")[0], recursive=True)
            note = json.dumps({"epoch": epoch}).encode()
            write_bytes(filesystem, path, note, is_local=place.is_local)
    except (OSError, LedgerError):
        return False
    return last is not None and last >= epoch


def begin_write(place: Place, app_id: str) -> bool:
    """Note that a batch write of the `appId` begins; True when one before it has not ended.

    What that one sent is not in the ledger. False also where the folder cannot be read or written.
    """
    path = _write_path(place, app_id)
    try:
        filesystem = place.filesystem()
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        note = json.dumps({"at_ms": time.time_ns() // 1_000_000}).encode()
        return not write_bytes(filesystem, path, note, is_local=place.is_local, replace=False)
    except (OSError, LedgerError):
        return False


def end_write(place: Place, app_id: str) -> None:
    """The ledger has the write."""
    with contextlib.suppress(OSError, LedgerError):
        place.filesystem().delete_file(_write_path(place, app_id))


def _write_path(place: Place, app_id: str) -> str:
    return f"{place.root}/_started/w-{path_part(app_id)}.json"


def _last_begun(filesystem: fs.FileSystem, path: str) -> int | None:
    try:
        with filesystem.open_input_stream(path) as file:
            return int(json.loads(file.read())["epoch"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _earlier(filesystem: fs.FileSystem, paths: Iterable[str]) -> Earlier | None:
    since_ms, brokers = time.time_ns() // 1_000_000, dict[str, frozenset[str]]()
    for path in paths:
        try:
            with filesystem.open_input_stream(path) as file:
                note = json.loads(file.read())
            since_ms = min(since_ms, int(note["at_ms"]))
            for topic, names in note.get("topics", {}).items():
                brokers[topic] = brokers.get(topic, frozenset()).union(names)
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LedgerError(
                f"{path} cannot be read ({error}): delete it if its epoch has sent nothing",
                path=path,
            ) from error
    return Earlier(since_ms, brokers)
