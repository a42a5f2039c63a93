"""The dead-letter topic: each dead letter of a task once more as a message (`deadLetterTopic`).

Besides the ledger, which stays the one place that a backfill reads and that must not fail: a letter
that this topic cannot take (no body, data that no broker takes, brokers out of reach) is in the
ledger only, and its attempts are in the ledger too. A task run again writes its letters again.

The message has the row's body, keys, tags, sharding key and properties, and these of ours:
`DLQ_ORIGIN_TOPIC` and `DLQ_ORIGIN_MESSAGE_ID` (Java: MessageConst), `__dead_letter_id` (which is
its message id too), `__dead_letter_reason`, `__dead_letter_code`, `__dead_letter_error`,
`__dead_letter_query` and `__dead_letter_epoch`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from rocket_sink.errors import MessageError
from rocket_sink.message import Message
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine import SendEngine
from rocket_sink.producer.values import Completion, SendRequest
from rocket_sink.spark.journal import Journal
from rocket_sink.spark.outgoing import compressed
from rocket_sink.wire.properties import properties_of

_LOG: Final = log.logger(__name__)
_HOPELESS: Final = 50
"""Failures in a row after which the task writes no more letters to the topic: each may cost
`sendMsgTimeout`, and the ledger has them."""
_WINDOW: Final = 64
_POLL_S: Final = 0.1
_CONTEXT: Final = {
    "DLQ_ORIGIN_TOPIC": "topic",
    "DLQ_ORIGIN_MESSAGE_ID": "message_id",
    "__dead_letter_id": "letter_id",
    "__dead_letter_reason": "reason",
    "__dead_letter_code": "last_error_code",
    "__dead_letter_error": "last_error",
    "__dead_letter_query": "query_id",
    "__dead_letter_epoch": "epoch",
}
_COPIED: Final = ("body", "tags", "keys", "sharding_key", "properties")


class LetterTopic:
    """Sends one task's letters as the journal writes them; without the option it does nothing.

    Args:
        others: takes completions of other requests that are met while waiting.
    """

    def __init__(
        self,
        options: SinkOptions,
        engine: SendEngine,
        journal: Journal,
        others: deque[Completion],
    ) -> None:
        self._others = others
        self._options = options
        self._engine = engine
        self._journal = journal
        if options.dead_letter_topic:
            journal.on_letters = self.send
        self._topic = options.dead_letter_topic
        self._failures = 0
        self.in_flight = 0
        self.sent = 0
        self.left_out = 0
        """Letters that are in the ledger only."""

    def send(self, letters: pa.RecordBatch) -> None:
        """Submit ledger rows of the kind dead_letter; never raises for what they hold."""
        names = dict.fromkeys((*_COPIED, *_CONTEXT.values()))
        for row in letters.select(list(names)).to_pylist():
            request = None if self._failures >= _HOPELESS else self._request(row)
            if request is None:
                self.left_out += 1
            else:
                self.in_flight += 1
                self._engine.submit(request)
            while self.in_flight >= _WINDOW:
                self._others += [c for c in self._engine.poll(_POLL_S) if not self.took(c)]

    def took(self, completion: Completion) -> bool:
        """True when it is the end of one of our requests; then it is dealt with."""
        if completion.token is not self:
            return False
        self._journal.letter_attempts(completion)
        self.in_flight -= 1
        if completion.outcome.delivered:
            self._failures = 0
            self.sent += 1
        else:
            self._failures += 1
            self.left_out += 1
        return True

    def close(self) -> None:
        """Say what is missing in the topic."""
        if self.left_out:
            _LOG.warning(
                "%d of %d dead letters are not in the topic %s, only in the ledger",
                self.left_out, self.left_out + self.sent, self._topic,
            )  # fmt: skip

    def _request(self, row: Mapping[str, Any]) -> SendRequest | None:
        context = {
            name: str(row[column]) for name, column in _CONTEXT.items() if row[column] is not None
        }
        for message in _messages(self._topic, row):
            try:
                properties = properties_of(message(), message_id=row["letter_id"], extra=context)
            except MessageError:
                continue
            body, sys_flag = compressed(row["body"], self._options)
            return SendRequest(
                self._topic, body, properties=properties, sys_flag=sys_flag, token=self,
                message_id=row["letter_id"],
            )  # fmt: skip
        return None


def _messages(topic: str, row: Mapping[str, Any]) -> Iterator[Any]:
    """The row as a message; then, for what was refused may be one of these, its body alone."""
    body = row["body"]
    if not body:
        return
    yield lambda: Message(
        topic, body, tags=row["tags"], keys=row["keys"] or (), sharding_key=row["sharding_key"],
        properties=dict(row["properties"] or ()),
    )  # fmt: skip
    yield lambda: Message(topic, body)
