"""The driver's side of `delivery=transactional`: it commits the half messages of decided epochs.

An epoch is decided once the ledger has its rows. Then the driver ends the epoch: it commits the
half messages, and appends a row that says so. If the driver is killed in between, another caller
ends the epoch: the next start of the query, a `TransactionChecker` that a broker asks, or
`rocket-sink transactions settle`. All of them call `TransactionCommitter.end`, one at a time, and
nothing else commits. So no message becomes visible twice or out of order.

The answers to a broker that asks about a half message:

    its epoch is not decided                            -> UNKNOWN: the broker asks again
    decided, and the message is not in the epoch        -> ROLLBACK: a failed attempt has sent it
    decided, in the epoch, and consumers see it         -> ROLLBACK of this copy
    decided, in the epoch, and consumers do not see it  -> end the epoch now; UNKNOWN

The answer is never COMMIT. A broker stores the half message again before it asks
(TransactionalMessageServiceImpl.putBackHalfMsgQueue), so there can be two copies, and the broker
commits each copy on request. A COMMIT during `TransactionCommitter.end` would double the message,
or make it visible before earlier messages of its queue. After `end` has committed one copy, a later
answer rolls the other copy back, or the broker gives up that copy after transactionCheckMax
questions. The visible message stays in both cases."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from pyspark.sql import SparkSession

from rocket_sink.errors import DeliveryError, LedgerError, RocketSinkError
from rocket_sink.forks import ForkLock
from rocket_sink.ledger.append.table import check_table, last_txn_version, txn_app_id
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.epoch_starts import begin_commit, end_commit
from rocket_sink.ledger.lock import ENDS_LOCK, LedgerLock, ledger_lock
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import RunContext, build_rows
from rocket_sink.ledger.schema import TRANSACTION
from rocket_sink.ledger.storage import is_classic
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.admin.half_commits import CommitReport, HalfMessageCommitter
from rocket_sink.producer.pool import worker_pool
from rocket_sink.producer.producer import Producer
from rocket_sink.producer.transactions import ROLLBACK, UNKNOWN, TransactionState
from rocket_sink.spark.decided_epoch import DecidedEpoch, decided_epoch
from rocket_sink.task.transaction_marker import HalfMark, check_group
from rocket_sink.text import storable
from rocket_sink.wire.stored import StoredMessage

_LOG: Final = log.logger(__name__)
_ALARM_S: Final = 300
"""Age of half messages from which their commit logs a warning. By default brokers ask for 450 s
(transactionCheckMax 15, transactionCheckInterval 30 s). Then they move the half message away."""
_WAIT_S: Final = 600.0
"""Longest wait while another process ends epochs of the ledger."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EndReport:
    """The result of ending an epoch.

    Attributes:
        committed: number of messages that are visible now; `found_stored` were visible before.
        refused: number of messages that their brokers have dropped, so that they are not visible.
        busy: another process is ending epochs of the ledger; nothing was done.
    """

    query_id: str
    epoch: int
    committed: int = 0
    found_stored: int = 0
    refused: int = 0
    busy: bool = False
    topics: tuple[str, ...] = ()


