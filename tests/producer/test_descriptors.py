"""A process without free file descriptors: LocalResourcesError, no isolation, and recovery."""

import contextlib
import errno
import os
import resource
import threading

import pytest

from rocket_sink.errors import LocalResourcesError, NotSentError, SendError
from rocket_sink.message import Message
from rocket_sink.net import transport
from rocket_sink.net.client import NetworkClient
from rocket_sink.options import SinkOptions
from rocket_sink.producer.producer import Producer
from tests.producer.conftest import send
from tests.test_forks import end_of, fork


@contextlib.contextmanager
def descriptors_left(count):
    """Leave the process so many descriptors to open; for use in a child."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    fillers = []
    with contextlib.suppress(OSError):
        while True:
            fillers.append(os.open("/dev/null", os.O_RDONLY))
    for number in fillers[:count]:
        os.close(number)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in fillers[count:]:
            os.close(number)


def in_child(action):
    """Run in a child: the limit is the process's, and other tests run in this one."""
    assert end_of(fork(action)) == 0


@pytest.mark.parametrize("left", range(4))
def test_a_producer_cannot_be_made(cluster, left):
    def child():
        with descriptors_left(left):
            # A producer needs three descriptors.
            if left == 3:
                Producer(nameServer=cluster.name_server)
                return
            with pytest.raises(NotSentError, match=r"Too many open files.*ulimit") as caught:
                Producer(nameServer=cluster.name_server)
            assert type(caught.value) is LocalResourcesError
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.errno == errno.EMFILE
        Producer(nameServer=cluster.name_server).send(Message("orders", b"after"))

    in_child(child)
    assert len(cluster.messages("orders")) == (left < 3)


def test_a_connection_cannot_be_made(cluster):
    def child():
        with Producer(nameServer=cluster.name_server, sendMsgTimeout=500) as producer:
            # The connection to the name server is open.
            queues = producer.fetch_publish_message_queues("orders")
            with descriptors_left(0):
                for _ in range(3):
                    with pytest.raises(NotSentError, match="Too many open files") as caught:
                        producer.send(Message("orders", b"x"), queue=queues[0])
                    assert type(caught.value) is LocalResourcesError
                assert producer.isolations() == []
            producer.send(Message("orders", b"after"), queue=queues[0])

    in_child(child)
    assert [message.body for message in cluster.messages("orders")] == [b"after"]


def test_a_name_server_cannot_be_asked(cluster):
    def child():
        with Producer(nameServer=cluster.name_server, sendMsgTimeout=500) as producer:
            with descriptors_left(0), pytest.raises(SendError, match="Too many open files"):
                producer.send(Message("orders", b"x"))
            producer.send(Message("orders", b"after"), timeout_ms=60_000)

    in_child(child)
    assert [message.body for message in cluster.messages("orders")] == [b"after"]


def test_descriptors_that_come_free_in_time_are_used(make_engine, cluster, monkeypatch):
    """The send is tried again until the deadline; no broker is isolated."""
    real, refused, here = transport._new_socket, [], threading.get_ident()

    def sometimes(*kind):
        # Only the engine is limited: a producer of an earlier test may still connect in its thread.
        if threading.get_ident() == here and len(refused) < 5:
            refused.append(kind)
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*kind)

    engine = make_engine(sendMsgTimeout=60_000, retryTimesWhenSendFailed=9)
    engine.publish_info("orders")
    monkeypatch.setattr(transport, "_new_socket", sometimes)
    completion = send(engine, 1)
    assert completion.outcome.delivered and len(completion.attempts) == 1 + len(refused) == 6
    assert {attempt.error_code for attempt in completion.attempts[:-1]} == {"LOCAL_RESOURCES"}
    assert engine.isolations() == []


def test_a_closed_half_of_a_client_is_not_left_behind():
    """Descriptors that were opened before the limit was reached are closed again."""

    def child():
        options = SinkOptions.parse(nameServer="n:1")
        before = sorted(os.listdir("/proc/self/fd"))
        for count in range(3):
            with descriptors_left(count), contextlib.suppress(LocalResourcesError):
                NetworkClient(options)
        assert sorted(os.listdir("/proc/self/fd")) == before

    in_child(child)
