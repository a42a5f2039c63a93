"""Appends to the ledger's table, by delta-rs where it may commit, else by Spark's Delta. With
delta-rs, tasks or the driver write rows into data files, and the driver commits the files. With
Spark's Delta, Spark writes the rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.delta_rs import commit, last_version
from rocket_sink.ledger.append.exclusive import warn_if_shared
from rocket_sink.ledger.append.table import (
    executors_token,
    is_table,
    open_for_commits,
    reading,
    table_version,
    task_errors,
    written_rows,
)
from rocket_sink.ledger.path import LOG_FOLDER, LedgerPath
from rocket_sink.ledger.schema import EPOCH, LEDGER_SCHEMA, ledger_ddl
from rocket_sink.ledger.storage import is_classic
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.ledger.transport.data_files import (
    FILES_DDL,
    DataFile,
    OverBatches,
    named_files,
    write_data_files,
    write_files,
)
from rocket_sink.net import log

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

_LOG: Final = log.logger(__name__)


class Append(ABC):
    """An append to the table, begun before its rows exist; for one thread and one save.

    Args:
        app_id, version: Delta's transaction of the append. The table accepts a transaction only
            once. With an empty `app_id` the append has no transaction.
        token: name of the commit in the table's history; empty: no name.
        table_version: version of the table before the append.

    Attributes:
        sequence: the first order number of the append's rows (`schema.SEQUENCE`).
        is_own: whether this append has committed. It stays False if the table had the transaction
            already, and with Spark's Delta, which does not tell who committed a transaction.
    """

    def __init__(
        self, spark: SparkSession, place: LedgerPath, app_id: str, version: int, token: str,
        table_version: int,
    ) -> None:  # fmt: skip
        self._spark = spark
        self.place = place
        self._app_id = app_id
        self._version = version
        self._token = token
        self.is_own = False
        self.sequence = (table_version + 1) << 32

    def made_by_tasks(self, frame: DataFrame, make: OverBatches) -> DataFrame:
        """Return a frame to pass to `save`. Its rows are made in tasks, by `mapInArrow(make)`."""
        token = executors_token(self._spark, self.place)
        return self._made(frame, make if token is None else partial(_proved, token, make))

    def save(self, made: DataFrame) -> None:
        """Run the frame's tasks and commit; do nothing if the table has the transaction already.
        Raise LedgerError if a task has raised one, or if the commit has failed."""
        with task_errors(self.place):
            self._save(made)

    @abstractmethod
    def save_rows(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Append rows that the driver has; do nothing if the table has the transaction already."""

    @abstractmethod
    def row_count(self) -> int:
        """Return the number of rows that `save` has appended; 0 if the log does not tell."""

    @abstractmethod
    def accounts(
        self, columns: Sequence[str], query_id: str, run_id: str, epoch: int
    ) -> list[dict[str, Any]]:
        """Return columns of the `epoch` rows that `save` has appended. Do not read the columns from
        the frame of `save`: a second action on the frame would send the rows again."""

    @abstractmethod
    def _made(self, frame: DataFrame, make: OverBatches) -> DataFrame: ...

    @abstractmethod
    def _save(self, made: DataFrame) -> None: ...


def begin_append(
    spark: SparkSession, place: LedgerPath, app_id: str = "", version: int = 0, token: str = ""
) -> Append:
    """Begin an append by delta-rs or by Spark's Delta, whichever commits to this table. Raise
    LedgerError if the table was deleted, or if its store cannot be read now."""
    table = open_for_commits(spark, place)
    if table is not None:
        return _ByDeltaRs(spark, place, app_id, version, token, table)
    if not is_table(spark, place):
        # Raise here: Spark's Delta would make a new table without partitions.
        raise _deleted(place, "nothing is sent or appended")
    if is_classic(spark):
        warn_if_shared(spark, place)
    return _BySpark(spark, place, app_id, version, token, table_version(spark, place))


