"""A pool of send engines in a worker process, for later tasks and epochs with the same digest of
all options. `acquire` closes engines that were idle for `producerCacheTimeout`. PySpark workers end
by `os._exit`, so nothing closes the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rocket_sink.forks import ForkLock
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.shared_state import SharedBrokerState


def make_engine(options: SinkOptions) -> SendEngine:
    """Return an engine with the executor's shared broker state."""
    return SendEngine(options, shared=SharedBrokerState.open(options))


class ProducerPool:
    """Engines by configuration. An engine has one user at a time: nested tasks get two engines."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        make: Callable[[SinkOptions], SendEngine] = make_engine,
    ) -> None:
        self._clock = clock
        self._make = make
        self._lock = ForkLock()
        self._pid = os.getpid()
        self._idle: list[tuple[SendEngine, float]] = []
        """Idle engines, each with the time of its release, in the order of these times."""
        self._leased: set[SendEngine] = set()

    def acquire(self, options: SinkOptions) -> SendEngine:
        """Return an idle engine of this configuration, or a new one."""
        with self._lock:
            self._after_fork()
            expired = self._take_expired()
            same = [entry for entry in self._idle if entry[0].options.digest == options.digest]
            if same:
                # Take the engine that was used last: its connections are most likely alive.
                self._idle.remove(same[-1])
                self._leased.add(same[-1][0])
        for old in expired:
            old.close()
        if same:
            return same[-1][0]
        engine = self._make(options)
        with self._lock:
            self._leased.add(engine)
        return engine

    def release(self, engine: SendEngine, *, usable: bool = True) -> None:
        """Give an engine back; close it if it is broken, not `usable`, or has pending requests.
        Raises RuntimeError if the engine was released twice, or to a wrong pool."""
        with self._lock:
            self._after_fork()
            if engine not in self._leased:
                raise RuntimeError(
                    "the released engine is not leased from this pool; each acquire is followed by "
                    "exactly one release"
                )
            self._leased.remove(engine)
            keep = usable and not engine.is_broken and not engine.pending
            if keep:
                self._idle.append((engine, self._clock()))
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
        with self._lock:
            entries, self._idle = self._idle, []
        for engine, _ in entries:
            engine.close()

    def _take_expired(self) -> list[SendEngine]:
        """Remove and return the idle engines that are broken, or were idle for too long."""
        now_s = self._clock()
        expired = [
            engine
            for engine, since_s in self._idle
            if engine.is_broken
            or now_s - since_s >= engine.options.producer_cache_timeout_ms / 1000
        ]
        self._idle = [entry for entry in self._idle if entry[0] not in expired]
        return expired

    def _after_fork(self) -> None:
        """Drop the parent's engines in a forked child, without sending on the parent's sockets."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        for engine, _ in self._idle:
            engine.abandon()
        self._idle.clear()
        self._leased.clear()


_worker_pool = ProducerPool()


def worker_pool() -> ProducerPool:
    return _worker_pool
