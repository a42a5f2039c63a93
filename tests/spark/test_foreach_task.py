"""The foreach lane if Spark hands out rows slowly: `gatherMaxDelayMs` and its thread."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from unittest.mock import MagicMock, Mock, call

import pytest
from pyspark.sql import Row
from pyspark.sql.types import TimestampType

from rocket_sink import RocketSink
from rocket_sink.errors import ColumnError, ConfigurationError, DeliveryError
from rocket_sink.ledger.records import RunContext
from rocket_sink.options import SinkOptions
from rocket_sink.rows.row_batcher import FarTime, RowBatcher
from rocket_sink.spark import foreach_task
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import Answer, FakeCluster
from tests.clusters import are_in_order, scripted_cluster
from tests.ledger.values import spool_rows
from tests.producer.waiting import until

LONG_S = 60.0
BUSY = Answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy")


cluster = scripted_cluster(t=4)


class World(NamedTuple):
    """A topic, a ledger, and tasks of a foreach."""

    cluster: FakeCluster
    ledger: Path

    def task(self, *bodies, **options):
        """Return a sink in an open task that has these rows."""
        settings = {
            "nameServer": self.cluster.name_server, "topic": "t", "ledger": str(self.ledger),
            "sendMsgTimeout": 60_000, "appId": "a", "gatherMaxDelayMs": 1,
        }  # fmt: skip
        sink = RocketSink(**{**settings, **options})
        sink.open(0, 1)
        for body in bodies:
            sink.process(Row(body=body))
        return sink

    def bodies(self):
        return sorted(message.body for message in self.cluster.messages("t"))

    def account(self):
        """Return the last row of the only task's spool."""
        (path,) = self.ledger.rglob("*.arrow")
        (epoch,) = [row for row in spool_rows(path) if row["kind"] == "epoch"]
        return epoch


@pytest.fixture
def world(cluster, tmp_path):
    return World(cluster, tmp_path)


_of_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def only_threads_of_this_test():
    """Remember the threads of earlier tests, whose tasks were never closed."""
    _of_others.update(threading.enumerate())


def threads():
    started = set(threading.enumerate()) - _of_others
    return [thread for thread in started if thread.name == "rocket-sink-flush"]


def test_slow_rows_are_stored_while_the_task_goes_on(world):
    sink = world.task()
    for number in range(5):
        sink.process(Row(body=str(number)))
        until(lambda number=number: len(world.bodies()) == number + 1)
    sink.close(None)
    assert world.bodies() == [b"%d" % number for number in range(5)]
    epoch = world.account()
    assert (epoch["rows_in"], epoch["acked"], epoch["complete"]) == (5, 5, True)
    assert not threads()


def test_answers_are_read_while_spark_is_silent(world):
    """A retry needs the answer to be read, and so does a row behind another of its key."""
    world.cluster.on_send(BUSY, times=1)
    sink = world.task(ordering="strict")
    sink.process(Row(body="1", sharding_key="k"))
    time.sleep(0.05)
    sink.process(Row(body="2", sharding_key="k"))
    until(lambda: len(world.bodies()) == 2)
    sink.close(None)
    assert world.bodies() == [b"1", b"2"]


def test_and_of_a_batch_that_was_full(world):
    world.cluster.on_send(BUSY, times=1)
    sink = world.task("1", "2", requestMaxMessages=1)
    until(lambda: world.bodies() == [b"1", b"2"])
    sink.close(None)


def test_rows_keep_their_order_and_none_goes_twice(world):
    """Both threads cut batches; chance decides where they meet, so the test has many."""
    chance, total = random.Random(7), 3000
    sink = world.task(ordering="strict", requestMaxMessages=20)
    for number in range(total):
        sink.process(Row(body=f"{number:04}", sharding_key=f"k{number % 3}"))
        if chance.random() < 0.1:
            time.sleep(chance.choice((0.0005, 0.001, 0.0015, 0.003)))
    sink.close(None)
    stored = world.cluster.messages("t")
    assert sorted(int(message.body) for message in stored) == list(range(total))
    assert are_in_order(stored)
    epoch = world.account()
    assert (epoch["rows_in"], epoch["acked"]) == (total, total)


def test_a_row_that_comes_while_others_are_taken_waits_no_longer(world, monkeypatch):
    batch_of_rows = RowBatcher.batch
    late = [Row(body="late")]

    def batch(self, rows):
        if late:
            # `process` does so between its append and the end of `take`: it saw no need to look.
            sink._task._rows.append(late.pop())
        return batch_of_rows(self, rows)

    monkeypatch.setattr(RowBatcher, "batch", batch)
    sink = world.task()
    sink.process(Row(body="early"))
    until(lambda: world.bodies() == [b"early", b"late"])
    sink.close(None)
    assert world.bodies() == [b"early", b"late"]