@dataclass(eq=False)
class TransactionCommitter:
    """Ends epochs of one ledger. Raises a LedgerError if there is no ledger, or if the session is a
    Spark Connect session, which cannot read Delta's transactions.

    Args:
        options: how to reach the brokers, and the ledger.
        ordered: commit in the order of each queue; None: only if the options set an `ordering`.
    """

    spark: SparkSession
    options: SinkOptions
    _: KW_ONLY
    ordered: bool | None = None

    def __post_init__(self) -> None:
        if not is_classic(self.spark):
            raise LedgerError(
                "delivery=transactional asks Delta for its transactions, which a Spark Connect "
                "session cannot: use a classic session"
            )
        self._place = resolve_path(self.options.ledger)
        self._ledger = Ledger(self.options.ledger)
        self._ledger_id = check_table(self.spark, self._place)
        self.group = check_group(self._ledger_id, self.options)

    def open_epochs(self, query_id: str | None = None, *, refused: bool = False) -> list[Any]:
        """Return decided epochs that have not ended, in order, as rows of `Ledger.transactions`;
        with `refused` also those of which brokers did not have all half messages."""
        epochs = self._ledger.transactions(self.spark)
        epochs = epochs.where("open OR refused > 0" if refused else "open")
        if query_id is not None:
            epochs = epochs.where(epochs.query_id == query_id)
        return sorted(epochs.collect(), key=lambda row: (row.query_id, row.epoch))

    def end(
        self,
        query_id: str,
        epoch: int,
        *,
        wait_s: float,
        again: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> EndReport:
        """Make the epoch's messages visible, each once; do nothing if it has ended or is undecided.

        Args:
            wait_s: longest wait for another process that ends epochs of this ledger.
            again: check the messages even if the epoch has ended, and commit the invisible ones.

        Raises:
            DeliveryError: a broker did not commit; the call can be repeated.
            SendError: the error is fatal (credentials).
            LedgerError: the lock was lost, for example because this process was stopped for long.
        """
        with ledger_lock(self._place, wait_s, name=ENDS_LOCK) as lock:
            if lock is None:
                return EndReport(query_id, epoch, busy=True)
            self._check_same_ledger()
            decision = decided_epoch(self.spark, self._place, query_id, epoch)
            if decision is None or (decision.is_ended and not again):
                return EndReport(query_id, epoch)
            return self._end(decision, query_id, epoch, lock, again=again, progress=progress)

    def listen(self, *topics: str) -> None:
        """Answer the brokers' questions about these topics from now on. If that fails, only warn:
        the half messages stay as they are while nobody answers."""
        try:
            driver_answerer(self.spark, self.options, self.group).watch(*topics)
        except RocketSinkError as error:
            _LOG.warning(
                "brokers get no answers about half messages of %s: %s", ", ".join(topics), error
            )

    def end_earlier(self, query_id: str) -> None:
        """End the decided epochs that an earlier run of the query has not ended. After an error the
        query must not go on: its later epochs would become visible first."""
        for row in self.open_epochs(query_id):
            self.finish(query_id, row.epoch)

    def finish(self, query_id: str, epoch: int) -> None:
        """Make the epoch's messages visible, and listen for questions about its topics. Raise a
        DeliveryError if a broker did not commit messages, or has lost some."""
        report = self.end(query_id, epoch, wait_s=_WAIT_S)
        if report.topics:
            self.listen(*report.topics)
        check_ended(report)

    def members(self, query_id: str, epoch: int) -> frozenset[str] | None:
        """Return the ids of the half messages that the epoch commits; None if it is undecided.
        Raise LedgerError if another ledger is at the path now: it knows nothing of this ledger's
        half messages, and its epochs have the same numbers."""
        self._check_same_ledger()
        last = last_txn_version(self.spark, self._place, txn_app_id(query_id))
        if last is None or last < epoch:
            return None
        decision = decided_epoch(self.spark, self._place, query_id, epoch)
        return frozenset(decision.halves.column("message_id").to_pylist() if decision else ())

    def _check_same_ledger(self) -> None:
        if check_table(self.spark, self._place) != self._ledger_id:
            raise LedgerError(
                f"the ledger {self._place} was deleted and made anew, and its half messages of "
                "before belong to no ledger. They stay as they are; brokers drop them in the end. "
                "If the folder was deleted by mistake, put it back from a backup",
                path=self._place.uri,
            )

    def _end(
        self, decision: DecidedEpoch, query_id: str, epoch: int, lock: LedgerLock, *, again: bool,
        progress: Progress,
    ) -> EndReport:  # fmt: skip
        started_s, since_ms = time.monotonic(), decision.since_ms
        ordered = self.options.ordering != "none" if self.ordered is None else self.ordered
        begun_before = not begin_commit(self._place, query_id, epoch)
        with worker_pool().engine(self.options) as engine:
            commits = HalfMessageCommitter(
                engine, group=self.group, ordered=ordered, since_ms=since_ms,
                progress=lambda done: progress(done, len(decision.halves)),
                check=lock.check,
            )  # fmt: skip
            report = commits.commit(decision.halves, doubtful=begun_before or again)
        age_s = time.time() - since_ms / 1000
        if age_s > _ALARM_S:
            _LOG.warning(
                "half messages of epoch %d were up to %d s old when they were committed; brokers "
                "stop asking about them after transactionCheckMax * transactionCheckInterval "
                "(450 s by default): make the epochs shorter", epoch, age_s,
            )  # fmt: skip
        ctx = RunContext(query_id, decision.run_id, epoch, lane=decision.lane)
        self._note(report, ctx, time.monotonic() - started_s)
        end_commit(self._place, query_id, epoch)
        return EndReport(
            query_id, epoch, report.committed, report.found_stored, len(report.refused),
            topics=tuple(sorted(decision.halves.column("topic").unique().to_pylist())),
        )  # fmt: skip

    def _note(self, report: CommitReport, ctx: RunContext, duration_s: float) -> None:
        batches = [
            build_rows(
                TRANSACTION, 1,
                {
                    "committed": [report.committed], "found_stored": [report.found_stored],
                    "refused": [len(report.refused)], "duration_ms": [duration_s * 1000],
                },
                ctx,
            )
        ]  # fmt: skip
        if report.refused:
            halves = [half for half, _ in report.refused]
            columns = {
                "topic": [half.topic for half in halves],
                "broker_name": [half.broker_name for half in halves],
                "message_id": [half.message_id for half in halves],
                "remark": [storable(remark) for _, remark in report.refused],
            }
            batches.append(build_rows(TRANSACTION, len(halves), columns, ctx))
        self._ledger.append(self.spark, *batches)


def check_ended(report: EndReport) -> None:
    """Raise a DeliveryError if the epoch is not ended, or if some of its messages are lost."""
    if report.busy:
        raise DeliveryError(
            f"epoch {report.epoch} is in the ledger, and its half messages are not committed: "
            "another process has long been ending epochs (rocket-sink transactions?). Start the "
            "query again"
        )
    if report.refused:
        raise DeliveryError(
            f"{report.refused} messages of epoch {report.epoch} are in the ledger, but their "
            "brokers do not have their half messages: a master was lost, fileReservedTime is over, "
            "or nameServer leads to another cluster. In the last case start `rocket-sink "
            "transactions settle --refused` with the right one first. The ledger's transaction "
            "rows name the messages. When the query is started again, it goes on with the next "
            "epoch",
            counts={"acked": report.committed},
        )


_EPOCHS: Final = 4
"""Number of decided epochs whose members are cached."""
_UNDECIDED_S: Final = 0.2
_RETRY_S: Final = 30.0
"""Shortest time between two tries to end an epoch: by default brokers ask every 30 s."""

OnDecision = Callable[[HalfMark, str, TransactionState], None]


@dataclass(eq=False)
class CheckBacks:
    """Decides on half messages that brokers ask about. Only one thread may call an instance.

    Args:
        members: returns the ids of an epoch's half messages, or None if the epoch is undecided.
            Once decided, the ids never change.
        is_visible: returns whether consumers see (topic, message id).
        end: ends an epoch; it may raise `RocketSinkError`.
        on_decision: called with each decision.
    """

    members: Callable[[str, int], frozenset[str] | None]
    is_visible: Callable[[str, str], bool]
    end: Callable[[str, int], object]
    _: KW_ONLY
    on_decision: OnDecision = lambda mark, message_id, state: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], frozenset[str]] = OrderedDict()
        self._not_before_s: dict[tuple[str, int], float] = {}
        self._undecided_s: dict[tuple[str, int], float] = {}
        """{the last undecided epoch: time until which it is taken for undecided}. Brokers ask about
        thousands of messages at once, and one read of the ledger answers them all."""

    def __call__(self, message: StoredMessage) -> TransactionState:
        """Return the decision on a half message; UNKNOWN if the ledger cannot be read now."""
        mark, message_id = HalfMark.read(message.properties), message.message_id
        if mark is None or message_id is None:
            return UNKNOWN
        try:
            try:
                state = self._decide(message.topic, message_id, mark)
            except RocketSinkError as error:
                _LOG.warning("cannot decide on the half message %s now: %s", message_id, error)
                state = UNKNOWN
            self.on_decision(mark, message_id, state)
        except Exception as error:
            # The session may have ended. The broker asks again, perhaps another client.
            _LOG.warning("a half message was not decided on: %s", str(error).partition("\n")[0])
            return UNKNOWN
        return state

    def _decide(self, topic: str, message_id: str, mark: HalfMark) -> TransactionState:
        epoch = (mark.query_id, mark.epoch)
        members = self._members_of(epoch)
        if members is None:
            return UNKNOWN
        if message_id not in members or self.is_visible(topic, message_id):
            return ROLLBACK
        if self.clock() >= self._not_before_s.get(epoch, 0.0):
            self._not_before_s[epoch] = self.clock() + _RETRY_S
            self.end(*epoch)
        return UNKNOWN

    def _members_of(self, epoch: tuple[str, int]) -> frozenset[str] | None:
        members = self._known.get(epoch)
        if members is None and self.clock() >= self._undecided_s.get(epoch, 0.0):
            members = self.members(*epoch)
            if members is None:
                self._undecided_s = {epoch: self.clock() + _UNDECIDED_S}
            else:
                self._known[epoch] = members
                while len(self._known) > _EPOCHS:
                    self._not_before_s.pop(self._known.popitem(last=False)[0], None)
        return members


