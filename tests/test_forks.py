"""A forked child works, even if another thread of the parent held a lock."""

import ast
import contextlib
import os
import signal
import threading
import time
import traceback
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pytest

from rocket_sink import Producer, TableProducer
from rocket_sink.forks import ForkLock
from rocket_sink.message import Message
from rocket_sink.net import identity
from rocket_sink.options import SinkOptions
from rocket_sink.producer import request_reply
from rocket_sink.producer.engine.mapped_table import MappedFile, MappedTable
from rocket_sink.spark import listener, transactions
from tests.clusters import scripted_cluster
from tests.producer.waiting import in_threads
from tests.test_layers import MODULES, layer_of, nodes_of

_LONGEST_S = 20.0
"""The longest time for a child; only a child that hangs uses all of it."""


cluster = scripted_cluster(orders=4)


@contextlib.contextmanager
def held(*locks):
    """Hold the locks in another thread."""
    go, has = threading.Event(), threading.Event()

    def hold():
        for lock in locks:
            lock.acquire()
        has.set()
        go.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    has.wait()
    try:
        yield
    finally:
        go.set()
        thread.join()


def fork(action):
    """Fork a child that calls `action`; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        action()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def end_of(pid):
    """Return the child's exit code, or say that it hung."""
    until_s = time.monotonic() + _LONGEST_S
    while time.monotonic() < until_s:
        pid_done, status = os.waitpid(pid, os.WNOHANG)
        if pid_done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def check(action, *locks):
    with held(*locks):
        assert end_of(fork(action)) == 0


def test_a_lock_is_free_in_the_child_and_stays_held_in_the_parent():
    lock = ForkLock()

    def child():
        assert lock.acquire(0)
        assert not lock.acquire(0.01)
        lock.release()
        with lock:
            pass

    with held(lock):
        assert end_of(fork(child)) == 0
        assert not lock.acquire(0)


@pytest.mark.parametrize("path", ["_session.builder._lock", "_renewing"])
def test_a_producer(cluster, path):
    options = {"autoBatch": True, "enableTrace": True, "sendMsgTimeout": 60_000}
    with Producer(nameServer=cluster.name_server, **options) as producer:
        producer.send(Message("orders", b"parent"))
        lock = attrgetter(path)(producer)

        def child():
            assert producer.broker_health() == []
            assert producer.isolations() == []
            assert producer.send(Message("orders", b"sync")).outcome.delivered
            assert producer.send_async(Message("orders", b"async")).result(60).outcome.delivered
            producer.close()

        check(child, lock)
        assert producer.send(Message("orders", b"parent")).outcome.delivered
    bodies = sorted(message.body for message in cluster.messages("orders"))
    assert bodies == [b"async", b"parent", b"parent", b"sync"]


def test_many_threads_of_a_child_make_one_client(cluster):
    with Producer(nameServer=cluster.name_server, sendMsgTimeout=60_000) as producer:
        producer.send(Message("orders", b"parent"))
        cluster.brokers[0].requests.clear()

        def child():
            ready, clients = threading.Barrier(8), []

            def send(_):
                ready.wait()
                clients.append(producer._live_session())

            in_threads(8, send)
            assert len(clients) == 8 and len(set(map(id, clients))) == 1

        for _ in range(5):
            check(child)


def test_a_child_that_asks_makes_itself_known_to_all_brokers(cluster, monkeypatch):
    """The parent did so before, but its topics do not count for the child's client."""
    # A busy machine may need more than half a second for the announcement.
    monkeypatch.setattr(request_reply, "_ANNOUNCE_S", _LONGEST_S)
    with Producer(nameServer=cluster.name_server) as producer:
        parents = producer._session
        parents.request_reply.connect_all("orders", parents.engine.clock() + 20)
        assert parents.engine.heartbeats.all_sent()
        announced = []

        def child():
            session = producer._live_session()

            def instead(*more):
                announced.append(session.engine.heartbeats.all_sent())
                raise InterruptedError

            session.driver.send = instead
            with contextlib.suppress(InterruptedError):
                producer.request(Message("orders", b"ping"), 20.0)
            assert announced == [True]
            assert not session.request_reply._waiting

        check(child)


