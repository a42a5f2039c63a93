"""Groups of single messages on the scripted cluster; no message that leaves a group is lost.

The brokers' stores show who has which message, by client id and body.
"""

import threading
import time
from collections import Counter

import pyarrow as pa
import pytest

from rocket_sink.errors import DeliveryError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.dispatcher import Dispatcher
from rocket_sink.task import request_factory
from rocket_sink.testing import Answer, Delay, Drop, FakeCluster
from rocket_sink.wire.codes import ResponseCode, SysFlag, mq_version
from tests.clusters import scripted_cluster
from tests.group_faults import FAULTS, groups
from tests.ledger.values import spool_rows
from tests.task.one_task import CTX, run_task

assert groups  # a fixture

TOPIC = "t"
ROWS = 900
HOSTILE = 'a "quoted" \\ back\\slash é 中 \U0001f600 \x7f'


cluster = scripted_cluster(**{TOPIC: 4})


def options(cluster, folder, **more):
    defaults = {"sendMsgTimeout": "20s", "connectTimeoutMs": "20s", **more}
    return SinkOptions.parse(
        nameServer=cluster.name_server, topic=TOPIC, ledger=str(folder), **defaults
    )


def delayed(rows=ROWS, **more):
    levels = pa.array([3] * rows, pa.int32())
    return {"body": [b"body-%d" % n for n in range(rows)], "delay_level": levels, **more}


def copies(cluster):
    return Counter(
        message.body for broker in cluster.brokers for message in broker.store.messages(TOPIC)
    )


def test_each_message_is_whole_and_there_once(cluster, tmp_path, groups):
    columns = delayed(
        tags=["tag" if n % 3 else None for n in range(ROWS)],
        properties=pa.array(
            [[("name", HOSTILE), (HOSTILE, str(n))] for n in range(ROWS)],
            pa.map_(pa.string(), pa.string()),
        ),
        flag=pa.array(range(ROWS), pa.int32()),
    )
    total = run_task(options(cluster, tmp_path), CTX, columns)
    assert (total.acked, total.requests, total.attempts) == (ROWS, ROWS, ROWS)
    assert sum(groups) == ROWS and max(groups) > 100
    stored = [message for broker in cluster.brokers for message in broker.store.messages(TOPIC)]
    ids = {message.properties["UNIQ_KEY"] for message in stored}
    assert len(ids) == len(stored) == ROWS
    sends = [row for row in spool_rows(*tmp_path.rglob("*.arrow")) if row["kind"] == "send"]
    assert sum(row["frames"] or 1 for row in sends) == ROWS
    for row in (row for row in sends if row["frames"]):
        sent = row["message_ids"].split("\x02")
        assert ids.issuperset(sent) and len(sent) == row["frames"]
        times = [row[f"rtt_{name}ms"] for name in ("min_", "p50_", "p95_", "p99_", "")]
        assert times == sorted(times) and times[0] > 0
    for message in stored:
        n = int(message.body.removeprefix(b"body-"))
        assert message.flag == n
        assert [message.properties.get(name) for name in ("name", HOSTILE, "TAGS", "DELAY")] == [
            HOSTILE, str(n), "tag" if n % 3 else None, "3",
        ]  # fmt: skip


def doubled(counts):
    """Return the number of messages that are stored more than once."""
    return sum(count > 1 for count in counts.values())


def broker_of(cluster):
    return cluster.broker("broker-a")


