"""`Ledger`, the public way to read and maintain a ledger."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from rocket_sink.errors import LedgerError
from rocket_sink.ledger import views
from rocket_sink.ledger.append.appender import begin_append
from rocket_sink.ledger.append.delta_rs import check_files, data_files
from rocket_sink.ledger.append.named import located
from rocket_sink.ledger.append.table import (
    check_table,
    ensure_table,
    has_delta,
    is_table,
    missing,
    no_delta,
    open_direct,
    open_for_commits,
    read_table,
    reading,
    table_version,
)
from rocket_sink.ledger.driver.fold import FoldSummary, await_ended_queries, fold
from rocket_sink.ledger.path import LOG_FOLDER, first_line, resolve_path
from rocket_sink.ledger.records import in_order
from rocket_sink.ledger.transport.files import letters_in, quarantined, spooled_epochs, spooled_rows
from rocket_sink.ledger.upkeep.expire import Expired, Retention, expire_ledger
from rocket_sink.ledger.upkeep.growth import keep_small, merge
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.tables import html_table

if TYPE_CHECKING:
    import pyarrow as pa
    from delta.tables import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

    from rocket_sink.ledger.report import Report


_LOG: Final = log.logger(__name__)
FULL_SYNC_WAIT_S: Final = 300.0
"""Longest wait of `sync_fully` for another process's fold. A fold of many files takes minutes."""

_LISTING: Final = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
_LISTING_TASKS: Final = 32
"""Delta's VACUUM by default lists a table's folders in 10,000 tasks. A ledger has few folders."""

_VACUUM_HOURS: Final = 7 * 24.0
_VACUUM_IGNORES: Final = "spark.databricks.delta.vacuum.retentionWindowIgnore.enabled"
"""Setting of Delta 4.1 and later, by default true: a VACUUM ignores the hours that it is given."""

_VACUUM_COMMITS: Final = "spark.databricks.delta.vacuum.logging.enabled"
"""Setting by which Spark's Delta commits a note of a VACUUM, which may overwrite a commit."""


