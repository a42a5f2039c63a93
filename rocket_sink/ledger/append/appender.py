"""An append to the table: by delta-rs where it may, by Spark's Delta elsewhere.

By delta-rs the rows become data files where they are made, by tasks or the driver, and the driver
commits the files. By Spark's Delta the rows are what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.data_files import (
    FILES_DDL,
    DataFile,
    OverBatches,
    told_files,
    write_and_tell,
    write_data_files,
)
from rocket_sink.ledger.append.delta_rs import commit, last_version
from rocket_sink.ledger.append.exclusive import warn_if_shared
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.schema import LEDGER_SCHEMA, ledger_ddl
from rocket_sink.ledger.storage import is_classic
from rocket_sink.ledger.table import (
    LedgerToken,
    executors_token,
    is_table,
    open_for_commits,
    said_by_task,
    table_version,
)
from rocket_sink.net import log

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

_LOG: Final = log.logger(__name__)


class Append:
    """Begun before its rows are made; for one thread, and one call of `save` or `save_rows`.

    Args:
        app_id, version: the transaction, which the table takes once; empty: none.
        token: named beside the commit, in the table's history.

    Attributes:
        sequence: of its rows.
        is_own: the table has the transaction from here. False before a commit, of a transaction
            that it had before, and by Spark's Delta, which does not tell.
    """

    def __init__(
        self, spark: SparkSession, place: LedgerPath, app_id: str = "", version: int = 0,
        token: str = "",
    ) -> None:  # fmt: skip
        self._spark = spark
        self.place = place
        self._app_id = app_id
        self._version = version
        self._token = token
        self._table = table = open_for_commits(spark, place)
        if table is None:
            if not is_table(spark, place):
                # Spark's Delta would make another one, which is not partitioned.
                raise LedgerError(
                    f"the ledger {place.uri} was deleted while a query wrote to it; nothing is "
                    "sent or appended. Put the folder back from a backup, or start the query "
                    "again, which makes a new ledger",
                    path=place.uri,
                )
            if is_classic(spark):
                warn_if_shared(spark, place)
        last = last_version(place, table, app_id) if table is not None and app_id else None
        self._is_held = last is not None and last >= version
        self.is_own = False
        current_version = table_version(spark, place) if table is None else table.version()
        self.sequence = (current_version + 1) << 32

    def made_by_tasks(self, frame: DataFrame, make: OverBatches) -> DataFrame:
        """Return the frame for `save`, whose one action makes the rows, by `mapInArrow(make)`."""
        token = executors_token(self._spark, self.place)
        if token is not None:
            make = partial(_proved, token, make)
        if self._table is None:
            return frame.mapInArrow(make, ledger_ddl())
        return frame.mapInArrow(partial(write_and_tell, self.place, make), FILES_DDL)

    def save(self, made: DataFrame) -> list[DataFile] | None:
        """Run the tasks and commit; nothing where the table holds the transaction.

        Returns the files, None where Spark's Delta has committed.

        Raises:
            LedgerError: a task has it, or the commit has failed.
        """
        try:
            if self._table is None:
                self._save_by_spark(made)
                return None
            if self._is_held:
                _LOG.info(
                    "the ledger %s has %s %d already: nothing is sent",
                    self.place.uri, self._app_id, self._version,
                )  # fmt: skip
                return []
            files = told_files(made.collect())
        except Exception as error:
            task_error = said_by_task(error, self.place)
            if task_error is None:
                raise
            raise task_error from error  # Spark's own says nothing of the reason
        self._commit(self._table, files)
        return files

    def save_rows(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Append rows of the driver; nothing where the table holds the transaction."""
        if self._table is not None:
            if self._is_held:
                return
            self._commit(self._table, write_data_files(self.place, batches))
            return
        rows = pa.Table.from_batches(batches, LEDGER_SCHEMA)
        frame = self._spark.createDataFrame(rows).coalesce(1)
        token = executors_token(self._spark, self.place)
        if token is not None:
            frame = frame.mapInArrow(partial(_proved, token, iter), ledger_ddl())
        self._save_by_spark(frame)

    def _commit(self, table: DeltaTable, files: Sequence[DataFile]) -> None:
        commit(self.place, table, files, self._app_id, self._version, self._token)
        self.is_own = True

    def _save_by_spark(self, rows: DataFrame) -> None:
        # Options of this write only: the session settings of that name leak into later writes.
        writer = rows.write.format("delta").mode("append")
        if self._app_id:
            writer = writer.option("txnAppId", self._app_id)
            writer = writer.option("txnVersion", str(self._version))
        if self._token:
            writer = writer.option("userMetadata", self._token)
        writer.save(self.place.uri)


def _proved(
    token: LedgerToken, make: OverBatches, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Refuse disks that executors do not share: files that tasks write there would be lost."""
    token.check()
    yield from make(batches)
