"""The parts of a producer that belong to one process: engine, driver, locks, batches.

A forked child makes a new session. It must not use its parent's connections. The inherited locks
may have been held during the fork. The child has its own client id, which brokers must learn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rocket_sink.errors import ConfigurationError, ProtocolError
from rocket_sink.net import log
from rocket_sink.net.channel import Channel
from rocket_sink.net.hooks import RpcHooks
from rocket_sink.options import SinkOptions
from rocket_sink.producer.accumulator import BatchAccumulator
from rocket_sink.producer.driver import Driver
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.headers import CredentialsProvider
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.producer.hooks import Hooks
from rocket_sink.producer.process_end import finish_at_end
from rocket_sink.producer.request_builder import RequestBuilder
from rocket_sink.producer.request_reply import RequestReply
from rocket_sink.producer.tracing import Tracer
from rocket_sink.producer.transactions import TransactionClient, TransactionListener
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.headers import Frame

_LOG: Final = log.logger(__name__)


class ClientSession:
    """The parts of a producer in one process (`of_pid`). The producer adds `tracer` to its hooks.

    Without `autoBatch` there is no accumulator, and without `enableTrace` no tracer.
    """

    def __init__(
        self,
        options: SinkOptions,
        *,
        hooks: Hooks,
        rpc_hooks: RpcHooks,
        credentials: CredentialsProvider | None,
        listener: Callable[[], TransactionListener | None],
    ) -> None:
        """Make the parts, without connecting; raises OptionError or ConfigurationError."""
        self.engine = engine = SendEngine(
            options,
            shared=SharedBrokerState.in_process(),
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
        self.builder = builder = RequestBuilder(options, identity.message_ids)
        self.transactions = TransactionClient(identity.group, driver, builder, hooks, listener)
        self.request_reply = RequestReply(driver, builder)
        self.accumulator: BatchAccumulator | None = None
        if options.auto_batch:
            self.accumulator = BatchAccumulator(options, builder, driver)
            driver.add_task(self.accumulator)
        self.tracer: Tracer | None = None
        if options.enable_trace:
            self.tracer = Tracer(options, builder, driver)
            driver.add_task(self.tracer)
        finish_at_end(self)

    def finish(self) -> None:
        """Send all accepted messages at the end of the process."""
        self.driver.finish()

    def _serve(self, channel: Channel, frame: Frame) -> bool:
        """Serve a broker's request; return False if its code is unknown.

        The driving thread calls this under the driver's lock, so it must not block.
        """
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
