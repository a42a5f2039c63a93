"""Appends to the ledger's table, by delta-rs where it may commit, else by Spark's Delta. With
delta-rs, tasks or the driver write rows into data files, and the driver commits the files. With
Spark's Delta, Spark writes the rows.

Whoever commits, an append counts as done only if the table's log shows a commit with the append's
token, and as many added rows as were handed over. Nobody deletes the source of the rows before."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import pyarrow as pa
from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.delta_rs import commit, last_version
from rocket_sink.ledger.append.exclusive import warn_if_shared
from rocket_sink.ledger.append.table import (
    executors_token,
    is_table,
    last_txn_version,
    open_for_commits,
    rows_of_commit,
    rows_of_epoch,
    table_version,
    task_errors,
)
from rocket_sink.ledger.path import LOG_FOLDER, LedgerPath, failing
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.schema import EPOCH, LEDGER_SCHEMA, ledger_ddl
from rocket_sink.ledger.storage import is_classic, spark_frame
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
Rows: TypeAlias = Sequence[pa.RecordBatch]


class Append(ABC):
    """An append to the table, begun before its rows exist; for one thread and one save.

    Args:
        app_id, version: Delta's transaction of the append. The table accepts a transaction only
            once. With an empty `app_id` the append has no transaction.
        token: name of the commit in the table's history; empty: a new name.
        table_version: version of the table before the append.
        is_held: whether the table has the transaction already; then the append does nothing.

    Attributes:
        sequence: the first order number of the append's rows (`schema.SEQUENCE`).
        rows: number of rows that the log says this append has added; None before `save`, and if the
            table had the transaction already.
        merges: whether delta-rs commits to the table. Then this process may also merge its files.
    """

    merges: ClassVar[bool]

    def __init__(
        self, spark: SparkSession, place: LedgerPath, app_id: str, version: int, token: str,
        table_version: int, *, is_held: bool,
    ) -> None:  # fmt: skip
        self._spark = spark
        self.place = place
        self._app_id = app_id
        self._version = version
        self._token = token or uuid.uuid4().hex
        self._table_version = table_version
        self._is_held = is_held
        self.rows: int | None = None
        self.sequence = (table_version + 1) << 32

    def made_by_tasks(self, frame: DataFrame, make: OverBatches) -> DataFrame:
        """Return a frame to pass to `save`. Its rows are made in tasks, by `mapInArrow(make)`."""
        token = executors_token(self._spark, self.place)
        return self._made(frame, make if token is None else partial(_proved, token, make))

    def save(
        self, made: DataFrame, rows: int | None = None, later: Callable[[], Rows] = tuple
    ) -> None:
        """Run the frame's tasks and commit; do nothing if the table has the transaction already.
        If the tasks make no rows, delta-rs makes no commit.

        Args:
            later: makes further rows of the commit when the tasks have ended. Only delta-rs waits
                for them: Spark's Delta commits as soon as the tasks end.
            rows: number of rows that the tasks make; None: unknown. With delta-rs each task counts
                its rows. Spark's Delta gets them from the tasks, so nobody else counts them.

        Raises:
            LedgerError: a task has raised one, the commit has failed, or the log does not show it.
        """
        if self._is_held:
            _LOG.info(
                "the ledger %s has %s %d already: nothing is sent",
                self.place, self._app_id, self._version,
            )  # fmt: skip
            return
        with task_errors(self.place):
            counted = self._save(made, later)
        if counted == 0 and not rows:
            # The tasks have written no file, so there is no commit. A repetition sends nothing.
            self.rows = 0
        else:
            self._confirm(counted if rows is None else rows)

    def save_rows(self, batches: Rows) -> None:
        """Append rows that the driver has, as `save`."""
        if not self._is_held:
            self._save_rows(batches)
            self._confirm(sum(batch.num_rows for batch in batches))

    def _confirm(self, handed: int | None) -> None:
        """Check that the log shows this append with `handed` rows; None: with any number."""
        try:
            added = rows_of_commit(self._spark, self.place, self._token, self._table_version)
        except FileNotFoundError as error:
            raise _deleted(self.place, _NOT_APPENDED) from error
        if added is None:
            raise LedgerError(
                f"cannot commit to the ledger {self.place}: its log does not show the commit "
                f"{self._token}. Another process has committed the same transaction, or has "
                "overwritten this commit",
                path=self.place.uri,
            )
        if handed is not None and added != handed:
            raise short(self.place, self._token, added, handed)
        self.rows = added

    @abstractmethod
    def _save_rows(self, batches: Rows) -> None: ...

    def accounts(self, columns: Sequence[str], ctx: RunContext) -> list[dict[str, Any]]:
        """Return columns of the `epoch` rows of the write `ctx`, which `save` has appended or is
        about to commit. Do not read the columns from the frame of `save`: a second action on the
        frame would send the rows again."""
        epoch = (self._spark, self.place, (EPOCH,), ctx.query_id, ctx.epoch)
        rows = rows_of_epoch(*epoch, (*columns, "run_id"), before=_ALL_SENT).to_pylist()
        return [row for row in rows if row["run_id"] == ctx.run_id]

    @abstractmethod
    def _made(self, frame: DataFrame, make: OverBatches) -> DataFrame: ...

    @abstractmethod
    def _save(self, made: DataFrame, later: Callable[[], Rows]) -> int | None:
        """Commit the rows of the frame; return their number, as tasks have counted it."""


def begin_append(
    spark: SparkSession, place: LedgerPath, app_id: str = "", version: int = 0, token: str = ""
) -> Append:
    """Begin an append by delta-rs or by Spark's Delta, whichever commits to this table. Raise
    LedgerError if the table was deleted, or if its store cannot be read now."""
    table = open_for_commits(spark, place)
    if table is not None:
        last = last_version(place, table, app_id) if app_id else None
        is_held = last is not None and last >= version
        return _ByDeltaRs(spark, place, app_id, version, token, table, is_held=is_held)
    if not is_table(spark, place):
        # Raise here: Spark's Delta would make a new table without partitions.
        raise _deleted(place, "nothing is sent or appended")
    last = None
    if is_classic(spark):
        warn_if_shared(spark, place)
        last = last_txn_version(spark, place, app_id) if app_id else None
    is_held, newest = last is not None and last >= version, table_version(spark, place)
    return _BySpark(spark, place, app_id, version, token, newest, is_held=is_held)


class _ByDeltaRs(Append):
    merges = True

    def __init__(
        self, spark: SparkSession, place: LedgerPath, app_id: str, version: int, token: str,
        table: DeltaTable, *, is_held: bool,
    ) -> None:  # fmt: skip
        super().__init__(spark, place, app_id, version, token, table.version(), is_held=is_held)
        self._table = table

    def _made(self, frame: DataFrame, make: OverBatches) -> DataFrame:
        return frame.mapInArrow(partial(write_files, self.place, make), FILES_DDL)

    def _save(self, made: DataFrame, later: Callable[[], Rows]) -> int:
        self._files = named_files(made.collect())
        if not self._files:
            return 0
        return self._commit(self._files + write_data_files(self.place, later()))

    def _save_rows(self, batches: Rows) -> None:
        self._commit(write_data_files(self.place, batches))

    def accounts(self, columns: Sequence[str], ctx: RunContext) -> list[dict[str, Any]]:
        # `later` asks before the commit, when the table does not name the files yet.
        import pyarrow.parquet as pq

        paths = [f"{self.place.root}/{file.path}" for file in self._files if file.kind == EPOCH]
        with failing(f"{_ALL_SENT}the ledger {self.place} cannot be read now", self.place.uri):
            rows = pq.read_table(paths, columns=[*columns], filesystem=self.place.filesystem())
            return [*rows.to_pylist()]

    def _commit(self, files: list[DataFile]) -> int:
        commit(self.place, self._table, files, self._app_id, self._version, self._token)
        return sum(file.rows for file in files)


class _BySpark(Append):
    merges = False

    def _made(self, frame: DataFrame, make: OverBatches) -> DataFrame:
        return frame.mapInArrow(make, ledger_ddl())

    def _save(self, made: DataFrame, later: Callable[[], Rows] = tuple) -> None:
        # Set options of this write. Session settings of the same names would affect later writes.
        writer = made.write.format("delta").mode("append")
        if self._app_id:
            writer = writer.option("txnAppId", self._app_id)
            writer = writer.option("txnVersion", str(self._version))
        try:
            writer.option("userMetadata", self._token).save(self.place.uri)
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

    def _save_rows(self, batches: Rows) -> None:
        rows = pa.Table.from_batches(batches, LEDGER_SCHEMA)
        frame = spark_frame(self._spark, rows).coalesce(1)
        if executors_token(self._spark, self.place) is not None:
            frame = self.made_by_tasks(frame, iter)
        self._save(frame)


def short(place: LedgerPath, token: str, added: int, handed: int) -> LedgerError:
    """Return the error for a commit that has added other rows than were handed over."""
    return LedgerError(
        f"the commit {token} of the ledger {place} has added {added} rows, and {handed} were "
        "handed over: the table lacks rows, or has rows twice. Files of the spool with these rows "
        "are kept. See what else writes to the ledger, and report this with its _delta_log",
        path=place.uri,
    )


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
