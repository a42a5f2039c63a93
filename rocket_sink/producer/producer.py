"""The public producer, usable without Spark; in step with Java's DefaultMQProducer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from rocket_sink.errors import (
    ConfigurationError,
    MessageIllegalError,
    NotSentError,
    SendError,
)
from rocket_sink.message import Message, MessageQueue, SendResult
from rocket_sink.producer.compose import Part
from rocket_sink.producer.oneway import send_oneway
from rocket_sink.producer.request_reply import Requests
from rocket_sink.producer.send_future import Callback, SendFuture
from rocket_sink.producer.ticket import Ticket
from rocket_sink.producer.transactions import TransactionSends
from rocket_sink.producer.values import SendRequest
from rocket_sink.routing.choice import select_by
from rocket_sink.routing.keyed import owner, place
from rocket_sink.routing.publish import PublishInfo

Selector = Callable[[Sequence[MessageQueue], Message, Any], MessageQueue | None]


class Producer(TransactionSends, Requests):
    """Sends messages; thread-safe; a context manager.

    A synchronous caller drives the connections himself; `send_async` starts a thread that does.
    From the first send on a sleeping daemon thread sends heartbeats while nobody sends
    (`heartbeatBrokerInterval`), so that brokers go on listing the producer group. A forked child
    connects anew, under another client id and with other message ids.

    A message with a sharding key goes to the queue that owns the key (`shardingHash`). With
    `ordering=strict` the key never moves; with `best_effort` it moves while its broker is
    isolated; with `none` it moves, too, but one queue has many requests in flight, as in Java.

    Args:
        options: parsed options, or give them by name (`nameServer=...`).
    """

    # --- send modes --------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Send and wait; tried again on other brokers as the options say.

        `queue` and `selector` (called with all queues, the message and `arg`) fix the queue: all
        attempts go there.

        Raises:
            MessageError: the message is not acceptable; nothing was sent.
            SendError: NotSentError, RejectedError or UnknownOutcomeError.
        """
        request = self._request(message, queue, selector, arg, timeout_ms)
        return self._result(self._wait(request, (message,)))

    def send_async(
        self,
        message: Message,
        callback: Callback | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
    ) -> Future[SendResult]:
        """Send without waiting for the answer; blocks only while the window is full.

        The callback gets (result, None) or (None, error); it runs on the producer's thread.

        Raises:
            MessageError, WindowFullError, ProducerClosedError; all else is in the future.
        """
        plain = queue is None and selector is None and timeout_ms is None
        if plain and self._gatherer is not None and self._gatherer.takes(message):
            return self._gather(message, callback)
        request = self._request(message, queue, selector, arg, timeout_ms)
        context = None
        if self._hooks:
            ids = (request.message_id,)
            context = self._hooks.before("async", request.topic, (message,), ids)
        future = SendFuture(self._hooks, context, callback)
        self._driver.start_thread()
        try:
            self._driver.post(request, future, self._deadline_s(request))
        except NotSentError as error:
            self._hooks.ended(context, None, error)
            raise
        return future

    def _gather(self, message: Message, callback: Callback | None) -> Future[SendResult]:
        self._check_open()
        assert self._gatherer is not None
        message_id, encoded = self._composer.encoded(message)
        context = None
        if self._hooks:
            topic = self._composer.topic(message.topic)
            context = self._hooks.before("async", topic, (message,), (message_id,))
        future = SendFuture(self._hooks, context, callback)
        self._gatherer.add(message, message_id, encoded, future)
        return future

    def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        arg: Any = None,
    ) -> None:
        """Send without an answer: at most once, and nobody tells whether.

        The queue is chosen as for `send`. Returns when the frame has gone to the kernel.

        Raises:
            NotSentError: it could not be sent (Java 5.x loses it silently here).
        """
        request = self._request(message, queue, selector, arg, None)
        context = self._hooks.before("oneway", request.topic, (message,), (request.message_id,))
        try:
            send_oneway(self._driver, request, self._timeout_s)
        except NotSentError as error:
            self._hooks.ended(context, None, error)
            raise
        self._hooks.ended(context, None, None)

    def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> list[SendResult]:
        """Send messages of one topic in as few requests as `maxMessageSize` allows.

        One result per request, in order. A request that the broker refuses as too big is sent
        again in halves, under the same message ids, so that only the guilty message fails.

        Raises:
            MessageError: INVALID_BATCH and of single messages; nothing was sent.
            SendError: the first one; facts: `results`, those that were stored.
        """
        self._check_open()
        return self._send_parts(list(self._composer.batches(messages, queue)), timeout_ms)

    def _send_parts(
        self, parts: Sequence[Part], timeout_ms: int | None, *, in_turn: bool = False
    ) -> list[SendResult]:
        begun: Iterable[Ticket | NotSentError] = (self._begin(part, timeout_ms) for part in parts)
        if not in_turn:
            begun = list(begun)
        results: list[SendResult] = []
        failure: BaseException | None = None
        for part, ticket in zip(parts, begun, strict=True):
            try:
                results += self._batch_results(part, ticket, timeout_ms)
            except SendError as error:
                results += error.facts.get("results", ())
                failure = failure or error
        if failure is not None:
            failure.facts["results"] = failure.results = results  # type: ignore[attr-defined]
            raise failure
        return results

    def _begin(self, part: Part, timeout_ms: int | None) -> Ticket | NotSentError:
        """Submit it; the error if that failed, as others are on their way already."""
        request, context = part.request, None
        request.timeout_s = self._given_s(timeout_ms)
        ticket = Ticket()
        if self._hooks:
            ids = tuple(request.message_id.split(","))
            context = self._hooks.before("batch", request.topic, part.messages, ids)
            ticket = Ticket(lambda completion: self._hooks.after(context, completion))
        try:
            self._driver.submit(request, ticket, self._deadline_s(request))
        except NotSentError as error:
            self._hooks.ended(context, None, error)
            return error
        return ticket

    def _batch_results(
        self, part: Part, ticket: Ticket | NotSentError, timeout_ms: int | None
    ) -> list[SendResult]:
        if isinstance(ticket, NotSentError):
            raise ticket
        completion = self._driver.wait(ticket)
        if part.request.batch and isinstance(completion.error, MessageIllegalError):
            return self._send_parts(self._composer.halves(part), timeout_ms, in_turn=True)
        return [self._result(completion)]

    def fetch_publish_message_queues(self, topic: str) -> list[MessageQueue]:
        """The topic's writable queues.

        Raises:
            NoRouteError, NameServerUnavailableError
        """
        return list(self._info(self._composer.topic(topic)).queues)

    # --- inside ------------------------------------------------------------------------------

    def _request(
        self,
        message: Message,
        queue: MessageQueue | None,
        selector: Selector | None,
        arg: Any,
        timeout_ms: int | None,
    ) -> SendRequest:
        self._check_open()
        if queue is not None and selector is not None:
            raise ConfigurationError("give a queue or a selector, not both")
        request = self._composer.single(message)
        request.timeout_s = self._given_s(timeout_ms)
        if selector is not None:
            queue = select_by(selector, self._info(request.topic), message, arg)
        if queue is not None:
            request.queue = self._composer.queue(queue)
        elif message.sharding_key is not None:
            self._shard(request, message.sharding_key)
        return request

    def _shard(self, request: SendRequest, key: str) -> None:
        if self.options.ordering == "strict":
            request.queue = owner(self._info(request.topic), key, self._sharding_hash)
            request.ordered = True
            return

        def choose(info: PublishInfo, available: Callable[[str], bool]) -> MessageQueue | None:
            return place(info, owner(info, key, self._sharding_hash), available)

        request.choose = choose
        request.ordered = self.options.ordering == "best_effort"
