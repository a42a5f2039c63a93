"""Waits for the work of another thread, or holds the producer's thread."""

import threading
import time
from contextlib import contextmanager


def until(
    condition, timeout_s=120.0, poll_s=0.001,
    failure="it did not happen in time",
):  # fmt: skip
    """Check the condition again and again; fail with this text when the time is over."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, failure
        time.sleep(poll_s)


def in_threads(count, work, timeout_s=60.0):
    """Run `work(number)` in so many threads at once; fail if one has not ended in time."""
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads)


@contextmanager
def held(producer):
    """Hold the producer's thread in a call, so that requests wait in its queue."""
    reached, over = threading.Event(), threading.Event()

    def hold():
        reached.set()
        return over.wait(60)

    thread = threading.Thread(target=producer._live_session().driver.call, args=(hold,))
    thread.start()
    try:
        assert reached.wait(60)
        yield
    finally:
        over.set()
        thread.join(60)