class Ledger:
    """The ledger at a path: a local path, or one that both Spark and pyarrow know.

    `spark.read.format("delta").load(path)` reads the same table. The views of this class also know
    which rows count. They read folded rows only. Call `sync` first to include the rows that tasks
    wrote since the last fold. The table's columns have comments that explain them.

    Every method that reads raises:
        LedgerError: no ledger there, another Delta table, or another schema version.
    """

    _version: int | None = None
    """The version of the table to read; None: the newest."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._place = resolve_path(located(os.fspath(path)))

    def at(self, version: int) -> Ledger:
        """Return the ledger as it was at a Delta version (`version(spark)`), to read rows and views
        and to report; nothing is folded then. Files of replaced versions stay for two days at
        least, and commits for two days. Needs Spark's Delta."""
        past = Ledger(self._place.uri)
        past._version = version
        return past

    @property
    def path(self) -> str:
        """The table's folder, as an absolute path."""
        return str(self._place)

    @property
    def uri(self) -> str:
        """The folder's URI for Spark's `load` and `save`, on any default file system."""
        return self._place.uri

    def __repr__(self) -> str:
        return f"Ledger({self.path!r})"

    def _repr_html_(self) -> str:
        if not self.exists():
            rows = [("table", "none yet: it is made by the first write, or by `create(spark)`")]
        else:
            aside = len(self.quarantined())
            rows = [("epochs that are not folded yet", f"{self.unfolded_epochs():,}")]
            rows += [("damaged spool files, put aside", f"{aside:,}")] if aside else []
            rows += [("what it says", "ledger.report(spark)")]
        return html_table(f"Ledger {self.path}", rows)

    def create(self, spark: SparkSession) -> str:
        """Make the table if it does not exist; return the ledger's id."""
        return ensure_table(spark, self._place)

    def version(self, spark: SparkSession) -> int:
        """Return Delta's newest version of the table."""
        return table_version(spark, self._place)

    def exists(self, spark: SparkSession | None = None) -> bool:
        """Return whether there is a table; without a session, whether its log folder exists."""
        if spark is not None:
            return is_table(spark, self._place)
        log = f"{self._place.root}/{LOG_FOLDER}"
        return bool(self._place.filesystem().get_file_info(log).type.name == "Directory")

    def sync(self, spark: SparkSession, *, wait_s: float = 60.0) -> FoldSummary:
        """Move the rows of all finished spool files into the table; there may be no such files. If
        a query of this process has just ended, first wait until Spark confirms its last epochs."""
        await_ended_queries(spark)
        return fold(spark, self._place, wait_s=wait_s)

    def sync_fully(self, spark: SparkSession, *, wait_s: float | None = None) -> FoldSummary:
        """Do as `sync`, but raise an error if another process is folding.

        Raises:
            LedgerError: another process had the lock for `wait_s`.
        """
        wait_s = FULL_SYNC_WAIT_S if wait_s is None else wait_s
        summary = self.sync(spark, wait_s=wait_s)
        if summary.busy:
            raise LedgerError(
                f"the ledger {self.path} is being folded by {summary.holder}, for more than "
                f"{wait_s:g} s: rows that tasks wrote last are missing. Try again after its end",
                path=self.path,
            )
        return summary

    def unfolded_epochs(self) -> int:
        """Return the number of epochs with rows that are not in the table yet."""
        return len(spooled_epochs(self._place))

    def quarantined(self) -> list[str]:
        """Return the damaged spool files that folds have set aside. The table lacks their rows.

        A file may become readable later, for example after a temporary disk error. Then move it
        back to its folder below `_spool`, and the next fold takes it."""
        return quarantined(self._place)

    def append(self, spark: SparkSession, *batches: pa.RecordBatch) -> None:
        """Append rows of the driver: resolutions by hand, or exported dead letters."""
        ensure_table(spark, self._place)
        append = begin_append(spark, self._place)
        append.save_rows(list(in_order(batches, append.sequence)))
        keep_small(append)

    def rows(self, spark: SparkSession) -> DataFrame:
        """Return the rows of every kind, as stored."""
        return read_table(spark, self._place, self._version)

    def sends(self, spark: SparkSession) -> DataFrame:
        """Return a row per request attempt. `in_flight` means that no answer was ever recorded."""
        return views.view(self.rows(spark), "sends")

    def dead_letters(self, spark: SparkSession, *, pending: bool = True) -> DataFrame:
        """Return dead letters, in the columns of the row contract and columns of their own.

        A dead letter is pending if it is not `settled` and its task attempt counts. The dead
        letters of a failed attempt do not count, because the next attempt has its own. Sort by
        `epoch`, `partition`, `ordinal` for the order in which a key's dead letters were given up.
        """
        return views.view(self.rows(spark), "pending_letters" if pending else "letters")

    def resolutions(self, spark: SparkSession) -> DataFrame:
        """Return the resolutions of dead letters: resent, parked, dropped, or unparked. The last
        undoes earlier resolutions, except resent."""
        return views.view(self.rows(spark), "resolutions")

    def settled(self, spark: SparkSession) -> DataFrame:
        """Return `letter_id` of letters that were ever resent, or are parked or dropped now."""
        return views.view(self.rows(spark), "settled")

    def backfills(self, spark: SparkSession) -> DataFrame:
        """Return `letter_id`, `tries`, `open` of dead letters that backfills were about to send.

        `tries` counts backfills that failed because of the dead letter itself, not because of an
        unreachable broker. `open`: the dead letter may be stored, because a backfill was killed or
        got no valid answer."""
        return views.view(self.rows(spark), "backfills")

    def transactions(self, spark: SparkSession, *, pending: bool = False) -> DataFrame:
        """Return a row per epoch with half messages (`delivery=transactional`).

        `open`: the epoch is in the ledger, so its messages are to be committed, but the ledger does
        not know yet that all brokers have done so. `pending` returns only open epochs. `halves`
        counts the messages to commit, `committed` those that are visible, `refused` those that
        their brokers no longer have. Half messages of attempts that failed before the epoch's
        append are in no ledger. They are never committed, and brokers drop them."""
        transactions = views.view(self.rows(spark), "transactions")
        return transactions.where("open") if pending else transactions

    def isolations(self, spark: SparkSession) -> DataFrame:
        """Return a row per isolation, with `isolated_ms`."""
        return views.view(self.rows(spark), "isolations")

    def epochs(self, spark: SparkSession) -> DataFrame:
        """Return a row per query and epoch: the accounts of the task attempts that count.

        `adds_up`: each partition has a complete attempt, with rows_in = acked + degraded + dead +
        unknown + filtered, and there are no `missing_rows`. A failed send of a `TableProducer`
        counts as no rows, and adds up. `missing_rows`: rows of a confirmed epoch that Spark handed
        to tasks, but that are in no accounts. A task wrote to another folder, or its file is gone.
        `confirmed`: Spark reported the epoch as done, or `write_batch` has committed its rows.
        `num_input_rows`: rows that Spark read from its sources, by its own count.
        `superseded_attempts`, `superseded_rows`: attempts that do not count (also killed ones), and
        the rows that brokers may have stored for them. Counted attempts may store these rows again.
        """
        return views.view(self.rows(spark), "epochs")

    def attempts(self, spark: SparkSession) -> DataFrame:
        """Return a row per task attempt with any rows; `counts` is true for attempts that count.

        An attempt that was killed, or whose accounts have expired, has only sends: its `rows_in` is
        null."""
        return views.view(self.rows(spark), "attempts")

    def report(
        self, spark: SparkSession, *, query: str | None = None, since: dt.datetime | None = None,
        until: dt.datetime | None = None, epochs: int = 20, charts: bool = False, group: str = "",
        options: SinkOptions | None = None,
    ) -> Report:  # fmt: skip
        """Return what `rocket-sink report` shows, as a value: the verdict and the figures.

        First fold, as the command does. If another process folds at that time, or this one cannot
        (a warning says why), `unfolded_epochs` says how many epochs are missing. A notebook shows
        the report as tables, or with `charts` as a page with charts. `print(report)` shows text,
        and `ledger.report.to_html(report)` returns the page.

        Args:
            query: a streaming query's id, or its beginning.
            since, until: the time of the rows; a naive time is in UTC.
            epochs: the largest number of epochs to list.
            group: compare the offsets of the messages with the positions of this consumer group.
            options: name servers and credentials for the group; without them those of NAMESRV_ADDR.

        Raises:
            LedgerError: also if no query, or several queries, have an id that begins with `query`.
        """
        # Import here, because tasks import this module and make no report.
        from rocket_sink.ledger.query.duckdb_reader import reader_of
        from rocket_sink.ledger.report import Scope, figures

        is_past = self._version is not None
        try:
            is_folded = is_past or not self.sync(spark).busy
        except LedgerError as error:
            _LOG.warning("%s. The report lacks the rows that are not folded yet", error)
            is_folded = False
        read = views.reader(self.rows(spark)) if is_past else reader_of(spark, self._place)
        if read is None:
            raise missing(self._place)
        return figures(
            read, self.path, Scope(query, _in_utc(since), _in_utc(until)), epochs=epochs,
            unfolded_epochs=0 if is_folded else self.unfolded_epochs(),
            unfolded_letters=0 if is_folded else letters_in(spooled_rows(self._place.spools)),
            quarantined_files=len(self.quarantined()), series=charts, group=group,
            options=options,
        )  # fmt: skip

    def optimize(self, spark: SparkSession) -> dict[str, int]:
        """Compact small files; return {"files_added": n, "files_removed": n}."""
        table = open_for_commits(spark, self._place)
        if table is not None:
            check_files(self._place)
            check_table(spark, self._place)
            removed, added = merge(self._place, table, everything=True)
            return {"files_added": added, "files_removed": removed}
        metrics = self._delta(spark).optimize().executeCompaction().select("metrics").head()
        if metrics is None:
            return {"files_added": 0, "files_removed": 0}
        done = metrics["metrics"]
        return {"files_added": done["numFilesAdded"], "files_removed": done["numFilesRemoved"]}

    def expire(
        self, spark: SparkSession, older_than: Mapping[str, dt.timedelta] | None = None, *,
        settled_bodies: dt.timedelta | None = dt.timedelta(days=7), dry_run: bool = False,
    ) -> Expired:  # fmt: skip
        """Drop old rows, and bodies of dead letters that were stored or dropped.

        Rows that are still needed stay: pending dead letters, open transactions, resolutions of
        dead letters that stay, and the last two epochs of each query. Streams, folds and reports
        may run at the same time. A running query or the next expiry deletes the replaced files,
        after two days at least.

        Args:
            older_than: {kind: least age of the rows to drop}; rows of other kinds stay.
            settled_bodies: least time since a dead letter was settled; None: bodies stay.
            dry_run: only count.

        Raises:
            LedgerError: also if Spark's Delta commits to the ledger.
        """
        rows_ms = {kind: _millis(age) for kind, age in (older_than or {}).items()}
        bodies_ms = None if settled_bodies is None else _millis(settled_bodies)
        return expire_ledger(spark, self._place, Retention(rows_ms, bodies_ms), dry_run=dry_run)

    def vacuum(self, spark: SparkSession, retain_hours: float | None = None) -> None:
        """Delete data files that no version within `retain_hours` needs, and older files that no
        version names. The default is a week, or the table's `delta.deletedFileRetentionDuration` if
        that is longer: files of a running write are in no version before its end.

        Raises:
            LedgerError: Delta's safety check refuses so short a time, or Delta cannot read the log,
                or the log names a file that no rocket-sink wrote.
        """
        listing = min(int(spark.conf.get(_LISTING) or _LISTING_TASKS), _LISTING_TASKS)
        settings = {_LISTING: str(listing), _VACUUM_IGNORES: "false"}
        if open_for_commits(spark, self._place) is not None:
            settings[_VACUUM_COMMITS] = "false"
        with reading(self._place), _set(spark, settings):
            table = self._delta(spark)
            if (readable := open_direct(spark, self._place)) is not None:
                data_files(self._place, readable)  # refuses a forged log before anything is deleted
            try:
                table.vacuum(_VACUUM_HOURS if retain_hours is None else retain_hours)
            except Exception as error:
                if "RETENTION" not in str(error):
                    raise
                if retain_hours is not None:
                    raise LedgerError(
                        f"{first_line(error)} Readers, writes and folds under way may still need "
                        "the files; when there are none, set "
                        "spark.databricks.delta.retentionDurationCheck.enabled=false in the "
                        "session",
                        path=self.uri,
                    ) from error
                table.vacuum()  # The table keeps its files for longer than a week.

    def _delta(self, spark: SparkSession) -> DeltaTable:
        if not has_delta(spark):
            raise LedgerError(no_delta(self._place), path=self.uri)
        from delta.tables import DeltaTable

        if self._place.is_local:
            check_files(self._place)
        check_table(spark, self._place)
        return DeltaTable.forPath(spark, self._place.uri)


@contextlib.contextmanager
def _set(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, previous in before.items():
            if previous is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, previous)


def _millis(span: dt.timedelta) -> int:
    return span // dt.timedelta(milliseconds=1)


def _in_utc(moment: dt.datetime | None) -> dt.datetime | None:
    return moment.replace(tzinfo=dt.timezone.utc) if moment and moment.tzinfo is None else moment
