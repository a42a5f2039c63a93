"""The future of an asynchronous send: a `concurrent.futures.Future` without a lock.

The producer's thread ends futures, and must not wait for a caller. So `result` and `exception` wait
for a gate of their own, which the end of the send opens; appending and popping of gates are atomic.
The functions `wait` and `as_completed` of the standard library need the condition of the standard
class. If one of them looks at a future before its end, the notices' thread ends this future,
because their locks may be held for long. Both sides call `dict.setdefault` for "condition", and the
first caller wins.

Users' code (hooks, the callback, functions of `add_done_callback`) runs on the callbacks' thread.

The dict is `_once`, not the instance's `__dict__`. Python 3.10 and 3.11 make `__dict__` on its
first use, and crash if a garbage collection lets a second thread make it at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from threading import Condition
from typing import Any, Final, NamedTuple, TypeAlias

from rocket_sink.message import SendResult
from rocket_sink.net import log
from rocket_sink.producer.engine.attempt import Completion
from rocket_sink.producer.hooks import Hooks, SendContext
from rocket_sink.producer.worker import Worker, seconds

_LOG: Final = log.logger(__name__)
_FINISHED: Final = "FINISHED"
_ENDED: Final = object()
_PRUNE_AT: Final = 4096
Callback: TypeAlias = "Callable[[SendResult | None, BaseException | None], None]"


class Workers(NamedTuple):
    """The threads of a producer that may wait for others.

    Attributes:
        callbacks: runs the users' hooks and callbacks.
        notices: logs the records of the producer's thread, and notifies `concurrent.futures.wait`.
            These never wait for a callback.
    """

    callbacks: Worker
    notices: Worker


class SendFuture(Future[SendResult]):
    """The future of one message. After the end of the send, hooks and a callback are called."""

    # The initial values that `Future.__init__` would set for each future.
    _state = "PENDING"
    _result: Any = None
    _exception: Any = None
    _context: tuple[Hooks, SendContext] | None = None
    _callback: Callback | None = None
    _is_seen = False
    """Whether somebody has asked for the end, or got it by a callback."""

    def __init__(
        self, workers: Workers, hooks: Hooks, context: SendContext | None, callback: Callback | None
    ) -> None:
        self._workers = workers
        if context is not None:
            self._context = hooks, context
        if callback is not None:
            self._callback = callback
        self._once: dict[str, Any] = {}

    # `Future.__init__` would make these objects; here the first use makes each.

    @property
    def _condition(self) -> Condition:  # type: ignore[override]
        """The condition by which the standard library reads the state."""
        condition = self._once.get("condition") or self._once.setdefault("condition", Condition())
        if condition is not _ENDED:
            return condition  # type: ignore[no-any-return]
        # The send has ended, but the thread that ends it may not have set the state yet.
        self._state = _FINISHED
        return self._once.setdefault("late_condition", Condition())  # type: ignore[no-any-return]

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        return self._once.setdefault("waiters", [])  # type: ignore[no-any-return]

    def cancel(self) -> bool:
        """Return False, because a sent message cannot be revoked."""
        return False

    def cancelled(self) -> bool:
        return False

    def running(self) -> bool:
        """Return False: the message is either pending or done."""
        return False

    def done(self) -> bool:
        return self._state == _FINISHED

    @property
    def is_unseen_failure(self) -> bool:
        """Whether the send has failed, and nobody knows it yet."""
        return self._exception is not None and not self._is_seen

    def result(self, timeout: float | None = None) -> SendResult:
        """Return the result, or raise the SendError; wait at most `timeout` seconds."""
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                del self, error  # Break the reference cycle of the traceback.
        return self._result  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the SendError, or None; wait for the end at most `timeout` seconds."""
        if self._state != _FINISHED:
            gate = threading.Lock()
            gate.acquire()
            self._once.setdefault("gates", []).append(gate)
            # The end opens all gates after it has set the state.
            if self._state != _FINISHED and not gate.acquire(timeout=seconds(timeout)):
                raise FutureTimeoutError
        self._is_seen = True
        return self._exception  # type: ignore[no-any-return]

    def add_done_callback(self, fn: Callable[[Future[SendResult]], object]) -> None:
        """Call `fn` with this future after its end, on the callbacks' thread; now if it is done."""
        if self._state == _FINISHED:
            self._call(fn, self)
            return
        self._once.setdefault("done_callbacks", []).append(fn)
        if self._state == _FINISHED:  # The end may have seen no function.
            self._workers.callbacks.put(self._call_back)

    # --- the end -----------------------------------------------------------------------------

    def on_done(self, completion: Completion) -> None:
        self.resolve(completion.result, completion.error)

    def resolve(self, result: SendResult | None, error: BaseException | None) -> None:
        """Set the result or the error; later calls do nothing. Never wait, and run no user's code:
        the producer's thread calls this."""
        if self._state == _FINISHED:
            return
        self._result, self._exception = result, error
        once = self._once
        if once.setdefault("condition", _ENDED) is not _ENDED:
            self._workers.notices.put(self._end_watched)
            return
        self._state = _FINISHED
        if len(once) > 1:
            self._open_gates()
        if self._callback is not None or self._context is not None or "done_callbacks" in once:
            self._workers.callbacks.put(self._call_back)

    def refuse(self, error: BaseException) -> None:
        """End a future that its caller never gets; only the hooks are called."""
        self._callback = None
        self._exception, self._state = error, _FINISHED
        self._call_back()

    def _end_watched(self) -> None:
        with self._condition:
            self._state = _FINISHED
            for waiter in self._waiters:
                add = waiter.add_result if self._exception is None else waiter.add_exception
                add(self)
            self._condition.notify_all()
        self._open_gates()
        self._workers.callbacks.put(self._call_back)

    def _open_gates(self) -> None:
        gates = self._once.get("gates", ())
        with contextlib.suppress(IndexError):
            while gates:
                gates.pop().release()

    def _call_back(self) -> None:
        """Call the hooks, the callback and the functions of `add_done_callback`, each once."""
        context, self._context = self._context, None
        callback, self._callback = self._callback, None
        if context is not None:
            context[0].after(context[1], self._result, self._exception)
        if callback is not None:
            self._is_seen = True
            self._call(callback, self._result, self._exception)
        functions = self._once.get("done_callbacks", [])
        while functions:
            self._call(functions.pop(0), self)

    @staticmethod
    def _call(function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException:  # asyncio.CancelledError is not an Exception.
            _LOG.exception("a callback of a send raised")


def end_all(ends: Iterable[tuple[SendFuture, SendResult | None, BaseException | None]]) -> None:
    for future, result, error in ends:
        future.resolve(result, error)


class OpenFutures:
    """The futures of asynchronous sends that have not ended. Any thread may append; only the
    thread that drives the engine calls the other methods."""

    def __init__(self) -> None:
        self.unseen: list[SendFuture] = []
        """The last failures that nobody knew of at the last call of `undone`, so that the end of
        the process can count them. The limit bounds the memory of a program that never asks."""
        self._new: list[SendFuture] = []
        self._older: list[SendFuture] = []
        self.append = self._new.append

    def prune(self) -> None:
        """Drop ended futures from time to time."""
        if len(self._new) > _PRUNE_AT:
            self.undone()

    def undone(self) -> list[SendFuture]:
        """Return the futures that have not ended, in the order of the sends."""
        count = len(self._new)
        futures = [*self.unseen, *self._older, *self._new[:count]]
        del self._new[:count]
        self._older = [future for future in futures if not future.done()]
        # A future that ends meanwhile is in both lists.
        self.unseen = [future for future in futures if future.is_unseen_failure][-_PRUNE_AT:]
        return list(self._older)
