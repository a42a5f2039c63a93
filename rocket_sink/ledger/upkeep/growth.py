"""Merging of small files; checkpoints of the table's log, and removal of old files.

Every fold makes a file per kind and a commit. Files of a kind are merged by tiers of size: when a
tier has `_FAN` files, these and all smaller files become one file. So a row is written about four
times, and a kind has some twenty files that are not full.

Old commits stay for two days (`append.table.PROPERTIES`), and so do the files that they replaced: a
stream that reads the ledger may stop that long. Checkpoints name replaced files for six hours only,
and few old checkpoints stay, because thousands of names in each would make up most of the log. So
the files are deleted together with the commits that replaced them, not by a vacuum."""

from __future__ import annotations

import datetime as dt
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from pyarrow import fs

from rocket_sink.ledger.append.delta_rs import StoredFile, check_named, open_table, stored_files
from rocket_sink.ledger.notes import read_bytes, remove_file
from rocket_sink.ledger.path import LOG_FOLDER, LedgerPath
from rocket_sink.ledger.upkeep.rewrite import rewrite
from rocket_sink.net import log
from rocket_sink.producer.process_end import native_calls

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from rocket_sink.ledger.append.appender import Append

_LOG: Final = log.logger(__name__)
_PASS_COMMITS: Final = 10
"""Number of commits between two searches for files to merge."""
_CHECKPOINT_COMMITS: Final = 10, 50
"""Fewest and most commits between two checkpoints. Readers read all commits after the last one."""
_CLEAN_UP_COMMITS: Final = 500
"""Number of commits between two clean-ups, each of which lists the log. Of the checkpoints of so
many commits one stays, for readers of an old version."""
_ACTIONS_PER_COMMIT: Final = 50
"""After a checkpoint of n actions the next one is due n / `_ACTIONS_PER_COMMIT` commits later."""
_FAN: Final = 8
_SMALLEST: Final = 32 * 1024
"""Bound of the smallest tier (bytes). Each next bound is `_FAN` times as large, up to 16 MiB."""
_TIERS: Final = 4
_ROW_BYTES: Final = 64
"""Usual bytes of a row."""

_CHECKPOINT: Final = re.compile(r"([0-9]{20})\.checkpoint\.parquet")
_RETENTION: Final = re.compile(r"interval ([0-9]+) (millisecond|second|minute|hour|day|week)s?")
"""Durations of Delta's table properties."""

_passed: dict[LedgerPath, int] = {}
"""{ledger: version of the table when this process last merged its files}."""


@native_calls.uninterrupted()
def keep_small(append: Append) -> None:
    """Merge files, write a checkpoint and clean up, if due after this commit; never raise."""
    place, version = append.place, append.sequence >> 32
    # The version is smaller than before if the ledger was deleted and made anew.
    is_done = append.merges and append.rows is not None
    if not is_done or 0 <= version - _passed.get(place, -_PASS_COMMITS) < _PASS_COMMITS:
        return
    _passed[place] = version
    try:
        table = open_table(place)
        if table is not None:
            merge(place, table)
            _write_checkpoint(place)
    except Exception as error:
        _LOG.warning("the ledger %s is not kept small now: %s", place, error)


def merge(place: LedgerPath, table: DeltaTable, *, everything: bool = False) -> tuple[int, int]:
    """Merge the small files of full tiers; return the numbers of files before and after. With
    `everything` merge all files below the largest tier's bound, whatever their number."""
    files = stored_files(place, table)
    groups = list(_groups(files, everything=everything))
    if not groups or not rewrite(place, table, groups):
        return 0, 0
    return sum(map(len, groups)), len(groups)


