"""Engines of a worker process, reused across tasks and epochs.

Keyed by the whole configuration (credentials by digest) and the process id; reference counted;
an idle one is closed at the next checkout after `producerCacheTimeout`. No thread: PySpark workers
end with `os._exit`, so nothing may need an orderly end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rocket_sink.forks import ForkLock
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.shared_state import SharedBrokerState


@dataclass
class _Idle:
    engine: SendEngine
    since_s: float
    timeout_s: float


def make_engine(options: SinkOptions) -> SendEngine:
    """An engine on the executor's shared health store."""
    return SendEngine(options, shared=SharedBrokerState.open(options))


class ProducerPool:
    """Engines by configuration; an engine has one user at a time.

    Two tasks of one process with one configuration (nested use) get two engines, so none is ever
    closed, or driven by another user, while it is out.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        make: Callable[[SinkOptions], SendEngine] | None = None,
    ) -> None:
        self._clock = clock
        self._make = make or make_engine
        self._lock = ForkLock()
        self._pid = os.getpid()
        self._idle: dict[str, list[_Idle]] = {}
        self._out: dict[int, tuple[SendEngine, str, float]] = {}

    def acquire(self, options: SinkOptions) -> SendEngine:
        """An idle engine of this configuration, or a new one."""
        key, now_s = options.digest, self._clock()
        with self._lock:
            self._after_fork()
            expired = self._expired(now_s)
            engine = self._reusable(key)
            if engine is not None:
                self._lend(engine, key, options)
        for old in expired:
            old.close()
        if engine is None:
            engine = self._make(options)
            with self._lock:
                self._lend(engine, key, options)
        return engine

    def release(self, engine: SendEngine) -> None:
        """Give it back; a broken one, or one with requests pending, is closed.

        Raises:
            RuntimeError: it is not out (given back twice, or of another pool).
        """
        with self._lock:
            self._after_fork()
            if id(engine) not in self._out:
                raise RuntimeError(
                    "an engine was released that is not checked out of this pool; each acquire "
                    "is followed by exactly one release"
                )
            _, key, timeout_s = self._out.pop(id(engine))
            keep = not engine.broken and not engine.pending
            if keep:
                self._idle.setdefault(key, []).append(_Idle(engine, self._clock(), timeout_s))
        if not keep:
            engine.close()

    def drop(self, engine: SendEngine) -> None:
        """Give it back as unusable: it is closed."""
        with self._lock:
            known = self._out.pop(id(engine), None)
        if known is None:
            raise RuntimeError("an engine was dropped that is not checked out of this pool")
        engine.close()

    @contextmanager
    def engine(self, options: SinkOptions) -> Iterator[SendEngine]:
        """acquire and release; after an exception the engine is dropped, not reused."""
        engine = self.acquire(options)
        try:
            yield engine
        except BaseException:
            self.drop(engine)
            raise
        self.release(engine)

    def close(self) -> None:
        """Close all idle engines."""
        with self._lock:
            engines = [item.engine for items in self._idle.values() for item in items]
            self._idle.clear()
        for engine in engines:
            engine.close()

    @property
    def idle(self) -> int:
        return sum(map(len, self._idle.values()))

    def __repr__(self) -> str:
        return f"<ProducerPool {len(self._out)} out, {self.idle} idle>"

    def _lend(self, engine: SendEngine, key: str, options: SinkOptions) -> None:
        self._out[id(engine)] = (engine, key, options.producer_cache_timeout_ms / 1000)

    def _reusable(self, key: str) -> SendEngine | None:
        """The youngest idle engine: its connections are the most likely to be alive."""
        items = self._idle.get(key, [])
        while items:
            engine = items.pop().engine
            if not engine.broken:
                return engine
        return None

    def _expired(self, now_s: float) -> list[SendEngine]:
        expired = []
        for key, items in list(self._idle.items()):
            old = [item for item in items if now_s - item.since_s >= item.timeout_s]
            expired += [item.engine for item in old]
            kept = [item for item in items if item not in old]
            if kept:
                self._idle[key] = kept
            else:
                del self._idle[key]
        return expired

    def _after_fork(self) -> None:
        """A forked child must not use, nor say good-bye on, its parent's connections."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        for items in self._idle.values():
            for item in items:
                item.engine.abandon()
        self._idle.clear()
        self._out.clear()


_worker_pool = ProducerPool()


def worker_pool() -> ProducerPool:
    """This process's pool."""
    return _worker_pool
