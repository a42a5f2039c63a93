"""The future of an asynchronous send: a `concurrent.futures.Future` with a lazy condition.

The standard class makes a condition of a dozen objects per future. That costs more than the
message, and most sends end before a thread waits for them. So this class makes the condition when a
thread first needs it. That thread and the end of the send both call `dict.setdefault` for "gate";
the first caller wins. If the thread wins, the code of the standard class runs. If the send has
ended first, no thread has to be woken.

The dict is `_once`, not the instance's `__dict__`. Python 3.10 and 3.11 make `__dict__` on its
first use, and crash if a garbage collection lets a second thread make it at the same time."""

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
    """The future of one message. At the end of the send it calls hooks and a callback."""

    # The initial values that `Future.__init__` would set for each future.
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

    # `Future.__init__` would make these objects; here the first use makes each.

    @property
    def _condition(self) -> Condition:  # type: ignore[override]
        """The condition with which the methods of `Future` read the state, or wait."""
        gate = self._once.get("gate") or self._once.setdefault("gate", Condition())
        if gate is not _ENDED:
            return gate  # type: ignore[no-any-return]
        # The send has ended, but the thread that ends it may not have set the state yet.
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
        return self._state == _FINISHED

    def result(self, timeout: float | None = None) -> SendResult:
        """Return the result, or raise the SendError; wait at most `timeout` seconds."""
        if self._state == _FINISHED and self._exception is None:
            return self._result  # type: ignore[no-any-return]
        return super().result(timeout)

    def on_done(self, completion: Completion) -> None:
        self.ended(completion.result, completion.error)

    def ended(self, result: SendResult | None, error: BaseException | None) -> None:
        """Set the result or the error, and call hooks and callback; later calls do nothing."""
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
                # The error must not end the producer's thread, or keep other futures from ending.
                # Catch BaseException, because asyncio.CancelledError is not an Exception.
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
    """End each future. If a callback raises KeyboardInterrupt, raise it after the last future."""
    interrupt: KeyboardInterrupt | None = None
    for future, result, error in ends:
        try:
            future.ended(result, error)
        except KeyboardInterrupt as caught:
            interrupt = caught
    if interrupt is not None:
        raise interrupt
