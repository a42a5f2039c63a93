"""The way of requests through the engine, from one attempt to the next until they complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from rocket_sink.errors import Outcome, SendError, UnknownOutcomeError, UnwrittenError
from rocket_sink.net import log
from rocket_sink.net.client import NetworkClient
from rocket_sink.net.telemetry import ClientMetrics
from rocket_sink.producer.engine.attempt import (
    CheckResult,
    Completion,
    End,
    SendAttempt,
    SendRequest,
    Wait,
)
from rocket_sink.producer.engine.dispatcher import Dispatcher
from rocket_sink.producer.engine.frame_group import GroupAttempt
from rocket_sink.producer.engine.limits import Window
from rocket_sink.producer.engine.response_handler import NextStep, ResponseHandler
from rocket_sink.producer.engine.routes import Routes
from rocket_sink.producer.engine.stored_check import StoredChecks
from rocket_sink.producer.engine.waiting import WaitingRequests
from rocket_sink.wire.headers import Frame

_LOG: Final = log.logger(__name__)


@dataclass(eq=False, repr=False)
class RequestFlow:
    """The open attempts of an engine. Each is in exactly one collection: a connection's requests in
    flight, `waiting`, or the stored checks.

    Attributes:
        ends: ends of attempts that are not handled yet.
        done: completions that nobody has taken yet.
    """

    _clock: Callable[[], float]
    _client: NetworkClient
    _routes: Routes
    _dispatcher: Dispatcher
    handler: ResponseHandler
    _stored_checks: StoredChecks
    waiting: WaitingRequests
    window: Window
    ends: deque[End] = field(default_factory=deque)
    done: list[Completion] = field(default_factory=list)
    _metrics: ClientMetrics | None = field(default_factory=ClientMetrics.of_process)

    def settle(self, now_s: float) -> None:
        """Handle ended attempts and send due attempts, until there are no more of either."""
        ends, waiting, handler = self.ends, self.waiting, self.handler
        answered: dict[GroupAttempt, None] = {}
        while True:
            while ends:
                attempt, result, sent_s, at_s = ends.popleft()
                if attempt.done:
                    continue
                attempt.sent_s, attempt.ended_s = sent_s, at_s
                if isinstance(attempt, GroupAttempt):
                    self._end_group(attempt, result)
                    if attempt.group.in_parts:
                        answered[attempt] = None
                else:
                    self._end(attempt, result)
            if answered:
                self._complete_parts(answered)
            if not waiting.size:
                waiting.events.clear()
                return
            due = () if handler.stopping else waiting.pop_due(now_s)
            if not due:
                return
            for attempt in due:
                if not attempt.done:
                    self.send(attempt, now_s)

    def _end(self, attempt: SendAttempt, result: Any, *, feedback: bool = True) -> None:
        """Complete the request of an ended attempt, or take its next step. `result` is None if a
        oneway request is written; an exception other than a SendError is a defect of this package.
        With `feedback`, a failure counts against the broker."""
        handler, step = self.handler, None
        try:
            match result:
                case Frame():
                    step = handler.handle_answer(attempt, result)
                case SendError():
                    step = handler.handle_failure(attempt, result, feedback=feedback)
                case CheckResult():
                    step = handler.handle_check(attempt, result)
                case None:
                    attempt.release()
                    step = Completion(attempt.request.token, Outcome.UNKNOWN, None, None)
                case _:
                    raise result
        except Exception as error:
            # Complete the request nevertheless, because a caller waits for it.
            step = self._defect_completion(attempt, error)
        if type(step) is Completion:
            self._complete(attempt, step)
        else:
            self._take_step(attempt, step)

    def _end_group(self, group: GroupAttempt, result: Any) -> None:
        try:
            ends = self.handler.group_ended(group, result)
        except Exception as error:
            ends = [(single, error) for single in group.leave_all()]
        for number, (attempt, end) in enumerate(ends):
            # Messages that fail together count as one failure of their broker.
            self._end(attempt, end, feedback=not number)
        if not group.requests and not group.done:
            self._complete(group, self.handler.part_ended(group))

    def _defect_completion(self, attempt: SendAttempt, error: Exception) -> Completion:
        """Return the completion of an attempt whose end could not be handled (a defect)."""
        _LOG.error("the end of a request at %s was not handled", attempt.address, exc_info=error)
        attempt.release()
        text = f"an answer of {attempt.address or 'a broker'} could not be handled: {error!r}"
        cause = UnknownOutcomeError(text, topic=attempt.request.topic)
        cause.__cause__ = error
        token = attempt.request.token
        return Completion(token, cause.outcome, None, cause, maybe_duplicate=True)

    def send(self, attempt: SendAttempt, now_s: float) -> None:
        """Dispatch the attempt, or keep it until it may be sent. If a broker has room for a part of
        a group only, send this part before other requests can take the room."""
        to_send = [attempt]
        while to_send:
            attempt = to_send.pop()
            try:
                wait = self._dispatcher.send(attempt, now_s)
            except Exception as caught:
                error = caught
                if not isinstance(error, SendError):
                    _LOG.exception("a request was not sent")
                    if attempt.channel is not None:
                        continue  # The connection has the attempt, and will end it.
                    error = UnwrittenError(f"it cannot be sent: {caught!r}")
                attempt.ended_s = now_s
                self._take_step(attempt, self.handler.handle_failure(attempt, error))
                continue
            target = attempt.target
            if wait is Wait.BROKER and target and (room := attempt.room_at(target.broker)):
                assert isinstance(attempt, GroupAttempt)
                part, others = attempt.leave(0, room), attempt.leave(room, attempt.size)
                to_send += (others, part)
                empty = Completion(attempt.request.token, Outcome.ACKED, None, None)
                self._complete(attempt, empty)
            elif wait is Wait.BROKER:
                self.waiting.add(attempt, wait, self._dispatcher.room_deadline_s(attempt, now_s))
            elif wait is not None:
                self.waiting.add(attempt, wait, attempt.deadline_s)

    def _take_step(self, attempt: SendAttempt, step: Completion | NextStep) -> None:
        if isinstance(step, Completion):
            self._complete(attempt, step)
            return
        following, wait, due_s = step
        if following is not attempt:
            self.waiting.ordered.replace(attempt, following)
        if wait is Wait.VERIFY:
            self._stored_checks.begin(following)
        else:
            self.waiting.add(following, wait, due_s)

    def _complete(self, attempt: SendAttempt, completion: Completion) -> None:
        attempt.done = True
        self.done.append(completion)  # first, so that no error of a later line can lose it
        self.window.give_back(attempt.body_bytes, attempt.window_requests)
        if attempt.turn is not None:
            self.waiting.leave(attempt)
        if self._metrics is not None:
            self._measure(self._metrics, attempt, completion)

    def _measure(
        self, metrics: ClientMetrics, attempt: SendAttempt, completion: Completion
    ) -> None:
        request, stored = attempt.request, completion.stored
        if stored is None and isinstance(attempt, GroupAttempt):
            # If there is no error, all messages have left the group or have completed before.
            if completion.error is not None:
                self.measure_failure(request, completion.error, attempt.address)
            return
        metrics.record(
            request.topic,
            request.message_count if stored is None else len(stored),
            attempt.ended_s - (request.since_s or attempt.ready_s),
            address=attempt.address,
            result=completion.result,
            error=completion.error,
        )

    @property
    def is_measured(self) -> bool:
        return self._metrics is not None

    def measure_failure(
        self, request: SendRequest, error: SendError, address: str | None = None
    ) -> None:
        """Measure a request that failed as a whole; each message of a group is a request."""
        if self._metrics is None:
            return
        now_s = self._clock()
        requests = 1 if request.group is None else request.message_count
        for _ in range(requests):
            self._metrics.record(
                request.topic,
                request.message_count // requests,
                now_s - (request.since_s or now_s),
                address=address,
                result=None,
                error=error,
            )

    def _complete_parts(self, answered: dict[GroupAttempt, None]) -> None:
        """Complete the answered messages of groups of which other messages still wait."""
        for attempt in answered:
            if not attempt.done:
                completion = self.handler.part_ended(attempt)
                if completion.stored is not None:
                    self.done.append(completion)
                    self.window.give_back(*attempt.give_back(completion.stored))
                    if self._metrics is not None:
                        self._measure(self._metrics, attempt, completion)
        answered.clear()

    def move_unsent(self, broker_name: str, now_s: float) -> None:
        """Dispatch a broker's unwritten requests again; without a fixed queue they go elsewhere."""
        address = self._routes.addresses().get(broker_name)
        channel = self._client.peek(address) if address else None
        for owner in channel.withdraw() if channel is not None else ():
            if isinstance(owner, SendAttempt):
                owner.release()
                owner.ended_s = now_s
                again = owner.next_attempt(owner.ready_s, counts=False)
                self._take_step(owner, NextStep(again))
            else:
                owner.on_end(UnwrittenError(f"{address} takes no more bytes"), None, now_s)

    def abandon_pending(self, error: SendError, now_s: float) -> None:
        """Complete all requests, as not sent with this error, or as unknown."""
        handler = self.handler
        handler.stopping = True
        self.settle(now_s)
        self._stored_checks.abandon(now_s)
        for attempt in self.waiting.drain_all():
            if not attempt.done:
                attempt.on_end(error.copy(), None, now_s)
        self.settle(now_s)
        for channel in self._client.channels:
            if channel.connection.in_flight:
                self._client.fail(channel, error.copy(), now_s)
        self.settle(now_s)
        handler.stopping = False