def _groups(files: Iterable[StoredFile], *, everything: bool) -> Iterable[list[StoredFile]]:
    """Yield the groups of files to be merged, each of one kind."""
    tiers: dict[str, list[list[StoredFile]]] = defaultdict(lambda: [[] for _ in range(_TIERS)])
    for file in files:
        # Count at least `_ROW_BYTES` per row: rows that compress well are not copied faster.
        size = max(file.size, file.rows * _ROW_BYTES)
        tier = next((n for n in range(_TIERS) if size < _SMALLEST * _FAN**n), None)
        if tier is not None:
            tiers[file.kind][tier].append(file)
    for of_kind in tiers.values():
        full = [n for n, tier in enumerate(of_kind) if len(tier) >= _FAN]
        if everything and sum(map(len, of_kind)) > 1:
            full = [_TIERS - 1]
        if full:
            # Put older files first: a merge copies one file after the other, so rows stay in order.
            yield sorted(
                (file for tier in of_kind[: full[-1] + 1] for file in tier),
                key=lambda file: (file.oldest is not None, file.oldest, file.path),
            )


def _write_checkpoint(place: LedgerPath) -> None:
    """Write a checkpoint, if one is due, and clean up from time to time."""
    filesystem, log_folder = place.filesystem(), f"{place.root}/{LOG_FOLDER}"
    data = read_bytes(filesystem, f"{log_folder}/_last_checkpoint")
    note = json.loads(data) if data else {}
    last = int(note.get("version", 0))
    fewest, most = _CHECKPOINT_COMMITS
    due = min(max(fewest, int(note.get("size", 0)) // _ACTIONS_PER_COMMIT), most)
    table = open_table(place)  # Open anew: the object of a commit lacks its removals.
    if table is None or table.version() + 1 - last < due:
        return
    if place.is_local:
        # Remove the checksum that Hadoop made of Spark's `_last_checkpoint`. It does not fit
        # delta-rs's file, so Spark would take the file for damaged.
        Path(log_folder, "._last_checkpoint.crc").unlink(missing_ok=True)
    table.create_checkpoint()
    if table.version() // _CLEAN_UP_COMMITS > last // _CLEAN_UP_COMMITS:
        clean_up(place, table)


def clean_up(place: LedgerPath, table: DeltaTable) -> None:
    """Delete the commits that are older than the table's `delta.logRetentionDuration`, and the
    files that they replaced; also most of the checkpoints that are not new.

    Raises:
        LedgerError: a commit names a file that is not the ledger's.
        OSError: the store cannot be read or written now.
    """
    settings = table.metadata().configuration
    retention = _RETENTION.fullmatch(settings.get("delta.logRetentionDuration", ""))
    if retention is None or settings.get("delta.enableExpiredLogCleanup") == "false":
        return
    filesystem = place.filesystem()
    kept_s = dt.timedelta(**{f"{retention[2]}s": int(retention[1])}).total_seconds()
    # Take commits of the next minute, too: delta-rs deletes by its own clock.
    before = time.time() - kept_s + 60
    named = {file.path for file in stored_files(place, table)}
    selector = fs.FileSelector(f"{place.root}/{LOG_FOLDER}", allow_not_found=True)
    newest = table.version() // _CLEAN_UP_COMMITS
    new_blocks, old_blocks, paths = {newest - 1, newest}, set[int](), list[str]()
    for info in sorted(filesystem.get_file_info(selector), key=lambda info: info.base_name):
        if match := _CHECKPOINT.fullmatch(info.base_name):
            block = int(match[1]) // _CLEAN_UP_COMMITS
            paths += [info.path] if block in old_blocks else []
            old_blocks |= {block} - new_blocks
        if info.extension == "json" and (info.mtime_ns or 0) / 1e9 < before:
            actions = map(json.loads, (read_bytes(filesystem, info.path) or b"").splitlines())
            removals = [action["remove"] for action in actions if "remove" in action]
            files = [(unquote(r["path"]), r["partitionValues"]["kind"]) for r in removals]
            check_named(place.uri, files)
            paths += [
                f"{place.root}/{path}" for path, kind in files
                if path not in named and path.startswith(f"kind={kind}/")
            ]  # fmt: skip
    for path in paths:
        remove_file(filesystem, path)
    table.cleanup_metadata()
