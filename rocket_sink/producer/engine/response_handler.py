"""Handling of ended attempts, for all send modes: a request completes, or another attempt follows.
The handler applies `routing.retry`, tells `Brokers` and `Routes` of failures, and sends nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple

from rocket_sink.errors import (
    AuthenticationError,
    BatchTooLargeError,
    ConnectError,
    ConnectionLostError,
    DegradedError,
    GoAwayError,
    InvalidAnswerError,
    Isolate,
    NoRouteError,
    NotSentError,
    Outcome,
    RequestTimeoutError,
    SendError,
    UnwrittenError,
)
from rocket_sink.message import MessageQueue, SendResult
from rocket_sink.net.channel import Result
from rocket_sink.net.client import NetworkClient
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import (
    AttemptHistory,
    AttemptRecord,
    CheckResult,
    Completion,
    SendAttempt,
    Wait,
)
from rocket_sink.producer.engine.brokers import Brokers
from rocket_sink.producer.engine.frame_group import GroupAttempt
from rocket_sink.producer.engine.headers import HeaderTemplates
from rocket_sink.producer.engine.limits import RequestLimits
from rocket_sink.producer.engine.routes import Routes
from rocket_sink.routing.address_map import with_origin
from rocket_sink.routing.fault import BUSY, FAILING
from rocket_sink.routing.retry import Retry, error_for_answer, retry_after, retry_degraded
from rocket_sink.wire.answers import PlainAnswers, SendAnswers
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.responses import (
    DEFAULT_REGION,
    SEND_STATUS,
    SendAnswer,
    SendAnswerFrame,
    decode_send_answer,
)

_UNREACHED: Final = (ConnectError, UnwrittenError, RequestTimeoutError, ConnectionLostError)
"""Errors after which the broker's address is probed, because nothing has answered there."""
_RECONNECT: Final = (ConnectionLostError, UnwrittenError, GoAwayError)
"""Errors after which requests need a new connection."""


class NextStep(NamedTuple):
    """The next attempt, which is sent at once by default, or after a wait. With Wait.VERIFY
    `attempt` is the ended attempt: a check has to find out whether its broker stored the messages.
    """

    attempt: SendAttempt
    wait: Wait = Wait.DELAY
    due_s: float = 0.0


