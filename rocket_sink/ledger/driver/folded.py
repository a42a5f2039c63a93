"""A ledger that a session folds while queries write to it: the jobs of the session's fold thread.

All that is remembered of the ledger belongs to the table that is at its path now. If the folder is
deleted and made anew, the follower sees another table, and reads that table from its beginning."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

import pyarrow.compute as pc

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.follower import FollowerState, LedgerFollower
from rocket_sink.ledger.driver.fold import fold, spools_in_use
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.query.duckdb_reader import reader_of
from rocket_sink.ledger.records import RunContext, confirmed_row
from rocket_sink.ledger.schema import EPOCH
from rocket_sink.ledger.transport.files import spooled_rows
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.upkeep.expire import Retention, expire_daily
from rocket_sink.ledger.views import OUTCOMES
from rocket_sink.net import log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG: Final = log.logger(__name__)
_COUNTS: Final = ("rows_in", *OUTCOMES)
_COLUMNS: Final = ("query_id", "run_id", "epoch", "complete", "first_error", *_COUNTS)
_UNCOUNTED: Final = 10_000
"""Limit of epochs that wait for a comparison; beyond it the oldest epochs are dropped."""
_RETRY_S: Final = 1.0
"""Shortest pause between a failed fold and the next one, if no event comes."""
_EXPIRY_S: Final = 3600.0
"""Pause between two looks for an expiry, which itself comes once a day."""

Epoch = tuple[str, int]
"""Run, number of the epoch."""


class Accounts:
    """Row counts by query run, of the rows that a ledger's table got since this object was made.
    The constructor raises LedgerError or OSError if the ledger's files are out of reach."""

    def __init__(self, place: LedgerPath) -> None:
        self._place = place
        self._sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.follower = LedgerFollower(place, {EPOCH: _COLUMNS}, skips_gone=True)

    def read(self, *, with_spool: bool = False) -> dict[Epoch, dict[str, Any]]:
        """Add the table's new rows, and those of the spool on request; return their counts and the
        `first_error` by epoch. Raise OSError or ValueError if the table cannot be read."""
        sums: defaultdict[Epoch, Counter[str]] = defaultdict(Counter)
        errors: dict[Epoch, str] = {}
        parts = [rows for _, rows in self.follower.new_rows()]
        if with_spool:
            rows = spooled_rows(self._place.spools).filter(pc.field("kind") == EPOCH)
            parts.append(rows.select(_COLUMNS))
        for rows in parts:
            for row in rows.filter(pc.field("complete")).to_pylist():
                key = row["run_id"], row["epoch"]
                counts = {name: row[name] or 0 for name in _COUNTS}
                self._sums[row["run_id"]].update(counts)
                sums[key].update(counts)
                errors[key] = errors.get(key) or row["first_error"] or ""
        return {key: {**counts, "first_error": errors[key]} for key, counts in sums.items()}

    def take(self, run: str) -> Counter[str]:
        """Return the row counts of a run that has ended, and forget them."""
        return self._sums.pop(run, Counter())