def test_a_child_has_another_client_id_although_it_is_named(cluster):
    """Brokers push replies to a client id: to whichever of its connections came last."""
    options = {"nameServer": cluster.name_server, "instanceName": "one"}
    with Producer(**options) as producer, Producer(**options, producerGroup="g") as other:
        parent_id = producer._session.engine.identity.client_id
        assert parent_id.endswith("@one") and other._session.engine.identity.client_id == parent_id

        def child():
            for inherited in (producer, other):
                assert inherited.send(Message("orders", b"x")).outcome.delivered
                client_id = inherited._session.engine.identity.client_id
                assert client_id == f"{parent_id}#{os.getpid()}"
            with Producer(**options, producerGroup="h") as third:
                assert third._session.engine.identity.client_id == client_id

        check(child)
        assert producer._session.engine.identity.client_id == parent_id


def test_a_table_producer(cluster):
    table = pa.table({"body": [b"%d" % n for n in range(50)]})
    with TableProducer(nameServer=cluster.name_server, topic="orders") as producer:
        producer.send(table)

        def child():
            assert producer.send(table).summary.acked == 50
            producer.close()

        check(child, producer._lock, producer._pool._lock)
        assert producer.send(table).summary.acked == 50
    assert len(cluster.messages("orders")) == 150


def test_the_writers_lock_of_a_shared_file(tmp_path):
    """A child that found the lock held would wait for ever, so it gives up after milliseconds."""
    file = MappedFile.shared(tmp_path / "table", 4096)
    table = MappedTable(file, 0, 4, 512)
    assert table.put("key", b"parent's")

    def child():
        for number in range(5):
            assert table.put("key", b"%d" % number)

    # Hold the thread's lock but not the file's, which the parent would keep.
    check(child, file._thread_lock)
    assert table.get("key") == b"4"
    assert table.put("key", b"parent's"), "the parent's own lock is as it was"
    file.close()


OPTIONS = SinkOptions.parse(nameServer="n:1", instanceName="one")


@pytest.mark.parametrize(
    ("action", "lock"),
    [
        (listener._LOCK.__enter__, listener._LOCK),
        (transactions._lock.__enter__, transactions._lock),
        (lambda: identity.Identity(OPTIONS).claim(), identity._claiming),
        (lambda: MappedFile.shared(Path("new"), 4096).close(), MappedFile._guard),
    ],
)  # fmt: skip
def test_a_lock_of_the_process(action, lock, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(action, lock)


RENEWED = {
    "rocket_sink.producer.worker": "of one request, which ends in the process that sent it",
    "rocket_sink.producer.request_builder": "of the session",
    "rocket_sink.producer.future": "of one request, which ends in the process that sent it",
    "rocket_sink.spark.listener": "of the thread that folds, which only the driver's process has",
    "rocket_sink.spark.foreach_task": "of a task, which a child refuses to use",
    "rocket_sink.net.log": "its table is made anew in a child",
    "rocket_sink.ledger.lock": "of the thread that renews, which only the holder has",
    "rocket_sink.spark.backfill.backfill": "of one call",
}
"""The modules whose locks no child meets, each with the reason."""


def locks_in(source):
    """Return the lines that make a lock of `threading`."""
    names = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier"}
    return [
        node.lineno
        for node in nodes_of(source)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", None)) in names
    ]


def test_every_other_lock_is_free_after_a_fork():
    layers = {"values", "wire", "routing", "net", "producer", "ledger", "spark"}
    modules = {
        module
        for module, path in MODULES.items()
        if layer_of(module) in layers and locks_in(path.read_text())
    }
    assert modules == {*RENEWED, "rocket_sink.forks"}, "a lock that outlives a fork is a ForkLock"
    hidden = [
        module for module, path in MODULES.items() if "functools.cached_p" in path.read_text()
    ]
    assert hidden == ["rocket_sink.forks"], "has a lock of its own before Python 3.12"
    assert locks_in("import threading\nlock = threading.Lock()") == [2]
