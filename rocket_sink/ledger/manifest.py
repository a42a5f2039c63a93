"""Manifests: what one fold takes, written down before anything is appended.

`_spool/_folds/<number>.json` is there from before the append until all its files are deleted. A
fold that finds one completes it with the very same files and number: should another process's
append of it still be under way, Delta lets one of the two through, and both are equal.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import asdict, dataclass

from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.place import Place
from rocket_sink.ledger.small_file import write_bytes

_SUFFIX = ".json"
_SPOOL_FILE = re.compile(r"q-[^/]*/(-?[0-9]+/)?[^/]+\.arrow")


@dataclass(frozen=True)
class Manifest:
    """One fold. `files` are paths below the spool, `token` names this manifest in Delta's log."""

    ledger_id: str
    number: int
    files: tuple[str, ...]
    bytes: int
    token: str

    def paths(self, place: Place) -> list[str]:
        return [f"{place.spool}/{file}" for file in self.files]


def manifest_path(place: Place, number: int) -> str:
    return f"{place.folds}/{number}{_SUFFIX}"


def write_manifest(
    place: Place, filesystem: fs.FileSystem, ledger_id: str, number: int, files: list[fs.FileInfo]
) -> Manifest:
    """Write down the next fold, whole or not at all."""
    names = tuple(info.path.removeprefix(f"{place.spool}/") for info in files)
    size = sum(info.size or 0 for info in files)
    manifest = Manifest(ledger_id, number, names, size, uuid.uuid4().hex)
    data = json.dumps(asdict(manifest), indent=1).encode()
    write_bytes(filesystem, manifest_path(place, number), data, is_local=place.is_local)
    return manifest


def unfinished(place: Place, filesystem: fs.FileSystem) -> list[Manifest]:
    """Manifests that dead folds left, in their order.

    Raises:
        LedgerError: one cannot be read; the text names it.
    """
    infos = filesystem.get_file_info(fs.FileSelector(place.folds, allow_not_found=True))
    paths = [info.path for info in infos if info.is_file and info.path.endswith(_SUFFIX)]
    return sorted((_read(path, filesystem) for path in paths), key=lambda m: m.number)


def _checked(manifest: Manifest) -> Manifest:
    """A fold deletes what its manifest lists: that must be spool files, whoever wrote it."""
    for name in manifest.files:
        if _SPOOL_FILE.fullmatch(name) is None:
            raise ValueError(f"{name!a} is no spool file")
    return manifest


def _read(path: str, filesystem: fs.FileSystem) -> Manifest:
    try:
        with filesystem.open_input_stream(path) as stream:
            values = json.loads(bytes(stream.read()))
        return _checked(Manifest(**{**values, "files": tuple(values["files"])}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LedgerError(
            f"the fold manifest {path} cannot be read: {error}. If the table holds its fold, "
            "delete the spool files that it lists, then the manifest; else delete the manifest",
            path=path,
        ) from error
