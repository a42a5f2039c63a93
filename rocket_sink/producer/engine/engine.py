"""The send engine: many requests in flight at all brokers, one retry loop for every send mode.

The caller's thread drives the engine. Only look-ups of host names run in other threads. Each open
attempt is in exactly one collection: a connection's requests in flight, `waiting`, or
`stored_checks`. Each collection ends an attempt at its deadline."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Final

from rocket_sink.errors import (
    NoRouteError,
    Outcome,
    ProducerClosedError,
    SendError,
    UnknownOutcomeError,
    UnwrittenError,
)
from rocket_sink.net import log
from rocket_sink.net.channel import Channel
from rocket_sink.net.client import NetworkClient
from rocket_sink.net.hooks import RpcHooks
from rocket_sink.net.identity import Identity
from rocket_sink.net.telemetry import ClientMetrics
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import (
    CheckResult,
    Completion,
    End,
    SendAttempt,
    SendRequest,
    Wait,
    single_kind,
)
from rocket_sink.producer.engine.brokers import Brokers
from rocket_sink.producer.engine.dispatcher import Dispatcher
from rocket_sink.producer.engine.frame_group import GroupAttempt, attempt_kind
from rocket_sink.producer.engine.headers import CredentialsProvider, HeaderTemplates
from rocket_sink.producer.engine.heartbeat import Heartbeats
from rocket_sink.producer.engine.limits import RateLimiter, RequestLimits, Window
from rocket_sink.producer.engine.questions import Questions
from rocket_sink.producer.engine.response_handler import NextStep, ResponseHandler
from rocket_sink.producer.engine.routes import NameServers, Routes
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.producer.engine.stored_check import StoredChecks
from rocket_sink.producer.engine.waiting import WaitingRequests
from rocket_sink.routing.fault import Isolation
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.headers import Frame

_LOG: Final = log.logger(__name__)
STEP_S: Final = 0.02
_TICK_S: Final = 0.01


class SendEngine:
    """Sends requests, and completes each request exactly once.

    Args:
        options: name servers, limits, time-outs, credentials.
        shared: the broker state of the executor; None: a state for this engine alone.
        clock: returns monotonic seconds.
        record_attempts: add a record of each attempt to the request's Completion.
        credentials: returns the credentials, at the start and after each refusal by a broker; None:
            the options have them.
        on_request: serves a broker's request; returns False to refuse it.
        rpc_hooks: called before and after every request of any kind.
    """

    def __init__(
        self,
        options: SinkOptions,
        *,
        shared: SharedBrokerState | None = None,
        clock: Callable[[], float] = time.monotonic,
        record_attempts: bool = True,
        rng: Random | None = None,
        credentials: CredentialsProvider | None = None,
        on_request: Callable[[Channel, Frame], bool] | None = None,
        rpc_hooks: RpcHooks | None = None,
    ) -> None:
        """Make the engine; raises OptionError. It connects to no server yet."""
        rng = rng or Random()
        self.options = options
        self.clock = clock
        self.identity = Identity(options)
        self.shared = shared or SharedBrokerState.in_process()
        self._limits = RequestLimits(options)
        self._headers = HeaderTemplates(options, self.identity.group, credentials)
        self.client = NetworkClient(
            options,
            clock=clock,
            sign=self._headers.added,
            hide=self._headers.hide,
            on_request=on_request,
            hooks=rpc_hooks,
        )
        self.brokers = Brokers(options, self.shared, rng)
        self.name_servers = NameServers(
            options.name_servers, self.client, rng, options.connect_timeout_ms / 1000
        )
        self.routes = Routes(options, self.name_servers, self.shared)
        self.heartbeats = Heartbeats(options, self.client, self.routes, self.brokers, self.identity)
        self.stored_checks = StoredChecks(
            options.stored_check_delay_ms / 1000, self._limits.stored_check_s, self.client,
            self.routes, self.reread_credentials,
        )  # fmt: skip
        self.waiting = WaitingRequests(self.routes, self.brokers)
        self._questions = Questions(self.client)
        self._dispatcher = Dispatcher(
            self.client, self.routes, self.brokers, self._headers, self.waiting.ordered,
            self.heartbeats, self._questions, self._limits,
        )  # fmt: skip
        self._handler = ResponseHandler(
            options, self.client, self.routes, self.brokers, self._headers, self._limits, rng,
            records=record_attempts,
        )  # fmt: skip
        self.window = Window(options)
        self._rates = RateLimiter.of(options, clock())
        self._ends: deque[End] = deque()
        self._done: list[Completion] = []
        self.longest_s = self._limits.timeout_s
        """The longest total time of any request so far."""
        self._next_tick_s = 0.0
        self.closed = False
        self._metrics = ClientMetrics.of_process()

    def __repr__(self) -> str:
        return f"<SendEngine {self.options.name_server}, {self.pending} pending>"

    # --- the caller's side -------------------------------------------------------------------

    def submit(self, request: SendRequest) -> None:
        """Submit a request. Drive the engine while the window or the rate limit has no room. Raise
        ProducerClosedError if the engine is closed. The Completion has all other errors."""
        while not self.try_submit(request):
            self.drive()

    def try_submit(self, request: SendRequest) -> bool:
        """Submit a request if window and rate limit have room, else return False."""
        if self.closed:
            raise ProducerClosedError("the producer is closed")
        if request.group is None:
            (kind, body, size), requests = single_kind(request), 1
        else:
            (kind, body, size), requests = attempt_kind(request), request.message_count
        now_s, rates = self.clock(), self._rates
        if rates is not None and not rates.allows(request.message_count, size, now_s):
            return False
        if not self.window.take(size, requests):
            return False
        if rates is not None:
            rates.spend(request.message_count, size, now_s)
        timeout_s = self._limits.timeout_s
        own_timeout_s = request.timeout_s
        if request.ordered or own_timeout_s is not None:
            timeout_s = self._limits.order_wait_s if own_timeout_s is None else own_timeout_s
            self.longest_s = max(self.longest_s, timeout_s)
        strict = request.ordered and request.choose is None
        since_s = request.since_s or now_s
        if self._metrics is not None:
            request.since_s = since_s
        attempt = kind(self._ends, request, body, size, strict, since_s, since_s + timeout_s)
        self._send(attempt, now_s)
        if self._ends or attempt.ended_s or attempt.done:
            self._settle(now_s)
        return True

    def has_room(self, request: SendRequest) -> bool:
        """Return whether window and rate limit have room for a request now."""
        size, rates = attempt_kind(request)[2], self._rates
        if self.closed:
            return True
        allowed = rates is None or rates.allows(request.message_count, size, self.clock())
        return allowed and self.window.has_room(size)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        """Drive the engine for at most `timeout_s`; return as soon as a request is complete."""
        until_s = self.clock() + timeout_s
        self.drive(0.0 if self._done else min(timeout_s, STEP_S))
        self._drive_while(lambda: not self._done and self.pending > 0, until_s)
        return self.take()

    def drive(self, timeout_s: float = STEP_S) -> None:
        """Run one step of at most `timeout_s`. Completions stay here until `take` or `poll`."""
        self.process(self.client.wait(self.prepare(timeout_s)))

    def drive_for(self, time_s: float) -> None:
        self._drive_while(lambda: True, self.clock() + time_s)

    def _drive_while(self, goes_on: Callable[[], bool], until_s: float) -> None:
        while goes_on() and (left_s := until_s - self.clock()) > 0:
            self.drive(min(left_s, STEP_S))

    def take(self) -> list[Completion]:
        """Return the completions since the last call, without driving the engine."""
        done, self._done = self._done, []
        return done

    def drain(self, deadline_s: float = math.inf) -> list[Completion]:
        """Drive until nothing is pending, or until `deadline_s` on the engine's clock. At the
        deadline all pending requests complete as NOT_SENT or UNKNOWN."""
        self._drive_while(lambda: self.pending > 0, deadline_s)
        if self.pending:
            self._abandon_pending(UnwrittenError("given up before it was sent: the time is over"))
        return self.take()

    @property
    def pending(self) -> int:
        """The number of submitted requests that are not complete."""
        return self.window.requests

    @property
    def has_completions(self) -> bool:
        return bool(self._done)

    def publish_info(self, topic: str) -> TopicPublishInfo:
        """Return the topic's writable queues; ask the name servers if the route is not cached.
        Raise NoRouteError or NameServerUnavailableError."""
        until_s = self.clock() + self._limits.timeout_s
        while (info := self.known_route(topic, until_s)) is None:
            self.drive()
        return info

    def fresh_route(self, topic: str) -> TopicPublishInfo:
        """Return the name servers' route. If no server answers, return the cached route, which may
        be as old as the engine's last send. Raise NoRouteError or NameServerUnavailableError."""
        until_s = self.clock() + self._limits.timeout_s
        # A cached route, or the answer to a look-up that is under way, may be old: ask again.
        is_old = self.routes.fetching(topic) or self.routes.get(topic, self.clock()) is not None
        self._await_look_up(topic, until_s)
        if is_old:
            self.routes.refresh(topic, self.clock())
            self._await_look_up(topic, until_s)
        return self.publish_info(topic)

    def _await_look_up(self, topic: str, until_s: float) -> None:
        while self.routes.fetching(topic) and self.clock() < until_s:
            self.drive()
            self.routes.get(topic, self.clock())

    def known_route(self, topic: str, until_s: float) -> TopicPublishInfo | None:
        """Return the known route; None while a look-up is under way: then drive, and call again.
        Raise the look-up's error, or NoRouteError at `until_s`."""
        now_s = self.clock()
        info = self.routes.get(topic, now_s)
        if info is not None:
            return info
        error = self.routes.error(topic)
        final = not isinstance(error, NoRouteError) or self.routes.is_unresolvable(topic)
        final = final and not self.routes.fetching(topic)
        if error is not None and (final or now_s >= until_s):
            raise error.copy()
        if now_s >= until_s:
            raise NoRouteError(f"no route of topic {topic!r} within the time", topic=topic)
        return None

    def batch_limit(self, topic: str) -> int | None:
        """Return the limit of a batch's bytes that fits all brokers of the topic; None: no broker
        has refused a batch for its size. Any thread may call this."""
        info = self.routes.peek(topic)
        return None if info is None else self.brokers.batch_limit(info)

    def reread_credentials(self, signed_s: float) -> bool:
        """Read the credentials again; return whether they have changed since `signed_s`."""
        return self._headers.reread(signed_s, self.clock())

    def isolations(self) -> list[Isolation]:
        """Return the isolation events since the last call, and forget them."""
        kept = self.brokers.faults.events
        events = list(kept)
        kept.clear()
        return events

    @property
    def broken(self) -> bool:
        """Whether the engine must not be used again (closed, fatal error, or forked process)."""
        return self.closed or self._handler.fatal or self.identity.of_pid != os.getpid()

    def close(self, timeout_s: float = 1.0) -> None:
        """Complete pending requests as not sent or unknown, unregister at the brokers (for at most
        `timeout_s`), and close the connections. A second call does nothing."""
        if self.closed:
            return
        if self.identity.of_pid != os.getpid():
            self.abandon()
            return
        if self.pending:
            # End requests first: an unanswered heartbeat may close a connection `unregister` needs.
            self._abandon_pending(ProducerClosedError("the producer was closed before it was sent"))
        self.closed = True
        self.heartbeats.unregister(timeout_s)
        self.client.close()
        self.shared.close()

    def abandon(self) -> None:
        """Close the connections without sending anything, for example in a forked child."""
        self.closed = True
        self.client.abandon()

    # --- driving -----------------------------------------------------------------------------

    def prepare(self, timeout_s: float) -> float:
        """Write queued data. Return how long the caller may wait for the connections, at most
        `timeout_s`. Threads that share an engine hold their lock during `prepare` and `process`,
        and release it for the wait."""
        wait_s = self.client.prepare(timeout_s)
        if self._ends:
            return 0.0
        if self.waiting.size:
            wait_s = self.waiting.wait_s(wait_s, self.clock())
        return wait_s if self._rates is None else self._rates.wait_s(wait_s, self.clock())

    def process(self, ready: Iterable[tuple[Channel, int]]) -> None:
        """Read from the connections that are ready after a wait, and handle all that is due."""
        self.client.process(ready)
        now_s = self.clock()
        self._settle(now_s)
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + _TICK_S
            self._tick(now_s)

    def _tick(self, now_s: float) -> None:
        self.brokers.update_suspicion(self.heartbeats.connections(), now_s)
        for name in self.brokers.take_worsened():
            self._move_unsent(name, now_s)
        self.stored_checks.step(now_s)
        self.heartbeats.run(now_s)
        self._settle(now_s)
        # Write now, because a caller that has got its answer may not drive the engine again soon.
        self.client.write()

    def _settle(self, now_s: float) -> None:
        """Handle ended attempts and send due attempts, until there are no more of either."""
        ends, waiting, handler = self._ends, self.waiting, self._handler
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
            due = waiting.pop_due(now_s) if waiting.size and not handler.stopping else ()
            if not due:
                return
            for attempt in due:
                if not attempt.done:
                    self._send(attempt, now_s)

    def _end(self, attempt: SendAttempt, result: Any, *, feedback: bool = True) -> None:
        """Complete the request of an ended attempt, or take its next step. `result` is None if a
        oneway request is written; an exception other than a SendError is a defect of this package.
        With `feedback`, a failure counts against the broker."""
        handler, step = self._handler, None
        try:
            match result:
                case Frame():
                    step = handler.answered(attempt, result)
                case SendError():
                    step = handler.failed(attempt, result, feedback=feedback)
                case CheckResult():
                    step = handler.verified(attempt, result)
                case None:
                    attempt.release()
                    step = Completion(attempt.request.token, Outcome.UNKNOWN, None, None)
                case _:
                    raise result
        except Exception as error:
            # Complete the request nevertheless, because a caller waits for it.
            step = self._unhandled(attempt, error)
        if type(step) is Completion:
            self._complete(attempt, step)
        else:
            self._take_step(attempt, step)

    def _end_group(self, group: GroupAttempt, result: Any) -> None:
        try:
            ends = self._handler.group_ended(group, result)
        except Exception as error:
            ends = [(single, error) for single in group.leave_all()]
        for number, (attempt, end) in enumerate(ends):
            # Messages that fail together count as one failure of their broker.
            self._end(attempt, end, feedback=not number)
        if not group.open_count and not group.done:
            self._complete(group, self._handler.part_ended(group))

    def _unhandled(self, attempt: SendAttempt, error: Exception) -> Completion:
        """Return the completion of an attempt whose end could not be handled (a defect)."""
        _LOG.error("the end of a request at %s was not handled", attempt.address, exc_info=error)
        attempt.release()
        text = f"an answer of {attempt.address or 'a broker'} could not be handled: {error!r}"
        cause = UnknownOutcomeError(text, topic=attempt.request.topic)
        cause.__cause__ = error
        token = attempt.request.token
        return Completion(token, cause.outcome, None, cause, maybe_duplicate=True)

    def _send(self, attempt: SendAttempt, now_s: float) -> None:
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
                self._take_step(attempt, self._handler.failed(attempt, error))
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
                self.waiting.add(attempt, wait, now_s + STEP_S)

    def _take_step(self, attempt: SendAttempt, step: Completion | NextStep) -> None:
        if isinstance(step, Completion):
            self._complete(attempt, step)
            return
        following, wait, due_s = step
        if following is not attempt:
            self.waiting.ordered.replace(attempt, following)
        if wait is Wait.VERIFY:
            self.stored_checks.begin(following)
        else:
            self.waiting.add(following, wait, due_s)

    def _complete(self, attempt: SendAttempt, completion: Completion) -> None:
        attempt.done = True
        self._done.append(completion)  # first, so that no error of a later line can lose it
        self.window.give_back(attempt.body_bytes, attempt.places)
        if attempt.turn is not None:
            self.waiting.leave(attempt, attempt.ended_s)
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

    def measure_failure(
        self, request: SendRequest, error: SendError, address: str | None = None
    ) -> None:
        """Measure a request that failed as a whole; each message of a group is a request."""
        if self._metrics is None:
            return
        now_s = self.clock()
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
                completion = self._handler.part_ended(attempt)
                if completion.stored is not None:
                    self._done.append(completion)
                    self.window.give_back(*attempt.give_back(completion.stored))
                    if self._metrics is not None:
                        self._measure(self._metrics, attempt, completion)
        answered.clear()

    def _move_unsent(self, broker_name: str, now_s: float) -> None:
        """Dispatch a broker's unwritten requests again; without a fixed queue they go elsewhere."""
        address = self.routes.addresses().get(broker_name)
        channel = self.client.peek(address) if address else None
        for owner in channel.withdraw() if channel is not None else ():
            if isinstance(owner, SendAttempt):
                owner.release()
                owner.ended_s = now_s
                again = owner.next_attempt(owner.ready_s, counts=False)
                self._take_step(owner, NextStep(again))
            else:
                owner.on_end(UnwrittenError(f"{address} takes no more bytes"), None, now_s)

    def _abandon_pending(self, error: SendError) -> None:
        now_s, handler = self.clock(), self._handler
        handler.stopping = True
        self._settle(now_s)
        self.stored_checks.abandon(now_s)
        for attempt in self.waiting.drain_all():
            if not attempt.done:
                attempt.on_end(error.copy(), None, now_s)
        self._settle(now_s)
        for channel in self.client.channels:
            if channel.connection.in_flight:
                self.client.fail(channel, error.copy(), now_s)
        self._settle(now_s)
        handler.stopping = False
