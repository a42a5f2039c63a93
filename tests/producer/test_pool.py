"""The pool has an engine for each configuration, open while in use, and none from before a fork."""

import os
from types import SimpleNamespace

import pytest

from rocket_sink.options import SinkOptions
from rocket_sink.producer.pool import ProducerPool

A = SinkOptions.parse(nameServer="h1:9876")
B = SinkOptions.parse(nameServer="h1:9876", accessKey="u", secretKey="one")
C = SinkOptions.parse(nameServer="h1:9876", accessKey="u", secretKey="two")


class FakeEngine:
    def __init__(self, options):
        self.options = options
        self.is_broken = False
        self.pending = 0
        self.closed = self.abandoned = 0

    def close(self):
        self.closed += 1

    def abandon(self):
        self.abandoned += 1


@pytest.fixture
def clock():
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def pool(clock):
    return ProducerPool(clock=lambda: clock.now, make=FakeEngine)


def test_reused_by_the_same_configuration_only(pool):
    engines = {}
    for options in (A, B, C):
        engines[options.digest] = pool.acquire(options)
        pool.release(engines[options.digest])
    assert len(engines) == 3
    for options in (C, A, B):
        assert pool.acquire(options) is engines[options.digest]


def test_credentials_do_not_show(pool):
    pool.acquire(B)
    assert "one" not in repr(pool) and "one" not in repr(B) and "one" not in B.digest


def test_two_users_have_two_engines(pool):
    first, second = pool.acquire(A), pool.acquire(A)
    assert first is not second
    pool.release(first)
    assert not first.closed and not second.closed
    assert pool.acquire(A) is first


def test_giving_back_twice_is_loud(pool):
    engine = pool.acquire(A)
    pool.release(engine)
    with pytest.raises(RuntimeError, match="exactly one release"):
        pool.release(engine)
    with pytest.raises(RuntimeError):
        pool.release(FakeEngine(A))


def test_idle_ones_are_closed_at_the_next_checkout(pool, clock):
    engine = pool.acquire(A)
    pool.release(engine)
    clock.now += 599
    assert pool.acquire(A) is engine
    clock.now += 10_000
    other = pool.acquire(B)
    assert not engine.closed, "closed while it was out"
    pool.release(engine)
    clock.now += 601
    pool.release(other)
    assert pool.acquire(A) is not engine
    assert engine.closed == 1 and not other.closed


@pytest.mark.parametrize(("name", "value"), [("is_broken", True), ("pending", 3)])
def test_broken_or_busy_ones_are_not_kept(pool, name, value):
    engine = pool.acquire(A)
    setattr(engine, name, value)
    pool.release(engine)
    assert engine.closed == 1
    engine = pool.acquire(A)
    pool.release(engine)
    engine.is_broken = True
    assert pool.acquire(A) is not engine


def test_an_exception_drops_the_engine(pool):
    with pytest.raises(ZeroDivisionError), pool.engine(A) as engine:
        raise ZeroDivisionError
    assert engine.closed == 1 and not pool._idle
    with pool.engine(A) as engine:
        pass
    assert not engine.closed and len(pool._idle) == 1


def test_a_fork_starts_with_nothing(pool, monkeypatch):
    idle, out = pool.acquire(A), pool.acquire(A)
    pool.release(idle)
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    fresh = pool.acquire(A)
    assert fresh is not idle and fresh is not out
    assert idle.abandoned == 1 and not idle.closed and not out.closed
    with pytest.raises(RuntimeError):
        pool.release(out)
