"""The first lines of a verdict name the cause that a broker gave, and its remedy: each error class,
injected by the scripted cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rocket_sink import errors
from rocket_sink.errors import RocketSinkError, SendError
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.records import RunContext, in_order
from rocket_sink.ledger.report import Report, Scope, figures
from rocket_sink.ledger.report.causes import CAUSES
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.routing.retry import ERROR_OF_CODE
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import Answer, CloseConnection, Drop, FakeCluster, IncompleteAnswer

from .night import store
from .values import confirmed, context

Break = Callable[[FakeCluster], None]


def answers(code: int, remark: str = "the broker's own words") -> Break:
    return lambda cluster: cluster.brokers[0].on_send(Answer(code, remark), times=None)


def behaves(behaviour: CloseConnection | Drop | IncompleteAnswer) -> Break:
    return lambda cluster: cluster.brokers[0].on_send(behaviour, times=None)


SIGNATURE = "check signature failed"
CASES: dict[str, tuple[Break, str, str]] = {
    "AUTH_FAILED": (
        answers(1, f"AclException: {SIGNATURE}"),
        (f"broker-a does not accept the user or the signature (AUTH_FAILED: AclException: "
        f"{SIGNATURE})"),
        ("set the options accessKey and secretKey to a user of the brokers, then start the query "
         "again"),
    ),
    "NO_PERMISSION": (
        answers(16, "the topic[t] sending message is forbidden"),
        ("the topic t is closed on broker-a to this account (NO_PERMISSION: the topic[t] sending "
         "message is forbidden)"),
        "allow the account to write there",
    ),
    "NO_ROUTE": (
        lambda cluster: cluster.create_topic("t", perm=4),
        "the topic t has no queue that may be written to (NO_ROUTE: ",
        ("create the topic, open it (mqadmin updateTopicPerm), or start its brokers, then start "
         "the query again"),
    ),
    "NAME_SERVER_UNAVAILABLE": (
        FakeCluster.stop_name_server, "no name server answers (NAME_SERVER_UNAVAILABLE: ",
        "start a name server, or mend the option nameServer, then start the query again",
    ),
    "CONNECT": (
        lambda cluster: cluster.brokers[0].kill(), "broker-a ", "start broker-a",
    ),
    "BROKER_BUSY": (answers(2), "broker-a is too busy (BROKER_BUSY: ", "look at the disk"),
    "REQUEST_CODE_NOT_SUPPORTED": (
        answers(3), "broker-a does not know the request of a send", "look at the address",
    ),
    "MESSAGE_ILLEGAL": (
        answers(13), "broker-a refuses messages of the topic t as illegal", "compare maxMessage",
    ),
    "BATCH_TOO_LARGE": (
        answers(1, "message body size exceeded"),
        "broker-a refuses messages of the topic t as too large", "raise maxMessageSize",
    ),
    "SERVICE_NOT_AVAILABLE": (
        answers(14, "disk full"),
        "broker-a takes no messages (SERVICE_NOT_AVAILABLE: disk full)", "look at the disk",
    ),
    "TOPIC_NOT_FOUND": (answers(17), "broker-a does not have the topic t", "create the topic"),
    "INVALID_QUEUE": (answers(29), "broker-a ", "give the topic its queues back"),
    "QUEUE_MOVED": (answers(501), "a queue of the topic t is on another broker", "run the query"),
    "GO_AWAY": (answers(1500), "broker-a shuts down (GO_AWAY: ", "start broker-a"),
    "NOT_STORED": (
        answers(1, "create mapped file failed, server is busy or broken."),
        "broker-a cannot store messages", "look at the log of broker-a",
    ),
    "BROKER_ERROR": (
        answers(1), "broker-a answers with an error (BROKER_ERROR: the broker's own words)",
        "look at the log of broker-a",
    ),
    "CONNECTION_LOST": (behaves(CloseConnection(stores=False)), "broker-a ", "start broker-a"),
    "REQUEST_TIMEOUT": (behaves(Drop(stores=False)), "broker-a ", "start broker-a"),
    "INVALID_ANSWER": (
        behaves(IncompleteAnswer()), "broker-a answers with bytes", "look at what",
    ),
    "ACKED_DEGRADED": (answers(10), "broker-a stores messages less durably", "look at the disk"),
    "BROKER_TOO_OLD": (
        lambda cluster: setattr(cluster.brokers[0], "version", 401),
        "broker-a is too old for the delays of the topic t", "upgrade broker-a to 5.0 or later",
    ),
}  # fmt: skip
COLUMNS = {"BROKER_TOO_OLD": {"delay_ms": [1000]}}
OTHERS = {
    "LOCAL_RESOURCES", "NOT_SENT", "REJECTED", "TLS", "TLS_REFUSED", "UNKNOWN", "UNKNOWN_HOST",
    "UNWRITTEN", "WINDOW_FULL",
}  # fmt: skip
"""Codes with a remedy that no scripted broker gives: NOT_SENT, REJECTED and UNKNOWN are bases whose
subclasses brokers give; both TLS codes and UNKNOWN_HOST need certificates or a DNS server, and fail
at the name server first; LOCAL_RESOURCES, UNWRITTEN and WINDOW_FULL need a worker without
descriptors, a full socket, or a full window. Tests of net and producer raise those."""
NOT_OF_TASKS = {"SEND", "PRODUCER_CLOSED", "REQUESTER_GONE", "REPLY_NOT_TAKEN", "DEGRADED"}
"""Codes that a task's sends never have: bases, replies, and codes whose rows have an outcome."""


