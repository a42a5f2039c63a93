"""What to answer when a broker asks about a half message: the ledger decides.

    not decided yet                                     -> UNKNOWN: asked again
    decided, and the message is not in the epoch        -> ROLLBACK: an attempt's that failed
    decided, in the epoch, and consumers see it         -> ROLLBACK of this copy
    decided, in the epoch, and consumers do not see it  -> its epoch is ended now, UNKNOWN

Never COMMIT. A broker that asks has written the half message anew (TransactionalMessageServiceImpl.
putBackHalfMsgQueue), so that there are two of it that can be committed, and it commits as often as
it is told to. While the epoch is being ended a commit from here would double the message, and end
it before those that go before it in its queue. `Endings.end` does it instead, in order, once. The
copy that stays behind is rolled back by a later question, or given up by the broker after
transactionCheckMax questions: neither touches the message that was made visible.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from rocket_sink.errors import RocketSinkError
from rocket_sink.forks import ForkLock
from rocket_sink.net import log
from rocket_sink.producer.admin import Admin
from rocket_sink.producer.producer import Producer
from rocket_sink.producer.transaction_values import ROLLBACK, UNKNOWN, TransactionState
from rocket_sink.spark.endings import Endings, EndReport
from rocket_sink.spark.halves import HalfMark
from rocket_sink.wire.stored import StoredMessage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocket_sink.options import SinkOptions

_LOG: Final = log.logger(__name__)
_EPOCHS: Final = 4
"""Decided epochs whose members are remembered."""
_RETRY_S: Final = 30.0
"""After an epoch could not be ended; brokers ask again as often by themselves."""

Members = Callable[[str, int], "frozenset[str] | None"]
IsVisible = Callable[[str, str], bool]
End = Callable[[str, int], object]
Told = Callable[[HalfMark, str, TransactionState], None]


class CheckBacks:
    """Decides on one half message at a time; called by one thread.

    Args:
        members: ids of an epoch's half messages; None: not decided. A decision never changes.
        is_visible: (topic, message id): consumers see it.
        end: ends an epoch; it may raise `RocketSinkError`.
        told: called with each decision.
    """

    def __init__(
        self,
        members: Members,
        is_visible: IsVisible,
        end: End,
        *,
        told: Told = lambda mark, message_id, state: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._is_visible = is_visible
        self._end = end
        self._told = told
        self._clock = clock
        self._known: OrderedDict[tuple[str, int], frozenset[str]] = OrderedDict()
        self._not_before_s: dict[tuple[str, int], float] = {}

    def __call__(self, message: StoredMessage) -> TransactionState:
        """The answer; what cannot be found out is UNKNOWN."""
        mark, message_id = HalfMark.read(message.properties), message.message_id
        if mark is None or message_id is None:
            return UNKNOWN
        try:
            state = self._decide(message.topic, message_id, mark)
        except RocketSinkError as error:
            _LOG.warning("nothing is known of the half message %s now: %s", message_id, error)
            state = UNKNOWN
        self._told(mark, message_id, state)
        return state

    def _decide(self, topic: str, message_id: str, mark: HalfMark) -> TransactionState:
        epoch = (mark.query_id, mark.epoch)
        members = self._members_of(epoch)
        if members is None:
            return UNKNOWN
        if message_id not in members or self._is_visible(topic, message_id):
            return ROLLBACK
        if self._clock() >= self._not_before_s.get(epoch, 0.0):
            self._not_before_s[epoch] = self._clock() + _RETRY_S
            self._end(*epoch)
        return UNKNOWN

    def _members_of(self, epoch: tuple[str, int]) -> frozenset[str] | None:
        known = self._known.get(epoch)
        if known is None:
            known = self._members(*epoch)
            if known is not None:
                self._known[epoch] = known
                while len(self._known) > _EPOCHS:
                    self._not_before_s.pop(self._known.popitem(last=False)[0], None)
        return known


class Answerer:
    """Answers the brokers' questions about one ledger's half messages, on threads of its own.

    Args:
        told: called with each decision.
        ended: called with the report of each epoch that was ended because a broker asked.
        ordered: as of `Endings`.
    """

    def __init__(
        self,
        spark: SparkSession,
        options: SinkOptions,
        *,
        told: Told = lambda mark, message_id, state: None,
        ended: Callable[[EndReport], None] = lambda report: None,
        ordered: bool | None = None,
    ) -> None:
        self._endings = Endings(spark, options, ordered=ordered)
        self._ended = ended
        self._admin = Admin(options)
        self._watched: set[str] = set()
        decide = CheckBacks(self._endings.members, self._visible, self._end, told=told)
        self._producer = Producer(
            options.with_(producerGroup=self._endings.group, autoBatch=False, enableTrace=False),
            transaction_listener=lambda message: _decided(decide, message),
        )

    def watch(self, *topics: str) -> None:
        """Be asked by the brokers of these topics, too.

        Raises:
            NoRouteError, NameServerUnavailableError
        """
        new = set(topics) - self._watched
        if new:
            self._producer.listen_for_checks(*sorted(new))
            self._watched |= new

    def close(self) -> None:
        self._producer.close(timeout_s=1.0)
        self._admin.close()

    def _visible(self, topic: str, message_id: str) -> bool:
        found = self._admin.query_by_unique_key(topic, message_id, max_messages=1, bodies=False)
        return bool(found)

    def _end(self, query_id: str, epoch: int) -> None:
        report = self._endings.end(query_id, epoch, wait_s=0.0, again=True)
        if report.refused:
            _LOG.warning(
                "%d messages of query %s epoch %d are lost: their brokers do not have their half "
                "messages any more; the ledger names them", report.refused, query_id, epoch,
            )  # fmt: skip
        if report.committed or report.refused:
            self._ended(report)


def _decided(decide: CheckBacks, message: StoredMessage) -> TransactionState:
    try:
        return decide(message)
    except Exception as error:
        # The session may have ended; the broker asks again, and perhaps another one.
        _LOG.warning("a half message was not decided on: %s", str(error).partition("\n")[0])
        return UNKNOWN


_answerers: dict[tuple[str, str], Answerer] = {}
_lock: Final = ForkLock()


def driver_answerer(spark: SparkSession, options: SinkOptions) -> Answerer:
    """This process's answerer for these options; it lives as long as the Spark application.

    Raises:
        LedgerError, OptionError
    """
    key = (spark.sparkContext.applicationId, options.digest)
    with _lock:
        for old in [one for one in _answerers if one[0] != key[0]]:
            _answerers.pop(old).close()
        found = _answerers.get(key)
        if found is None:
            found = _answerers[key] = Answerer(spark, options)
        return found
