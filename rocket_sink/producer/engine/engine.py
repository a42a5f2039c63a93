"""The send engine: many requests in flight at all brokers, one retry loop for every send mode.

The caller's thread drives the engine. Only look-ups of host names run in other threads.
`RequestFlow` has the open attempts."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Iterable
from random import Random
from typing import Final

from rocket_sink.errors import NoRouteError, ProducerClosedError, UnwrittenError
from rocket_sink.net.channel import Channel
from rocket_sink.net.client import NetworkClient
from rocket_sink.net.hooks import RpcHooks
from rocket_sink.net.identity import Identity
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import Completion, SendAttempt, SendRequest, content_of
from rocket_sink.producer.engine.brokers import Brokers
from rocket_sink.producer.engine.dispatcher import Dispatcher
from rocket_sink.producer.engine.frame_group import GroupAttempt
from rocket_sink.producer.engine.headers import CredentialsProvider, HeaderTemplates
from rocket_sink.producer.engine.heartbeat import Heartbeats
from rocket_sink.producer.engine.limits import RateLimiter, RequestLimits, Window
from rocket_sink.producer.engine.questions import Questions
from rocket_sink.producer.engine.request_flow import RequestFlow
from rocket_sink.producer.engine.response_handler import ResponseHandler
from rocket_sink.producer.engine.routes import NameServers, Routes
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.producer.engine.stored_check import StoredChecks
from rocket_sink.producer.engine.waiting import WaitingRequests
from rocket_sink.routing.fault import Isolation
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.headers import Frame

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
            sign=self._headers.adder,
            hide=self._headers.hide,
            on_request=on_request,
            hooks=rpc_hooks,
        )
        self.brokers = Brokers(options, self.shared, rng)
        name_servers = NameServers(options, self.client, rng, options.connect_timeout_ms / 1000)
        events: set[Hashable] = set()
        """Events for which requests may wait (`waiting`)."""
        self.routes = Routes(options, name_servers, self.shared, events)
        self.heartbeats = Heartbeats(
            options, self.client, self.routes, self.brokers.faults, self.identity
        )
        self.stored_checks = StoredChecks(
            options.stored_check_delay_ms / 1000, self._limits.stored_check_s, self.client,
            self.routes, self.reread_credentials,
        )  # fmt: skip
        waiting = WaitingRequests(events, self.routes, self.brokers)
        dispatcher = Dispatcher(
            self.client, self.routes, self.brokers, self._headers, waiting.ordered,
            self.heartbeats, Questions(self.client, events), self._limits,
        )  # fmt: skip
        handler = ResponseHandler(
            options, self.client, self.routes, self.brokers, self._headers, self._limits, rng,
            records=record_attempts,
        )  # fmt: skip
        self.flow = RequestFlow(
            clock, self.client, self.routes, dispatcher, handler, self.stored_checks,
            waiting, Window(options),
        )  # fmt: skip
        self._rates = RateLimiter.of(options, clock())
        self.longest_s = self._limits.timeout_s
        """The longest total time of any request so far."""
        self._next_tick_s = 0.0
        self.closed = False

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
        (body, size), kind, requests = content_of(request), SendAttempt, 1
        if request.group is not None:
            kind, requests = GroupAttempt, request.message_count
        now_s, rates = self.clock(), self._rates
        if rates is not None and not rates.allows(request.message_count, size, now_s):
            return False
        flow = self.flow
        if not flow.window.take(size, requests):
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
        if flow.is_measured:
            request.since_s = since_s
        attempt = kind(flow.ends, request, body, size, strict, since_s, since_s + timeout_s)
        flow.send(attempt, now_s)
        if flow.ends or attempt.ended_s or attempt.done:
            flow.settle(now_s)
        return True

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        """Drive the engine for at most `timeout_s`; return as soon as a request is complete."""
        until_s = self.clock() + timeout_s
        self.drive(0.0 if self.flow.done else min(timeout_s, STEP_S))
        self._drive_while(lambda: not self.flow.done and self.pending > 0, until_s)
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
        done, self.flow.done = self.flow.done, []
        return done

    def drain(self, deadline_s: float = math.inf) -> list[Completion]:
        """Drive until nothing is pending, or until `deadline_s` on the engine's clock. At the
        deadline all pending requests complete as NOT_SENT or UNKNOWN."""
        self._drive_while(lambda: self.pending > 0, deadline_s)
        if self.pending:
            error = UnwrittenError("given up before it was sent: the time is over")
            self.flow.abandon_pending(error, self.clock())
        return self.take()

    @property
    def pending(self) -> int:
        """The number of submitted requests that are not complete."""
        return self.flow.window.requests

    @property
    def has_completions(self) -> bool:
        return bool(self.flow.done)

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
    def is_broken(self) -> bool:
        """Whether the engine must not be used again (closed, fatal error, or forked process)."""
        return self.closed or self.flow.handler.fatal or self.identity.of_pid != os.getpid()

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
            error = ProducerClosedError("the producer was closed before it was sent")
            self.flow.abandon_pending(error, self.clock())
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
        if self.flow.ends:
            return 0.0
        now_s = self.clock()
        if self.flow.waiting.size:
            wait_s = self.flow.waiting.wait_s(self.routes.wait_s(wait_s, now_s), now_s)
        return wait_s if self._rates is None else self._rates.wait_s(wait_s, now_s)

    def process(self, ready: Iterable[tuple[Channel, int]]) -> None:
        """Read from the connections that are ready after a wait, and handle all that is due."""
        self.client.process(ready)
        now_s = self.clock()
        self.flow.settle(now_s)
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + _TICK_S
            self._tick(now_s)

    def _tick(self, now_s: float) -> None:
        self.brokers.update_suspicion(self.heartbeats.connections(), now_s)
        for name in self.brokers.take_worsened():
            self.flow.move_unsent(name, now_s)
        self.routes.start_planned(now_s)
        self.stored_checks.step(now_s)
        self.heartbeats.run(now_s)
        self.flow.settle(now_s)
        # Write now, because a caller that has got its answer may not drive the engine again soon.
        self.client.write()
