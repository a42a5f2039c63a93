"""The first lines of a verdict name the cause that a broker gave, and its remedy: each error class,
injected by the scripted cluster."""

import contextlib
import errno
import shlex
import socket
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pyarrow as pa
import pytest

from rocket_sink import cli, errors
from rocket_sink.errors import RocketSinkError, SendError
from rocket_sink.ledger.records import in_order
from rocket_sink.ledger.report.causes import CAUSES
from rocket_sink.net import transport
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.routing.retry import ERROR_OF_CODE
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import Answer, CloseConnection, Drop, IncompleteAnswer
from rocket_sink.wire.codes import PermName
from tests.clusters import scripted_cluster
from tests.ledger.views import report_of
from tests.net.test_transport import IP, Authority
from tests.tls_relay import TlsFront, TlsRelay

from .night import store
from .values import confirmed, context


def answers(code, remark="the broker's own words"):
    return behaves(Answer(code, remark))


def behaves(behaviour):
    return lambda cluster, _: cluster.brokers[0].on_send(behaviour, times=None)


def closes_to_tls(cluster, until):
    """Let the name server speak TLS; the broker ends a handshake without an answer."""
    folder = Path(until.enter_context(TemporaryDirectory()))
    relay = TlsRelay(cluster.name_server, Authority(folder, "good-ca").server("ns", IP))
    until.callback(relay.close)
    return {"nameServer": relay.address, "tlsMode": "insecure"}


def has_the_certificate_of_a_stranger(cluster, until):
    folder = Path(until.enter_context(TemporaryDirectory()))
    trusted, stranger = Authority(folder, "good-ca"), Authority(folder, "bad-ca")
    relays = TlsFront(
        cluster, lambda name: (trusted if name == "name server" else stranger).server(name, IP)
    )
    until.callback(relays.close)
    return {
        "nameServer": relays.name_server, "tlsMode": "verify-full", "tlsCa": str(trusted.file),
    }  # fmt: skip


def leaves_no_descriptor(_, until):
    """Let the worker have a connection to the name server, and none to the broker."""
    sockets = chain([socket.socket()], repeat(OSError(errno.EMFILE, "Too many open files")))
    until.enter_context(mock.patch.object(transport, "_new_socket", side_effect=sockets))


def takes_no_bytes(cluster, until):
    write, address = transport.Transport.write, cluster.brokers[0].address

    def written(self, buffers):
        return 0 if self.address == address else write(self, buffers)

    until.enter_context(mock.patch.object(transport.Transport, "write", written))


def answers_while_the_task_ends(cluster, _):
    """Leave two requests without an answer, and refuse a third for good."""
    cluster.brokers[0].on_send(Drop(stores=False), times=2)
    cluster.brokers[0].on_send(Answer(1, f"AclException: {SIGNATURE}"), times=None)


SIGNATURE = "check signature failed"
CASES = {
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
        ("open the topic: `rocket-sink topic create t -n HOST:9876 --permission 'read and write'`, "
         "or give the account its rights (docs/deploy/acl.md), then `rocket-sink backfill "),
    ),
    "NO_ROUTE": (
        lambda cluster, _: cluster.create_topic("t", perm=4),
        "the topic t has no queue that may be written to (NO_ROUTE: ",
        "start the topic's brokers, or create or open it: `rocket-sink topic create t -n HOST:9876",
    ),
    "NAME_SERVER_UNAVAILABLE": (
        lambda cluster, _: cluster.stop_name_server(),
        "no name server answers (NAME_SERVER_UNAVAILABLE: ",
        "start a name server, or mend the option nameServer, then start the query again",
    ),
    "CONNECT": (
        lambda cluster, _: cluster.brokers[0].kill(), "broker-a ", "start broker-a",
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
        "broker-a refuses messages of the topic t as too large", "set requestMaxBytes",
    ),
    "SERVICE_NOT_AVAILABLE": (
        answers(14, "disk full"),
        "broker-a takes no messages (SERVICE_NOT_AVAILABLE: disk full)", "look at the disk",
    ),
    "TOPIC_NOT_FOUND": (answers(17), "broker-a does not have the topic t", "put the topic on"),
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
    "TLS": (
        closes_to_tls, "the TLS handshake with broker-a fails (TLS: ", "look at the option tlsMode",
    ),
    "TLS_REFUSED": (
        has_the_certificate_of_a_stranger,
        "broker-a and this client do not accept each other's certificate or protocol",
        "look at the options tlsMode, tlsCa",
    ),
    "UNKNOWN_HOST": (
        lambda *_: {"addressMap": "broker-a:*=broker-a.invalid:10911"},
        "broker-a has stored nothing since ", "mend the DNS, or brokerIP1 of broker-a",
    ),
    "LOCAL_RESOURCES": (
        leaves_no_descriptor, "the workers have no descriptor or memory", "raise ulimit -n",
    ),
    "UNWRITTEN": (takes_no_bytes, "broker-a ", "start broker-a"),
    "UNKNOWN": (
        answers_while_the_task_ends, "tasks ended before broker-a answered (UNKNOWN: ",
        "look in the tasks' logs",
    ),
    "BROKER_TOO_OLD": (
        lambda cluster, _: setattr(cluster.brokers[0], "version", 401),
        "broker-a is too old for the delays of the topic t", "upgrade broker-a to 5.0 or later",
    ),
}  # fmt: skip
COLUMNS = {
    "BROKER_TOO_OLD": {"delay_ms": [1000]},
    "UNKNOWN": {"body": ["a"] * 3, "broker_name": ["broker-a"] * 3, "queue_id": [0, 1, 2]},
}
NOT_OF_TASKS = {
    "DEGRADED", "NOT_SENT", "PRODUCER_CLOSED", "REJECTED", "REPLY_NOT_TAKEN", "REQUESTER_GONE",
    "SEND", "WINDOW_FULL",
}  # fmt: skip
"""Codes that no send of a task ever has: bases (NOT_SENT, REJECTED, SEND), replies, codes of a
`Producer` (PRODUCER_CLOSED, WINDOW_FULL), and DEGRADED, whose rows have an outcome."""


