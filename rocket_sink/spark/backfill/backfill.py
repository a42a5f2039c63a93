"""Backfill: sends the pending dead letters of a ledger again, or the rows of a table, once.

    with Backfill(spark, options, Selection(reasons=("transport",))) as work:
        plan = work.plan()
        work.run(plan.selected)

A backfill keeps the order of each sharding key, and the message ids. It may run twice, or again
after it was killed: it notes each sent letter in a resolution (a new row of the ledger), and a
letter with a resolution is no longer pending. It asks brokers about messages that may be stored
(`.resend`). A table's backfill also keeps its state in the ledger, and makes a missing ledger. The
limits per second are divided over the tasks.

One backfill of a ledger runs at a time: `with` claims the ledger, from before the plan to the end.
The next backfill waits, or is refused."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Final

from pyspark.accumulators import Accumulator
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (Spark's own habit)

from rocket_sink.errors import LedgerError, OptionError
from rocket_sink.ledger.append.table import ledger_token, prove_executors
from rocket_sink.ledger.driver.ledger import FULL_SYNC_WAIT_S, Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.backfill_marks import BackfillClaim
from rocket_sink.ledger.transport.files import open_files
from rocket_sink.options import BODY, SinkOptions
from rocket_sink.spark.backfill.resend import (
    CHUNK,
    RESULT_DDL,
    WAITING_DDL,
    Resent,
    send_partition,
    waiting_of,
)
from rocket_sink.spark.backfill.sources import SENT_COLUMNS, DeadLetters, Selection, Source, marked
from rocket_sink.spark.checks.session_settings import check_session, with_task_rate
from rocket_sink.text import UUID

_SAMPLE: Final = 10
_PROGRESS_S: Final = 0.5
_ORDER_WAIT_MS: Final = 10_000
_QUERY: Final = "backfill-"
"""Prefix of every backfill's query id; the rest is a UUID. An `appId` may have this prefix, too."""
_QUERIES: Final = re.compile(_QUERY + UUID)
_OTHERS_WAIT_S: Final = 20.0
"""Longest wait for the workers of a killed driver; they end soon after it."""


@dataclass
class Plan:
    """The plan of a backfill: numbers of dead letters (of a table: rows), and a sample of them.

    Attributes:
        without_body: letters that cannot be sent, because they have no body.
        without_topic: letters that cannot be sent: neither they nor the options have a topic.
        left_alone: letters that have failed in `max_tries` backfills.
        behind: letters that come after a left-alone letter of their key.
        asked: selected letters that may be stored already; brokers are asked before they are sent.
    """

    pending: int = 0
    selected: int = 0
    selected_bytes: int = 0
    without_body: int = 0
    without_topic: int = 0
    left_alone: int = 0
    behind: int = 0
    asked: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    by_topic: dict[str, int] = field(default_factory=dict)
    sample: list[dict[str, Any]] = field(default_factory=list)

    def count_selected(self, row: Any) -> None:
        """Add a row of `_sums`."""
        self.selected += row.selected
        self.selected_bytes += row.bytes
        self.asked += row.asked


