"""Letters that were settled since a version of the table, read by tasks: no Spark, no JVM.

A task may begin hours after its backfill was planned, and letters may have been parked since. The
commits after the plan's version are few: their files are read as Delta's protocol names them
(`_delta_log/<version>.json`, actions `add`; a ledger never removes rows).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.place import Place
from rocket_sink.ledger.schema import RESOLUTION, UNPARKED


def settled_since(place: Place, version: int) -> set[str]:
    """`letter_id` of the letters that a commit after this version settled, and none took back.

    Raises:
        LedgerError: the table's log or a file of it cannot be read.
    """
    filesystem = place.filesystem()
    last: dict[str, str] = {}
    try:
        for path in _added(place, filesystem, version):
            for letter, way in _resolutions(filesystem, path):
                # What is stored stays so; of the others the last one counts.
                if last.get(letter) != "resent":
                    last[letter] = way
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise LedgerError(
            f"cannot read what was settled in the ledger {place.uri} since version {version}: "
            f"{error}",
            path=place.uri,
        ) from error
    return {letter for letter, way in last.items() if way != UNPARKED}


def _added(place: Place, filesystem: fs.FileSystem, version: int) -> Iterator[str]:
    """Paths of the files with resolutions, commit after commit."""
    while True:
        version += 1
        try:
            with filesystem.open_input_stream(f"{place.root}/_delta_log/{version:020}.json") as log:
                lines = bytes(log.read()).splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            add: dict[str, Any] = json.loads(line).get("add") or {}
            if add.get("dataChange") and add["partitionValues"].get("kind") == RESOLUTION:
                yield f"{place.root}/{unquote(add['path'])}"


def _resolutions(filesystem: fs.FileSystem, path: str) -> Iterator[tuple[str, str]]:
    import pyarrow.parquet as pq

    with filesystem.open_input_file(path) as file:
        found = pq.read_table(file, columns=["letter_id", "resolution"], partitioning=None)
    yield from zip(found["letter_id"].to_pylist(), found["resolution"].to_pylist(), strict=True)
