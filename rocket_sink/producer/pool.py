"""A pool of send engines in a worker process. Later tasks and epochs reuse the engines.

Tasks with the same digest of all options use the same engines. `acquire` closes engines that were
idle for `producerCacheTimeout`. PySpark workers end by `os._exit`, so nothing closes the rest.
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
    """Return an engine with the executor's shared broker state."""
    return SendEngine(options, shared=SharedBrokerState.open(options))


class ProducerPool:
    """Engines by configuration. An engine has one user at a time: nested tasks get two engines."""

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
        self._leased: dict[int, tuple[SendEngine, str, float]] = {}

    def acquire(self, options: SinkOptions) -> SendEngine:
        """Return an idle engine of this configuration, or a new one."""
        key, now_s = options.digest, self._clock()
        with self._lock:
            self._after_fork()
            expired = self._expired(now_s)
            engine = self._reusable(key)
            if engine is not None:
                self._lease(engine, key, options)
        for old in expired:
            old.close()
        if engine is None:
            engine = self._make(options)
            with self._lock:
                self._lease(engine, key, options)
        return engine

    def release(self, engine: SendEngine, *, usable: bool = True) -> None:
        """Give an engine back; close it if it is broken, not `usable`, or has pending requests.

        Raises:
            RuntimeError: the engine is not leased: it was released twice, or to a wrong pool.
        """
        with self._lock:
            self._after_fork()
            if id(engine) not in self._leased:
                raise RuntimeError(
                    "the released engine is not leased from this pool; each acquire is followed by "
                    "exactly one release"
                )
            _, key, timeout_s = self._leased.pop(id(engine))
            keep = usable and not engine.broken and not engine.pending
            if keep:
                self._idle.setdefault(key, []).append(_Idle(engine, self._clock(), timeout_s))
        if not keep:
            engine.close()

    @contextmanager
    def engine(self, options: SinkOptions) -> Iterator[SendEngine]:
        """Lease an engine for a `with` block; close it if the block raises."""
        engine = self.acquire(options)
        try:
            yield engine
        except BaseException:
            self.release(engine, usable=False)
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
        return f"<ProducerPool {len(self._leased)} leased, {self.idle} idle>"

    def _lease(self, engine: SendEngine, key: str, options: SinkOptions) -> None:
        self._leased[id(engine)] = (engine, key, options.producer_cache_timeout_ms / 1000)

    def _reusable(self, key: str) -> SendEngine | None:
        """Return the idle engine that was used last: its connections are most likely alive."""
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
        """Drop the parent's engines in a forked child, without sending on the parent's sockets."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        for items in self._idle.values():
            for item in items:
                item.engine.abandon()
        self._idle.clear()
        self._leased.clear()


_worker_pool = ProducerPool()


def worker_pool() -> ProducerPool:
    return _worker_pool
