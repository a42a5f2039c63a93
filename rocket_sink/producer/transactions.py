"""Transactional messages: half message, local transaction, commit or rollback, transaction checks.

In a check a broker asks for the state of an open transaction: by default first when the half
message is 6 s old (transactionTimeOut), then every 30 s (transactionCheckInterval). After 15 checks
(transactionCheckMax) the broker moves the message to TRANS_CHECK_MAX_TIME_TOPIC, and never delivers
it. Brokers send checks to any connected client of the producer group, so the listener may run in
another process than the sender. The commit stores the message with another queue offset."""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rocket_sink.errors import (
    DegradedError,
    InvalidAnswerError,
    MessageError,
    NotStoredError,
    Outcome,
    ProtocolError,
    RocketSinkError,
    SendError,
)
from rocket_sink.message import Message, SendResult
from rocket_sink.net import log
from rocket_sink.net.channel import Channel
from rocket_sink.producer.driver import Driver
from rocket_sink.producer.hooks import Hooks
from rocket_sink.producer.request_builder import RequestBuilder, with_message_id
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.text import clean
from rocket_sink.wire import requests
from rocket_sink.wire.codes import ResponseCode, SysFlag
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.ids import decode_offset_message_id
from rocket_sink.wire.properties import PGROUP, TRAN_MSG
from rocket_sink.wire.responses import TransactionCheck, decode_transaction_check
from rocket_sink.wire.stored import StoredMessage

_LOG: Final = log.logger(__name__)
_HELD_CHECKS: Final = 2000
"""Limit of waiting checks (Java: checkRequestHoldMax). Brokers repeat dropped checks."""
_REMARK_CHARS: Final = 1024
"""Limit of an exception's text in a remark, because brokers log remarks."""


class TransactionState(enum.Enum):
    """The state of a local transaction; the values are Java's names (LocalTransactionState)."""

    COMMIT = "COMMIT_MESSAGE"
    ROLLBACK = "ROLLBACK_MESSAGE"
    UNKNOWN = "UNKNOW"
    """The state is not known yet: the broker will check."""


COMMIT: Final = TransactionState.COMMIT
ROLLBACK: Final = TransactionState.ROLLBACK
UNKNOWN: Final = TransactionState.UNKNOWN
FLAGS: Final = {
    COMMIT: SysFlag.TRANSACTION_COMMIT,
    ROLLBACK: SysFlag.TRANSACTION_ROLLBACK,
    UNKNOWN: SysFlag.TRANSACTION_NOT,
}

Execute = Callable[[Message, Any], TransactionState | None]
TransactionListener = Callable[[StoredMessage], TransactionState | None]


@dataclass(frozen=True)
class TransactionResult:
    """The result of a half message and its transaction.

    Attributes:
        send_result: the result of the half message. Its queue offset is in the half topic.
        state: the result of `execute`. UNKNOWN if `execute` raised or returned None. ROLLBACK if
            the half message was stored degraded, so that `execute` was not called.
        local_error: the exception of `execute`.
        end_error: the error of END_TRANSACTION (the commit or rollback). A broker that did not get
            this request sends a check.
    """

    send_result: SendResult
    state: TransactionState
    local_error: BaseException | None = None
    end_error: SendError | None = None

    @property
    def transaction_id(self) -> str:
        """The client message id, by which the listener identifies the transaction."""
        return self.send_result.message_id

    @property
    def ended(self) -> bool:
        """Return whether the broker has confirmed the commit or the rollback."""
        return self.state is not UNKNOWN and self.end_error is None


