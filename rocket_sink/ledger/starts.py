"""Which epochs have been begun before: small files beside the ledger, one per task attempt.

    <ledger>/_started/q-<query>/<epoch>/<run>~<partition>~<stage attempt>~<unique>.json

A task attempt writes its file before its first send and then looks at the others' of its epoch. An
epoch may have left messages on the brokers when the file of another run is there (a restart), of
another attempt of the partition (a task's retry) or of another attempt of the stage, or when the
query has begun a later epoch (its checkpoint was cut back). Otherwise nothing of it was sent. Delta
looks into no folder whose name starts with `_`.

    <ledger>/_started/q-<query>.json

is the driver's note of the epoch that it began last, in the foreachBatch lane: what died there
before Delta's commit has left no rows in the ledger, so who runs the epoch again doubts for it.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.place import Place, path_part
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.small_file import write_bytes

_KEPT: Final = 3
"""Epochs whose files are kept; the newest alone shows that a checkpoint was cut back."""


@dataclass(frozen=True)
class Earlier:
    """What earlier attempts at an epoch may have sent, and where to.

    Attributes:
        since_ms: when the first of them began, ms since 1970 on its own clock.
        brokers: names of the brokers that they knew.
    """

    since_ms: int
    brokers: frozenset[str]


class EpochStarts:
    """The beginnings of one query's epochs."""

    def __init__(self, place: Place, ctx: RunContext) -> None:
        self._place = place
        self._ctx = ctx
        self._folder = f"{place.root}/_started/q-{path_part(ctx.query_id)}"

    def begin(self, brokers: Iterable[str]) -> Earlier | None:
        """Note durably that this task attempt begins; None when no other one was before it.

        Raises:
            LedgerError: the ledger's folder cannot be read or written.
        """
        ctx = self._ctx
        filesystem = self._place.filesystem()
        folder = f"{self._folder}/{ctx.epoch}"
        own = "~".join(map(str, (*self._mine(), uuid.uuid4().hex))) + ".json"
        note = json.dumps({"at_ms": time.time_ns() // 1_000_000, "brokers": sorted(brokers)})
        try:
            filesystem.create_dir(folder, recursive=True)
            write_bytes(filesystem, f"{folder}/{own}", note.encode(), is_local=self._place.is_local)
            others = self._others(filesystem, own)
            return _earlier(filesystem, others) if others else None
        except OSError as error:
            raise LedgerError(
                f"cannot note the begin of epoch {ctx.epoch} at {folder}: {error}. "
                "delivery=effectively_once needs a ledger folder that tasks can write to",
                path=folder,
            ) from error

    def _mine(self) -> tuple[str, int | None, int | None]:
        ctx = self._ctx
        return path_part(ctx.run_id), ctx.partition, ctx.stage_attempt

    def _others(self, filesystem: fs.FileSystem, own: str) -> list[str]:
        """Paths of the files of attempts that may have sent what this one is about to send."""
        run, partition, stage_attempt = map(str, self._mine())
        infos = filesystem.get_file_info(fs.FileSelector(self._folder, recursive=True))
        paths = [info.path for info in infos if info.is_file and info.path.endswith(".json")]
        self._prune(filesystem, paths)
        found = []
        for path in paths:
            epoch, name = path.split("/")[-2:]
            if name == own or not epoch.isdigit() or int(epoch) < self._ctx.epoch:
                continue
            its_run, its_partition, its_stage_attempt, _ = name.split("~")
            if (
                int(epoch) > self._ctx.epoch
                or its_run != run
                or its_partition == partition
                or its_stage_attempt != stage_attempt
            ):
                found.append(path)
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


def _last_begun(filesystem: fs.FileSystem, path: str) -> int | None:
    try:
        with filesystem.open_input_stream(path) as file:
            return int(json.loads(file.read())["epoch"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _earlier(filesystem: fs.FileSystem, paths: Iterable[str]) -> Earlier | None:
    since_ms, brokers = time.time_ns() // 1_000_000, set[str]()
    for path in paths:
        try:
            with filesystem.open_input_stream(path) as file:
                note = json.loads(file.read())
            since_ms = min(since_ms, int(note["at_ms"]))
            brokers.update(map(str, note["brokers"]))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(
                f"{path} cannot be read ({error}): delete it if its epoch has sent nothing",
                path=path,
            ) from error
    return Earlier(since_ms, frozenset(brokers))
