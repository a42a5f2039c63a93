"""The future of an asynchronous send: a `concurrent.futures.Future` that is cheap until a thread
waits for it.

The standard one makes a condition with its lock, queue and bound methods at once: a dozen objects,
which cost more to make, and to be looked at by the garbage collector, than the message. Most end
before any thread asks. So the condition is made by the first that asks, and whether that was before
or after the end is decided by one atomic `dict.setdefault`: before, all goes the standard way;
after, there is no thread to wake.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition
from typing import Any, Final, TypeAlias

from rocket_sink.message import SendResult
from rocket_sink.net import log
from rocket_sink.producer.engine.attempt import Completion
from rocket_sink.producer.hooks import Hooks, SendContext

_LOG: Final = log.logger(__name__)
_FINISHED: Final = "FINISHED"
_ENDED: Final = object()
Callback: TypeAlias = "Callable[[SendResult | None, BaseException | None], None]"


class SendFuture(Future[SendResult]):
    """The end of one message, told to its hooks, to the thread that waits, and to a callback.

    `cancel` is always False: what is sent cannot be taken back.
    """

    # What Future.__init__ sets, where it is the same for all.
    _state = "PENDING"
    _result: Any = None
    _exception: Any = None

    def __init__(
        self, hooks: Hooks, context: SendContext | None, callback: Callback | None
    ) -> None:
        self._hooks, self._context, self._callback = hooks, context, callback

    @property
    def _condition(self) -> Condition:  # type: ignore[override]
        """What looks at this future's state by the standard methods comes here first."""
        own = self.__dict__
        own.setdefault("_waiters", [])
        own.setdefault("_done_callbacks", [])
        gate = own.get("_gate") or own.setdefault("_gate", Condition())
        if gate is not _ENDED:
            return gate  # type: ignore[no-any-return]
        # The thread that ended it may not have come to this line yet.
        self._state = _FINISHED
        return own.setdefault("_late_gate", Condition())  # type: ignore[no-any-return]

    def cancel(self) -> bool:
        """Nothing is cancelled."""
        return False

    def done(self) -> bool:
        """It has ended, well or not."""
        return self._state == _FINISHED

    def result(self, timeout: float | None = None) -> SendResult:
        """The result; waits for it at most `timeout` seconds.

        Raises:
            TimeoutError, SendError
        """
        if self._state == _FINISHED and self._exception is None:
            return self._result  # type: ignore[no-any-return]
        return super().result(timeout)

    def on_done(self, completion: Completion) -> None:
        """The driver's word, once."""
        self.ended(completion.result, completion.error)

    def ended(self, result: SendResult | None, error: BaseException | None) -> None:
        """A result or an error, once."""
        if self._context is not None:
            self._hooks.ended(self._context, result, error)
        if result is not None:
            self.set_result(result)
        else:
            self.set_exception(error)
        if self._callback is not None:
            try:
                self._callback(result, error)
            except Exception:
                # Others of its batch wait behind it.
                _LOG.exception("a callback of a send raised")

    def set_result(self, result: SendResult) -> None:
        """The driver's."""
        self._result = result
        if self.__dict__.setdefault("_gate", _ENDED) is _ENDED:
            self._state = _FINISHED
        else:
            super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """The driver's."""
        self._exception = exception
        if self.__dict__.setdefault("_gate", _ENDED) is _ENDED:
            self._state = _FINISHED
        else:
            super().set_exception(exception)
