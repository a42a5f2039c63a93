"""Oneway sends: at most once, without an answer; but a frame that cannot go is an error.

Java 5.x loses the message silently when the connection cannot be made; here the caller hears of it.
"""

from __future__ import annotations

import time

from rocket_sink.errors import (
    InvalidQueueError,
    NoRouteError,
    NotSentError,
    SendError,
    UnwrittenError,
    WindowFullError,
)
from rocket_sink.message import MessageQueue
from rocket_sink.net.link import Link
from rocket_sink.producer.driver import Driver
from rocket_sink.producer.engine import SendEngine
from rocket_sink.producer.outcomes import too_old
from rocket_sink.producer.values import SendRequest
from rocket_sink.producer.window import measured
from rocket_sink.routing.publish import PublishInfo
from rocket_sink.wire.requests import send_message_v2


def send_oneway(driver: Driver, request: SendRequest, timeout_s: float) -> None:
    """Returns when the frame has gone to the kernel.

    Raises:
        NotSentError: no route, no connection, a broker that would ignore what the message asks
            for, no room in the rate limits, or no byte taken before the time-out.
    """
    engine = driver.engine
    driver.call(_Oneway(engine, request, engine.clock() + timeout_s).step)


class _Oneway:
    """One message on its way: route, queue, version, write; `step` until it is gone."""

    def __init__(self, engine: SendEngine, request: SendRequest, deadline_s: float) -> None:
        self._engine = engine
        self._request = request
        self._deadline_s = deadline_s
        self._queue: MessageQueue | None = None
        self._address = ""
        self._link: Link | None = None
        self._asked = False
        self._untold: SendError | None = None

    def step(self) -> bool:
        """True when it is gone; called under the driver's lock."""
        now_s = self._engine.clock()
        if self._link is None:
            if self._queue is None and not self._place(now_s):
                return False
            if self._request.least_version and not self._is_new_enough(now_s):
                return False
            if not self._is_allowed(now_s):
                return False
            self._link = self._write(now_s)
        return self._has_gone(self._link, now_s)

    def _place(self, now_s: float) -> bool:
        engine, topic = self._engine, self._request.topic
        info = engine.known_route(topic, self._deadline_s)
        if info is None:
            return False
        queue = self._choose(info, now_s)
        if queue is None or info.index_of(queue) is None:
            raise InvalidQueueError(f"{queue} is not in the route", topic=topic)
        address = info.address_of(queue)
        if address is None:
            raise NoRouteError(f"broker {queue.broker_name} has no master", topic=topic)
        self._queue, self._address = queue, address
        return True

    def _choose(self, info: PublishInfo, now_s: float) -> MessageQueue | None:
        request = self._request
        if request.queue is not None:
            return request.queue
        if request.choose is not None:
            return request.choose(info, self._engine.available)
        return self._engine.select(info, now_s)

    def _is_new_enough(self, now_s: float) -> bool:
        engine, address = self._engine, self._address
        version = engine.brokers.versions.get(address)
        if version is None and not self._asked:
            self._asked = True
            engine.errands.introduce(address, self._introduced, self._deadline_s, now_s)
        if version is None and self._untold is not None:
            raise UnwrittenError(f"{address} did not tell its version: {self._untold}")
        if version is not None and version < self._request.least_version:
            assert self._queue is not None
            raise too_old(self._request.topic, self._queue.broker_name, address, version)
        return version is not None

    def _introduced(self, error: SendError | None, now_s: float) -> None:
        self._untold = error

    def _is_allowed(self, now_s: float) -> bool:
        engine, request = self._engine, self._request
        size = measured(request.body)[1]
        if engine.allows(request.message_count, size, now_s):
            engine.spend(request.message_count, size, now_s)
            return True
        if now_s >= self._deadline_s:
            raise WindowFullError(
                "the rate limits (options maxMessagesPerSecond, maxBytesPerSecond) left it no "
                "room in time",
                topic=request.topic,
            )
        return False

    def _write(self, now_s: float) -> Link:
        request, engine, queue = self._request, self._engine, self._queue
        assert queue is not None
        frame = send_message_v2(
            producer_group=engine.identity.group,
            topic=request.topic,
            queue_id=queue.queue_id,
            born_ms=time.time_ns() // 1_000_000,
            properties=request.properties,
            broker_name=queue.broker_name,
            body=b"".join(measured(request.body)[0]),
            sys_flag=request.sys_flag,
            flag=request.flag,
            default_topic=engine.options.create_topic_key,
            default_topic_queue_nums=engine.options.default_topic_queue_nums,
        )
        engine.pump.oneway(self._address, frame, now_s)
        link = engine.pump.peek(self._address)
        assert link is not None
        engine.pump.flush(link, now_s)
        return link

    def _has_gone(self, link: Link, now_s: float) -> bool:
        if isinstance(link.ended, NotSentError):
            raise type(link.ended)(str(link.ended), **link.ended.facts) from link.ended
        if link.ended is not None:
            raise UnwrittenError(f"the oneway message was not sent: {link.ended}")
        if link.is_open and not link.unwritten:
            return True
        if now_s >= self._deadline_s:
            raise UnwrittenError(f"{link.address} did not take the oneway message in time")
        return False