@dataclass(eq=False)
class TransactionChecker:
    """Answers the brokers' questions about one ledger's half messages, on threads of its own.

    Args:
        on_decision: called with each decision.
        on_end: called with the report of each epoch that was ended because a broker asked.
        ordered: see `TransactionCommitter`.
    """

    spark: SparkSession
    options: SinkOptions
    _: KW_ONLY
    on_decision: OnDecision = lambda mark, message_id, state: None
    on_end: Callable[[EndReport], None] = lambda report: None
    ordered: bool | None = None

    def __post_init__(self) -> None:
        self._committer = TransactionCommitter(self.spark, self.options, ordered=self.ordered)
        self._admin = Admin(self.options)
        self._watched: set[str] = set()
        group = self._committer.group
        self._producer = Producer(
            self.options.with_(producerGroup=group, autoBatch=False, traceSample=0),
            transaction_listener=CheckBacks(
                self._committer.members, self._is_visible, self._end, on_decision=self.on_decision
            ),
        )

    def watch(self, *topics: str) -> None:
        """Answer the transaction checks of these topics' brokers from now on."""
        new = set(topics) - self._watched
        if new:
            self._producer.listen_for_checks(*sorted(new))
            self._watched |= new

    def close(self) -> None:
        self._producer.close(timeout_s=1.0)
        self._admin.close()

    def _is_visible(self, topic: str, message_id: str) -> bool:
        messages = self._admin.query_by_unique_key(topic, message_id, max_messages=1, bodies=False)
        return bool(messages)

    def _end(self, query_id: str, epoch: int) -> None:
        report = self._committer.end(query_id, epoch, wait_s=0.0, again=True)
        if report.refused:
            _LOG.warning(
                "%d messages of query %s epoch %d are lost: brokers no longer have their half "
                "messages; the ledger names them", report.refused, query_id, epoch,
            )  # fmt: skip
        if report.committed or report.refused:
            self.on_end(report)


_answerers: dict[tuple[str, str, str], TransactionChecker] = {}
"""{(application, digest of the options, producer group): checker}. The group belongs to a ledger's
id, so a ledger that was made anew at its path has another checker."""
_lock: Final = ForkLock()


def driver_answerer(spark: SparkSession, options: SinkOptions, group: str) -> TransactionChecker:
    """Return this process's checker for these options and the producer group of their ledger. It
    lives as long as the application and the ledger."""
    key = (spark.sparkContext.applicationId, options.digest, group)
    with _lock:
        for old in list(_answerers):
            if old[0] != key[0] or (old[1] == key[1] and old != key):
                _answerers.pop(old).close()
        if key not in _answerers:
            _answerers[key] = TransactionChecker(spark, options)
        return _answerers[key]
