"""Request-reply, and recall of timed messages.

Replies come from no queue: the broker that gets a reply pushes it to the requester. So the
requester must be connected to the broker, and have sent it a heartbeat: `request` connects to the
brokers of all known routes, keeps the connections, and starts the producer's thread."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final, cast

from rocket_sink.errors import NoRouteError, ReplyTimeoutError
from rocket_sink.message import Message, MessageQueue, SendResult
from rocket_sink.message_rules import check_topic
from rocket_sink.net import log
from rocket_sink.net.channel import Channel
from rocket_sink.producer.driver import Driver
from rocket_sink.producer.request_builder import RequestBuilder
from rocket_sink.producer.worker import Waiter
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.routing.topic_publish_info import TopicCache
from rocket_sink.wire import requests
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.ids import decode_recall_handle
from rocket_sink.wire.properties import CORRELATION_ID, REPLY_TO_CLIENT, TTL
from rocket_sink.wire.responses import PushedReply, decode_pushed_reply, reply_address, text_field
from rocket_sink.wire.stored import StoredMessage

_LOG: Final = log.logger(__name__)
_ANNOUNCE_S: Final = 0.5
"""Longest wait for connections to all brokers, because a broker may be down."""


class RequestReply:
    """Requests, replies and recalls of one client."""

    def __init__(self, driver: Driver, builder: RequestBuilder) -> None:
        self._driver = driver
        self._builder = builder
        self._waiting: dict[str, Waiter] = {}
        """Several threads use this without a lock, so each use is one atomic operation."""
        self._connected_topics: TopicCache[str, None] = TopicCache()
        self.late_replies = 0

    def request(
        self, message: Message, timeout_s: float, queue: MessageQueue | None
    ) -> PushedReply:
        deadline_s = self._driver.engine.clock() + timeout_s
        self.connect_all(self._builder.topic(message.topic), deadline_s)
        correlation_id = str(uuid.uuid4())
        extra = {
            CORRELATION_ID: correlation_id,
            REPLY_TO_CLIENT: self._driver.engine.identity.client_id,
            TTL: str(int(timeout_s * 1000)),
        }
        request = self._builder.single(message, extra)
        request.queue = None if queue is None else self._builder.queue(queue)
        request.timeout_s = max(0.001, deadline_s - self._driver.engine.clock())
        reply = self._waiting[correlation_id] = Waiter()
        try:
            sent = self._driver.send(request, (message,), "request")
            if not reply.wait(deadline_s - self._driver.engine.clock()):
                raise ReplyTimeoutError(
                    f"no reply within {timeout_s} s to the request {sent.message_id} on "
                    f"{sent.queue}",
                    message_id=sent.message_id,
                    correlation_id=correlation_id,
                )
            return cast(PushedReply, reply.value)
        finally:
            self._waiting.pop(correlation_id, None)

    def reply(
        self, request: StoredMessage | Mapping[str, str], body: bytes, **fields: Any
    ) -> SendResult:
        properties = request.properties if isinstance(request, StoredMessage) else request
        topic, extra = reply_address(properties)
        message = Message(topic, body, **fields)
        reply = self._builder.single(message, extra)
        # The reply topic belongs to the cluster, and has no namespace.
        reply.topic, reply.reply = topic, True
        return self._driver.send(reply, (message,), "reply")

    def recall(self, topic: str, recall_handle: str) -> str:
        check_topic(topic)
        handle = decode_recall_handle(recall_handle)
        name, topic = handle.broker_name, self._builder.topic(topic)
        info = self._driver.publish_info(topic)
        address = info.masters.get(name) or self._driver.engine.routes.addresses().get(name)
        if address is None:
            raise NoRouteError(f"broker {name} of the recall handle has no master", topic=topic)
        frame = requests.recall_message(
            producer_group=self._driver.engine.identity.group,
            topic=topic,
            recall_handle=recall_handle,
            broker_name=name,
        )
        answer = self._driver.invoke(address, frame)
        remark = answer.remark
        if answer.code == ResponseCode.NO_PERMISSION and "operation is forbidden" in (remark or ""):
            remark = (
                f"{remark}; a broker recalls messages only with recallMessageEnable=true in its "
                "configuration (false by default)"
            )
        error = error_for_answer(
            answer.code, remark, topic=topic, broker_name=name, broker_address=address
        )
        if error is not None:
            raise error
        return text_field(answer, "msgId")

    def connect_all(self, topic: str, deadline_s: float) -> None:
        """Connect and send heartbeats to all known brokers before the first request to a topic."""
        engine = self._driver.engine
        self._driver.publish_info(topic, timeout_s=max(0.001, deadline_s - engine.clock()))
        if topic in self._connected_topics:
            return
        until_s = min(deadline_s, engine.clock() + _ANNOUNCE_S)
        self._driver.stay_connected(until_s)
        self._connected_topics[topic] = None

    def take_reply(self, channel: Channel, frame: Frame) -> None:
        reply = decode_pushed_reply(frame)
        waiting = self._waiting.pop(reply.correlation_id, None)
        self._driver.engine.client.respond(channel, frame, ResponseCode.SUCCESS)
        if waiting is None:
            self.late_replies += 1
            text = "a reply to the unknown request %s is dropped"
            log.about(channel.address, _LOG).warning(text, reply.correlation_id)
        else:
            waiting.finish(reply)
