"""The foreach lane if Spark hands out rows slowly: `gatherMaxDelayMs` and its thread."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row

from rocket_sink import RocketSink
from rocket_sink.errors import ColumnError, ConfigurationError, DeliveryError
from rocket_sink.rows.row_batcher import RowBatcher
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import Answer, FakeCluster
from tests.clusters import scripted_cluster
from tests.ledger.values import spool_rows
from tests.producer.waiting import until

LONG_S = 60.0


cluster = scripted_cluster(t=4)


def sink_of(cluster: FakeCluster, ledger: Path, **options: Any) -> RocketSink:
    settings = {"nameServer": cluster.name_server, "topic": "t", "ledger": str(ledger),
             "sendMsgTimeout": 60_000, "appId": "a", "gatherMaxDelayMs": 1, **options}  # fmt: skip
    return RocketSink(**settings)


def bodies(cluster: FakeCluster) -> list[bytes]:
    return sorted(message.body for message in cluster.messages("t"))


_of_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def only_threads_of_this_test() -> None:
    """Remember the threads of earlier tests, whose tasks were never closed."""
    _of_others.update(threading.enumerate())


def threads() -> list[threading.Thread]:
    started = set(threading.enumerate()) - _of_others
    return [thread for thread in started if thread.name == "rocket-sink-flush"]


def account(ledger: Path) -> dict[str, Any]:
    """Return the last row of the only task's spool."""
    (path,) = ledger.rglob("*.arrow")
    (found,) = [row for row in spool_rows(path) if row["kind"] == "epoch"]
    return found


def test_slow_rows_are_stored_while_the_task_goes_on(cluster: FakeCluster, tmp_path: Path) -> None:
    sink = sink_of(cluster, tmp_path)
    sink.open(0, 1)
    for number in range(5):
        sink.process(Row(body=str(number)))
        until(lambda number=number: len(bodies(cluster)) == number + 1)
    sink.close(None)
    assert bodies(cluster) == [b"%d" % number for number in range(5)]
    epoch = account(tmp_path)
    assert (epoch["rows_in"], epoch["acked"], epoch["complete"]) == (5, 5, True)
    assert not threads()


