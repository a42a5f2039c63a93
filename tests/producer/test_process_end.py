"""A process ends without `close`: the messages that `send_async` accepted are sent nevertheless.

Scripts run as processes of their own on the scripted cluster of the test, which counts the messages
that arrive.
"""

import multiprocessing.process
import multiprocessing.util
import time

import pytest

from rocket_sink.producer import process_end
from rocket_sink.testing import Answer, Drop
from rocket_sink.wire.codes import RequestCode
from tests.decoding import decode_trace
from tests.python import run_python

COUNT = 500
LIMIT_S = 120.0

HEAD = """\
import atexit, functools, multiprocessing, os, sys, threading, time, warnings
from concurrent.futures import ProcessPoolExecutor
from rocket_sink import Message, Producer
address, count = sys.argv[1], int(sys.argv[2])
Producer = functools.partial(Producer, nameServer=address, sendMsgTimeout=60_000)
p = Producer()

def work(producer=None):
    producer = producer or Producer()
    for number in range(count):
        producer.send_async(Message("orders", b"%d" % number))

"""

ENDS = {
    "spawn": """
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0
""",
    "pool": """
with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
    assert pool.submit(work).result() is None
""",
    "last line": "work(p)",
    "a function's producer": "work()",
    "fork": """
pid = os.fork()
if pid == 0:
    work(p)
else:
    assert os.waitpid(pid, 0)[1] == 0
""",
    "multiprocessing fork": """
child = multiprocessing.get_context("fork").Process(target=work, args=(p,))
child.start()
child.join()
assert child.exitcode == 0
""",
    "a thread outlives main": """
def later():
    threading.main_thread().join()
    work(p)
threading.Thread(target=later).start()
""",
    "first send at exit": "atexit.register(work, p)",
    "a producer made at exit": "atexit.register(work)",
    "first batch at exit": "atexit.register(work, Producer(autoBatch=True))",
    "batches": "work(Producer(autoBatch='30s'))",
    "a thread of a child outlives its target": """
def target():
    work(p)
    def later():
        time.sleep(0.3)
        p.send_async(Message("orders", b"late"))
        assert p.send(Message("orders", b"last")).status == "SEND_OK"
    threading.Thread(target=later).start()
count -= 2
child = multiprocessing.get_context("fork").Process(target=target)
child.start()
child.join()
assert child.exitcode == 0
""",
}


@pytest.fixture
def run(cluster, tmp_path):
    """Return a function that runs a script to its end."""

    def run(script, *flags):
        path = tmp_path / "script.py"
        path.write_text(HEAD + script)
        return run_python(
            *flags, path, cluster.name_server, str(COUNT), timeout_s=LIMIT_S, may_fail=True
        )

    return run


@pytest.mark.parametrize("end", ENDS)
def test_all_that_was_taken_is_sent(cluster, run, end):
    process = run(ENDS[end], "-W", "ignore:This process:DeprecationWarning")  # of os.fork
    assert (process.returncode, process.stderr) == (0, "")
    assert len(cluster.messages("orders")) == COUNT


def test_an_uncaught_error_loses_no_message(cluster, run):
    process = run("work(p)\nraise KeyError(17)")
    assert process.returncode == 1 and process.stderr.endswith("KeyError: 17\n")
    assert len(cluster.messages("orders")) == COUNT


def test_traces_of_the_last_sends_are_sent(cluster, run):
    cluster.create_topic("RMQ_SYS_TRACE_TOPIC", 1)
    script = """
p = Producer(enableTrace=True)
for number in range(10):
    p.send(Message("orders", b"x")) if number % 2 else p.send_async(Message("orders", b"x"))
"""
    assert run(script).stderr == ""
    traces = cluster.messages("RMQ_SYS_TRACE_TOPIC")
    assert sum(len(decode_trace(trace.body.decode())) for trace in traces) == 10


@pytest.mark.parametrize("answer", [Answer(13, "illegal"), Drop()])
def test_one_line_counts_what_was_not_delivered(cluster, run, answer):
    """A silent broker delays the end no longer than the sends' own deadlines."""
    cluster.on_send(answer, times=None)
    ended = run("""
p = Producer(sendMsgTimeout=2000, retryTimesWhenSendFailed=0)
work(p)
began = time.monotonic()
atexit._run_exitfuncs()
assert time.monotonic() - began < 30
""")
    assert ended.returncode == 0
    [line] = ended.stderr.splitlines()
    assert f" ERROR at least {COUNT} messages of asynchronous sends were not delivered" in line


