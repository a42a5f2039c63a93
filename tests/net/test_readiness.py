"""Waits for sockets: their interests, wakes, and a selector that another thread closes."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from rocket_sink.net import transport
from rocket_sink.net.client import READ, WRITE, Readiness


def test_an_interest_can_change_and_a_wake_ends_one_wait_only():
    readiness, (end, other_end) = Readiness(), socket.socketpair()
    channel: Any = SimpleNamespace(transport=end, interest=0)
    with end, other_end:
        for interest, ready in ((READ, 0), (READ | WRITE, WRITE), (READ, 0)):
            readiness.watch(channel, interest)
            assert readiness.wait(0) == ([(channel, ready)] if ready else [])
        readiness.wake()
        assert readiness.wait(60.0) == []
        assert not readiness._selector.select(0)
        for _ in range(2):
            readiness.close()
        readiness.wake()
        assert readiness.wait(60.0) == []


def test_a_wait_that_another_thread_closes_ends_without_an_error():
    def wait_twice(readiness, started):
        started.set()
        return [readiness.wait(0.05), readiness.wait(0.05)]

    with ThreadPoolExecutor(1) as pool:
        for _ in range(50):
            readiness, started = Readiness(), threading.Event()
            waits = pool.submit(wait_twice, readiness, started)
            started.wait()
            readiness.close()
            assert waits.result(30) == [[], []]


def test_sockets_do_not_wait_and_notice_dead_peers():
    with transport._new_socket(socket.AF_INET, socket.SOCK_STREAM, 0) as sock:
        assert not sock.getblocking()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
