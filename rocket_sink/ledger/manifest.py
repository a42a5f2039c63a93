"""Manifests: what one fold takes, written down before anything is appended.

`_spool/_folds/<number>.json` is there from before the append until all its files are deleted. A
fold that finds one completes it with the very same files and number: should another process's
append of it still be under way, Delta lets one of the two through, and both are equal.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import asdict, dataclass
from typing import Final

from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.place import FOLDS, SPOOL, Place

_FOLDER: Final = f"{SPOOL}/{FOLDS}"
_SPOOL_FILE: Final = re.compile(r"q-[^/]*/(-?[0-9]+/)?[^/]+\.arrow")


@dataclass(frozen=True)
class Manifest:
    """One fold. `files` are paths below the spool, `token` names this manifest in Delta's log."""

    ledger_id: str
    number: int
    files: tuple[str, ...]
    bytes: int
    token: str

    def __post_init__(self) -> None:
        """A fold deletes what its manifest lists: that must be spool files, whoever wrote it."""
        for name in self.files:
            if _SPOOL_FILE.fullmatch(name) is None:
                raise ValueError(f"{name!a} is no spool file")

    @property
    def path(self) -> str:
        """Below the ledger's folder."""
        return f"{_FOLDER}/{self.number}.json"

    def paths(self, place: Place) -> list[str]:
        return [f"{place.spool}/{file}" for file in self.files]


def write_manifest(
    store: NoteStore, place: Place, ledger_id: str, number: int, files: list[fs.FileInfo]
) -> Manifest:
    """Write down the next fold, whole or not at all."""
    names = tuple(info.path.removeprefix(f"{place.spool}/") for info in files)
    size = sum(info.size or 0 for info in files)
    manifest = Manifest(ledger_id, number, names, size, uuid.uuid4().hex)
    store.write(manifest.path, asdict(manifest))
    return manifest


def unfinished(store: NoteStore) -> list[Manifest]:
    """Manifests that dead folds left, in their order.

    Raises:
        LedgerError: one cannot be read; the text names it.
    """
    found = (_read(store, path) for path in store.paths(_FOLDER))
    return sorted(found, key=lambda manifest: manifest.number)


def _read(store: NoteStore, path: str) -> Manifest:
    try:
        values = store.read(path)
        return Manifest(**{**values, "files": tuple(values["files"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        path = store.where(path)
        raise LedgerError(
            f"the fold manifest {path} cannot be read: {error}. If the table holds its fold, "
            "delete the spool files that it lists, then the manifest; else delete the manifest",
            path=path,
        ) from error