def test_each_error_class_has_a_remedy_and_a_case() -> None:
    def classes(root: type[SendError]) -> Iterator[type[SendError]]:
        yield root
        for child in root.__subclasses__():
            yield from classes(child)

    codes = {each.code for each in classes(SendError) if each.__module__ == errors.__name__}
    assert codes - NOT_OF_TASKS == set(CAUSES) - {"ACKED_DEGRADED"}
    assert set(CASES) | OTHERS == set(CAUSES)
    assert {each.code for each in ERROR_OF_CODE.values()} <= set(CASES)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=1) as fake:
        fake.create_topic("t")
        yield fake


def run(cluster: FakeCluster, folder: Path, ctx: RunContext, nth: int = 1, **columns: Any) -> None:
    """Run a task with one row, and fold its ledger rows also if the task fails."""
    options = SinkOptions.parse(
        nameServer=cluster.name_server, topic="t", sendMsgTimeout=400, connectTimeoutMs=200,
        retryTimesWhenSendFailed=1, deliveryTimeoutMs=400, onDegraded="fail",
    )  # fmt: skip
    rows: list[pa.RecordBatch] = []
    batch = pa.RecordBatch.from_pydict({"body": ["a"], **columns})
    pool = ProducerPool(make=lambda own: SendEngine(own, shared=None))
    runner = TaskRunner(options, ctx, emit=rows.append, pool=pool, keeps_dead_letters=True)
    with contextlib.closing(pool), contextlib.suppress(RocketSinkError), runner:
        runner.feed(batch, resolve_columns(batch.schema, options))
        runner.finish()
        rows.append(confirmed(ctx, 1, rows_in=1))
    store(folder, in_order(rows, nth << 32))


def report(folder: Path) -> Report:
    quick = open_quick(str(folder))
    assert quick is not None
    return figures(quick.query, str(folder), Scope())


@pytest.mark.parametrize("code", CASES)
def test_the_first_line_is_the_cause_and_its_remedy(
    code: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    break_, says, remedy = CASES[code]
    break_(cluster)
    run(cluster, tmp_path / "ledger", context(), **COLUMNS.get(code, {}))
    first = report(tmp_path / "ledger").verdict[0]
    assert first.name in ("sends_fail", "broker_unreachable", "broker_left_route")
    assert first.text.startswith(says)
    assert code in first.text
    assert first.next.startswith(remedy)


@pytest.mark.parametrize("code", ["AUTH_FAILED", "NO_ROUTE"])
def test_a_cause_that_was_mended_is_no_cause(
    code: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    """The query starts again after the repair and runs the epoch that had failed."""
    CASES[code][0](cluster)
    ctx = context()
    run(cluster, tmp_path / "ledger", ctx)
    names = [finding.name for finding in report(tmp_path / "ledger").verdict]
    assert names[:2] == ["sends_fail", "epochs_unfinished"]
    cluster.brokers[0].behave()
    cluster.create_topic("t")
    again = replace(ctx, run_id="run-2", task_attempt_id=11)
    run(cluster, tmp_path / "ledger", again, 2)
    well, *notes = report(tmp_path / "ledger").verdict
    assert well.name == "all_is_well"
    assert "0 rows" not in " ".join(note.text for note in notes)
