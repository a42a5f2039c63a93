"""What all of the public producer's send modes stand on: engine, driver, composer, life cycle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.errors import (
    ConfigurationError,
    NotSentError,
    ProducerClosedError,
    ProtocolError,
)
from rocket_sink.forks import ForkLock
from rocket_sink.message import Message, SendResult
from rocket_sink.net import log
from rocket_sink.net.link import Link
from rocket_sink.net.rpc_hooks import RpcHook, RpcHooks
from rocket_sink.options import SinkOptions
from rocket_sink.producer.compose import Composer
from rocket_sink.producer.credentials import CredentialsProvider
from rocket_sink.producer.driver import Driver
from rocket_sink.producer.engine import SendEngine
from rocket_sink.producer.gathering import Gatherer
from rocket_sink.producer.hooks import Hooks, SendHook
from rocket_sink.producer.shared import SharedHealth
from rocket_sink.producer.ticket import Ticket
from rocket_sink.producer.tracing import Tracer
from rocket_sink.producer.values import BrokerHealth, Completion, SendRequest
from rocket_sink.routing.fault import Isolation
from rocket_sink.routing.publish import PublishInfo
from rocket_sink.wire.frame import Frame
from rocket_sink.wire.namespace import with_namespace

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG: Final = log.logger(__name__)


class ProducerBase:
    """See the module. `_handlers` serve the brokers' own requests, by code: each is called under
    the driver's lock on the leading thread, and must not block."""

    def __init__(
        self,
        options: SinkOptions | None = None,
        *,
        credentials: CredentialsProvider | None = None,
        **more: Any,
    ) -> None:
        """Raises OptionError; connects to nobody yet."""
        if options is not None and more:
            options = options.with_(**more)
        self.options = options if options is not None else SinkOptions.parse(more)
        self._renewing = ForkLock()
        self._closed = False
        self._credentials = credentials
        self._group = with_namespace(self.options.namespace, self.options.producer_group)
        self._hooks = Hooks(self._group)
        self._rpc_hooks = RpcHooks()
        self._handlers: dict[int, Callable[[Link, Frame], None]] = {}
        self.tracer: Tracer | None = None
        self._start()

    def _start(self) -> None:
        """Make what is this process's own, with all its locks: at first, and after a fork."""
        engine = SendEngine(
            self.options,
            shared=SharedHealth.in_process(),
            record_attempts=False,
            credentials=self._credentials,
        )
        engine.pump.rpc_hooks = self._rpc_hooks
        try:
            engine.identity.claim()
        except ConfigurationError:
            engine.close()
            raise
        self._id_lock = threading.Lock()
        self._engine = engine
        self._driver = Driver(self._engine)
        self._composer = Composer(self.options, self._new_id, self._new_ids)
        self._timeout_s = self.options.send_msg_timeout_ms / 1000
        self._sharding_hash = self.options.sharding_hash
        self._engine.on_request = self._serve
        self._gatherer: Gatherer | None = None
        if self.options.auto_batch:
            self._gatherer = Gatherer(
                self.options,
                self._composer,
                self._submit_called,
                self._driver.attend,
                self._engine.clock,
            )
            self._driver.chores.add(self._gatherer)
        if self.options.enable_trace:
            self._trace()

    def _submit_called(self, request: SendRequest, ended: Callable[[Completion], None]) -> None:
        self._driver.start_thread()
        self._driver.post(request, Ticket(ended), self._deadline_s(request))

    def _trace(self) -> None:
        options = self.options
        tracer = Tracer(
            options.trace_topic,
            self._group,
            self._send_trace,
            self._driver.attend,
            self._engine.clock,
        )
        self._hooks.replace(self.tracer, tracer)
        self.tracer = tracer
        self._driver.chores.add(tracer)

    def _send_trace(self, message: Message) -> None:
        def ended(completion: Completion) -> None:
            if completion.error is not None and self.tracer is not None:
                self.tracer.lost(completion.error)

        self._submit_called(self._composer.single(message), ended)

    def _serve(self, link: Link, frame: Frame) -> bool:
        """A broker's request; what it does wrong must not end the connection."""
        handler = self._handlers.get(frame.code)
        if handler is None:
            return False
        try:
            handler(link, frame)
        except ProtocolError as error:
            _LOG.warning(
                "%s sent an unreadable request %d: %s",
                link.address,
                frame.code,
                error,
                extra={"peer": link.address},
            )
        return True

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._engine.pending} pending"
        return f"<Producer {self.options.producer_group} at {self.options.name_server}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for what is in flight, unregister, close. Closing twice is nothing."""
        if self._closed:
            return
        self._closed = True
        if self._engine.identity.of_pid == os.getpid():
            self._driver.close(timeout_s)
            self._engine.identity.release()
            log.flush()

    def add_hook(self, hook: SendHook) -> None:
        """Call the hook before and after every send from now on."""
        self._hooks.add(hook)

    def add_rpc_hook(self, hook: RpcHook) -> None:
        """Call the hook around every request of any kind from now on (Java: RPCHook)."""
        self._rpc_hooks.add(hook)

    def broker_health(self) -> list[BrokerHealth]:
        """What is known of each broker now: is it avoided, for how long, how quick is it."""
        self._renew_after_fork()
        with self._driver.lock:
            return self._engine.brokers.health(self._engine.clock())

    def isolations(self) -> list[Isolation]:
        """Which brokers (or topics on them) came to be avoided since the last call, and why.

        Times are seconds of `time.monotonic`. At most the last 10,000 events are kept.
        """
        self._renew_after_fork()
        with self._driver.lock:
            return self._engine.isolations()

    # --- inside ------------------------------------------------------------------------------

    def _stay_reachable(self) -> None:
        """Brokers may have something to ask or to tell, at any time."""
        if not self._engine.stays_connected:
            self._engine.stays_connected = True
            self._engine.errands.look_now()
        self._driver.start_thread()

    def _check_open(self) -> None:
        if self._closed:
            raise ProducerClosedError("the producer is closed")
        self._renew_after_fork()
        self._driver.keeper.start()

    def _renew_after_fork(self) -> None:
        """The connections are the parent's, and so are the locks' owners."""
        if self._engine.identity.of_pid == os.getpid():
            return
        with self._renewing:
            if self._engine.identity.of_pid != os.getpid():
                self._engine.abandon()
                self._start()

    def _new_id(self) -> str:
        with self._id_lock:
            return self._engine.identity.message_id()

    def _new_ids(self, count: int) -> list[str]:
        with self._id_lock:
            return self._engine.identity.message_ids(count)

    def _info(self, topic: str) -> PublishInfo:
        """The route, driven through the shared driver."""
        found: list[PublishInfo] = []
        deadline_s = self._engine.clock() + self._timeout_s

        def step() -> bool:
            info = self._engine.known_route(topic, deadline_s)
            if info is not None:
                found.append(info)
            return info is not None

        self._driver.call(step)
        return found[0]

    def _given_s(self, timeout_ms: int | None) -> float | None:
        return None if timeout_ms is None else timeout_ms / 1000

    def _deadline_s(self, request: SendRequest) -> float:
        return self._engine.clock() + (request.timeout_s or self._timeout_s)

    def _wait(
        self, request: SendRequest, messages: Sequence[Message] = (), mode: str = "sync"
    ) -> Completion:
        """Submit and wait; the hooks hear of `messages`."""
        context = None
        if self._hooks and messages:
            ids = tuple(request.message_id.split(","))
            context = self._hooks.before(mode, request.topic, messages, ids)
        ticket = Ticket()
        try:
            self._driver.submit(request, ticket, self._deadline_s(request))
        except NotSentError as error:
            self._hooks.ended(context, None, error)
            raise
        completion = self._driver.wait(ticket)
        if context is not None:
            self._hooks.after(context, completion)
        return completion

    def _result(self, completion: Completion) -> SendResult:
        if completion.result is None:
            assert completion.error is not None
            raise completion.error
        return completion.result
