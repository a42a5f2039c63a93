"""The states and the result of a transaction, and the user's code that decides on them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rocket_sink.errors import SendError
from rocket_sink.message import Message, SendResult
from rocket_sink.net import log
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.stored import StoredMessage

_LOG: Final = log.logger(__name__)


class TransactionState(enum.Enum):
    """What became of the local transaction; the values are Java's LocalTransactionState names."""

    COMMIT = "COMMIT_MESSAGE"
    ROLLBACK = "ROLLBACK_MESSAGE"
    UNKNOWN = "UNKNOW"
    """Not known yet: the broker will ask."""


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
    """What became of a half message and of its transaction.

    Attributes:
        send_result: the half message's; its queue offset is in the hidden half topic.
        state: what `execute` said; ROLLBACK for a half message stored less durably than asked
            for (`execute` was not called); UNKNOWN when it raised or answered nothing.
        local_error: what `execute` raised.
        end_error: why the broker did not confirm the end. It will ask the listener then, unless
            it did get the request.
    """

    send_result: SendResult
    state: TransactionState
    local_error: Exception | None = None
    end_error: SendError | None = None

    @property
    def transaction_id(self) -> str:
        """The client message id, by which the listener knows the transaction again."""
        return self.send_result.message_id

    @property
    def ended(self) -> bool:
        """The broker has confirmed the commit or the rollback."""
        return self.state is not UNKNOWN and self.end_error is None


def executed(
    execute: Execute, message: Message, arg: Any
) -> tuple[TransactionState, Exception | None]:
    try:
        return _state(execute(message, arg)), None
    except Exception as error:
        _LOG.exception("the local transaction %s raised", message.message_id)
        return UNKNOWN, error


def checked(
    listener: TransactionListener | None, message: StoredMessage
) -> tuple[TransactionState, Exception | None]:
    try:
        return (UNKNOWN if listener is None else _state(listener(message))), None
    except Exception as error:
        _LOG.exception("the listener raised for transaction %s", message.message_id)
        return UNKNOWN, error


def _state(answer: object) -> TransactionState:
    """None is UNKNOWN, as in Java.

    Raises:
        TypeError: anything else that is no state.
    """
    if answer is None:
        return UNKNOWN
    if isinstance(answer, TransactionState):
        return answer
    raise TypeError(f"a TransactionState is wanted, not {answer!r}")