def test_answers_are_read_while_spark_is_silent(cluster: FakeCluster, tmp_path: Path) -> None:
    """A retry needs the answer to be read, and so does a row behind another of its key."""
    cluster.on_send(Answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"), times=1)
    sink = sink_of(cluster, tmp_path, ordering="strict")
    sink.open(0, 1)
    sink.process(Row(body="1", sharding_key="k"))
    time.sleep(0.05)
    sink.process(Row(body="2", sharding_key="k"))
    until(lambda: len(bodies(cluster)) == 2)
    sink.close(None)
    assert bodies(cluster) == [b"1", b"2"]


def test_and_of_a_batch_that_was_full(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.on_send(Answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"), times=1)
    sink = sink_of(cluster, tmp_path, requestMaxMessages=1)
    sink.open(0, 1)
    sink.process(Row(body="1"))
    sink.process(Row(body="2"))
    until(lambda: sorted(bodies(cluster)) == [b"1", b"2"])
    sink.close(None)


def test_rows_keep_their_order_and_none_goes_twice(cluster: FakeCluster, tmp_path: Path) -> None:
    """Both threads cut batches; chance decides where they meet, so the test has many."""
    chance, total = random.Random(7), 3000
    sink = sink_of(cluster, tmp_path, ordering="strict", requestMaxMessages=20)
    sink.open(0, 1)
    for number in range(total):
        sink.process(Row(body=str(number), sharding_key=f"k{number % 3}"))
        if chance.random() < 0.1:
            time.sleep(chance.choice((0.0005, 0.001, 0.0015, 0.003)))
    sink.close(None)
    stored = cluster.messages("t")
    assert sorted(int(message.body) for message in stored) == list(range(total))
    of_key: dict[int, list[int]] = defaultdict(list)
    for message in sorted(stored, key=lambda one: one.queue_offset):
        of_key[int(message.body) % 3].append(int(message.body))
    assert all(numbers == sorted(numbers) for numbers in of_key.values())
    epoch = account(tmp_path)
    assert (epoch["rows_in"], epoch["acked"]) == (total, total)


def test_a_row_that_comes_while_others_are_taken_waits_no_longer(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_of_rows = RowBatcher.batch
    late = [Row(body="late")]

    def batch(self: RowBatcher, rows: Any) -> pa.RecordBatch:
        if late:
            # `process` does so between its append and the end of `take`: it saw no need to look.
            sink._task._rows.append(late.pop())  # type: ignore[union-attr]
        return batch_of_rows(self, rows)

    monkeypatch.setattr(RowBatcher, "batch", batch)
    sink = sink_of(cluster, tmp_path)
    sink.open(0, 1)
    sink.process(Row(body="early"))
    until(lambda: bodies(cluster) == [b"early", b"late"])
    sink.close(None)
    assert bodies(cluster) == [b"early", b"late"]


def test_an_attempt_with_other_pauses_gives_the_same_ids(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    for attempt, gap_s in enumerate((0.004, 0.0)):
        sink = sink_of(cluster, tmp_path / str(attempt))
        sink.open(0, 1)
        for number in range(20):
            sink.process(Row(body=str(number // 2)))
            time.sleep(gap_s)
        sink.close(None)
    ids = defaultdict(set)
    for message in cluster.messages("t"):
        ids[message.body].add(message.properties["UNIQ_KEY"])
    assert len(cluster.messages("t")) == 40
    assert {body: len(message_ids) for body, message_ids in ids.items()} == {
        b"%d" % number: 2 for number in range(10)
    }


class TestErrors:
    def failed(self, cluster: FakeCluster, tmp_path: Path) -> RocketSink:
        """Return a sink whose thread has failed."""
        sink = sink_of(cluster, tmp_path, onInvalid="fail")
        sink.open(0, 1)
        sink.process(Row(body="good"))
        until(lambda: bodies(cluster) == [b"good"])
        # The thread may have taken the row, and failed, before this call looks.
        with contextlib.suppress(DeliveryError):
            sink.process(Row(body=None))
        until(lambda: not threads())
        return sink

    def test_the_next_row_raises_it(self, cluster: FakeCluster, tmp_path: Path) -> None:
        sink = self.failed(cluster, tmp_path)
        with pytest.raises(DeliveryError, match="onInvalid") as caught:
            sink.process(Row(body="later"))
        with pytest.raises(DeliveryError, match="onInvalid"):
            sink.process(Row(body="later"))
        sink.close(caught.value)
        assert bodies(cluster) == [b"good"]

    def test_the_thread_sends_nothing_after_an_error_of_process(
        self, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Spark may call `close` much later, and answers let the thread send waiting requests."""

        def feed(run: TaskRunner, batch: pa.RecordBatch, plan: object) -> None:
            if threading.current_thread() is threading.main_thread():
                raise DeliveryError("budget")

        monkeypatch.setattr(TaskRunner, "feed", feed)
        monkeypatch.setattr(TaskRunner, "drive", lambda run: True)
        sink = sink_of(cluster, tmp_path, requestMaxMessages=1)
        sink.open(0, 1)
        sink.process(Row(body="taken by the thread"))
        with pytest.raises(DeliveryError, match="budget") as caught:
            while True:
                sink.process(Row(body="more"))
        until(lambda: not threads(), LONG_S)
        sink.close(caught.value)

    def test_also_when_it_came_before_the_rows_were_taken(
        self, cluster: FakeCluster, tmp_path: Path
    ) -> None:
        sink = sink_of(cluster, tmp_path)
        sink.open(0, 1)
        sink.process(Row(body=7))
        until(lambda: not threads())
        with pytest.raises(ColumnError) as caught:
            sink.process(Row(body="later"))
        sink.close(caught.value)

    def test_close_raises_it(self, cluster: FakeCluster, tmp_path: Path) -> None:
        sink = self.failed(cluster, tmp_path)
        with pytest.raises(DeliveryError, match="onInvalid"):
            sink.close(None)
        assert bodies(cluster) == [b"good"]
        assert not account(tmp_path)["complete"]

    def test_the_worker_is_fit_for_the_next_task(
        self, cluster: FakeCluster, tmp_path: Path
    ) -> None:
        sink = self.failed(cluster, tmp_path)
        sink.close(RuntimeError("upstream"))
        sink.open(0, 2)
        sink.process(Row(body="next"))
        until(lambda: bodies(cluster) == [b"good", b"next"])
        sink.close(None)


def test_a_task_that_is_given_up_leaves_no_thread(cluster: FakeCluster, tmp_path: Path) -> None:
    sink = sink_of(cluster, tmp_path, gatherMaxDelayMs=30_000)
    sink.open(0, 1)
    sink.process(Row(body="x"))
    assert threads()
    sink.close(RuntimeError("upstream"))
    assert not threads() and not bodies(cluster)


def test_without_a_delay_rows_wait_and_there_is_no_thread(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    sink = sink_of(cluster, tmp_path, gatherMaxDelayMs=0)
    sink.open(0, 1)
    for _ in range(700):
        sink.process(Row(body="x"))
    assert not threads()
    time.sleep(0.05)
    assert not bodies(cluster)
    sink.close(None)
    assert len(bodies(cluster)) == 700


def test_a_forked_child_sends_nothing_of_its_parent(cluster: FakeCluster, tmp_path: Path) -> None:
    sink = sink_of(cluster, tmp_path, gatherMaxDelayMs=300)
    sink.open(0, 1)
    sink.process(Row(body="parent"))
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
    until(lambda: bodies(cluster) == [b"parent"])
    sink.close(None)
    assert bodies(cluster) == [b"parent"]
