"""Dispatch of attempts, without retries: the choice of queue and broker, and the write."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

from rocket_sink.errors import (
    BrokerTooOldError,
    InvalidQueueError,
    MessageIllegalError,
    NoRouteError,
    SendError,
    UnwrittenError,
)
from rocket_sink.net.channel import Channel
from rocket_sink.net.client import NetworkClient
from rocket_sink.producer.engine.attempt import SendAttempt, Wait
from rocket_sink.producer.engine.brokers import Brokers, SendTarget
from rocket_sink.producer.engine.frame_group import GroupAttempt
from rocket_sink.producer.engine.headers import HeaderTemplates
from rocket_sink.producer.engine.heartbeat import Heartbeats
from rocket_sink.producer.engine.limits import RequestLimits
from rocket_sink.producer.engine.questions import Questions
from rocket_sink.producer.engine.routes import Routes
from rocket_sink.producer.engine.waiting import OrderedQueues
from rocket_sink.routing.retry import attempt_deadline
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.codes import V5_0_0, V5_4_0, V5_5_0, ResponseCode, version_name
from rocket_sink.wire.headers import ONEWAY_FLAG

_JOINED_BYTES: Final = 2048
"""Frame size below which head and body are copied into one buffer, because the copy is cheap."""

_IGNORED: Final = {
    V5_0_0: "deliver a timed message at once: timed delivery came with 5.0; use a delay_level",
    V5_4_0: "ignore a priority: priorities came with 5.4; send without priority",
    V5_5_0: "ignore a lite topic: lite topics came with 5.5; use a sharding_key",
}
"""{version: what an older broker would do, and what to use instead}"""


@dataclass(eq=False, repr=False)
class Dispatcher:
    """Writes attempts to connections; used by the thread of its engine only."""

    _client: NetworkClient
    _routes: Routes
    _brokers: Brokers
    _headers: HeaderTemplates
    _ordered: OrderedQueues
    _heartbeats: Heartbeats
    _questions: Questions
    _limits: RequestLimits

    def send(self, attempt: SendAttempt, now_s: float) -> Wait | None:
        """Write the attempt to a connection, or return the event to wait for. Raise SendError if it
        cannot be sent; `attempt.broker` is set if the broker is at fault."""
        request = attempt.request
        if now_s >= attempt.deadline_s:
            raise self._out_of_time(attempt)
        info = self._routes.get(request.topic, now_s)
        if info is None:
            self._routes.check_resolvable(request.topic)
            return Wait.ROUTE
        target = self._choose(attempt, info, now_s)
        if type(target) is Wait:
            attempt.target = None
            return target
        assert isinstance(target, SendTarget)
        if request.ordered and not self._ordered.enter(attempt, target.queue):
            return Wait.TURN
        attempt.target = target
        attempt.wall_ms = time.time_ns() // 1_000_000
        if not target.address:
            raise NoRouteError(f"broker {target.home} has no master now", topic=request.topic)
        broker = target.broker
        if broker.window is not None and attempt.room_at(broker) < attempt.requests:
            return Wait.BROKER
        broker.in_flight += attempt.requests
        attempt.broker, attempt.handed_s = broker, now_s
        wait = None
        if request.least_version and not self._is_new_enough(attempt, now_s):
            wait = Wait.VERSION
        elif request.lacks_keys and not self._may_lack_keys(attempt, target, now_s):
            wait = Wait.POLICY
        if wait is not None:
            attempt.release()
            return wait
        if isinstance(attempt, GroupAttempt):
            self._write_group(attempt, target, now_s)
        else:
            self._write(attempt, target, now_s)
        return None

    def _deadlines(self, attempt: SendAttempt, now_s: float) -> tuple[float, float]:
        """Return the deadline of an attempt that begins now, and the latest extended deadline."""
        if attempt.request.verify_ids:
            # Answers are more reliable than checks of the store: wait as long as a check may take.
            deadline_s = now_s + self._limits.stored_check_s
        else:
            deadline_s = self.unsent_deadline_s(attempt, now_s)
        # Allow an extension: a retry would store messages twice if a live broker has the request.
        return deadline_s, attempt.deadline_s if self._limits.attempt_cap_s is None else deadline_s

    def unsent_deadline_s(self, attempt: SendAttempt, now_s: float) -> float:
        """Return the end of the attempt's share of the request's time, if it begins at `now_s`."""
        limits, request = self._limits, attempt.request
        attempts = (request.attempts or limits.max_attempts) - attempt.counted + 1
        return attempt_deadline(
            now_s, attempt.deadline_s, attempts, limits.attempt_cap_s, strict=attempt.strict
        )

    def room_deadline_s(self, attempt: SendAttempt, now_s: float) -> float:
        """Return the end of the attempt's share of the request's time, until which it waits for
        room at the best brokers. Return infinity after it: the attempt waits for any usable broker,
        until its deadline. The share of the last attempt ends at the deadline, so that attempt
        never goes to a worse broker."""
        share_s = self.unsent_deadline_s(attempt, attempt.ready_s)
        return share_s if now_s < share_s else math.inf

    # --- the choice of a queue ---------------------------------------------------------------

    def _choose(
        self, attempt: SendAttempt, info: TopicPublishInfo, now_s: float
    ) -> SendTarget | Wait:
        request, brokers = attempt.request, self._brokers
        queue = request.queue
        if queue is not None:
            if info.index_of(queue) is None:
                if queue.broker_name not in info.masters:
                    raise NoRouteError(
                        f"broker {queue.broker_name} is not in the route of the topic now: start "
                        "it, or if it runs, create the topic there (a topic that was made by its "
                        "first send may be on one broker only)",
                        topic=request.topic,
                    )
                raise InvalidQueueError(
                    f"{queue} is not in the route of the topic any more: its broker takes no "
                    "writes now (wipeWritePerm), or the topic has fewer queues",
                    topic=request.topic, response_code=0, remark="",
                )  # fmt: skip
            return brokers.target(info, queue)
        if attempt.pinned is not None and info.index_of(attempt.pinned) is not None:
            return brokers.target(info, attempt.pinned)
        ranking = brokers.ranking(info, now_s)
        if ranking.is_silent:
            # A silent proxy makes all its brokers silent. A look-up may find another proxy.
            self._routes.refresh(request.topic, now_s)
        if request.choose is not None:
            best = {broker.name for broker in ranking.best}
            queue = request.choose(info, best.__contains__)
            return self._await_queue(info, now_s) if queue is None else brokers.target(info, queue)
        last = None if attempt.history is None else attempt.history.last_broker
        target = ranking.take(attempt.requests, last=last)
        if target is not None:
            return target
        if not ranking.brokers:
            return self._await_queue(info, now_s)
        if now_s >= self.unsent_deadline_s(attempt, attempt.ready_s):
            target = ranking.take(attempt.requests, last=last, worse=True)
        return target or Wait.BROKER

    def _await_queue(self, info: TopicPublishInfo, now_s: float) -> Wait:
        """Wait for another route, because this one has no queue for the request."""
        self._routes.refresh(info.topic, now_s)
        return Wait.ROUTE

    # --- writing -----------------------------------------------------------------------------

    def _write(self, attempt: SendAttempt, target: SendTarget, now_s: float) -> None:
        client = self._client
        channel = client.channel(target.address, now_s)
        deadline_s, latest_s = self._deadlines(attempt, now_s)
        opaque = channel.connection.open_request(
            deadline_s=deadline_s, token=attempt, latest_s=latest_s, oneway=attempt.request.oneway
        )
        try:
            head = self._header(attempt, target, opaque)
        except Exception as error:
            self._take_back(attempt, channel, error)
        attempt.channel = channel
        size = attempt.wire_bytes = len(head) + attempt.body_bytes
        body = attempt.body
        if size < _JOINED_BYTES and len(body) == 1 and type(body[0]) is bytes:
            client.send(channel, attempt, (head + body[0],), size, now_s)
        else:
            client.send(channel, attempt, [head, *body], size, now_s)

    def _write_group(self, attempt: GroupAttempt, target: SendTarget, now_s: float) -> None:
        queue = target.queue
        channel = self._client.channel(target.address, now_s)
        deadline_s, latest_s = self._deadlines(attempt, now_s)
        attempt.first_opaque = channel.connection.open_group(
            attempt.size, deadline_s=deadline_s, token=attempt, latest_s=latest_s
        )
        try:
            frames = memoryview(
                attempt.group.frames(
                    self._headers.template(attempt.request.topic, batch=False),
                    first_opaque=attempt.first_opaque,
                    queue_id=queue.queue_id,
                    born_ms=attempt.wall_ms,
                    broker_name=queue.broker_name,
                )
            ).cast("B")
        except Exception as error:
            self._take_back(attempt, channel, error)
        attempt.channel = channel
        attempt.wire_bytes = len(frames)
        self._client.send(channel, attempt, (frames,), len(frames), now_s)

    def _take_back(self, attempt: SendAttempt, channel: Channel, error: Exception) -> NoReturn:
        """Undo the start of an attempt whose frame cannot be made; raise a SendError."""
        channel.connection.cancel(attempt)
        attempt.release()  # not the broker's failure
        if isinstance(error, SendError):
            raise error
        raise UnwrittenError(f"its frame cannot be made: {error!r}") from error

    def _header(self, attempt: SendAttempt, target: SendTarget, opaque: int) -> bytes:
        request, queue = attempt.request, target.queue
        template = self._headers.templates.get((request.topic, request.batch, request.reply))
        if template is None:
            template = self._headers.template(
                request.topic, batch=request.batch, reply=request.reply
            )
        born_ms = request.born_ms or attempt.wall_ms
        hooks = self._client.rpc_hooks
        if not hooks and not request.oneway:
            return template.head(
                opaque, queue.queue_id, born_ms, request.properties, attempt.body_bytes,
                queue.broker_name, request.sys_flag, request.flag, attempt.body,
            )  # fmt: skip
        frame = template.frame(
            queue.queue_id, born_ms, request.properties, queue.broker_name, request.sys_flag,
            request.flag,
        )  # fmt: skip
        frame.flag = ONEWAY_FLAG if request.oneway else 0
        if hooks:
            frame.body = b"".join(attempt.body)
            frame = attempt.hooked = hooks.before(target.address, frame)
        return template.head_of(frame, opaque, attempt.body_bytes, attempt.body)

    # --- checks of the broker ----------------------------------------------------------------

    def _is_new_enough(self, attempt: SendAttempt, now_s: float) -> bool:
        """Return True if the broker supports the request; False while its version is unknown.
        Raise BrokerTooOldError if the broker is too old."""
        request, address, heartbeats = attempt.request, attempt.address, self._heartbeats
        # After a reconnection, another broker may be at the address.
        version = self._client.channel(address, now_s).peer_version
        if version is None:
            frame, learn = heartbeats.frame(), partial(heartbeats.learn_version, address)
            self._questions.ask(address, address, frame, learn, attempt.ready_s, now_s)
            return False
        if version >= request.least_version:
            return True
        name = version_name(version)
        raise BrokerTooOldError(
            f"broker {attempt.home} ({address}) is RocketMQ {name} and would "
            f"{_IGNORED[request.least_version]}, or a newer broker",
            topic=request.topic, broker_name=attempt.home, broker_address=address,
            broker_version=name,
        )  # fmt: skip

    def _may_lack_keys(self, attempt: SendAttempt, target: SendTarget, now_s: float) -> bool:
        """Return whether the topic takes messages without keys; False while that is unknown. Raise
        MessageIllegalError if the topic wants keys: the broker checks no batch, but refuses such a
        single message. The engine's user then sends the messages one by one."""
        topic = attempt.request.topic
        wants_keys = self._questions.wants_keys(topic, target, attempt.ready_s, now_s)
        if wants_keys:
            raise MessageIllegalError(
                f"topic {topic!r} on {target.home} has cleanup.policy=COMPACTION, where a message "
                "without keys is lost: fill the column keys (Message.keys)",
                topic=topic, broker_name=target.home, broker_address=target.address,
                response_code=int(ResponseCode.MESSAGE_ILLEGAL),
                remark="Required message key is missing",
            )  # fmt: skip
        return wants_keys is not None

    def _out_of_time(self, attempt: SendAttempt) -> SendError:
        """Return the previous attempt's error, or one that says what this attempt waited for."""
        if attempt.history is not None and attempt.history.last_error is not None:
            # Copy the error for each message, because callers add facts to it.
            return attempt.history.last_error.copy()
        if attempt.waits is Wait.TURN:
            return UnwrittenError("its turn in the queue did not come")
        if attempt.waits is Wait.BROKER:
            who = f"broker {attempt.home} is" if attempt.home else "the brokers of its topic are"
            return UnwrittenError(f"{who} busy: no place came free there in time")
        if attempt.waits is Wait.VERSION or attempt.waits is Wait.POLICY:
            return UnwrittenError(f"{attempt.address} did not tell {attempt.waits.value} in time")
        error = self._routes.error(attempt.request.topic)
        return error.copy() if error else UnwrittenError("no time was left")