def test_each_error_class_has_a_remedy_and_a_case():
    def classes(root):
        yield root
        for child in root.__subclasses__():
            yield from classes(child)

    codes = {each.code for each in classes(SendError) if each.__module__ == errors.__name__}
    assert codes - NOT_OF_TASKS == set(CAUSES) - {"ACKED_DEGRADED"}
    assert set(CASES) == set(CAUSES)
    assert {each.code for each in ERROR_OF_CODE.values()} <= set(CASES)


cluster = scripted_cluster(1, t=4)


def run(cluster, folder, ctx, nth=1, more=None, **columns):
    """Run a task with one row, and fold its ledger rows also if the task fails."""
    options = SinkOptions.parse({
        "nameServer": cluster.name_server, "topic": "t", "sendMsgTimeout": 400,
        "connectTimeoutMs": 200, "retryTimesWhenSendFailed": 1, "deliveryTimeoutMs": 400,
        "onDegraded": "fail", **(more or {}),
    })  # fmt: skip
    rows = []
    batch = pa.RecordBatch.from_pydict({"body": ["a"], **columns})
    pool = ProducerPool(make=lambda own: SendEngine(own, shared=None))
    runner = TaskRunner(options, ctx, emit=rows.append, pool=pool, keeps_dead_letters=True)
    with contextlib.closing(pool), contextlib.suppress(RocketSinkError), runner:
        runner.feed(batch, resolve_columns(batch.schema, options))
        runner.finish()
        rows.append(confirmed(ctx, 1, rows_in=batch.num_rows))
    store(folder, in_order(rows, nth << 32))


@pytest.mark.parametrize("code", CASES)
def test_the_first_line_is_the_cause_and_its_remedy(code, cluster, tmp_path):
    break_, says, remedy = CASES[code]
    with ExitStack() as until:
        more = break_(cluster, until)
        run(cluster, tmp_path / "ledger", context(), more=more, **COLUMNS.get(code, {}))
    first = report_of(tmp_path / "ledger").verdict[0]
    assert first.name in ("sends_fail", "broker_unreachable", "broker_left_route")
    assert first.text.startswith(says)
    assert code in first.text
    assert first.next.startswith(remedy)


@pytest.mark.parametrize("code", ["AUTH_FAILED", "NO_ROUTE"])
def test_a_cause_that_was_mended_is_no_cause(code, cluster, tmp_path):
    """The query starts again after the repair and runs the epoch that had failed."""
    CASES[code][0](cluster, ExitStack())
    ctx = context()
    run(cluster, tmp_path / "ledger", ctx)
    names = [finding.name for finding in report_of(tmp_path / "ledger").verdict]
    assert names[:2] == ["sends_fail", "epochs_unfinished"]
    cluster.brokers[0].behave()
    cluster.create_topic("t")
    again = replace(ctx, run_id="run-2", task_attempt_id=11)
    run(cluster, tmp_path / "ledger", again, 2)
    well, *notes = report_of(tmp_path / "ledger").verdict
    assert well.name == "all_is_well"
    assert "0 rows" not in " ".join(note.text for note in notes)


@pytest.mark.parametrize("code", ["NO_PERMISSION", "NO_ROUTE", "TOPIC_NOT_FOUND"])
def test_the_command_of_a_remedy_mends_the_topic(code, cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("NAMESRV_ADDR", cluster.name_server)
    CASES[code][0](cluster, ExitStack())
    run(cluster, tmp_path / "ledger", context())
    command = shlex.split(report_of(tmp_path / "ledger").verdict[0].next.split("`")[1])
    cluster.brokers[0].behave()
    if code == "TOPIC_NOT_FOUND":
        cluster.delete_topic("t")
    else:
        cluster.create_topic("t", 8, perm=PermName.READ)
    assert command[0] == "rocket-sink" and cli.main(command[1:]) == 0
    (queues,) = cluster.route("t").queues
    assert queues.writable and queues.write == (4 if code == "TOPIC_NOT_FOUND" else 8)
