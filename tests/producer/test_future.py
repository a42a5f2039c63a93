"""SendFuture behaves like the standard future, whenever it is used."""

import asyncio
import itertools
import threading
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import as_completed, wait

import pytest

from rocket_sink.errors import BrokerError, UnwrittenError
from rocket_sink.producer.future import SendFuture, Workers
from rocket_sink.producer.hooks import Hooks
from rocket_sink.producer.worker import Worker
from tests.python import run_python

RESULT = ("a", "result")
WORKERS = Workers(Worker("callbacks"), Worker("notices"))


def make(callback=None):
    return SendFuture(WORKERS, Hooks("g"), None, callback)


def test_asked_after_the_end():
    future = make()
    assert not future.done() and not future.running() and not future.cancelled()
    future.resolve(RESULT, None)
    results = []
    future.add_done_callback(results.append)
    assert future.done() and future.result() is RESULT and future.exception() is None
    assert results == [future] and not future.cancel() and "finished" in repr(future)
    assert wait([future], timeout=0).done == {future} and list(as_completed([future])) == [future]


def test_asked_before_the_end():
    future, results = make(), []
    with pytest.raises(FutureTimeoutError):
        future.result(0)
    future.add_done_callback(results.append)
    waiter = threading.Thread(target=lambda: results.append(future.result(60)))
    waiter.start()
    future.resolve(RESULT, None)
    waiter.join(60)
    assert WORKERS.callbacks.flush(60)
    assert sorted(map(str, results)) == sorted(map(str, [future, RESULT]))


def test_an_error():
    early, late = make(), make()
    assert not wait([early], timeout=0).done
    for future in (early, late):
        future.resolve(None, UnwrittenError("no"))
        assert isinstance(future.exception(), UnwrittenError)
        with pytest.raises(UnwrittenError):
            future.result(0)


def test_a_callback_that_raises_is_logged(caplog):
    def bad(result, error):
        raise BrokerError("mine")

    future = make(bad)
    future.resolve(RESULT, None)
    assert WORKERS.callbacks.flush(60)
    assert future.result() is RESULT and "a callback of a send raised" in caplog.text


def test_in_an_event_loop():
    async def main():
        futures = [make() for _ in range(3)]
        futures[0].resolve(RESULT, None)
        wrapped = [asyncio.wrap_future(future) for future in futures]
        threading.Timer(0.01, lambda: [f.resolve(RESULT, None) for f in futures[1:]]).start()
        return await asyncio.gather(*wrapped)

    assert asyncio.run(main()) == [RESULT] * 3


def stops_at(method, step, reached, go_on):
    """Return a trace function that waits before the `step`-th line of the method."""
    lines = [0]

    def trace(frame, event, arg):
        if frame.f_code is not method.__code__:
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == step:
                reached.set()
                go_on.wait(60)
        return trace

    return trace


@pytest.mark.parametrize(
    ("way", "stopped", "step"),
    [
        *itertools.product(
            ["result", "callback", "as_completed", "wait"], [SendFuture.resolve], range(2, 7)
        ),
        *itertools.product(["result"], [SendFuture.exception], range(2, 6)),
        *itertools.product(["callback"], [SendFuture.add_done_callback], range(2, 4)),
    ],
)
def test_access_during_completion_gets_the_result(way, stopped, step):
    """Each thread stops within the method, until the other one has come as far as it can."""
    future, results = make(), []
    reached, go_on = threading.Event(), threading.Event()

    def end():
        future.resolve(RESULT, None)

    def ask():
        if way == "result":
            results.append(future.result(5))
        elif way == "callback":
            future.add_done_callback(results.append)
        elif way == "wait":
            results.extend(wait([future], timeout=5).done)
        else:
            results.extend(as_completed([future], timeout=5))

    works = [end, ask] if stopped is SendFuture.resolve else [ask, end]
    first, second = (threading.Thread(target=work) for work in works)
    threading.settrace(stops_at(stopped, step, reached, go_on))
    first.start()
    assert reached.wait(60)
    threading.settrace(None)
    second.start()
    second.join(0.05)  # The thread either is done now, or waits for the first.
    go_on.set()
    first.join(60)
    second.join(60)
    assert WORKERS.callbacks.flush(60)
    assert results == [RESULT if way == "result" else future]


ASKED_IN_A_COLLECTION = """
import gc
from rocket_sink.producer.future import SendFuture

asked = []
def ask(phase, info):
    # A finalizer that waits for a lock lets another thread run here.
    if phase == "start" and asked:
        future = asked.pop()
        assert future._condition and not future._waiters

gc.callbacks.append(ask)
kept = []
for _ in range(100):
    kept.append([{"a": 1} for _ in range(200)])  # Python keeps some dicts to use again
    future = SendFuture(None, None, None, None)
    asked.append(future)
    gc.set_threshold(1)
    future.resolve("a result", None)
    gc.set_threshold(0)
    asked.clear()
    assert future.done() and future.result(0) == "a result"
    del future
gc.collect()
print("whole")
"""


def test_another_thread_in_the_midst_of_a_collection_does_not_end_the_process():
    """Python 3.11 ended with SIGSEGV where two threads made a future's `__dict__` at once."""
    done = run_python("-X", "faulthandler", "-c", ASKED_IN_A_COLLECTION, may_fail=True)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