@dataclass(eq=False, repr=False)
class TransactionClient:
    """The half messages and transaction checks of one client."""

    _group: str
    _driver: Driver
    _builder: RequestBuilder
    _hooks: Hooks
    _listener: Callable[[], TransactionListener | None]
    """Returns the user's listener, which may be set later."""
    _checks: queue.Queue[tuple[str, TransactionCheck]] | None = None

    def listen_for_checks(self, topics: tuple[str, ...]) -> None:
        """Connect to the topics' brokers to get their checks (`Producer.listen_for_checks`)."""
        for topic in topics:
            self._driver.publish_info(self._builder.topic(topic))
        self._driver.stay_connected()

    def send(self, message: Message, execute: Execute, arg: Any = None) -> TransactionResult:
        """Send a half message and end its transaction (`Producer.send_in_transaction`)."""
        if message.is_single:
            raise MessageError(
                "a transactional message has no delay, priority or lite topic: brokers drop them",
                code="INVALID_DELAY", topic=message.topic, keys=message.keys,
            )  # fmt: skip
        if self._listener() is not None:
            self._driver.stay_connected()
        request = self._builder.single(message, {TRAN_MSG: "true", PGROUP: self._group})
        request.timed = True  # half messages are never in a batch
        request.sys_flag |= SysFlag.TRANSACTION_PREPARED
        identified = with_message_id(message, request.message_id)
        try:
            half = self._driver.send(request, (message,), "transaction")
        except DegradedError as degraded:
            self._end(identified, degraded.facts["result"], ROLLBACK, None)
            raise
        state, failure = ROLLBACK, None
        if half.outcome is Outcome.ACKED:
            state, failure = _user_decision(
                lambda: execute(identified, arg),
                "the local transaction %s raised", identified.message_id,
            )  # fmt: skip
        error = self._end(identified, half, state, failure)
        return TransactionResult(half, state, failure, error)

    def _end(
        self,
        message: Message,
        half: SendResult,
        state: TransactionState,
        failure: BaseException | None,
    ) -> SendError | None:
        """Commit or roll back; return the error, if any."""
        name = half.queue.broker_name
        try:
            offset = decode_offset_message_id(half.offset_message_id)
        except ProtocolError as unreadable:
            return InvalidAnswerError(f"{name} stored a half message without id: {unreadable}")
        frame = requests.end_transaction(
            producer_group=self._group,
            topic=self._builder.topic(message.topic),
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=offset,
            commit_or_rollback=FLAGS[state],
            msg_id=half.message_id,
            transaction_id=half.transaction_id,
            broker_name=name,
            remark=_remark("executing the local transaction", failure),
        )
        address = self._driver.engine.routes.addresses().get(name, half.broker_address)
        error = self._send_end(message, half.transaction_id, address, frame, state)
        if error is not None:
            text = "%s of transaction %s at %s failed: %s"
            log.about(address, _LOG).warning(text, state.name, half.message_id, name, error)
        return error

    def _send_end(
        self,
        message: Message | StoredMessage,
        transaction_id: str | None,
        address: str,
        frame: Frame,
        state: TransactionState,
    ) -> SendError | None:
        """Send END_TRANSACTION, then call the hooks; return the error, if any."""
        error: SendError | None = None
        try:
            if state is UNKNOWN:
                self._driver.oneway(address, frame)
            else:
                answer = self._driver.invoke(address, frame)
                if answer.code != ResponseCode.SUCCESS:
                    error = error_for_answer(answer.code, answer.remark, broker_address=address)
                    error = error or NotStoredError(
                        f"the broker answered {answer.code} to the end of the transaction",
                        response_code=answer.code,
                        remark=answer.remark,
                    )
        except SendError as failed:
            error = failed
        fields = frame.ext or {}
        self._hooks.end_transaction(
            topic=fields.get("topic", ""),  # A check may name no topic.
            message=message,
            message_id=fields["msgId"],
            transaction_id=transaction_id,
            broker_address=address,
            state=state.value,
            from_transaction_check=fields["fromTransactionCheck"] == "true",
            error=error,
        )
        return error

    # --- checks -------------------------------------------------------------------------

    def take_check(self, channel: Channel, frame: Frame) -> None:
        """Queue a check for the listener's thread. Without one, the broker asks another client."""
        check = decode_transaction_check(frame)
        if self._listener() is None or check.producer_group != self._group:
            text = "no listener for the transaction check of group %s"
            log.about(channel.address, _LOG).warning(text, check.producer_group)
            return
        if self._checks is None:
            checks: queue.Queue[tuple[str, TransactionCheck]] = queue.Queue(_HELD_CHECKS)
            threading.Thread(
                target=self._answer_checks, args=(checks,),
                name="rocket-sink-transaction-checks", daemon=True,
            ).start()  # fmt: skip
            self._checks = checks
        try:
            self._checks.put_nowait((channel.address, check))
        except queue.Full:
            text = "%d transaction checks wait; one more is dropped"
            log.about(channel.address, _LOG).warning(text, _HELD_CHECKS)

    def _answer_checks(self, checks: queue.Queue[tuple[str, TransactionCheck]]) -> None:
        while not self._driver.closing:
            try:
                address, check = checks.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                self._answer_check(address, check)
            except RocketSinkError as error:
                text = "the transaction check at %s was not answered: %s"
                log.about(address, _LOG).warning(text, address, error)
            except Exception:
                # Go on, because this thread has to answer later checks, too.
                text = "the transaction check at %s was not answered"
                log.about(address, _LOG).exception(text, address)

    def _answer_check(self, address: str, check: TransactionCheck) -> None:
        listener, message = self._listener(), check.message
        state, failure = _user_decision(
            lambda: None if listener is None else listener(message),
            "the listener raised for transaction %s", message.message_id,
        )  # fmt: skip
        frame = requests.end_transaction(
            producer_group=check.producer_group,
            topic=check.topic,
            tran_state_table_offset=check.tran_state_table_offset,
            commit_log_offset=check.commit_log_offset,
            commit_or_rollback=FLAGS[state],
            msg_id=check.transaction_id,
            transaction_id=check.transaction_id,
            from_transaction_check=True,
            broker_name=check.broker_name,
            remark=_remark("the transaction listener", failure),
        )
        error = self._send_end(check.message, check.transaction_id, address, frame, state)
        if error is not None:
            raise error


def _user_decision(
    decide: Callable[[], object], raised: str, message_id: str | None
) -> tuple[TransactionState, BaseException | None]:
    """Return the state that the user's code decides on. None counts as UNKNOWN, as in Java. If the
    code raises, log `raised` and the error, and return UNKNOWN and the error."""
    try:
        state = decide()
        if state is None or isinstance(state, TransactionState):
            return state or UNKNOWN, None
        raise TypeError(f"a TransactionState is wanted, not {state!r}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Java catches Throwable; CancelledError is no Exception.
        _LOG.exception(raised, message_id)
        return UNKNOWN, error


def _remark(who: str, failure: BaseException | None) -> str | None:
    if failure is None:
        return None
    try:
        text = repr(failure)
    except Exception:
        text = type(failure).__name__
    return f"{who} raised {clean(text, _REMARK_CHARS)}"