@dataclass(eq=False, repr=False)
class ResponseHandler:
    """Decides what follows from an answer or a failure.

    Attributes:
        records: add a record of each attempt to the request's Completion.
        stopping: the engine is completing all requests, so nothing is tried again.
        fatal: a request failed with an error that every other request would get, too.
    """

    _options: SinkOptions
    _client: NetworkClient
    _routes: Routes
    _brokers: Brokers
    _headers: HeaderTemplates
    _limits: RequestLimits
    _rng: Random
    records: bool
    stopping: bool = False
    fatal: bool = False

    # --- the ends of an attempt --------------------------------------------------------------

    def handle_answer(self, attempt: SendAttempt, frame: Frame) -> Completion | NextStep:
        rtt_s, broker = attempt.rtt_s, attempt.broker
        assert broker is not None
        if attempt.hooked is not None:
            self._client.rpc_hooks.after(attempt.address, attempt.hooked, frame)
        stored = frame.code in SEND_STATUS
        self._brokers.note_answer(broker, rtt_s, attempt.ended_s, stored=stored)
        if not stored:
            assert attempt.target is not None
            error = error_for_answer(
                frame.code,
                frame.remark,
                topic=attempt.request.topic,
                broker_name=attempt.target.queue.broker_name,
                broker_address=attempt.address,
            )
            assert error is not None
            return self.handle_failure(attempt, error)
        if broker.window is not None:
            broker.grow_window(self._options.max_in_flight)
        if attempt.request.batch and attempt.body_bytes > broker.largest_batch:
            broker.largest_batch = attempt.body_bytes
        try:
            answer = decode_send_answer(frame)
        except InvalidAnswerError as error:
            return self.handle_failure(attempt, error)
        attempt.release()
        if frame.code:
            return self._handle_degraded(attempt, answer)
        records: list[AttemptRecord] = []
        if self.records or attempt.history is not None:
            records = self._record(attempt, Outcome.ACKED, answer=answer)
        return _stored_completion(attempt, _result_of(attempt, answer, rtt_s), records)

    def group_ended(
        self, attempt: GroupAttempt, result: Result | CheckResult
    ) -> list[tuple[SendAttempt, Frame | Exception]]:
        """Handle a group's answers or failure. Return (attempt, its end) for each message that
        leaves the group, or for the group if it was not sent. Stored messages stay in the group
        until `part_ended`."""
        match result:
            case SendAnswers():
                self._group_stored(attempt, len(result))
                attempt.note_answers(result)
            case SendAnswerFrame():
                self._group_stored(attempt, 1)
                attempt.note_single_answer(result.opaque, result.answer)
            case Frame():
                return [(attempt.leave(result.opaque - attempt.first_opaque), result)]
            case PlainAnswers():  # Brokers never answer sends in this form.
                return [
                    (attempt.leave(frame.opaque - attempt.first_opaque), frame)
                    for frame in map(result.frame, range(len(result)))
                ]
            case NotSentError() if attempt.requests == attempt.size:
                return [(attempt, result)]
            case SendError():
                # Copy the error for each message, because `handle_check` changes its facts.
                return [(single, result.copy()) for single in attempt.leave_all()]
        return []

    def _group_stored(self, attempt: GroupAttempt, count: int) -> None:
        broker = attempt.broker
        assert broker is not None
        self._brokers.note_answer(broker, attempt.rtt_s, attempt.ended_s, stored=True)
        broker.grow_window(self._options.max_in_flight, count)
        broker.in_flight -= count

    def part_ended(self, attempt: GroupAttempt) -> Completion:
        """Return the completion of the messages stored since the group's last completion."""
        answer = attempt.first_answer()
        if answer is None:
            return Completion(attempt.request.token, Outcome.ACKED, None, None)
        records = self._record(attempt, Outcome.ACKED, answer=answer)
        completion = _stored_completion(attempt, _result_of(attempt, answer, 0.0), records)
        completion.stored = attempt.take_stored()
        if records:
            records[-1].message_count = len(completion.stored)
        return completion

    def handle_failure(
        self, attempt: SendAttempt, error: SendError, *, feedback: bool = True
    ) -> Completion | NextStep:
        """Handle an attempt not stored, or of unknown outcome; with `feedback`, tell `Brokers`."""
        broker, now_s = attempt.broker, attempt.ended_s
        in_flight = broker is not None
        if broker is not None and feedback:
            is_lost = bool(broker.proxy) and isinstance(error, RequestTimeoutError)
            if error.backs_off or is_lost:
                broker.busy(attempt.handed_s, now_s)
        attempt.release()
        history, limits = attempt.ensure_history(), self._limits
        verifies = error.outcome is Outcome.UNKNOWN and bool(attempt.request.verify_ids)
        is_late = error.outcome is Outcome.REJECTED and in_flight and now_s >= attempt.deadline_s
        waited = verifies or (is_late and bool(attempt.request.verify_ids))
        if waited and attempt.counted < (attempt.request.attempts or limits.max_attempts):
            # The wait for a reliable answer has used up the time, so give the next attempt more.
            # Other errors add no time: attempts that do not count would be repeated for ever.
            attempt.deadline_s = max(attempt.deadline_s, now_s + limits.timeout_s)
        retry = None if self.stopping else self._retry_after(attempt, error)
        history.earlier.append(type(error))
        history.last_error = error
        # A busy broker is isolated already. Avoiding it would rank it even behind a silent one.
        is_avoided = retry is not None and retry.avoids_broker
        is_avoided = is_avoided and not (error.backs_off and self._brokers.faults.enabled)
        history.last_broker = attempt.home if is_avoided else None
        verifies = verifies and in_flight and not self.stopping
        if error.outcome is Outcome.UNKNOWN and not verifies and history.unknown is None:
            history.unknown = error
        if error.refreshes_route and not self.stopping:
            self._routes.refresh(attempt.request.topic, now_s)
        if in_flight:
            if feedback:
                self._apply_feedback(attempt, retry, error)
            self._record(attempt, error.outcome, error=error)
        elif self.records and not attempt.wire_bytes:
            _note_wait(attempt, history, error)
        if verifies:
            return NextStep(attempt, Wait.VERIFY)
        if retry is None or now_s >= attempt.deadline_s:
            self.fatal = self.fatal or error.fatal
            return self._failed_completion(attempt, error)
        return self._next_step(attempt, retry)

    def handle_check(self, attempt: SendAttempt, result: CheckResult) -> Completion | NextStep:
        """Handle the end of a check whether the broker has stored an unanswered attempt. The
        attempt's record gets the outcome that the check has found."""
        message, error, history = result.message, result.error, attempt.ensure_history()
        if message is not None:
            del history.records[-1:]
            code = int(ResponseCode.SUCCESS)
            answer = SendAnswer(
                code, SEND_STATUS[code], message.offset_message_id, message.queue_id,
                message.queue_offset, None, DEFAULT_REGION, None, trace_on=True,
            )  # fmt: skip
            records = self._record(attempt, Outcome.ACKED, answer=answer)
            if records:
                records[-1].remark = "no answer came; found stored by its id"
            completion = _stored_completion(attempt, _result_of(attempt, answer, 0.0), records)
            completion.found_stored = True
            return completion
        if result.decided:
            # The broker says that the message is not stored, so this is a rejection.
            error.facts["outcome"] = Outcome.REJECTED
            vars(error)["outcome"] = Outcome.REJECTED
            for record in history.records[-1:]:
                record.outcome = Outcome.REJECTED
                record.remark = f"{record.remark}; its id is not stored"
            return self.handle_failure(attempt, error)
        history.unknown = history.unknown or error
        return self._failed_completion(attempt, error)

    # --- the next step -----------------------------------------------------------------------

    def _handle_degraded(self, attempt: SendAttempt, answer: SendAnswer) -> Completion | NextStep:
        """Handle an answer that says that a message is stored, but less durably than asked for."""
        retry = retry_degraded(
            answer.code,
            attempt=attempt.counted,
            max_attempts=attempt.request.attempts or self._limits.max_attempts,
            remaining_s=attempt.deadline_s - attempt.ended_s,
            stays=attempt.strict or attempt.request.queue is not None,
            options=self._options,
        )
        history = attempt.ensure_history()
        records = self._record(attempt, Outcome.ACKED_DEGRADED, answer=answer)
        result = _result_of(attempt, answer, attempt.rtt_s)
        if self.stopping or retry is None:
            return self._degraded_completion(attempt, result, records)
        history.degraded = history.degraded or result
        history.last_broker = attempt.home if retry.avoids_broker else None
        return self._next_step(attempt, retry)

    def _next_step(self, attempt: SendAttempt, retry: Retry) -> NextStep:
        now_s = attempt.ended_s
        again = attempt.next_attempt(now_s, counts=retry.counts)
        if retry.same_queue and attempt.target is not None:
            again.pinned = attempt.target.queue
        if retry.awaits_route and self._routes.fetching(attempt.request.topic):
            # If the known route may do, keep half of the remaining time for the attempt itself.
            remaining_s = attempt.deadline_s - now_s
            wait_s = remaining_s / 2 if retry.delay_s else remaining_s
            return NextStep(again, Wait.ROUTE, now_s + wait_s)
        return NextStep(again, due_s=now_s + retry.delay_s)

    def _retry_after(self, attempt: SendAttempt, error: SendError) -> Retry | None:
        request, history, now_s = attempt.request, attempt.ensure_history(), attempt.ended_s
        if isinstance(error, NoRouteError) and self._routes.is_unresolvable(request.topic):
            return None
        if (
            isinstance(error, AuthenticationError)
            and AuthenticationError not in history.earlier
            and self._headers.reread(attempt.handed_s, now_s)
        ):
            return Retry(counts=False)
        refused = sum(issubclass(tried, ConnectError) for tried in (type(error), *history.earlier))
        return retry_after(
            error,
            attempt=attempt.counted,
            max_attempts=request.attempts or self._limits.max_attempts,
            remaining_s=attempt.deadline_s - now_s,
            strict=attempt.strict,
            fixed_queue=request.queue is not None,
            retry_while_busy=request.retry_while_busy,
            # If every known broker may have refused a connection, the next attempt has to wait:
            # quick refusals would use up all attempts before a new route arrives.
            alternatives=len(set(self._routes.addresses().values())) > max(1, refused),
            earlier=history.earlier,
            options=self._options,
            rng=self._rng,
        )

    def _apply_feedback(self, attempt: SendAttempt, retry: Retry | None, error: SendError) -> None:
        """Isolate the broker, and replace the connection, as the error demands. Remember the size
        of a batch that is too large for the broker."""
        home, channel, now_s = attempt.home, attempt.channel, attempt.ended_s
        if isinstance(error, BatchTooLargeError):
            self._brokers.note_batch_refused(home, attempt.body_bytes)
        if self.stopping:
            isolates = Isolate.NOTHING
        else:
            isolates = error.isolates if retry is None else retry.isolates
        if isolates is Isolate.BROKER:
            # A broker that has answered other requests in the meantime is slow, not dead.
            heard = channel is not None and channel.heard_s > attempt.handed_s
            self._brokers.faults.update(
                home, attempt.rtt_s * 1000, now_s, rank=BUSY if error.backs_off else FAILING,
                reachable=heard or not isinstance(error, _UNREACHED), cause=error.code,
            )  # fmt: skip
        elif isolates is Isolate.TOPIC:
            self._brokers.faults.isolate_topic(attempt.request.topic, home, now_s, error.code)
        if isinstance(error, _RECONNECT) and channel is not None and not channel.draining:
            self._client.drain(channel, now_s)

    # --- records and completions -------------------------------------------------------------

    def _record(self, attempt: SendAttempt, outcome: Outcome, **end: Any) -> list[AttemptRecord]:
        """Add the attempt's record, if records are kept, and return the request's records."""
        history = attempt.history
        if not self.records:
            return history.records if history is not None else []
        record = _record_of(attempt, outcome, **end)
        if history is None:
            return [record]
        history.waited = None
        history.records.append(record)
        return history.records

    def _degraded_completion(
        self, attempt: SendAttempt, result: SendResult, records: list[AttemptRecord]
    ) -> Completion:
        """Return the completion of a degraded send: its result, or an error by `onDegraded`."""
        completion = _stored_completion(attempt, result, records)
        if self._options.on_degraded == "fail":
            completion.result = None
            completion.error = DegradedError(
                f"{result.queue.broker_name} stored the message and answered {result.status}, "
                "which onDegraded=fail does not accept; sent again it is stored twice",
                result=result, broker_name=result.queue.broker_name, topic=attempt.request.topic,
            )  # fmt: skip
        return completion

    def _failed_completion(self, attempt: SendAttempt, error: SendError) -> Completion:
        """Return the completion of a request whose last attempt was not acknowledged. If an earlier
        attempt was stored less durably than asked for, its result counts. Otherwise the error of
        the first attempt with an unknown outcome counts, if there is one."""
        history = attempt.ensure_history()
        if history.degraded is not None:
            return self._degraded_completion(attempt, history.degraded, history.records)
        error = with_origin(error, attempt.home)
        cause = history.unknown or error
        if cause is not error and error.__cause__ is None:
            cause.__cause__ = error
        facts = {"topic": attempt.request.topic, "attempts": attempt.number}
        for name, value in facts.items():
            cause.facts.setdefault(name, value)
            if not hasattr(cause, name):
                setattr(cause, name, value)
        return Completion(
            attempt.request.token,
            cause.outcome,
            None,
            cause,
            history.records,
            maybe_duplicate=history.unknown is not None,
        )


