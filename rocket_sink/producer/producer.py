"""The public producer, usable without Spark; it has the functions of Java's DefaultMQProducer."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from rocket_sink import forks
from rocket_sink.errors import (
    ConfigurationError,
    MessageIllegalError,
    NotSentError,
    ProducerClosedError,
    ProtocolError,
    RequestTimeoutError,
    SendError,
)
from rocket_sink.forks import ForkLock
from rocket_sink.message import Message, MessageQueue, SendResult
from rocket_sink.message_rules import with_namespace
from rocket_sink.net import log
from rocket_sink.net.channel import Channel
from rocket_sink.net.hooks import RpcHook, RpcHooks
from rocket_sink.net.identity import local_ip, new_message_ids
from rocket_sink.options import SinkOptions, constructor_options
from rocket_sink.producer.accumulator import BatchAccumulator
from rocket_sink.producer.driver import Driver, result_of
from rocket_sink.producer.engine.attempt import Completion, SendRequest
from rocket_sink.producer.engine.brokers import BrokerHealth
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.headers import CredentialsProvider
from rocket_sink.producer.future import Callback, SendFuture
from rocket_sink.producer.hooks import Hooks, SendContext, SendHook
from rocket_sink.producer.process_end import finish_at_end
from rocket_sink.producer.request_builder import (
    Part,
    RequestBuilder,
    with_message_id,
    with_trace_context,
)
from rocket_sink.producer.request_reply import RequestReply
from rocket_sink.producer.tracing import Tracer
from rocket_sink.producer.transactions import (
    Execute,
    TransactionClient,
    TransactionListener,
    TransactionResult,
)
from rocket_sink.producer.worker import Waiter
from rocket_sink.routing.fault import Isolation
from rocket_sink.routing.selectors import select_by
from rocket_sink.routing.sharding import LITE_TOPIC_HASH, fallback_queue, queue_for_key
from rocket_sink.routing.topic_publish_info import TopicCache, TopicPublishInfo
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.responses import PushedReply
from rocket_sink.wire.stored import StoredMessage

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG: Final = log.logger(__name__)
Selector = Callable[[Sequence[MessageQueue], Message, Any], MessageQueue | None]


class Producer:
    """Sends messages; thread-safe; a context manager.

    The first use starts a daemon thread, which sends all messages, and heartbeats
    (`heartbeatBrokerInterval`); callbacks run on a second one. All methods may be called by any
    thread, by callbacks and by signal handlers. Ctrl-C interrupts a wait, not a send. A forked
    child opens its own connections, with another client id (its pid is appended to `instanceName`)
    and other message ids.

    `send`, `send_async` and `send_oneway` put a message with a sharding key into the queue of the
    key (`shardingHash`). Batches, transactions and requests ignore the key. With `ordering=strict`
    the queues of keys do not change while a broker is missing: the messages of its keys wait. If
    the broker never comes back, only a new `Producer` gives its keys other queues. With
    `best_effort` a key uses another queue while its broker is isolated. `none` is like
    `best_effort`, but a queue may have many requests in flight, as in Java.

    Args:
        options: parsed options; alternatively, pass them by name (`nameServer=...`).
        credentials: a function that returns the credentials; None: take them from the options.
        transaction_listener: see `on_transaction_check`.
    """

    def __init__(
        self,
        options: SinkOptions | None = None,
        *,
        transaction_listener: TransactionListener | None = None,
        credentials: CredentialsProvider | None = None,
        **more: Any,
    ) -> None:
        """Make the producer; raises OptionError. It connects to no server yet."""
        self.options = constructor_options(options, more)
        self.on_transaction_check = transaction_listener
        """A function that gets the half message of a transaction check, and returns the state of
        the transaction. It runs on a thread of its own, one check at a time. An exception counts as
        UNKNOWN, so the broker checks again (see `producer.transactions`)."""
        self._credentials = credentials
        self._renewing = ForkLock()
        self._closed = False
        self._hooks = Hooks(with_namespace(self.options.namespace, self.options.producer_group))
        self._rpc_hooks = RpcHooks()
        self._placed: TopicCache[str, TopicPublishInfo] = TopicCache()
        """{topic: the route by which strict ordering gives keys queues} (`_route_of_keys`)"""
        self._session = self._new_session(None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._session.engine.pending} pending"
        return f"<Producer {self.options.producer_group} at {self.options.name_server}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def flush(self, timeout_s: float | None = None) -> None:
        """Send open batches at once, and wait until the messages of all earlier `send_async` calls
        have ended, and their callbacks have returned. Called by a callback, it does not wait for
        callbacks. Look at the futures for errors of single messages.

        Raises:
            RequestTimeoutError: some messages or callbacks have not ended after `timeout_s` (None:
                no limit). They go on.
        """
        session = self._current_session()
        if not session.driver.flush(timeout_s):
            raise RequestTimeoutError(
                f"flush: some messages, or their callbacks, have not ended after {timeout_s} s; "
                "they go on: look at the futures, or call flush again"
            )

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for pending requests and callbacks, at most `timeout_s` (None: no limit, but each
        request has a deadline); unregister, and close the connections. Called by a callback, it
        does not wait for callbacks."""
        if self._closed:
            return
        self._closed = True
        if self._session.of_pid == os.getpid():
            self._session.driver.close(timeout_s)
            log.flush()

    def __del__(self) -> None:
        session = self.__dict__.get("_session")
        if session is None or self._closed or session.of_pid != forks.pid:
            return
        session.driver.thread.abandon()
        warnings.warn(
            f"{self!r} was not closed: call close(), or use it in a with statement",
            ResourceWarning, stacklevel=2, source=self,
        )  # fmt: skip

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
        """Send a message and wait for the answer, with retries on other brokers.

        All attempts use `queue`, or the queue that `selector(queues, message, arg)` returns.

        Raises:
            MessageError: the message is illegal; nothing was sent.
            SendError: NotSentError, RejectedError or UnknownOutcomeError.
        """
        session, message = self._live_session(), with_trace_context(message)
        request = self._request(message, queue, selector, arg, timeout_ms)
        return session.driver.send(request, (message,), "sync")

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
        """Send a message without waiting for the answer.

        Blocks while the window is full. With a selector, or a sharding key in strict order, the
        first message of a topic also blocks during the look-up of its route. The callback gets
        (result, None) or (None, error). Callbacks run on a thread of their own, in the order in
        which the sends end, and may call everything.

        Raises:
            MessageError, WindowFullError, ProducerClosedError; other errors are in the future.
        """
        session, hooks, context = self._live_session(), self._hooks, None
        message, builder = with_trace_context(message), session.builder
        accumulator, request, size = session.accumulator, None, 0
        plain = queue is None and selector is None and timeout_ms is None
        if accumulator is not None and plain and accumulator.takes(message):
            size = builder.batch_bytes(message)
        else:
            accumulator = None
            try:
                request = self._request(message, queue, selector, arg, timeout_ms)
            except ProducerClosedError:
                raise
            except SendError as error:  # the look-up failed
                future = SendFuture(session.driver.workers, hooks, None, callback)
                future.resolve(None, error)
                return future
        if hooks.hooks:
            if request is None:
                message = with_message_id(message, builder.ids((message,))[0])
            ids = (request.message_id if request is not None else message.message_id or "",)
            context = hooks.before("async", builder.topic(message.topic), (message,), ids)
        driver = session.driver
        future = SendFuture(driver.workers, hooks, context, callback)
        try:
            if accumulator is not None:
                accumulator.add(message, size, future)
            elif request is not None:
                driver.submit(request, future)
        except NotSentError as error:
            # Do not call the callback, because the caller gets the error.
            future.refuse(error)
            raise
        # Append afterwards: an interrupted call leaves no future behind that nothing ends.
        driver.futures.append(future)
        driver.settle()
        return future

    def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        arg: Any = None,
    ) -> None:
        """Send a message at most once, without an answer; return when the frame is written.

        The queue is chosen as for `send`.

        Raises:
            NotSentError: the message could not be sent (Java 5.x loses it silently).
            RequestTimeoutError: the kernel took only a part of the frame before the time-out. The
                message may be stored.
        """
        session, message = self._live_session(), with_trace_context(message)
        request = self._request(message, queue, selector, arg, None)
        session.driver.send_oneway(request, (message,))

    def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> list[SendResult]:
        """Send messages of one topic in as few requests as `maxMessageSize` allows.

        Return one result per request, in order. If the broker refuses a request as illegal, parts
        of at most half its size are sent, and so on, with the same message ids. So only the illegal
        message fails. Later batches have no size that a broker of the topic has refused.

        Raises:
            MessageError: INVALID_BATCH, or a message is illegal; nothing was sent.
            SendError: the first error. Its fact `results` has the results of stored requests.
        """
        session = self._live_session()
        messages = [with_trace_context(message) for message in messages]
        parts = list(session.builder.batches(messages))
        for part in parts:
            part.request.queue = None if queue is None else session.builder.queue(queue)
            part.request.timeout_s = None if timeout_ms is None else timeout_ms / 1000
        return self._send_parts(parts)

    def fetch_publish_message_queues(self, topic: str) -> list[MessageQueue]:
        """Return the topic's writable queues.

        Raises:
            NoRouteError, NameServerUnavailableError
        """
        session = self._current_session()
        return list(session.driver.publish_info(session.builder.topic(topic)).queues)

    # --- transactions ------------------------------------------------------------------------

    def listen_for_checks(self, *topics: str) -> None:
        """Connect to the topics' brokers and answer their checks, without sending anything.

        Raises:
            NoRouteError, NameServerUnavailableError
        """
        self._live_session().transactions.listen_for_checks(topics)

    def send_in_transaction(
        self, message: Message, execute: Execute, arg: Any = None
    ) -> TransactionResult:
        """Send a half message, call `execute(message, arg)` when it is stored, commit or roll back.

        `execute` gets the message with its `message_id`, and returns the state of the transaction.
        If it raises, the result has the exception and the state UNKNOWN. Unlike Java's, this call
        waits until the broker has confirmed the commit or rollback. UNKNOWN is sent oneway, because
        brokers do not answer it. A half message that is stored degraded is rolled back.

        If the outcome of the half message is unknown, the error is raised, and `execute` is not
        called. A broker may check this transaction later; the listener has to answer ROLLBACK.

        Raises:
            MessageError: INVALID_DELAY (a half message has no delay, priority or lite topic), or as
                `send`; nothing was sent.
            SendError: the half message was not stored, or its outcome is unknown.
        """
        session = self._live_session()
        return session.transactions.send(with_trace_context(message), execute, arg)

    # --- requests, replies, recalls ----------------------------------------------------------

    def request(
        self, message: Message, timeout_s: float = 3.0, *, queue: MessageQueue | None = None
    ) -> PushedReply:
        """Send a message and wait for its consumer's reply.

        `timeout_s` limits the send and the wait together, and is the message's TTL.

        Raises:
            MessageError: nothing was sent.
            SendError: the request was not stored, or its outcome is unknown.
            ReplyTimeoutError: the request was stored, and no reply arrived in time.
        """
        session = self._live_session()
        return session.request_reply.request(with_trace_context(message), timeout_s, queue)

    def reply(
        self, request: StoredMessage | Mapping[str, str], body: bytes, **fields: Any
    ) -> SendResult:
        """Reply to a received request.

        `request` is the received message, or its properties. `fields` are further fields of the
        reply's `Message` (tags, keys, properties, flag). The call returns when a broker has pushed
        the reply to the requester. The requester may have stopped waiting by then (TTL).

        Raises:
            MessageError: NOT_A_REQUEST, or the reply is illegal; nothing was sent.
            SendError: the requester is not connected any more, or as `send`.
        """
        return self._live_session().request_reply.reply(request, body, **fields)

    def recall(self, topic: str, recall_handle: str) -> str:
        """Recall a timed message before its delivery; return the message's client id.

        The handle is in the SendResult of a message with `delay_ms` or `delivery_timestamp_ms`, if
        the broker has version 5.3.1 or later.

        Raises:
            MessageError: INVALID_TOPIC, INVALID_RECALL_HANDLE.
            SendError: the broker was not found, or the outcome is unknown, or the broker refused:
                the time has passed, or its recallMessageEnable is false (the default).
        """
        return self._live_session().request_reply.recall(topic, recall_handle)

    # --- hooks and broker state --------------------------------------------------------------

    def add_hook(self, hook: SendHook) -> None:
        """Call the hook before and after every send."""
        self._hooks.add(hook)

    def add_rpc_hook(self, hook: RpcHook) -> None:
        """Call the hook around every request (Java: RPCHook)."""
        self._rpc_hooks.append(hook)

    def broker_health(self) -> list[BrokerHealth]:
        """Return the present state of each broker: isolation and latency."""
        session = self._current_session()
        engine = session.engine
        return session.driver.read(lambda: engine.brokers.health(engine.clock()))

    def isolations(self) -> list[Isolation]:
        """Return the isolations of brokers, and of topics on brokers, since the last call.

        Times are seconds of `time.monotonic`. The last 10,000 events are kept."""
        session = self._current_session()
        return session.driver.read(session.engine.isolations)

    @property
    def late_replies(self) -> int:
        """Number of replies that arrived after the time-out of their request."""
        return self._session.request_reply.late_replies

    @property
    def tracer(self) -> Tracer | None:
        """The tracer, which counts lost traces; None without `traceSample`."""
        return self._session.tracer

    # --- sessions and requests ---------------------------------------------------------------

    def _live_session(self) -> ClientSession:
        """Return the session of this process, with heartbeats; raises ProducerClosedError."""
        if self._closed:
            raise ProducerClosedError("the producer is closed")
        session = self._session
        if session.of_pid != forks.pid:
            session = self._current_session()
        return session

    def _current_session(self) -> ClientSession:
        """Return the session of this process; make a new session after a fork."""
        if self._session.of_pid != os.getpid():
            with self._renewing:
                old = self._session
                if old.of_pid != os.getpid():
                    old.engine.abandon()
                    self._session = self._new_session(old.tracer)
        return self._session

    def _new_session(self, old_tracer: Tracer | None) -> ClientSession:
        this = weakref.ref(self)  # The session's thread must not keep the producer alive.
        session = ClientSession(
            self.options, self._hooks, self._rpc_hooks, self._credentials,
            lambda: None if (own := this()) is None else own.on_transaction_check,
        )  # fmt: skip
        if session.tracer is not None:
            self._hooks.add(session.tracer, instead_of=old_tracer)
        return session

    def _request(
        self,
        message: Message,
        queue: MessageQueue | None,
        selector: Selector | None,
        arg: Any,
        timeout_ms: int | None,
    ) -> SendRequest:
        if queue is not None and selector is not None:
            raise ConfigurationError("give a queue or a selector, not both")
        builder = self._session.builder
        request = builder.single(message)
        if timeout_ms is not None:
            request.timeout_s = timeout_ms / 1000
        if selector is not None:
            info = self._route_for(request)
            request.queue = select_by(selector, info, message, arg, builder.queue)
        elif queue is not None:
            request.queue = builder.queue(queue)
        elif message.lite_topic is not None:
            self._shard(request, message.lite_topic, LITE_TOPIC_HASH)
        elif message.sharding_key:
            self._shard(request, message.sharding_key, self.options.sharding_hash)
        return request

    def _route_for(self, request: SendRequest) -> TopicPublishInfo:
        """Return the route. The look-up counts for the request's time-out, as in Java."""
        driver = self._session.driver
        request.since_s = driver.engine.clock()
        try:
            # A known route needs no other thread; the send itself refreshes it.
            route = driver.engine.routes.peek(request.topic)
            return route or driver.publish_info(request.topic, timeout_s=request.timeout_s)
        except SendError as error:
            driver.engine.flow.measure_failure(request, error)
            raise

    def _route_of_keys(self, info: TopicPublishInfo) -> TopicPublishInfo:
        """Return the route that gives keys their queues in strict order. While a queue is missing,
        because its broker is down or takes no writes now, this is the last route that has the
        queue. So keys of missing queues wait, and other keys do not move."""
        route = self._placed.get(info.topic, info)
        if route is not info and any(info.index_of(queue) is None for queue in route.queues):
            return route
        self._placed[info.topic] = info
        return info

    def _shard(self, request: SendRequest, key: str, sharding_hash: str) -> None:
        ordering = self.options.ordering
        if ordering == "strict":
            info = self._route_of_keys(self._route_for(request))
            if request.timeout_s is None:
                request.since_s = 0.0  # `orderWaitMs` does not include the look-up.
            request.queue = queue_for_key(info, key, sharding_hash)
            request.ordered = True
            return

        def choose(info: TopicPublishInfo, available: Callable[[str], bool]) -> MessageQueue | None:
            return fallback_queue(info, queue_for_key(info, key, sharding_hash), available)

        request.choose = choose
        request.ordered = ordering == "best_effort"

    def _send_parts(
        self, parts: Sequence[Part], *, one_at_a_time: bool = False
    ) -> list[SendResult]:
        session = self._session
        begun: Iterable[tuple[Waiter, SendContext | None]] = map(self._begin, parts)
        if not one_at_a_time:
            begun = list(begun)
        results: list[SendResult] = []
        failure: SendError | None = None
        for part, (waiter, context) in zip(parts, begun, strict=True):
            completion = session.driver.completion(waiter)
            self._hooks.after(context, completion.result, completion.error)
            try:
                if part.request.batch and isinstance(completion.error, MessageIllegalError):
                    halves = session.builder.split(part)
                    results += self._send_parts(halves, one_at_a_time=True)
                else:
                    results.append(result_of(completion))
            except SendError as error:
                results += error.facts.get("results", ())
                failure = failure or error
        if failure is not None:
            failure.facts["results"] = failure.results = results  # type: ignore[attr-defined]
            raise failure
        return results

    def _begin(self, part: Part) -> tuple[Waiter, SendContext | None]:
        """Submit a part. Report an error in the waiter: other parts may be in flight."""
        request, hooks, context, waiter = part.request, self._hooks, None, Waiter()
        if hooks.hooks:
            context = hooks.before("batch", request.topic, part.messages, part.ids)
        try:
            self._session.driver.submit(request, waiter)
        except NotSentError as error:
            waiter.value = Completion(None, error.outcome, None, error)
        return waiter, context


