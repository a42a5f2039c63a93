"""A wait for sockets ends without an error if another thread closes the selector."""

from __future__ import annotations

import threading

from rocket_sink.net.client import Readiness


def test_nothing_is_ready_once_it_is_closed() -> None:
    readiness = Readiness()
    readiness.close()
    readiness.close()
    assert readiness.wait(60.0) == []
    readiness.wake()


def test_a_wait_that_another_thread_closes_ends_without_an_error() -> None:
    for _ in range(50):
        readiness, started, results = Readiness(), threading.Event(), list[object]()
        waiting = threading.Thread(target=_wait_twice, args=(readiness, started, results))
        waiting.start()
        started.wait()
        readiness.close()
        waiting.join(30)
        assert results == [[], []]


def _wait_twice(readiness: Readiness, started: threading.Event, results: list[object]) -> None:
    started.set()
    try:
        results += [readiness.wait(0.05), readiness.wait(0.05)]
    except Exception as error:
        results.append(error)
