"""The future of an asynchronous send: a `concurrent.futures.Future` with a lazy condition.

The standard class makes a condition of a dozen objects, which costs more than the message. Most
sends end before a thread waits for them, so this class makes the condition on its first use. An
atomic `dict.setdefault` decides whether that use or the end of the send came first. If the use came
first, the standard code runs; if not, no thread has to be woken. The dict is an attribute of its
own, because Python 3.10 and 3.11 make the instance's `__dict__` on its first use, and crash if a
garbage collection in the middle lets another thread make it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """The future of one message. Its end calls hooks and a callback, and wakes waiting threads.

    `cancel` always returns False: a sent message cannot be revoked.
    """

    # The constant attributes of Future.__init__.
    _state = "PENDING"
    _result: Any = None
    _exception: Any = None
    in_engine: bool | None = None
    """See `driver.Token`."""

    def __init__(
        self, hooks: Hooks, context: SendContext | None, callback: Callback | None
    ) -> None:
        self._hooks, self._context, self._callback = hooks, context, callback
        self._once: dict[str, Any] = {}

    # `Future.__init__` sets these attributes; here each is made on its first use.

    @property
    def _condition(self) -> Condition:  # type: ignore[override]
        """The lock of `Future`'s own methods that read the state or wait for it."""
        gate = self._once.get("gate") or self._once.setdefault("gate", Condition())
        if gate is not _ENDED:
            return gate  # type: ignore[no-any-return]
        # Set the state, because the completing thread may not have set it yet.
        self._state = _FINISHED
        return self._once.setdefault("late_gate", Condition())  # type: ignore[no-any-return]

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        return self._once.setdefault("waiters", [])  # type: ignore[no-any-return]

    @property
    def _done_callbacks(self) -> list[Any]:
        return self._once.setdefault("done_callbacks", [])  # type: ignore[no-any-return]

    def cancel(self) -> bool:
        """Return False, because a sent message cannot be revoked."""
        return False

    def done(self) -> bool:
        """Return whether the future has a result or an error."""
        return self._state == _FINISHED

    def result(self, timeout: float | None = None) -> SendResult:
        """Return the result; wait for it at most `timeout` seconds.

        Raises:
            TimeoutError, SendError
        """
        if self._state == _FINISHED and self._exception is None:
            return self._result  # type: ignore[no-any-return]
        return super().result(timeout)

    def on_done(self, completion: Completion) -> None:
        self.ended(completion.result, completion.error)

    def ended(self, result: SendResult | None, error: BaseException | None) -> None:
        """Set the result or the error, and call the callback; later calls do nothing."""
        if self._state == _FINISHED:
            return
        if self._context is not None:
            self._hooks.ended(self._context, result, error)
        if result is not None:
            self.set_result(result)
        else:
            self.set_exception(error)
        if self._callback is not None:
            try:
                self._callback(result, error)
            except KeyboardInterrupt:
                raise
            except BaseException:
                # Go on with the other futures, and the producer's thread. Catch BaseException:
                # asyncio.CancelledError is not an Exception.
                _LOG.exception("a callback of a send raised")

    def set_result(self, result: SendResult) -> None:
        self._result = result
        if self._once.setdefault("gate", _ENDED) is _ENDED:
            self._state = _FINISHED
        else:
            super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        self._exception = exception
        if self._once.setdefault("gate", _ENDED) is _ENDED:
            self._state = _FINISHED
        else:
            super().set_exception(exception)


def end_all(ends: Iterable[tuple[SendFuture, SendResult | None, BaseException | None]]) -> None:
    """End each future. Raise an interrupt (Ctrl-C) of a callback after all of them."""
    interrupt: KeyboardInterrupt | None = None
    for future, result, error in ends:
        try:
            future.ended(result, error)
        except KeyboardInterrupt as caught:
            interrupt = caught
    if interrupt is not None:
        raise interrupt