class FoldedLedger:
    """A ledger, and what the session knows of the queries that write to it. One thread does the
    jobs; others may call `add` and `begin_run`."""

    def __init__(self, session: SparkSession, place: LedgerPath) -> None:
        self.place = place
        self.accounts: Accounts | None = None
        self._due_s = math.inf
        """Time of the next fold; infinite while no rows wait for one."""
        self._session = session
        self._interval_s = math.inf
        self._retention: Retention | None = None
        self._folded_s = -math.inf
        self._expiry_s = math.inf
        """Time of the next look for an expiry; infinite before the first fold."""
        self._counted_runs: set[str] = set()
        """Runs that began after `accounts`, which therefore have all their rows."""
        self._handed: dict[Epoch, tuple[str, int, FollowerState]] = {}
        """{epoch that is done: (query, rows that Spark handed to its tasks, the state then)}."""
        self._rows_in: dict[Epoch, int] = {}
        """{epoch that is not compared yet: its rows in the table}."""
        self._first_epochs: set[str] = set()
        """Queries whose epoch 0 is done, for `new_queries`."""

    def add(self, interval_s: float, retention: Retention) -> None:
        """Take the options of a sink: the shortest interval and the longest retention apply."""
        self._interval_s = min(interval_s, self._interval_s)
        self._retention = retention.or_longer(self._retention or retention)

    def begin_run(self, run: str, *, is_late: bool) -> None:
        """Count the table's new rows from now on; `is_late`: the run may have written some already.
        Do nothing if the ledger's files are out of reach: the first fold logs the error."""
        if self.accounts is None and not self.place.problem:
            with contextlib.suppress(LedgerError, OSError):
                self.accounts = Accounts(self.place)
        if self.accounts is not None and not is_late:
            self._counted_runs.add(run)

    def end_run(self, run: str) -> Counter[str]:
        """Forget a run that has ended, with its epochs that are not compared yet; return its row
        counts."""
        self._counted_runs.discard(run)
        self._handed = {key: facts for key, facts in self._handed.items() if key[0] != run}
        return self.accounts.take(run) if self.accounts is not None else Counter()

    @property
    def waits(self) -> bool:
        """Whether rows may wait for a fold."""
        return self._due_s < math.inf

    @property
    def next_s(self) -> float:
        """Time of the next fold or expiry; infinite if none is due before an event."""
        return min(self._due_s, self._expiry_s)

    def is_fold_due(self) -> bool:
        return time.monotonic() >= self._due_s

    def is_expiry_due(self) -> bool:
        return time.monotonic() >= self._expiry_s

    def await_fold(self) -> None:
        """Let the next fold be due an interval after the last one began."""
        self._due_s = self._folded_s + self._interval_s

    def confirm(self, progress: Any, query: str | None, *, has_run_again: bool = False) -> None:
        """Note in the spool that an epoch is done. Raise LedgerError, OSError or ValueError if this
        fails.

        Args:
            progress: Spark's report of the epoch.
            query: name under which the query's tasks write to this ledger; None if they do not.
            has_run_again: Spark ran tasks in a later attempt of their stage, and the earlier one
                left no record of what it has sent. Then all rows of the epoch count as possible
                duplicates.
        """
        # An epoch that reads no rows may still send rows of an aggregation's state.
        if not progress.numInputRows and int(progress.sink.numOutputRows) <= 0:
            return
        if not progress.batchId:
            self._first_epochs.add(str(progress.id))
        if query is None:
            return
        run = str(progress.runId)
        ctx = RunContext(query, run, int(progress.batchId), lane="foreach")
        # Spark gives -1 if it does not count this sink's rows. The number of rows read is no
        # substitute, because a query may filter.
        handed = int(progress.sink.numOutputRows)
        rows = handed if handed >= 0 else progress.numInputRows
        spool = SpoolWriter(self.place.spools[0], ctx)
        spool.append(
            confirmed_row(
                ctx,
                num_input_rows=progress.numInputRows,
                rows_in=handed if handed >= 0 else None,
                duration_ms=float(progress.batchDuration),
                duplicates_possible=rows if has_run_again else None,
            )
        )
        spool.seal()
        if handed > 0 and self.accounts is not None and run in self._counted_runs:
            self._handed[run, ctx.epoch] = query, handed, self.accounts.follower.state
            _limit(self._handed)

    def handed_epochs(self) -> list[Epoch]:
        """Return the epochs to compare after the next fold, which may miss files of later ones."""
        return list(self._handed)

    def fold(self) -> bool:
        """Fold; return whether all finished files are in the table. If not, because another fold
        is under way, fold again soon; after an error, fold again after the interval. Raise what
        `fold.fold` raises."""
        self._folded_s = time.monotonic()
        self._due_s = self._folded_s + max(self._interval_s, _RETRY_S)
        if self.place.problem and not spools_in_use(self.place):
            is_folded = True  # Only foreachBatch and sink.write use this ledger.
        else:
            is_folded = not fold(self._session, self.place, wait_s=0).busy
        self._due_s = math.inf if is_folded else self._folded_s + _RETRY_S
        if is_folded and self._expiry_s == math.inf:
            self._expiry_s = self._folded_s
        return is_folded

    def read_accounts(self, *, with_spool: bool = False) -> dict[Epoch, dict[str, Any]]:
        """Return the counts of new rows, as `Accounts.read` does; empty without accounts."""
        if self.accounts is None:
            return {}
        tables = self.accounts.follower.state.tables
        counts = self.accounts.read(with_spool=with_spool)
        if self.accounts.follower.state.tables != tables:
            self._rows_in.clear()
        for key, sums in counts.items():
            if key[0] in self._counted_runs:
                self._rows_in[key] = self._rows_in.get(key, 0) + sums["rows_in"]
                _limit(self._rows_in)
        return counts

    def compare_counts(self, epochs: Collection[Epoch]) -> None:
        """Log an error for each epoch with fewer rows in the table than Spark handed to its tasks.
        Repeated attempts count, too, so a lower sum proves that rows are missing."""
        is_deleted = False
        for key in epochs:
            query, handed, before = self._handed.pop(key)
            if (rows := self._rows_in.pop(key, 0)) >= handed or self.accounts is None:
                continue
            now = self.accounts.follower.state
            if before.tables != now.tables or not now.has_table:
                is_deleted = True
            elif before.gaps == now.gaps:  # The follower has logged gaps.
                _LOG.error(
                    "the ledger %s lacks %d of the %d rows that Spark handed to the tasks of "
                    "epoch %d of the query %s: workers wrote to another folder than the driver's, "
                    "or files of its _spool are gone. Dead letters may be among them: look for the "
                    "same path on the disks of the workers",
                    self.place, handed - rows, handed, key[1], query,
                )  # fmt: skip
        if is_deleted:
            _LOG.warning(
                "the ledger %s was deleted while its query ran, so nobody can tell whether it "
                "lacks rows. Put the folder back from a backup; if it was deleted on purpose, stop "
                "the queries that write to it, because they make a new ledger there", self.place,
            )  # fmt: skip

    def expire(self) -> None:
        """Drop rows that are older than the queries' retention, once a day."""
        self._expiry_s = time.monotonic() + _EXPIRY_S
        expire_daily(self._session, self.place, self._retention or Retention())

    def new_queries(self) -> list[str]:
        """Return the queries whose epoch 0 was done since the last call."""
        queries, self._first_epochs = sorted(self._first_epochs), set()
        return queries

    def warn_of_successor(self, query_id: str) -> None:
        """Warn if a query with a new checkpoint writes to an earlier query's topics."""
        # Import here: workers import this module, too, but read no ledger.
        from rocket_sink.ledger.report.queries import successors
        from rocket_sink.ledger.sql import Scope, Scoped

        query = reader_of(self._session, self.place)
        for successor in successors(Scoped(query, Scope(query_id))) if query else ():
            _LOG.warning(
                "the query %s begins at epoch 0 and writes to %s, as the query %s did before it: "
                "if its checkpoint was deleted, all rows are sent again. With the option appId "
                "such a start is refused",
                query_id, successor.topic, successor.earlier,
            )  # fmt: skip


def _limit(epochs: dict[Epoch, Any]) -> None:
    """Drop the oldest epoch if there are too many."""
    if len(epochs) > _UNCOUNTED:
        del epochs[next(iter(epochs))]
