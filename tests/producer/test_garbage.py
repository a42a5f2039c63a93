"""A sent message is freed at once: cycles would wait for Python's garbage collector, whose work
grows with them (a third of the CPU time of automatic batching, as measured)."""

import gc
import weakref

import pytest

from rocket_sink.message import Message
from rocket_sink.producer.worker import Waiter
from tests.producer.waiting import until

LONG_S = 30.0


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


SENDS = {
    "send": lambda producer, message: producer.send(message),
    "send_async": lambda producer, message: producer.send_async(message).result(LONG_S),
    "send_batch": lambda producer, message: producer.send_batch([message]),
}


@pytest.mark.parametrize("auto_batch", [False, True])
@pytest.mark.parametrize("mode", SENDS)
def test_messages_and_waiters_are_freed(make_producer, mode, auto_batch, monkeypatch):
    waiters = []

    class Watched(Waiter):
        __slots__ = ("__weakref__",)

        def __init__(self, *given):
            super().__init__(*given)
            waiters.append(weakref.ref(self))

    for module in ("driver", "engine_thread", "producer"):
        monkeypatch.setattr(f"rocket_sink.producer.{module}.Waiter", Watched)
    producer = make_producer(autoBatch="1ms" if auto_batch else "", sendMsgTimeout=60_000)
    message = Message("orders", b"x")
    freed = weakref.ref(message)
    SENDS[mode](producer, message)
    del message
    until(lambda: freed() is None, LONG_S)
    until(lambda: not any(reference() for reference in waiters), LONG_S)
    assert waiters or mode == "send_async"
