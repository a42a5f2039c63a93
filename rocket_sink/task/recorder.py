"""The recorder of a task, which makes ledger rows (Arrow) of the task's events. It gathers
attempts, because a small record batch costs as much as a large one. It writes dead letters at once
and in order, because they must be durable before anything depends on them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from rocket_sink.errors import OptionError, Outcome, SendError
from rocket_sink.ledger.records import (
    GroupFacts,
    RunContext,
    dead_letter_rows,
    epoch_row,
    in_flight_rows,
    isolation_rows,
    send_rows,
)
from rocket_sink.option_spec import Secret, resolve_secret
from rocket_sink.options import OPTIONS, SinkOptions
from rocket_sink.producer.engine.attempt import AttemptRecord, Completion
from rocket_sink.routing.fault import Isolation
from rocket_sink.rows.checks import Refused
from rocket_sink.rows.row_batch import RowBatch
from rocket_sink.task.pending import PendingRequest
from rocket_sink.task.totals import TaskSummary

_GATHERED: Final = 500
"""Number of attempts that are gathered for a record batch."""


class LedgerRecorder:
    """Records the events of a task attempt as ledger rows.

    Args:
        emit: called with record batches of `LEDGER_SCHEMA`, in order.
        intents: also write a row for each request before its answer is awaited, so that the ledger
            shows the sends of a killed worker. Useless if `emit` drops rows of a failed task.
        is_replay: an earlier attempt may have sent the rows, so each row that becomes a dead letter
            may be stored. With `delivery=at_least_once` mark all of them: the others look rows up,
            or hide the earlier ones.
    """

    def __init__(
        self, options: SinkOptions, ctx: RunContext, emit: Callable[[pa.RecordBatch], None], *,
        intents: bool = False, is_replay: bool = False,
    ) -> None:  # fmt: skip
        self.is_replay = is_replay
        self._marks = is_replay and options.delivery == "at_least_once"
        self.ctx = ctx
        self._halves = options.delivery == "transactional"
        self._emit = emit
        self._include_body = options.body_retention_ms > 0
        self._secrets = _secrets_of(options)
        self._intents: list[PendingRequest] | None = [] if intents else None
        self._attempts: list[tuple[AttemptRecord, int, bool, GroupFacts | None]] = []
        self._requests = self._letters = self._letter_sends = 0
        self.on_dead_letters: Callable[[pa.RecordBatch], None] = lambda batch: None
        """Called with each batch of dead letters after `emit`."""

    def number_request(self, request: PendingRequest) -> None:
        """Give a request its number, and reserve numbers for the messages of a group."""
        request.number = self._requests + 1
        self._requests += request.requests
        if self._intents is not None:
            self._intents.append(request)

    def add_attempts(self, completion: Completion) -> None:
        request: PendingRequest = completion.token
        doubtful, facts = False, None
        if completion.stored is not None and request.columns is not None:
            ids = request.columns.message_ids
            facts = GroupFacts.of(completion.stored, ids, half=self._halves)
        if request.waited_ms and completion.attempts:
            completion.attempts[0].queue_wait_ms += request.waited_ms
            request.waited_ms = 0.0
        for attempt in completion.attempts:
            # The answer names an offset in a system topic, so the message's own offset is unknown.
            if request.delayed:
                attempt.queue_offset = -1
            group = facts if attempt is completion.attempts[-1] else None
            maybe_duplicate = doubtful or request.maybe_duplicate
            self._attempts.append((attempt, request.number, maybe_duplicate, group))
            # A half message without an answer is never committed, so it causes no duplicate.
            doubtful = doubtful or (attempt.outcome.value == "unknown" and not self._halves)
        if len(self._attempts) >= _GATHERED:
            self._flush_attempts()

    def add_letter_attempts(self, completion: Completion) -> None:
        """Record the attempts of a request to the dead-letter topic, with a negative number."""
        self._letter_sends -= 1
        self._attempts += [
            (attempt, self._letter_sends, False, None) for attempt in completion.attempts
        ]
        if len(self._attempts) >= _GATHERED:
            self._flush_attempts()

    def add_missing_route(self, error: SendError, topic: str) -> None:
        """Record the error that ends the task because its topic has no route. No request was made,
        so the row is a wait without a broker, and its request number is 0."""
        wait = AttemptRecord(
            attempt=1, topic=topic, broker_name="", broker_address="", queue_id=-1,
            queue_offset=-1, started_ms=time.time_ns() // 1_000_000, queue_wait_ms=0.0,
            connect_ms=0.0, rtt_ms=0.0, message_count=0, body_bytes=0, wire_bytes=0,
            outcome=error.outcome, error_code=error.code, remark=error.text,
        )  # fmt: skip
        self._attempts.append((wait, 0, False, None))

    def add_refused(self, rows: RowBatch, refused: Sequence[Refused]) -> None:
        """Record the refused rows of the batch `rows` as dead letters."""
        indices = pa.array([refusal.row for refusal in refused], pa.int64()).to_numpy()
        texts = pa.array([refusal.text for refusal in refused], pa.string())
        codes = pa.array([refusal.code for refusal in refused], pa.string())
        self.add_rows(rows.take(indices), reason="data", codes=codes, texts=texts)

    def add_rows(
        self, rows: RowBatch, *, reason: str, codes: Any, texts: Any,
        outcome: Outcome = Outcome.NOT_SENT,
    ) -> None:  # fmt: skip
        """Record rows that become dead letters before they are encoded. `codes` and `texts` of the
        errors are columns, or one value for all rows."""
        columns: dict[str, Any] = rows.columns()
        if isinstance(rows.topic, str):
            columns["topic"] = rows.topic
        columns |= {
            "first_error_code": codes, "first_error": texts,
            "last_error_code": codes, "last_error": texts,
            "reason": reason, "outcome": outcome.value, "attempts": 0,
            "maybe_duplicate": outcome is Outcome.UNKNOWN or None,
        }  # fmt: skip
        self.add_letters(columns, len(rows))

    def add_letters(self, columns: Mapping[str, Any], count: int) -> None:
        """Record dead letters; the columns are those of `dead_letter_rows`."""
        if self._marks and columns["reason"] != "data":
            columns = {**columns, "maybe_duplicate": True}
        batches = dead_letter_rows(
            columns, self.ctx, first_ordinal=self._letters, include_body=self._include_body,
            secrets=self._secrets,
        )  # fmt: skip
        self._letters += count
        for batch in batches:
            self._emit(batch)
            self.on_dead_letters(batch)

    def add_isolations(self, isolations: Sequence[Isolation]) -> None:
        if isolations:
            self._emit(isolation_rows(isolations, self.ctx))

    def add_account(self, summary: TaskSummary, *, complete: bool, duration_s: float) -> None:
        """Record the counts of the task attempt as its last row."""
        self.flush_intents()
        self._flush_attempts()
        row = epoch_row(
            vars(summary), self.ctx, complete=complete, duration_ms=duration_s * 1000,
            secrets=self._secrets,
        )  # fmt: skip
        self._emit(row)

    def flush_intents(self) -> None:
        """Write a row for each submitted request; call this before waiting for answers."""
        requests, self._intents = self._intents, [] if self._intents is not None else None
        if requests:
            rows = in_flight_rows(
                [request.number for request in requests], self.ctx,
                topic=[request.topic for request in requests],
                message_count=[request.message_count for request in requests],
                body_bytes=[request.byte_count for request in requests],
                message_id=[request.first_message_id for request in requests],
            )  # fmt: skip
            self._emit(rows)

    def _flush_attempts(self) -> None:
        gathered, self._attempts = self._attempts, []
        if gathered:
            attempts, numbers, doubtful, groups = zip(*gathered, strict=True)
            rows = send_rows(
                attempts, self.ctx, requests=numbers, maybe_duplicate=doubtful,
                half=[number > 0 for number in numbers] if self._halves else None,
                groups=groups, secrets=self._secrets,
            )  # fmt: skip
            self._emit(rows)


def _secrets_of(options: SinkOptions) -> tuple[str, ...]:
    """Return the values of all secret options, which no text in the ledger may show."""
    secrets = []
    for option in OPTIONS:
        value = getattr(options, option.attribute)
        if isinstance(value, Secret) and value:
            # A secret that cannot be read here was not used here, so no text shows it.
            with contextlib.suppress(OptionError):
                secrets.append(resolve_secret(option.name, value).reveal())
    return tuple(secrets)
