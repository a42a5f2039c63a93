"""A wait for sockets that another thread ends, or has ended."""

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
        readiness, begun, found = Readiness(), threading.Event(), list[object]()
        waiting = threading.Thread(target=_wait_twice, args=(readiness, begun, found))
        waiting.start()
        begun.wait()
        readiness.close()
        waiting.join(30)
        assert found == [[], []]


def _wait_twice(readiness: Readiness, begun: threading.Event, found: list[object]) -> None:
    begun.set()
    try:
        found += [readiness.wait(0.05), readiness.wait(0.05)]
    except Exception as error:
        found.append(error)
