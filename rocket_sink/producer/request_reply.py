"""Request-reply over two topics, and taking timed messages back.

A reply does not come through a queue: the replier's broker pushes it to the asking client, if that
is connected and has sent its heartbeat. So `request` connects to every broker of the known routes,
stays so, and needs the producer's thread. A reply that comes too late is dropped and counted.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

from rocket_sink.errors import NoRouteError, ReplyTimeoutError
from rocket_sink.message import Message, MessageQueue, SendResult
from rocket_sink.message_rules import check_topic
from rocket_sink.net import log
from rocket_sink.net.link import Link
from rocket_sink.producer.base import ProducerBase
from rocket_sink.routing.verdict import error_for_answer
from rocket_sink.wire import requests
from rocket_sink.wire.answers import decode_recall_answer
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.frame import Frame
from rocket_sink.wire.ids import decode_recall_handle
from rocket_sink.wire.peer import PushedReply, decode_pushed_reply, reply_address
from rocket_sink.wire.properties import CORRELATION_ID, REPLY_TO_CLIENT, TTL
from rocket_sink.wire.stored import StoredMessage

_LOG: Final = log.logger(__name__)
_GREETING_S: Final = 0.5
"""Longest wait for the connections to all brokers; a dead broker must not stop a request."""

_NOT_ENABLED: Final = (
    "a broker recalls messages only with recallMessageEnable=true in its configuration (false by "
    "default)"
)
"""RecallMessageProcessor says only that the operation is forbidden."""


class Requests(ProducerBase):
    """The side of `Producer` that asks for more than storing."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.late_replies = 0
        """Replies that nobody waited for any more."""
        self._handlers[RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT] = self._replied

    def _start(self) -> None:
        super()._start()
        self._asked: dict[str, Future[PushedReply]] = {}
        self._asked_lock = threading.Lock()
        self._introduced: set[str] = set()

    def request(
        self, message: Message, timeout_s: float = 3.0, *, queue: MessageQueue | None = None
    ) -> PushedReply:
        """Send a message and wait for the reply that its consumer sends.

        `timeout_s` is for both together, and travels with the message (TTL).

        Raises:
            MessageError: nothing was sent.
            SendError: the request was not stored, or nobody knows.
            ReplyTimeoutError: it was stored, and no reply came in time.
        """
        self._check_open()
        deadline_s = self._engine.clock() + timeout_s
        self._be_reachable(self._composer.topic(message.topic), deadline_s)
        correlation_id = str(uuid.uuid4())
        extra = {
            CORRELATION_ID: correlation_id,
            REPLY_TO_CLIENT: self._engine.identity.client_id,
            TTL: str(int(timeout_s * 1000)),
        }
        request = self._composer.single(message, extra)
        request.queue = None if queue is None else self._composer.queue(queue)
        request.timeout_s = max(0.001, deadline_s - self._engine.clock())
        reply: Future[PushedReply] = Future()
        with self._asked_lock:
            self._asked[correlation_id] = reply
        try:
            sent = self._result(self._wait(request, (message,), "request"))
            return reply.result(max(0.0, deadline_s - self._engine.clock()))
        except FutureTimeoutError:
            raise ReplyTimeoutError(
                f"no reply within {timeout_s} s to the request {sent.message_id} on {sent.queue}",
                message_id=sent.message_id,
                correlation_id=correlation_id,
            ) from None
        finally:
            with self._asked_lock:
                self._asked.pop(correlation_id, None)

    def reply(
        self, request: StoredMessage | Mapping[str, str], body: bytes, **fields: Any
    ) -> SendResult:
        """Answer a request that was received: the client that asked gets `body`.

        `request` is the message, or the properties that a consumer of any language got with it;
        `fields` are more of the reply's `Message` (tags, keys, properties, flag). Returns when a
        broker has pushed the reply to the client, which may have given up waiting (TTL).

        Raises:
            MessageError: NOT_A_REQUEST, or the reply is not acceptable; nothing was sent.
            SendError: the broker does not know the client any more, or as of `send`.
        """
        self._check_open()
        asked = request.properties if isinstance(request, StoredMessage) else request
        topic, extra = reply_address(asked)
        message = Message(topic, body, **fields)
        reply = self._composer.single(message, extra)
        reply.topic, reply.reply = topic, True  # the cluster's own topic: in no namespace
        return self._result(self._wait(reply, (message,), "reply"))

    def recall(self, topic: str, recall_handle: str) -> str:
        """Take a timed message back before its time; its client message id.

        The handle is in the SendResult of a message with `delay_ms` or `delivery_timestamp_ms`
        that a broker from 5.3.1 on stored.

        Raises:
            MessageError: INVALID_TOPIC, INVALID_RECALL_HANDLE.
            SendError: no broker for it, or the broker refused (the time has passed, or its
                recallMessageEnable is false, which is the default), or nobody knows.
        """
        self._check_open()
        check_topic(topic)
        handle = decode_recall_handle(recall_handle)
        name, topic = handle.broker_name, self._composer.topic(topic)
        info = self._info(topic)
        address = info.masters.get(name) or self._engine.routes.addresses().get(name)
        if address is None:
            raise NoRouteError(f"broker {name} of the recall handle has no master", topic=topic)
        frame = requests.recall_message(
            producer_group=self._group,
            topic=topic,
            recall_handle=recall_handle,
            broker_name=name,
        )
        answer = self._driver.invoke(address, frame, self._timeout_s)
        remark = answer.remark
        if answer.code == ResponseCode.NO_PERMISSION and "operation is forbidden" in (remark or ""):
            remark = f"{remark}; {_NOT_ENABLED}"
        error = error_for_answer(
            answer.code, remark, topic=topic, broker_name=name, broker_address=address
        )
        if error is not None:
            raise error
        return decode_recall_answer(answer)

    def _be_reachable(self, topic: str, deadline_s: float) -> None:
        """Heartbeats are on their way to all the topic's brokers before its first request is."""
        self._info(topic)
        self._stay_reachable()
        engine = self._engine
        if topic in self._introduced:
            return
        self._introduced.add(topic)
        engine.errands.look_now()
        until_s = min(deadline_s, engine.clock() + _GREETING_S)
        self._driver.call(lambda: engine.errands.all_greeted() or engine.clock() >= until_s)

    def _replied(self, link: Link, frame: Frame) -> None:
        reply = decode_pushed_reply(frame)
        with self._asked_lock:
            asked = self._asked.pop(reply.correlation_id, None)
        self._engine.pump.respond(link, frame, ResponseCode.SUCCESS)
        if asked is None:
            self.late_replies += 1
            _LOG.warning(
                "a reply to the unknown request %s is dropped",
                reply.correlation_id,
                extra={"peer": link.address},
            )
        else:
            asked.set_result(reply)