@dataclass(eq=False)
class Backfill:
    """A backfill of a ledger's dead letters, or of a table's rows.

    Args:
        options: connection and sending options. `ledger` is required; `topic`, if set, replaces the
            dead letters' own topics.
        source: a `Table`, or None for the ledger's dead letters.
        wait_s: longest wait for another backfill of the ledger; None waits until it ends.
        on_wait: called once before the first wait, with the holder of the ledger.
        move_keys: if no route has the broker of a letter's queue, send the letter to another queue.
            By default the letter waits for the broker: it must not overtake messages of its queue.

    Raises:
        OptionError: no ledger, or no name server.

    Raises from all methods:
        OptionError, ColumnError: the filter, columns or times do not fit the source.
        LedgerError: another backfill has the claim, or the ledger cannot be folded or written.
    """

    spark: SparkSession
    options: SinkOptions
    selection: Selection = field(default_factory=Selection)
    source: Source | None = None
    _: KW_ONLY
    move_keys: bool = False
    wait_s: float | None = None
    on_wait: Callable[[str], None] = lambda holder: None

    def __post_init__(self) -> None:
        if not self.options.ledger:
            raise OptionError(
                "option ledger is missing: a backfill notes there what it has sent", option="ledger"
            )
        self.ledger = Ledger(self.options.ledger)
        self.options = self.options.with_(ledger=self.ledger.uri)
        check_session(self.options, self.spark)
        self.options = backfill_options(self.options)
        self._source = self.source or DeadLetters()
        self.noun = self._source.noun
        self._claim: BackfillClaim | None = None

    def __enter__(self) -> Backfill:
        claim = BackfillClaim(resolve_path(self.ledger.path))
        claim.acquire(self.wait_s, on_wait=self.on_wait)
        self._claim = claim
        try:
            self._wait_for_others()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def plan(self, *, sample: int = _SAMPLE) -> Plan:
        """Fold the ledger, then count the dead letters; send nothing. Outside of `with` another
        backfill may run meanwhile."""
        self.ledger.sync_fully(self.spark)
        # Otherwise Spark would call the table's files missing, as if the ledger were damaged.
        prove_executors(self.spark, resolve_path(self.ledger.path))
        letters = self._pending()
        if letters is None:
            return Plan()
        plan = self._plan_of(letters)
        plan.sample = self._sample_of(letters, sample) if sample and plan.selected else []
        return plan

    def waiting(self) -> dict[str, int] | None:
        """Return the selected dead letters that would wait now: {broker that is in no route:
        number}. Return None if no name server answers."""
        _ = self.options.name_servers
        letters = self._pending()
        if letters is None:
            return {}
        columns = ("query_id", "topic", "sharding_key", "queue_id", "broker_name")
        chosen = self._chosen(letters)
        kept = chosen.select(*(name for name in columns if name in chosen.columns))
        counts: Counter[str] = Counter()
        for row in kept.mapInArrow(partial(waiting_of, self.options), WAITING_DDL).collect():
            counts[row.broker] += row.letters
        return None if "" in counts else dict(counts)

    def run(self, selected: int, *, progress: Callable[[int], None] | None = None) -> Resent:
        """Send the selected dead letters and write resolutions. Without `with`, claim the ledger.

        Args:
            selected: number of selected dead letters, from `plan`; it sets the number of tasks.
            progress: called from time to time, and at the end, with the number of letters of ended
                tasks. A task that ran twice counts twice.
        """
        if not selected:
            return Resent()
        if self._claim is None:
            with self:
                self.ledger.sync_fully(self.spark)
                return self.run(selected, progress=progress)
        # The table of a new ledger must exist before the first send.
        self.ledger.create(self.spark)
        self._source.begin(self.spark, self.ledger)
        version = self.ledger.version(self.spark)
        letters = self._pending()
        assert letters is not None
        total = Resent()
        parallel = self.spark.sparkContext.defaultParallelism
        tasks = max(1, min(8 * parallel, -(-selected // CHUNK)))
        letter_counter = self.spark.sparkContext.accumulator(0)
        options = with_task_rate(self.options, self.spark, tasks=tasks)
        send = partial(
            send_partition, options, f"{_QUERY}{uuid.uuid4()}", claim=self._claim.token,
            version=version, token=ledger_token(resolve_path(options.ledger), spools=True),
            on_dead_letters=letter_counter.add, pin_new=self._source.pins_new,
            move_keys=self.move_keys,
        )  # fmt: skip
        frame = self._in_order(self._chosen(letters), tasks)
        with _reports(progress, letter_counter):
            for row in frame.mapInArrow(send, RESULT_DDL).collect():
                total.add(row)
        self.ledger.sync(self.spark, wait_s=FULL_SYNC_WAIT_S)
        return total

    def _pending(self) -> DataFrame | None:
        return self._source.pending(self.spark, self.ledger, self.selection)

    def _chosen(self, letters: DataFrame) -> DataFrame:
        """Return the letters that the selection's filters, tries and limit choose."""
        selection = self.selection
        chosen = self._with_marks(letters).where("_chosen")
        if selection.limit is not None:
            chosen = chosen.orderBy("_place", "letter_id").limit(selection.limit)
        return chosen

    def _with_marks(self, letters: DataFrame) -> DataFrame:
        wanted = self._source.wanted(letters, self.selection)
        if not self.options.topic:
            wanted = wanted & letters["topic"].isNotNull()
        return marked(letters, wanted, self.selection)

    def _plan_of(self, letters: DataFrame) -> Plan:
        """Count the dead letters in one pass, and in a second pass if there is a limit."""
        selection = self.selection
        sized = letters.withColumn("size", F.octet_length("body"))
        grouped = self._with_marks(sized).groupBy("reason", "topic").agg(
            F.count("*").alias("pending"), *_sums("_chosen"),
            F.expr("count_if(size IS NULL)").alias("bodiless"),
            F.expr("count_if(_tired)").alias("tired"), F.expr("count_if(_behind)").alias("behind"),
        )  # fmt: skip
        plan, by_reason, by_topic = Plan(), Counter[str](), Counter[str]()
        for row in grouped.collect():
            plan.pending += row.pending
            plan.without_body += row.bodiless
            if row.topic is None and not self.options.topic:
                plan.without_topic += row.pending
            plan.left_alone += row.tired
            plan.behind += row.behind
            plan.count_selected(row)
            if row.reason is not None:
                by_reason[row.reason] += row.pending
            by_topic[row.topic or ""] += row.pending
        plan.by_reason, plan.by_topic = dict(by_reason), dict(by_topic)
        if selection.limit is not None and plan.selected > selection.limit:
            chosen = self._chosen(letters).select("open", F.octet_length("body").alias("size"))
            plan.selected = plan.selected_bytes = plan.asked = 0
            plan.count_selected(chosen.agg(*_sums("true")).head())
        return plan

    def _sample_of(self, letters: DataFrame, count: int) -> list[dict[str, Any]]:
        names = ("at", "topic", "tags", "keys", "sharding_key", "reason", "last_error_code",
                 "last_error", "body_bytes", "message_id", "letter_id", "tries")  # fmt: skip
        chosen = self._chosen(letters)
        if "body_bytes" not in chosen.columns:
            chosen = chosen.selectExpr("*", "octet_length(body) AS body_bytes")
        kept = [name for name in names if name in chosen.columns]
        rows = [row.asDict() for row in chosen.orderBy("_place").select(*kept).head(count)]
        for row in rows:
            if row.get("at"):  # Spark returns the driver's local time
                row["at"] = row["at"].astimezone(dt.timezone.utc)
        return rows

    def _in_order(self, letters: DataFrame, tasks: int) -> DataFrame:
        """Return the letters with each key, or else each id, of a topic to send to in one partition
        by `_place`."""
        topic = F.lit(self.options.topic) if self.options.topic else F.col("topic")
        spread = F.coalesce(F.col("sharding_key"), F.col("message_id"))
        named = ("unknown_at", "was_stored", *SENT_COLUMNS)
        columns = [name for name in named if name in letters.columns]
        return (
            letters.repartition(tasks, topic, spread)
            .sortWithinPartitions("_place")
            .select("letter_id", "query_id", "open", *columns)
        )

    def _wait_for_others(self) -> None:
        """Wait until the workers of a killed backfill have ended."""
        place = resolve_path(self.ledger.path)
        until_s = time.monotonic() + _OTHERS_WAIT_S
        while writer := next(open_files(place, _QUERIES), None):
            if time.monotonic() > until_s:
                raise LedgerError(
                    f"another backfill of the ledger {self.ledger.path} is at work: a worker still "
                    f"writes {writer.path}, although its driver is gone. Stop it",
                    path=self.ledger.path,
                )
            time.sleep(0.2)


def _sums(condition: str) -> list[Column]:
    """Return sums over the dead letters that meet a condition: number, bytes, open letters."""
    return [
        F.expr(f"count_if({condition})").alias("selected"),
        F.expr(f"coalesce(sum(if({condition}, size, 0)), 0)").alias("bytes"),
        F.expr(f"count_if({condition} AND open)").alias("asked"),
    ]


def backfill_options(options: SinkOptions) -> SinkOptions:
    """Return the sink's options for a backfill: failures are reported, not raised."""
    changes: dict[str, Any] = {
        "onInvalid": "dead_letter", "maxFailures": "", "columns": None, "orderBy": None,
        "bodyFormat": "column", "strictColumns": False,
        "ledgerRetention": {**dict(options.ledger_retention_ms), BODY: 0},
    }  # fmt: skip
    if options.delivery == "transactional":
        # A backfill has no epochs that could decide on half messages.
        changes["delivery"] = "at_least_once"
    if options.order_wait_ms == SinkOptions().order_wait_ms:
        # Wait less than by default: each chunk waits anew for a broker that is still away.
        changes["orderWaitMs"] = _ORDER_WAIT_MS
    kept = {name: value for name, value in options.given().items() if name not in changes}
    return SinkOptions.parse({**kept, **changes})


@contextlib.contextmanager
def _reports(progress: Callable[[int], None] | None, ended: Accumulator[int]) -> Iterator[None]:
    """Call `progress` with the value of `ended` from a thread, and once more at the end."""
    if progress is None:
        yield
        return
    done = threading.Event()

    def report() -> None:
        while not done.wait(_PROGRESS_S):
            progress(ended.value)

    watcher = threading.Thread(target=report, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        progress(ended.value)