class ClientSession:
    """The parts of a producer that belong to one process (`of_pid`). A forked child makes a new
    session, because it must not use its parent's connections, its inherited locks may have been
    held during the fork, and brokers must learn its own client id. Without `autoBatch` there is no
    accumulator, and without `traceSample` no tracer. The producer adds `tracer` to its hooks."""

    def __init__(
        self,
        options: SinkOptions,
        hooks: Hooks,
        rpc_hooks: RpcHooks,
        credentials: CredentialsProvider | None,
        listener: Callable[[], TransactionListener | None],
    ) -> None:
        """Make the parts, without connecting; raises OptionError or ConfigurationError."""
        self.engine = engine = SendEngine(
            options,
            record_attempts=False,
            credentials=credentials,
            on_request=self._serve,
            rpc_hooks=rpc_hooks,
        )
        identity = engine.identity
        try:
            identity.claim()
        except ConfigurationError:
            engine.close()
            raise
        self.of_pid = identity.of_pid
        self.driver = driver = Driver(engine, hooks)
        self.builder = builder = RequestBuilder(options, identity.message_ids, engine.batch_limit)
        self.transactions = TransactionClient(identity.group, driver, builder, hooks, listener)
        self.request_reply = RequestReply(driver, builder)
        own_builder = RequestBuilder(options, new_message_ids(local_ip()), engine.batch_limit)
        self.accumulator: BatchAccumulator | None = None
        if options.auto_batch:
            self.accumulator = BatchAccumulator(options, own_builder, driver)
            driver.thread.tasks.append(self.accumulator)
        self.tracer: Tracer | None = None
        if options.trace_sample:
            self.tracer = Tracer(options, own_builder, driver)
            driver.thread.tasks.append(self.tracer)
        finish_at_end(self)

    def finish(self) -> None:
        self.driver.finish()

    def _serve(self, channel: Channel, frame: Frame) -> bool:
        """Serve a broker's request; return False if its code is unknown. The driving thread calls
        this, so it must not block."""
        try:
            if frame.code == RequestCode.CHECK_TRANSACTION_STATE:
                self.transactions.take_check(channel, frame)
            elif frame.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
                self.request_reply.take_reply(channel, frame)
            else:
                return False
        except ProtocolError as error:
            text, peer = "%s sent an unreadable request %d: %s", channel.address
            log.about(peer, _LOG).warning(text, peer, frame.code, error)
        except Exception:
            # The error must not end the driving thread.
            text = "the request with code %d from %s was not served"
            _LOG.exception(text, frame.code, channel.address)
        return True