def test_a_producer_that_is_collected_says_so_and_sends_what_it_took(cluster, run):
    process = run(
        """
work(p)
p.listen_for_checks("orders")
del p
while any(thread.name == "rocket-sink-producer" for thread in threading.enumerate()):
    time.sleep(0.01)
with Producer() as closed:
    closed.send_async(Message("orders", b"x"))
del closed
os._exit(0)
""",
        "-Wdefault::ResourceWarning",
    )
    assert process.returncode == 0 and process.stderr.count("was not closed") == 1
    assert len(cluster.messages("orders")) == COUNT + 1
    for broker in cluster.brokers:
        codes = [request.code for request in broker.requests]
        assert RequestCode.UNREGISTER_CLIENT in codes


def test_an_exit_without_clean_up_waits_for_nothing(cluster, run):
    """PySpark's workers end in this way."""
    cluster.on_send(Drop(), times=None)
    began_s = time.monotonic()
    assert run("work(p); os._exit(7)").returncode == 7
    assert time.monotonic() - began_s < 50  # The sends' deadlines are 60 s away.


def test_a_child_registers_its_end_once(monkeypatch):
    """However many producers it makes."""
    monkeypatch.setattr(multiprocessing.process, "parent_process", lambda: "the parent")
    registry = {}
    monkeypatch.setattr(multiprocessing.util, "_finalizer_registry", registry)
    monkeypatch.setattr(process_end, "_registered", set())
    monkeypatch.setattr(process_end, "_senders", set())
    for _ in range(5):
        process_end.finish_at_end(object())
    assert len(registry) == 1


NATIVE = """\
import sys, threading
import deltalake, pyarrow
from rocket_sink.ledger.append.delta_rs import open_table
from rocket_sink.ledger.path import resolve_path

place, opened = resolve_path(sys.argv[1]), threading.Semaphore(0)
for _ in range(20):
    deltalake.write_deltalake(place.root, pyarrow.table({"kind": ["send"]}), mode="append")

def work():
    while True:
        assert open_table(place).version() == 19
        opened.release()

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
for _ in range(20):
    opened.acquire()
"""


def test_threads_within_delta_rs_do_not_crash_the_end(tmp_path):
    """Spark runs the functions of foreachBatch in daemon threads: such an end was a SIGSEGV."""
    process = run_python("-c", NATIVE, tmp_path / "table", timeout_s=LIMIT_S, may_fail=True)
    assert (process.returncode, process.stderr) == (0, "")


EPOCH = """\
import sys, threading, time
import pyarrow as pa
from rocket_sink.options import SinkOptions
from rocket_sink.spark.foreach_batch import BatchWriter

schema, reads = pa.schema([("n", pa.int64())]), threading.Semaphore(0)

def batches():
    end_s = None
    while end_s is None or time.monotonic() < end_s:
        if end_s is None and not threading.main_thread().is_alive():
            end_s = time.monotonic() + 2
        reads.release()
        yield pa.record_batch({"n": [1]}, schema)

class Frame:
    @property
    def sparkSession(self):
        pa.RecordBatchReader.from_batches(schema, batches()).read_all()
        sys.stdout.write("all batches were read\\n")
        raise SystemExit

options = SinkOptions.parse({"nameServer": "127.0.0.1:1", "topic": "orders"})
for _ in range(4):
    writer = BatchWriter(options)
    threading.Thread(target=writer.write_epoch, args=(Frame(), 0), daemon=True).start()
for _ in range(20):
    reads.acquire()
"""


def test_a_micro_batch_under_way_is_sent_before_the_end(tmp_path):
    """Threads within pyarrow, which calls Python, ended such a process by SIGABRT."""
    process = run_python("-c", EPOCH, timeout_s=LIMIT_S)
    assert process.stdout.splitlines() == ["all batches were read"] * 4
    [line] = process.stderr.splitlines()
    assert "waits for a micro-batch to be sent" in line
