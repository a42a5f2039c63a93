"""Sharding keys with pending dead letters, for tasks that must not overtake them (`onPendingKey`).

    <ledger>/_pending/<query>~<epoch>~<partition>~<unique>.json    {topic: [keys]}

A task attempt that gave up messages of sharding keys writes its keys before its end; the tasks of
later epochs, and of other queries with this ledger, read all such files when they begin: one
listing, of an empty folder as a rule. A driver lets go of keys (`release`) once the ledger shows
that none of their letters is pending: whenever the spool is folded, and before each epoch of the
foreachBatch lane. Only files whose attempt the ledger can know about are looked at, so letters that
are still on their way hold their keys.

Rows that were refused for what they are (reason `data`) hold no key: nothing sends them as they
are. Delta looks into no folder whose name starts with `_`.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger import views
from rocket_sink.ledger.place import Place, path_part
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.schema import EPOCH
from rocket_sink.ledger.small_file import write_bytes
from rocket_sink.ledger.table import is_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FOLDER: Final = "_pending"
_SUFFIX: Final = ".json"

Keys = dict[str, set[str]]
"""{topic: sharding keys}."""


class _Note(NamedTuple):
    """A file's name, taken apart."""

    path: str
    query: str
    epoch: int
    partition: str


class PendingKeys:
    """The held keys of one ledger, as tasks see them.

    Raises from all methods:
        LedgerError: the ledger's folder cannot be read or written.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def held_for(self, ctx: RunContext) -> Keys:
        """Keys that a task must hold back: those of its own epoch's earlier attempts are not."""
        query, found = path_part(ctx.query_id), Keys()
        with _errors(self._place):
            filesystem = self._place.filesystem()
            for note in _notes(self._place, filesystem):
                if note.query == query and note.epoch >= ctx.epoch:
                    continue
                for topic, keys in _read(filesystem, note.path).items():
                    found.setdefault(topic, set()).update(keys)
        return found

    def note(self, ctx: RunContext, keys: Mapping[str, Iterable[str]]) -> None:
        """Hold these keys from now on; durable on return."""
        lists = {topic: sorted(names) for topic, names in keys.items() if names}
        if not lists:
            return
        parts = (path_part(ctx.query_id), ctx.epoch, ctx.partition, uuid.uuid4().hex)
        folder = f"{self._place.root}/{_FOLDER}"
        path = f"{folder}/{'~'.join(map(str, parts))}{_SUFFIX}"
        with _errors(self._place):
            filesystem = self._place.filesystem()
            filesystem.create_dir(folder, recursive=True)
            data = json.dumps(lists).encode()
            write_bytes(filesystem, path, data, is_local=self._place.is_local)


def release(spark: SparkSession, place: Place) -> int:
    """Let go of the keys that have no pending letter any more; returns how many files went.

    Costs a listing while no key is held, two queries of the ledger otherwise.

    Raises:
        LedgerError: the ledger's folder cannot be read or written.
    """
    with _errors(place):
        filesystem = place.filesystem()
        notes = list(_notes(place, filesystem))
        if not notes or not is_table(spark, place):
            return 0
        rows = spark.read.format("delta").load(place.uri)
        settled = _settled(rows, notes)
        pending = _pending(rows) if settled else set()
        gone = 0
        for note in settled:
            keys = _read(filesystem, note.path)
            left = {t: [k for k in names if (t, k) in pending] for t, names in keys.items()}
            if not any(left.values()):
                with contextlib.suppress(FileNotFoundError):
                    filesystem.delete_file(note.path)
                gone += 1
        return gone


def _settled(rows: DataFrame, notes: list[_Note]) -> list[_Note]:
    """Those of attempts whose letters, if they count, are in the table."""
    from pyspark.sql import functions as f

    first = min(note.epoch for note in notes)
    ended = rows.where((rows.kind == EPOCH) & rows.complete & (rows.epoch >= first))
    last: dict[str, int] = {}
    tasks: set[tuple[str, int, str]] = set()
    found: Any = ended.select("query_id", "epoch", f.col("partition").cast("string")).distinct()
    for query_id, epoch, partition in found.collect():
        query = path_part(query_id)
        last[query] = max(epoch, last.get(query, epoch))
        tasks.add((query, epoch, str(partition)))  # a TableProducer's has none
    return [
        note
        for note in notes
        if (note.query, note.epoch, note.partition) in tasks
        or last.get(note.query, note.epoch) > note.epoch
    ]


def _pending(rows: DataFrame) -> set[tuple[str, str]]:
    letters = views.view(rows, "pending_letters")
    keyed = letters.where(letters.sharding_key.isNotNull() & (letters.reason != "data"))
    return {tuple(row) for row in keyed.select("topic", "sharding_key").distinct().collect()}


def _notes(place: Place, filesystem: fs.FileSystem) -> Iterator[_Note]:
    selector = fs.FileSelector(f"{place.root}/{_FOLDER}", allow_not_found=True)
    for info in filesystem.get_file_info(selector):
        name = info.base_name
        if name.endswith(_SUFFIX) and name.count("~") == 3:
            query, epoch, partition, _ = name.split("~")
            yield _Note(info.path, query, int(epoch), partition)


def _read(filesystem: fs.FileSystem, path: str) -> dict[str, list[str]]:
    try:
        with filesystem.open_input_stream(path) as file:
            found: dict[str, list[str]] = json.loads(file.read())
            return found
    except FileNotFoundError:
        return {}  # released meanwhile
    except ValueError as error:
        raise LedgerError(
            f"{path} cannot be read ({error}); its keys are in the ledger's dead letters. Delete "
            "it when they are resolved",
            path=path,
        ) from error


@contextlib.contextmanager
def _errors(place: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"the pending keys of the ledger {place.uri} cannot be read or written: {error}. "
            "onPendingKey=hold needs a ledger folder that tasks can write to",
            path=place.uri,
        ) from error
