"""Code of a user beside the producer: callbacks, signal handlers and handlers of logging.

They may take locks, block, send and close. Each script runs in a process of its own, because its
defect is to hang."""

import threading

import pytest

from rocket_sink.errors import RequestTimeoutError
from rocket_sink.message import Message
from tests.python import run_python

LIMIT_S = 120.0
HEAD = """\
import logging, random, signal, sys, threading, time
from rocket_sink import Message, Producer
from rocket_sink.errors import SendError
def make():
    producer = Producer(nameServer=sys.argv[1], sendMsgTimeout=60_000)
    producer.send(Message("orders", b"first"))
    return producer
def interrupted(handler, sends):
    random.seed(1)
    for _ in range(30):
        producer = make()
        signal.signal(signal.SIGALRM, lambda *_: handler(producer))
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.002, 0.02))
        end_s = time.monotonic() + 0.03
        try:
            while time.monotonic() < end_s:
                sends(producer)
        except SendError:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        producer.close()
"""
SCRIPTS = {
    "a callback takes a lock of senders": """
lock, producer = threading.Lock(), make()
def callback(result, error):
    with lock:
        pass
def work():
    for _ in range(30):
        with lock:
            producer.send(Message("orders", b"s"))
        producer.send_async(Message("orders", b"a"), callback)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
producer.close()
""",
    "a handler closes": """
interrupted(Producer.close, lambda producer: producer.send(Message("orders", b"s")))
""",
    "a handler sends": """
interrupted(
    lambda producer: producer.send(Message("orders", b"h")),
    lambda producer: producer.send(Message("orders", b"s")),
)
""",
    "a handler sends between futures": """
interrupted(
    lambda producer: producer.send_async(Message("orders", b"h")).result(),
    lambda producer: producer.send_async(Message("orders", b"s")).result(),
)
""",
    "a callback closes": """
producer, done = make(), threading.Event()
def callback(result, error):
    producer.close()
    done.set()
producer.send_async(Message("orders", b"a"), callback)
try:
    while not done.is_set():
        producer.send(Message("orders", b"s"))
except SendError:
    pass
assert done.wait(30)
""",
    "a handler of logging sends": """
producer, sent = make(), threading.Event()
class Handler(logging.Handler):
    def emit(self, record):
        producer.send(Message("orders", b"log"))
        sent.set()
logging.getLogger("rocket_sink").addHandler(Handler())
log = logging.getLogger("rocket_sink.producer.engine.request_flow")
producer._session.driver.call(lambda: log.warning("of the producer's thread") or True)
assert sent.wait(30)
producer.close()
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_users_code_may_call_everything(cluster, tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(HEAD + SCRIPTS[name] + "\nprint('done')\n")
    ended = run_python(script, cluster.name_server, timeout_s=LIMIT_S, may_fail=True)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_a_callback_that_blocks_delays_no_send(make_producer):
    producer, began, over = make_producer(), threading.Event(), threading.Event()

    def blocks(result, error):
        began.set()
        assert over.wait(60)

    producer.send_async(Message("orders", b"x"), blocks)
    assert began.wait(60)
    for _ in range(3):
        assert producer.send(Message("orders", b"x")).message_id
        assert producer.send_async(Message("orders", b"x")).result(60).message_id
    with pytest.raises(RequestTimeoutError, match="flush"):
        producer.flush(0.05)
    over.set()
    producer.flush()
