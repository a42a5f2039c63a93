"""`delivery=transactional` as the foreachBatch lane and batch writes use it, on the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rocket_sink.errors import RocketSinkError
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.spark.check_backs import driver_answerer
from rocket_sink.spark.endings import Endings, check_ended

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG: Final = log.logger(__name__)
_WAIT_S: Final = 600.0
"""Longest wait while another process ends epochs of the ledger."""


class Transactions:
    """Epochs' ends: `listen` first, `end` after each append."""

    def __init__(self, session: SparkSession, options: SinkOptions) -> None:
        """Raises LedgerError: a Spark Connect session."""
        self._session = session
        self._options = options
        self._endings = Endings(session, options)

    @property
    def group(self) -> str:
        """The producer group of the half messages."""
        return self._endings.group

    def listen(self) -> None:
        """Answer the brokers' questions from now on."""
        if self._options.topic:
            self._watch(self._options.topic)

    def end_earlier(self, query_id: str) -> None:
        """End what an earlier run of the query has decided and not ended.

        Raises:
            DeliveryError: a broker could not be made to commit; the query must not go on, or its
                later epochs would be visible before.
        """
        for row in self._endings.open_epochs(query_id):
            self.end(query_id, row.epoch)

    def end(self, query_id: str, epoch: int) -> None:
        """Make the epoch's messages visible.

        Raises:
            DeliveryError: a broker could not be made to, or has lost messages.
        """
        report = self._endings.end(query_id, epoch, wait_s=_WAIT_S)
        if report.topics:
            self._watch(*report.topics)
        check_ended(report)

    def _watch(self, *topics: str) -> None:
        """Answer the brokers' questions; half messages are safe without it, they only stay."""
        try:
            driver_answerer(self._session, self._options).watch(*topics)
        except RocketSinkError as error:
            _LOG.warning("nobody answers for half messages of %s: %s", ", ".join(topics), error)
