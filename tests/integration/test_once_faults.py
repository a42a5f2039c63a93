"""Effectively once on a real cluster: brokers frozen and killed under a task, and its replays."""

import dataclasses
from collections import Counter

import pytest

from tests.damaged import damaged
from tests.task.one_task import run_task

from .test_lanes_faults import CTX, ROWS, Sending, in_order

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

AGAIN = dataclasses.replace(CTX, run_id="r2", task_attempt_id=1)


@pytest.fixture(params=["none", "strict"])
def sending(request, cluster, tmp_path):
    return Sending(
        cluster, tmp_path, delivery="effectively_once", ordering=request.param,
        sendMsgMaxTimeoutPerRequest=300, sendMsgTimeout=60_000, orderWaitMs=2_000,
        requestMaxMessages=100, storedCheckTimeout=300_000, connectTimeoutMs=500,
    )  # fmt: skip


def check(sending, summary, *, in_part):
    """Check that every row is stored complete and once, with at most `in_part` torn copies."""
    stored = sending.stored()
    complete = [message for message in stored if not damaged(message)]
    counts = Counter(int(message.body) for message in complete)
    doubled = sum(count > 1 for count in counts.values())
    assert (ROWS - len(counts), doubled) == (0, 0), summary
    assert summary.acked == ROWS and summary.duplicates_possible <= in_part, summary
    assert len(stored) - len(complete) <= in_part, summary
    assert sending.options.ordering == "none" or in_order(stored)


def test_a_frozen_broker_doubles_nothing(sending):
    """Requests to a frozen broker run out of time, and it stores them when it wakes up."""
    broker = sending.cluster.brokers[0]

    def freeze():
        broker.freeze()
        sending.later(5.0, broker.thaw)

    check(sending, sending.run(freeze), in_part=0)


@pytest.mark.parametrize(
    "sending", [pytest.param("none", marks=pytest.mark.slow), "strict"], indirect=True
)
def test_a_killed_broker_doubles_nothing(sending):
    """Allow one torn copy: the message that the broker was writing (`test_torn_log.py`)."""
    broker = sending.cluster.brokers[1]

    def kill():
        broker.kill()
        sending.later(1.0, lambda: broker.restart(300))

    # A killed broker is away for longer than a frozen one.
    sending.options = sending.options.with_(order_wait_ms=200_000)
    check(sending, sending.run(kill), in_part=1)


def test_delayed_messages_are_found_where_they_wait(cluster, tmp_path):
    sending = Sending(cluster, tmp_path, delivery="effectively_once")
    rows = {
        "body": [str(i) for i in range(40)], "delay_level": [18] * 20 + [None] * 20,
        "delay_ms": [None] * 20 + [3_600_000] * 20,
    }  # fmt: skip
    for ctx, skipped in ((CTX, 0), (AGAIN, 40)):
        summary = run_task(sending.options, ctx, rows)
        assert (summary.acked, summary.found_stored) == (40, skipped)