@pytest.mark.parametrize("delivery", ["at_least_once", "effectively_once"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_plain_success_leaves_the_group(cluster, tmp_path, fault, delivery, groups):
    broker_of(cluster).on_send(FAULTS[fault], times=5, chance=0.1)
    total = run_task(options(cluster, tmp_path, delivery=delivery), CTX, delayed())
    counts = copies(cluster)
    assert set(counts) == set(delayed()["body"])
    assert total.acked + total.degraded == ROWS
    assert total.degraded == (5 if fault == "degraded" else 0)
    doubles = doubled(counts)
    assert doubles <= total.duplicates_possible
    if delivery == "effectively_once" or fault in ("busy", "degraded"):
        assert (doubles, total.duplicates_possible) == (0, 0)
    assert max(groups) > 100


def test_an_answer_that_does_not_come(cluster, tmp_path):
    """Messages without an answer are sent again, and each of them is announced; no others are."""
    broker_of(cluster).on_send(Drop(), times=3, chance=0.05)
    parsed = options(cluster, tmp_path, sendMsgTimeout="20s", attemptTimeoutMs="1s")
    total = run_task(parsed, CTX, delayed())
    counts = copies(cluster)
    assert set(counts) == set(delayed()["body"]) and total.acked == ROWS
    assert doubled(counts) <= total.duplicates_possible


def test_only_what_was_not_answered_is_sent_again(cluster, tmp_path):
    """Answers come out of order, and the connection ends before the last of them."""
    cluster.on_send(Delay(60_000), times=15, chance=0.1)

    def reset():
        until_s = time.monotonic() + 20
        while sum(copies(cluster).values()) < ROWS and time.monotonic() < until_s:
            time.sleep(0.01)
        time.sleep(0.5)
        for broker in cluster.brokers:
            broker.reset_connections()

    thread = threading.Thread(target=reset)
    thread.start()
    try:
        total = run_task(options(cluster, tmp_path), CTX, delayed())
    finally:
        thread.join()
    counts = copies(cluster)
    assert set(counts) == set(delayed()["body"]) and total.acked == ROWS
    # A connection to the second broker may end with a repetition on its way: a third copy then.
    assert sum(count > 1 for count in counts.values()) == total.duplicates_possible == 30


def test_one_bad_message_is_one_dead_letter(cluster, tmp_path):
    cluster.on_send(Answer(ResponseCode.MESSAGE_ILLEGAL, "too long"), times=2, chance=0.02)
    total = run_task(options(cluster, tmp_path), CTX, delayed())
    bad = ROWS - sum(copies(cluster).values())
    assert (total.acked, total.dead, total.unknown) == (ROWS - bad, bad, 0)
    assert 0 < bad <= 4


def test_no_error_budget_ends_the_task(cluster, tmp_path):
    broker_of(cluster).on_send(Answer(ResponseCode.MESSAGE_ILLEGAL, "too long"), times=1)
    with pytest.raises(DeliveryError, match="too long"):
        run_task(options(cluster, tmp_path, maxFailures=0), CTX, delayed())


def test_no_group_where_order_counts(cluster, tmp_path, groups):
    """Brokers handle the frames of one connection in several threads."""
    for broker in cluster.brokers:
        broker.version = mq_version(5, 5, 0)
    columns = delayed(60, lite_topic=["key"] * 60)
    del columns["delay_level"]
    total = run_task(options(cluster, tmp_path, ordering="strict"), CTX, columns)
    assert total.acked == 60 and not groups
    [stored] = [b.store.messages(TOPIC) for b in cluster.brokers if b.store.messages(TOPIC)]
    assert [message.body for message in stored] == columns["body"]


def test_compressed_bodies(cluster, tmp_path, groups):
    """Long bodies are compressed, each with its own flag; short bodies are sent as they are."""
    bodies = [b"%d " % n * (4000 if n % 2 else 4) for n in range(300)]
    run_task(options(cluster, tmp_path), CTX, {**delayed(300), "body": bodies})
    stored = [message for broker in cluster.brokers for message in broker.store.messages(TOPIC)]
    flags = {message.body: bool(message.sys_flag & SysFlag.COMPRESSED) for message in stored}
    assert len(flags) == 300 and sum(flags.values()) == 150
    assert max(groups) > 50


def test_what_leaves_a_group_is_not_compressed_again(cluster, tmp_path, monkeypatch):
    calls, compress = Counter[bytes](), request_factory.compress_body

    def counted(body, *more):
        calls[body] += 1
        return compress(body, *more)

    monkeypatch.setattr(request_factory, "compress_body", counted)
    cluster.on_send(FAULTS["busy"], times=20, chance=0.2)
    bodies = [b"%d " % n * (4000 if n % 2 else 4) for n in range(300)]
    total = run_task(options(cluster, tmp_path), CTX, {**delayed(300), "body": bodies})
    assert copies(cluster) == Counter(bodies) and total.attempts == 340
    assert calls == Counter(bodies)


def test_groups_in_a_small_window(cluster, tmp_path, groups):
    total = run_task(options(cluster, tmp_path, maxInFlight=8), CTX, delayed(300))
    assert total.acked == 300 and set(copies(cluster)) == set(delayed(300)["body"])
    assert max(groups) == 2


def test_parts_of_a_group_are_as_large_as_a_busy_brokers_window(tmp_path, monkeypatch):
    """Smaller parts cost more for each message, just when the broker has no time for that."""
    parts: list[tuple[int, int]] = []
    write = Dispatcher._write_group

    def noted(self, attempt, target, now_s):
        window = target.broker.window
        if window is not None:
            assert target.broker.in_flight <= int(window.limit)
            parts.append((attempt.size, int(window.limit)))
        write(self, attempt, target, now_s)

    monkeypatch.setattr(Dispatcher, "_write_group", noted)
    with FakeCluster(brokers=1, queues=4) as cluster:
        cluster.create_topic(TOPIC, 4)
        cluster.brokers[0].on_send(FAULTS["busy"], times=30, chance=0.01)
        total = run_task(options(cluster, tmp_path, maxInFlight=512), CTX, delayed(5000))
        assert copies(cluster) == Counter(delayed(5000)["body"])
    assert total.acked == 5000 and total.attempts == 5030
    sizes, limits = zip(*(part for part in parts if part[1] < 128), strict=True)
    assert sum(sizes) > 0.4 * sum(limits), parts
