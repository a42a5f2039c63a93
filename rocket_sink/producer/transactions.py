"""Transactional messages: a half message, a local transaction, commit or rollback, and check-backs.

Limits of the broker's checking, at its defaults: a half message is checked when it is 6 s old
(transactionTimeOut), every 30 s (transactionCheckInterval), at most 15 times
(transactionCheckMax); then it moves to TRANS_CHECK_MAX_TIME_TOPIC and is never delivered. A broker
asks any client of the producer group that is connected and has sent a heartbeat, so the listener
may run in another process than the sender (`listen_for_checks`). Delivery after a commit is to the
topic at the commit's time, not the send's; a half message's queue offset is not its final one.
"""

from __future__ import annotations

import queue
import threading
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
from rocket_sink.net.link import Link
from rocket_sink.options import SinkOptions
from rocket_sink.producer.base import ProducerBase
from rocket_sink.producer.compose import named
from rocket_sink.producer.transaction_values import (
    COMMIT,
    FLAGS,
    ROLLBACK,
    UNKNOWN,
    Execute,
    TransactionListener,
    TransactionResult,
    TransactionState,
    checked,
    executed,
)
from rocket_sink.routing.verdict import error_for_answer
from rocket_sink.wire import requests
from rocket_sink.wire.codes import RequestCode, ResponseCode, SysFlag
from rocket_sink.wire.frame import Frame
from rocket_sink.wire.ids import decode_offset_message_id
from rocket_sink.wire.peer import TransactionCheck, decode_transaction_check
from rocket_sink.wire.properties import PGROUP, TRAN_MSG
from rocket_sink.wire.stored import StoredMessage

_LOG: Final = log.logger(__name__)
_HELD_CHECKS: Final = 2000
"""Checks that wait for the listener (Java: checkRequestHoldMax); more are asked again anyway."""

__all__ = [
    "COMMIT",
    "ROLLBACK",
    "UNKNOWN",
    "TransactionListener",
    "TransactionResult",
    "TransactionSends",
    "TransactionState",
]