def _record_of(
    attempt: SendAttempt,
    outcome: Outcome,
    *,
    answer: SendAnswer | None = None,
    error: SendError | None = None,
) -> AttemptRecord:
    channel, now_s = attempt.channel, attempt.ended_s
    queue = attempt.request.queue if attempt.target is None else attempt.target.queue
    handed_s = attempt.handed_s or now_s
    connect_ms = 0.0
    if channel is not None and channel.opened_s >= handed_s:
        connect_ms = ((channel.ready_s or now_s) - channel.opened_s) * 1000
    code = answer.code if answer is not None else getattr(error, "response_code", None)
    return AttemptRecord(
        attempt=attempt.number,
        topic=attempt.request.topic,
        broker_name=queue.broker_name if queue is not None else "",
        broker_address=attempt.address,
        queue_id=queue.queue_id if queue is not None else -1,
        queue_offset=answer.queue_offset if answer is not None else -1,
        started_ms=attempt.wall_ms,
        queue_wait_ms=(handed_s - attempt.ready_s) * 1000,
        connect_ms=connect_ms,
        rtt_ms=attempt.rtt_s * 1000,
        message_count=attempt.request.message_count,
        body_bytes=attempt.body_bytes,
        wire_bytes=attempt.wire_bytes,
        outcome=outcome,
        response_code=code,
        error_code=error.code if error is not None else None,
        remark=getattr(error, "remark", None) or (error.text if error is not None else None),
        message_id=attempt.request.message_id,
        # Keep the first id only, because a batch may have thousands.
        offset_message_id=answer.offset_message_id.partition(",")[0] if answer is not None else "",
    )


