"""Messages that cannot be delivered: dead letters, and later rows that are held back.

In the ordered modes, later rows of a given-up message's key must not overtake it. In this task they
become dead letters HELD_BACK, in row order. A refused row can never be sent, so it holds none back.

With `deadLetterTopic`, each dead letter is also sent as a message to that topic: a copy of the
row's `_COPIED` columns, with the properties `_CONTEXT` (`DLQ_ORIGIN_*` from Java's MessageConst)
and the dead letter's id as message id. A dead letter that cannot be sent there (no body, illegal
data, brokers out of reach) is in the ledger only, and does not fail the task. The ledger also has
the attempts to send to the topic. A task that runs again writes its dead letters again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.errors import (
    BrokerError,
    MessageError,
    MessageIllegalError,
    Outcome,
    PermissionDeniedError,
    SendError,
)
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.message import Message
from rocket_sink.message_rules import with_namespace
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import Completion, SendRequest
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.rows.row_batch import RowBatch
from rocket_sink.task.encode import without_rows
from rocket_sink.task.ordering import OrderedQueues
from rocket_sink.task.pending import DecodedMessage, PendingRequest
from rocket_sink.task.recorder import LedgerRecorder
from rocket_sink.task.request_factory import compressed_body
from rocket_sink.task.totals import RowTotals
from rocket_sink.wire.properties import decode_properties, properties_of

_LOG: Final = log.logger(__name__)
_MOST_FAILURES_IN_A_ROW: Final = 50
"""The task stops sending to the topic after so many consecutive failures: each may take
`sendMsgTimeout`, and the ledger has the dead letters anyway."""
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


class DeadLetterTopic:
    """Sends one task's dead letters to the `deadLetterTopic`, if that option is set. `others`
    collects the completions of other requests that `send` reads while it waits."""

    def __init__(
        self, options: SinkOptions, engine: SendEngine, recorder: LedgerRecorder,
        others: deque[Completion],
    ) -> None:  # fmt: skip
        self._others = others
        self._options = options
        self._engine = engine
        self._recorder = recorder
        if options.dead_letter_topic:
            recorder.on_dead_letters = self.send
        self._topic = with_namespace(options.namespace, options.dead_letter_topic)
        self._failures = 0
        self.in_flight = 0
        self.sent = 0
        self.left_out = 0
        """Number of dead letters that were not sent to the topic."""

    def send(self, letters: pa.RecordBatch) -> None:
        """Send ledger rows of the kind dead_letter; rows that no broker can take raise no error."""
        for row in letters.select([*_COPIED, *_CONTEXT.values()]).to_pylist():
            request = None if self._failures >= _MOST_FAILURES_IN_A_ROW else self._request(row)
            if request is None:
                self.left_out += 1
            else:
                self.in_flight += 1
                self._engine.submit(request)
            while self.in_flight >= _WINDOW:
                self._others += [c for c in self._engine.poll(_POLL_S) if not self.take(c)]

    def take(self, completion: Completion) -> bool:
        """Handle the completion and return True if it belongs to a request of this object."""
        if completion.token is not self:
            return False
        self._recorder.add_letter_attempts(completion)
        self.in_flight -= 1
        if completion.outcome.delivered:
            self._failures = 0
            self.sent += 1
        else:
            self._failures += 1
            self.left_out += 1
        return True

    def close(self) -> None:
        """Warn if dead letters are missing in the topic."""
        if self.left_out:
            _LOG.warning(
                "%d of %d dead letters are not in the topic %s, only in the ledger",
                self.left_out, self.left_out + self.sent, self._topic,
            )  # fmt: skip

    def _request(self, row: Mapping[str, Any]) -> SendRequest | None:
        context = {
            name: str(row[column]) for name, column in _CONTEXT.items() if row[column] is not None
        }
        fields: dict[str, Any] = {
            "tags": row["tags"], "keys": row["keys"] or (), "sharding_key": row["sharding_key"],
            "properties": dict(row["properties"] or ()),
        }  # fmt: skip
        # A row with an illegal property is sent with only its body.
        for given in (fields, {}):
            try:
                message = Message(self._topic, row["body"], **given)
                properties = properties_of(message, message_id=row["letter_id"], extra=context)
            except MessageError:
                continue
            body, sys_flag = compressed_body(row["body"], self._options)
            return SendRequest(
                self._topic, body, properties=properties, sys_flag=sys_flag, token=self,
                message_id=row["letter_id"],
            )  # fmt: skip
        return None


HELD_BACK: Final = "HELD_BACK"
_HELD_HERE: Final = "held back: an earlier message of its key was given up in this task"
_HELD_BEFORE: Final = (
    "held back: its key has pending dead letters of an earlier epoch (onPendingKey=hold); a "
    "backfill sends them in order"
)
_POISON: Final = (MessageIllegalError, BrokerError)
"""Errors that a single message of a batch may cause: code 13, and code 1 with a Java exception."""

_COLUMN_OF: Final = {
    "TAGS": "tags",
    "__SHARDINGKEY": "sharding_key",
    "UNIQ_KEY": "message_id",
    "DELAY": "delay_level",
    "TIMER_DELAY_MS": "delay_ms",
    "TIMER_DELIVER_MS": "delivery_timestamp",
    "_SYS_MSG_PRIORITY_": "priority",
    "__LITE_TOPIC": "lite_topic",
}
_MESSAGE_SCHEMA: Final = pa.schema(
    LEDGER_SCHEMA.field(name)
    for name in (*_COLUMN_OF.values(), "body", "flag", "wait_store", "keys", "properties")
)


class DeadLetterWriter:
    """Turns given-up rows and requests into dead letters, and holds back later messages of their
    keys, and of the keys of earlier epochs' dead letters (`pending`: {topic: keys})."""

    def __init__(
        self, options: SinkOptions, recorder: LedgerRecorder, totals: RowTotals,
        ordered: OrderedQueues, pending: Mapping[str, set[str]],
    ) -> None:  # fmt: skip
        self._in_order = options.ordering != "none"
        self._once = options.delivery == "effectively_once"
        self._strict = options.ordering == "strict"
        self._recorder = recorder
        self._totals = totals
        self._ordered = ordered
        self._held: dict[str, set[str]] = {}
        self._pending = pending
        self.keys: dict[str, set[str]] = {}
        """{topic: sharding keys} of this task's dead letters, without refused rows."""

    def may_be_one_poison_row(self, request: PendingRequest, completion: Completion) -> bool:
        """Return whether one message may have caused the error, so that each is sent alone."""
        if self._once and completion.outcome is Outcome.UNKNOWN:
            return False
        has_several = request.message_count > 1 and not request.alone
        return has_several and isinstance(completion.error, _POISON)

    def give_up(self, request: PendingRequest, completion: Completion) -> None:
        """Give up a request, and hold back the messages that must not overtake it."""
        error = completion.error
        assert error is not None
        outcome = Outcome.UNKNOWN if request.maybe_duplicate else completion.outcome
        self._write(request, error, outcome)
        if not self._in_order or request.queue is None or request.delayed:
            return
        keys = self._hold_keys(request)
        if self._strict and not isinstance(error, _POISON):
            self._ordered.close_queue(request.queue, error)
            for waiting in self._ordered.take_waiting(request.queue):
                self.hold_back(waiting)
        elif keys:
            self._hold_waiting(request, keys)

    def hold_back(self, request: PendingRequest) -> None:
        """Give up a request because an earlier request was given up."""
        assert request.queue is not None
        self._hold_keys(request)
        if request.maybe_duplicate and request.first_error is not None:
            # The messages were sent before in a batch, and may be stored.
            self._write(request, request.first_error, Outcome.UNKNOWN)
            return
        cause = self._ordered.closing_error(request.queue) or request.first_error
        why = SendError(
            f"held back: {cause}" if cause else "held back: an earlier message of its key failed",
            code=HELD_BACK, broker_name=getattr(cause, "broker_name", None),
        )  # fmt: skip
        self._write(request, why, Outcome.NOT_SENT)

    def give_up_rows(self, rows: RowBatch, error: SendError) -> None:
        """Give up rows without a route, and later rows of their keys: the topic may get a route.
        Nobody can look up the rows of a replay with effectively once, so they may be stored."""
        assert isinstance(rows.topic, str)
        if not rows.is_delayed:
            keys = self._note(rows.topic, rows.order_keys())
            self._held.setdefault(rows.topic, set()).update(keys)
        outcome, reason = error.outcome, "transport"
        if self._once and self._recorder.is_replay:
            outcome, reason = Outcome.UNKNOWN, "unknown"
        self._recorder.add_rows(
            rows, reason=reason, codes=error.code, texts=error.text, outcome=outcome
        )
        self._totals.add_failed(outcome, error.code, len(rows), error.text)
        self._totals.note_other_failure()

    def without_held(self, rows: RowBatch) -> RowBatch:
        """Return the rows whose keys are not held back. The other rows become dead letters. Delayed
        rows are not held back, because order per key does not count for them."""
        topic = rows.topic
        assert isinstance(topic, str)
        if rows.is_delayed:
            return rows
        for keys, text in ((self._held, _HELD_HERE), (self._pending, _HELD_BEFORE)):
            held, order_keys = keys.get(topic), rows.order_keys()
            if not held or order_keys is None:
                continue
            members = pa.array(sorted(held), order_keys.type)
            mask = pc.is_in(order_keys, value_set=members).to_numpy(zero_copy_only=False)
            indices = np.flatnonzero(mask)
            if len(indices):
                back = rows.take(indices)
                self._note(topic, back.order_keys())
                self._recorder.add_rows(back, reason="held_back", codes=HELD_BACK, texts=text)
                self._totals.add_failed(Outcome.NOT_SENT, HELD_BACK, len(indices), text)
                if text is _HELD_BEFORE:
                    self._totals.note_other_failure()
                rows = without_rows(rows, indices)
        return rows

    def _home(self, request: PendingRequest) -> str | None:
        """Return the broker to which strict order, or the rows themselves, bind the request."""
        is_bound = self._strict or request.fixed
        return request.queue.broker_name if request.queue is not None and is_bound else None

    def _hold_keys(self, request: PendingRequest) -> set[str]:
        """Hold back later messages of the request's keys; return the keys."""
        keys = set()
        if request.sharded:
            order_keys = (message.order_key() for message in request.messages())
            keys = {key for key in order_keys if key is not None}
        self._held.setdefault(request.topic, set()).update(keys)
        self.keys.setdefault(request.topic, set()).update(keys)
        return keys

    def _note(self, topic: Any, keys: pa.Array | None) -> set[str]:
        """Add the keys to `self.keys`, and return them. Without `ordering` there are no keys."""
        if not self._in_order or keys is None:
            return set()
        names = set(pc.unique(keys.drop_null()).to_pylist())
        self.keys.setdefault(topic, set()).update(names)
        return names

    def _hold_waiting(self, request: PendingRequest, keys: set[str]) -> None:
        """Hold back waiting messages that have one of the keys; let the other messages wait on."""
        assert request.queue is not None
        kept = []
        for waiting in self._ordered.take_waiting(request.queue):
            is_held = [m.order_key() in keys for m in waiting.messages()]
            back = waiting.select(is_held)
            if back is not None:
                self.hold_back(back)
            remainder = (
                waiting.select([not flag for flag in is_held]) if back is not None else waiting
            )
            if remainder is not None:
                kept.append(remainder)
        self._ordered.put_back(request.queue, kept)

    def _write(self, request: PendingRequest, error: SendError, outcome: Outcome) -> None:
        messages, first = list(request.messages()), request.first_error or error
        reason = _reason(error, outcome)
        if reason == "transport":
            self._totals.note_unreachable(self._home(request))
        elif reason in ("data", "permission"):
            self._totals.note_other_failure()
        batch = pa.RecordBatch.from_pylist([*map(_row, messages)], schema=_MESSAGE_SCHEMA)
        columns = {
            **dict(zip(batch.schema.names, batch.columns, strict=True)),
            "topic": request.topic,
            "reason": reason,
            "outcome": outcome.value,
            "attempts": request.attempts,
            "maybe_duplicate": outcome is Outcome.UNKNOWN,
            "first_error_code": first.code,
            "first_error": first.text,
            "last_error_code": error.code,
            "last_error": error.text,
            "last_broker_name": getattr(error, "broker_name", None) or self._home(request),
        }
        if request.fixed and request.queue is not None:
            columns |= {
                "broker_name": request.queue.broker_name, "queue_id": request.queue.queue_id
            }  # fmt: skip
        self._recorder.add_letters(columns, len(messages))
        self._totals.add_failed(outcome, error.code, len(messages), error.text)


def _reason(error: SendError, outcome: Outcome) -> str:
    if outcome is Outcome.UNKNOWN:
        return "unknown"
    if error.code == HELD_BACK:
        return "held_back"
    if isinstance(error, MessageIllegalError):
        return "data"
    return "permission" if isinstance(error, PermissionDeniedError) else "transport"


def _row(message: DecodedMessage) -> dict[str, Any]:
    properties = decode_properties(message.properties)
    row: dict[str, Any] = {"body": message.body, "flag": message.flag}
    for name, column in _COLUMN_OF.items():
        text = properties.pop(name, None)
        if text is not None:
            is_number = pa.types.is_integer(_MESSAGE_SCHEMA.field(column).type)
            row[column] = int(text) if is_number else text
    row["wait_store"] = properties.pop("WAIT", "true") == "true"
    keys = properties.pop("KEYS", None)
    row["keys"] = keys.split(" ") if keys else None
    row["properties"] = list(properties.items()) or None
    return row
