"""Which streaming query an `appId` names: one small file beside the ledger for each.

    <ledger>/_started/q-<appId>.query.json

An `appId` replaces Spark's query id in the ledger, and only the checkpoint has that. So where the
id behind an `appId` is another one than it was, the checkpoint was deleted or is not the one that
belongs to it: epochs are counted from 0 again, and what the ledger says of them is about others.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Final

from rocket_sink.errors import CheckpointError, LedgerError
from rocket_sink.ledger.place import Place, path_part
from rocket_sink.ledger.small_file import write_bytes

if TYPE_CHECKING:
    from pyarrow import fs

_PROCESSES_REMEMBER: Final = 64


@functools.lru_cache(maxsize=_PROCESSES_REMEMBER)
def claim_app_id(place: Place, app_id: str, query_id: str) -> None:
    """Note that the `appId` names this query of Spark's; looked up once per process.

    Raises:
        CheckpointError: it names another one.
        LedgerError: the ledger's folder cannot be read or written.
    """
    path = _path(place, app_id)
    filesystem = place.filesystem()
    try:
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        note = json.dumps({"query_id": query_id}).encode()
        if write_bytes(filesystem, path, note, is_local=place.is_local, replace=False):
            return
        named = _read(filesystem, path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"cannot tell from {path} which query the appId {app_id!r} names: {error}", path=path
        ) from error
    if named != query_id:
        raise CheckpointError(
            f"in the ledger {place.uri} the appId {app_id!r} names the streaming query {named}, "
            f"and this one is {query_id}: its checkpoint was deleted, or is not the one that "
            "belongs to the appId. Nothing is sent. Start it with that query's checkpoint, or with "
            "another appId, which sends again whatever the source gives",
            query_id=query_id, app_id=app_id, named=named,
        )  # fmt: skip


def query_of(place: Place, app_id: str) -> str | None:
    """The query of Spark's that an `appId` names; None when none has claimed it yet.

    Raises:
        LedgerError, OSError, ValueError: the ledger's folder, or the note, cannot be read.
    """
    try:
        return _read(place.filesystem(), _path(place, app_id))
    except FileNotFoundError:
        return None


def _path(place: Place, app_id: str) -> str:
    return f"{place.root}/_started/q-{path_part(app_id)}.query.json"


def _read(filesystem: fs.FileSystem, path: str) -> str:
    with filesystem.open_input_stream(path) as file:
        return str(json.loads(file.read())["query_id"])