class _ByDeltaRs(Append):
    def __init__(
        self, spark: SparkSession, place: LedgerPath, app_id: str, version: int, token: str,
        table: DeltaTable,
    ) -> None:  # fmt: skip
        super().__init__(spark, place, app_id, version, token, table.version())
        last = last_version(place, table, app_id) if app_id else None
        self._is_held = last is not None and last >= version
        self._table = table
        self._files: list[DataFile] = []

    def _made(self, frame: DataFrame, make: OverBatches) -> DataFrame:
        return frame.mapInArrow(partial(write_files, self.place, make), FILES_DDL)

    def _save(self, made: DataFrame) -> None:
        if self._is_held:
            _LOG.info(
                "the ledger %s has %s %d already: nothing is sent",
                self.place, self._app_id, self._version,
            )  # fmt: skip
            return
        self._commit(named_files(made.collect()))

    def save_rows(self, batches: Sequence[pa.RecordBatch]) -> None:
        if not self._is_held:
            self._commit(write_data_files(self.place, batches))

    def _commit(self, files: list[DataFile]) -> None:
        commit(self.place, self._table, files, self._app_id, self._version, self._token)
        self._files, self.is_own = files, True

    def row_count(self) -> int:
        return sum(file.rows for file in self._files)

    def accounts(
        self, columns: Sequence[str], query_id: str, run_id: str, epoch: int
    ) -> list[dict[str, Any]]:
        import pyarrow.parquet as pq

        files = self.place.filesystem()
        paths = [f"{self.place.root}/{file.path}" for file in self._files if file.kind == EPOCH]
        read = partial(pq.read_table, columns=list(columns), filesystem=files)
        return [row for path in paths for row in read(path).to_pylist()]


class _BySpark(Append):
    def _made(self, frame: DataFrame, make: OverBatches) -> DataFrame:
        return frame.mapInArrow(make, ledger_ddl())

    def _save(self, made: DataFrame) -> None:
        # Set options of this write. Session settings of the same names would affect later writes.
        writer = made.write.format("delta").mode("append")
        if self._app_id:
            writer = writer.option("txnAppId", self._app_id)
            writer = writer.option("txnVersion", str(self._version))
        if self._token:
            writer = writer.option("userMetadata", self._token)
        try:
            writer.save(self.place.uri)
        except Exception as error:
            if self._begins_late():
                raise _deleted(self.place, _NOT_APPENDED) from error
            raise
        if self._begins_late():
            raise _deleted(self.place, _NOT_APPENDED)

    def _begins_late(self) -> bool:
        """If the table's log was deleted during the append, delete the later commits and return
        True.

        Spark's Delta commits the version after the one that it has read. In an object store this
        succeeds although the earlier commits are gone, but no reader can build a table from such a
        log. Return False if the log cannot be read, as on a client of Spark Connect."""
        if not is_classic(self._spark):
            return False
        try:
            files, log_folder = self.place.filesystem(), f"{self.place.root}/{LOG_FOLDER}"
            paths = files.get_file_info(fs.FileSelector(log_folder, allow_not_found=True))
            names = [path.base_name.lstrip(".") for path in paths]
            if f"{0:020}.json" in names or any("checkpoint" in name for name in names):
                return False
            for path, name in zip(paths, names, strict=True):
                if name[:20].isdecimal():
                    files.delete_file(path.path)
        except (OSError, LedgerError):
            return False
        return True

    def save_rows(self, batches: Sequence[pa.RecordBatch]) -> None:
        rows = pa.Table.from_batches(batches, LEDGER_SCHEMA)
        frame = self._spark.createDataFrame(rows).coalesce(1)
        if executors_token(self._spark, self.place) is not None:
            frame = self.made_by_tasks(frame, iter)
        self._save(frame)

    def row_count(self) -> int:
        return written_rows(self._spark, self.place, self._token)

    def accounts(
        self, columns: Sequence[str], query_id: str, run_id: str, epoch: int
    ) -> list[dict[str, Any]]:
        with reading(self.place, _ALL_SENT):
            table = self._spark.read.format("delta").load(self.place.uri)
            is_own = (
                (table.query_id == query_id) & (table.run_id == run_id) & (table.epoch == epoch)
            )
            rows = table.where(is_own & (table.kind == EPOCH)).select(*columns).collect()
        return [row.asDict() for row in rows]


def _deleted(place: LedgerPath, done: str) -> LedgerError:
    return LedgerError(
        f"the ledger {place} was deleted while a query wrote to it; {done}. Put the folder "
        "back from a backup, or start the query again, which makes a new ledger",
        path=place.uri,
    )


_NOT_APPENDED: Final = "rows of this append were sent or folded, and are on record nowhere"
_ALL_SENT: Final = (
    "All rows were sent, and the ledger has them: do not send them again. Only the counts of the "
    "tasks cannot be read. "
)


def _proved(
    token: LedgerToken, make: OverBatches, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    token.check()
    yield from make(batches)