class TransactionSends(ProducerBase):
    """The transactional side of `Producer`."""

    def __init__(
        self,
        options: SinkOptions | None = None,
        *,
        transaction_listener: TransactionListener | None = None,
        **more: Any,
    ) -> None:
        super().__init__(options, **more)
        self._listener: TransactionListener | None = None
        self._handlers[RequestCode.CHECK_TRANSACTION_STATE] = self._hold_check
        if transaction_listener is not None:
            self.on_transaction_check = transaction_listener

    def _start(self) -> None:
        super()._start()
        self._checks: queue.Queue[tuple[str, TransactionCheck]] | None = None

    @property
    def on_transaction_check(self) -> TransactionListener | None:
        """Called with a half message that the broker asks about; answers its state.

        It runs on a thread of its own, one check at a time. What it raises counts as UNKNOWN: the
        broker asks again. See the module for how often.
        """
        return self._listener

    @on_transaction_check.setter
    def on_transaction_check(self, listener: TransactionListener | None) -> None:
        self._listener = listener

    def listen_for_checks(self, *topics: str) -> None:
        """Connect to the topics' brokers and answer their checks, without sending anything.

        Raises:
            NoRouteError, NameServerUnavailableError
        """
        self._check_open()
        for topic in topics:
            self._info(self._composer.topic(topic))
        self._stay_reachable()

    def send_in_transaction(
        self, message: Message, execute: Execute, arg: Any = None
    ) -> TransactionResult:
        """Send a half message, call `execute(message, arg)` once it is stored, end it.

        `message` has its `message_id` set then. What `execute` raises does not come out of here:
        it is in the result, and the state is UNKNOWN. END_TRANSACTION is awaited, where Java
        sends it oneway and never learns of a failure; only UNKNOWN, which no broker answers, is
        oneway. A half message whose outcome is unknown is not executed: the error is raised, and
        the listener may be asked about a transaction that it never saw (answer ROLLBACK). A half
        message that is stored degraded is rolled back.

        Raises:
            MessageError: INVALID_DELAY (a half message cannot be timed, Java drops the delay), or
                as of `send`; nothing was sent.
            SendError: the half message was not stored, or nobody knows.
        """
        self._check_open()
        if message.is_timed:
            raise MessageError(
                "a transactional message cannot be delayed or timed",
                code="INVALID_DELAY", topic=message.topic, keys=message.keys,
            )  # fmt: skip
        if self._listener is not None:
            self._stay_reachable()
        request = self._composer.single(message, {TRAN_MSG: "true", PGROUP: self._group})
        request.timed = True  # never in a batch
        request.sys_flag |= SysFlag.TRANSACTION_PREPARED
        identified = named(message, request.message_id)
        try:
            half = self._result(self._wait(request, (message,), "transaction"))
        except DegradedError as degraded:
            self._end(identified, degraded.facts["result"], ROLLBACK, None)
            raise
        state, failure = ROLLBACK, None
        if half.outcome is Outcome.ACKED:
            state, failure = executed(execute, identified, arg)
        error = self._end(identified, half, state, failure)
        return TransactionResult(half, state, failure, error)

    def _end(
        self, message: Message, half: SendResult, state: TransactionState, failure: Exception | None
    ) -> SendError | None:
        """Tell the broker; the error, if it could not be told or refused."""
        name = half.queue.broker_name
        try:
            offset = decode_offset_message_id(half.offset_message_id).offset
        except ProtocolError as unreadable:
            return InvalidAnswerError(f"{name} stored a half message without id: {unreadable}")
        frame = requests.end_transaction(
            producer_group=self._group,
            topic=self._composer.topic(message.topic),
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=offset,
            commit_or_rollback=FLAGS[state],
            msg_id=half.message_id,
            transaction_id=half.transaction_id,
            broker_name=name,
            remark=f"executing the local transaction raised {failure!r}" if failure else None,
        )
        address = self._engine.routes.addresses().get(name, half.broker_address)
        error = self._tell_end(address, frame, state)
        self._tell_hooks(message, half.transaction_id, address, frame, state, error)
        if error is not None:
            _LOG.warning(
                "%s of transaction %s at %s: %s",
                state.name,
                half.message_id,
                name,
                error,
                extra={"peer": address},
            )
        return error

    def _tell_end(self, address: str, frame: Frame, state: TransactionState) -> SendError | None:
        try:
            if state is UNKNOWN:
                self._driver.oneway(address, frame)
                return None
            answer = self._driver.invoke(address, frame, self._timeout_s)
        except SendError as error:
            return error
        if answer.code == ResponseCode.SUCCESS:
            return None
        refused = error_for_answer(answer.code, answer.remark, broker_address=address)
        return refused or NotStoredError(
            f"the broker answered {answer.code} to the end of the transaction",
            response_code=answer.code,
            remark=answer.remark,
        )

    def _tell_hooks(
        self,
        message: Message | StoredMessage,
        transaction_id: str | None,
        address: str,
        frame: Frame,
        state: TransactionState,
        error: SendError | None,
    ) -> None:
        fields = frame.ext or {}
        self._hooks.end_transaction(
            topic=fields["topic"],
            message=message,
            message_id=fields["msgId"],
            transaction_id=transaction_id,
            broker_address=address,
            state=state.value,
            from_transaction_check=fields["fromTransactionCheck"] == "true",
            error=error,
        )

    # --- check-backs -------------------------------------------------------------------------

    def _hold_check(self, link: Link, frame: Frame) -> None:
        """Take a check over to the listener's thread; without a listener the broker asks others."""
        check = decode_transaction_check(frame)
        if self._listener is None or check.producer_group != self._group:
            _LOG.warning(
                "no listener for the transaction check of group %s",
                check.producer_group,
                extra={"peer": link.address},
            )
            return
        if self._checks is None:
            self._checks = queue.Queue(_HELD_CHECKS)
            threading.Thread(
                target=self._answer_checks, args=(self._checks,),
                name="rocket-sink-transaction-checks", daemon=True,
            ).start()  # fmt: skip
        try:
            self._checks.put_nowait((link.address, check))
        except queue.Full:
            _LOG.warning(
                "%d transaction checks wait; one more is dropped",
                _HELD_CHECKS,
                extra={"peer": link.address},
            )

    def _answer_checks(self, checks: queue.Queue[tuple[str, TransactionCheck]]) -> None:
        while not self._closed:
            try:
                address, check = checks.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                self._answer_check(address, check)
            except RocketSinkError as error:
                _LOG.warning(
                    "the transaction check at %s was not answered: %s",
                    address,
                    error,
                    extra={"peer": address},
                )

    def _answer_check(self, address: str, check: TransactionCheck) -> None:
        state, failure = checked(self._listener, check.message)
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
            remark=f"the transaction listener raised {failure!r}" if failure else None,
        )
        error = self._tell_end(address, frame, state)
        self._tell_hooks(check.message, check.transaction_id, address, frame, state, error)
        if error is not None:
            raise error