def _note_wait(attempt: SendAttempt, history: AttemptHistory, error: SendError) -> None:
    """Add an attempt that reached no broker to the record that sums up consecutive ones."""
    waited, wait_ms = history.waited, (attempt.ended_s - attempt.ready_s) * 1000
    if waited is None:
        waited = _record_of(attempt, Outcome.NOT_SENT, error=error)
        waited.broker_address, waited.wire_bytes, waited.rtt_ms = "", 0, 0.0
        waited.queue_wait_ms = 0.0
        waited.started_ms = int(time.time() * 1000 - wait_ms)
        history.waited = waited
        history.records.append(waited)
    waited.attempt = attempt.number
    waited.queue_wait_ms += wait_ms
    waited.error_code, waited.remark = error.code, error.text


def _result_of(attempt: SendAttempt, answer: SendAnswer, rtt_s: float) -> SendResult:
    request, history, target = attempt.request, attempt.history, attempt.target
    assert target is not None
    queue = target.queue
    if queue.queue_id != answer.queue_id:
        queue = MessageQueue(request.topic, queue.broker_name, answer.queue_id)
    return SendResult(
        Outcome.ACKED_DEGRADED if answer.code else Outcome.ACKED,
        answer.status,
        request.message_id,
        answer.offset_message_id,
        queue,
        answer.queue_offset,
        target.address,
        attempt.number,
        rtt_s * 1000,
        history is not None and (history.unknown is not None or history.degraded is not None),
        answer.transaction_id,
        answer.region_id,
        answer.recall_handle,
        answer.trace_on,
    )


def _stored_completion(
    attempt: SendAttempt, result: SendResult, records: list[AttemptRecord]
) -> Completion:
    return Completion(
        attempt.request.token, result.outcome, result, None, records, result.maybe_duplicate
    )