def test_an_attempt_with_other_pauses_gives_the_same_ids(world):
    for attempt, gap_s in enumerate((0.004, 0.0)):
        sink = world._replace(ledger=world.ledger / str(attempt)).task()
        for number in range(20):
            sink.process(Row(body=str(number // 2)))
            time.sleep(gap_s)
        sink.close(None)
    ids = Counter((m.body, m.properties["UNIQ_KEY"]) for m in world.cluster.messages("t"))
    assert sorted(body for body, _ in ids) == [b"%d" % (number // 2) for number in range(20)]
    assert set(ids.values()) == {2}


class TestErrors:
    def failed(self, world):
        """Return a sink whose thread has failed."""
        sink = world.task("good", onInvalid="fail")
        until(lambda: world.bodies() == [b"good"])
        # The thread may have taken the row, and failed, before this call looks.
        with contextlib.suppress(DeliveryError):
            sink.process(Row(body=None))
        until(lambda: not threads())
        return sink

    def test_the_next_row_raises_it(self, world):
        sink = self.failed(world)
        for _ in range(2):
            with pytest.raises(DeliveryError, match="onInvalid") as caught:
                sink.process(Row(body="later"))
        sink.close(caught.value)
        assert world.bodies() == [b"good"]

    def test_the_thread_sends_nothing_after_an_error_of_process(self, world, monkeypatch):
        """Spark may call `close` much later, and answers let the thread send waiting requests."""

        def feed(run, batch, plan):
            if threading.current_thread() is threading.main_thread():
                raise DeliveryError("budget")

        monkeypatch.setattr(TaskRunner, "feed", feed)
        monkeypatch.setattr(TaskRunner, "drive", lambda run: True)
        sink = world.task("taken by the thread", requestMaxMessages=1)
        with pytest.raises(DeliveryError, match="budget") as caught:
            while True:
                sink.process(Row(body="more"))
        until(lambda: not threads(), LONG_S)
        sink.close(caught.value)

    def test_also_when_it_came_before_the_rows_were_taken(self, world):
        sink = world.task(7)
        until(lambda: not threads())
        with pytest.raises(ColumnError) as caught:
            sink.process(Row(body="later"))
        sink.close(caught.value)

    def test_close_raises_it(self, world):
        sink = self.failed(world)
        with pytest.raises(DeliveryError, match="onInvalid"):
            sink.close(None)
        assert world.bodies() == [b"good"]
        assert not world.account()["complete"]

    def test_the_worker_is_fit_for_the_next_task(self, world):
        sink = self.failed(world)
        sink.close(RuntimeError("upstream"))
        sink.open(0, 2)
        sink.process(Row(body="next"))
        until(lambda: world.bodies() == [b"good", b"next"])
        sink.close(None)


def test_a_task_that_is_given_up_leaves_no_thread(world):
    sink = world.task("x", gatherMaxDelayMs=30_000)
    assert threads()
    sink.close(RuntimeError("upstream"))
    assert not threads() and not world.bodies()


def test_without_a_delay_rows_wait_and_there_is_no_thread(world):
    sink = world.task(*["x"] * 700, gatherMaxDelayMs=0)
    assert not threads()
    time.sleep(0.05)
    assert not world.bodies()
    sink.close(None)
    assert len(world.bodies()) == 700


def test_answers_are_read_after_some_hundred_rows(world, monkeypatch):
    rows = list[int]()
    monkeypatch.setattr(TaskRunner, "drive", lambda run: rows.append(len(sink._task._rows)))
    sink = world.task(gatherMaxDelayMs=0, requestMaxMessages=1000)
    for number in range(1700):
        sink.process(Row(body=str(number)))
    assert len(rows) == 3 and all(500 <= b - a < 620 for a, b in pairwise([0, *rows]))
    sink.close(None)


def test_a_time_that_no_datetime_holds_fails_no_task(world):
    sink, far = world.task(), 10**18
    convert = TimestampType().fromInternal
    assert convert(None) is None and convert(10**6).timestamp() == 1
    assert isinstance(convert(far), FarTime) and convert(far).micros == far
    sink.close(None)
    with pytest.raises((OverflowError, ValueError)):
        TimestampType().fromInternal(far)


@pytest.mark.parametrize(("delay_ms", "handed"), [(0, None), (5, Mock())])
def test_the_runner_of_a_task(monkeypatch, delay_ms, handed):
    runner = MagicMock()
    names = {"TaskRunner": runner, "streaming_query": lambda: "q", "id_settings": lambda: "s"}
    for name, stand_in in names.items():
        monkeypatch.setattr(foreach_task, name, stand_in)
    options = SinkOptions.parse(topic="t", gatherMaxDelayMs=delay_ms)
    task = foreach_task.ForeachTask(options, None, 1, 2, "token", handed)  # type: ignore[arg-type]
    ctx = RunContext("local", "local", 2, 1, lane="foreach")
    assert runner.call_args == call(
        options, ctx, token="token", streaming_query="q", settings="s", timed=delay_ms > 0,
        hands_over=handed is not None,
    )  # fmt: skip
    for _ in range(2):
        task.close(None)
    assert runner().finish.call_count == 1
    assert handed is None or handed.add.mock_calls == [call(runner().handed)]
    with pytest.raises(ConfigurationError, match=r"maxEpochFailures needs.*foreachBatch"):
        foreach_task.ForeachTask(options.with_(maxEpochFailures=1), None, 1, 2)


def test_a_forked_child_sends_nothing_of_its_parent(world):
    sink = world.task("parent", gatherMaxDelayMs=300)
    child = os.fork()
    if not child:
        signal.alarm(int(LONG_S))  # A test that hangs fails.
        refused = 0
        for use in (lambda: sink.close(None), lambda: sink.open(0, 1) and sink.close(None)):
            try:
                use()
            except ConfigurationError:
                refused += 1
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    until(lambda: world.bodies() == [b"parent"])
    sink.close(None)
    assert world.bodies() == [b"parent"]
