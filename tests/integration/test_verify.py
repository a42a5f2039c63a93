"""`rocket-sink verify` on a real broker: delayed messages, retention, a log that lost its end."""

import datetime as dt
import os
import time

import pyarrow as pa
import pytest

from rocket_sink.cluster import LocalCluster
from rocket_sink.message import Message, MessageQueue
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.producer import Producer
from rocket_sink.task.table_producer import TableProducer
from tests.clusters import make_topic
from tests.ledger.values import context
from tests.producer.waiting import until
from tests.recorded import run, verified

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

FILE_BYTES = 1 << 20
SMALL_FILES = {
    "mappedFileSizeCommitLog": str(FILE_BYTES), "maxMessageSize": str(FILE_BYTES // 2),
    "cleanResourceInterval": "200", "deleteCommitLogFilesInterval": "1", "fileReservedTime": "0",
    # Files are deleted by mqadmin only: this hour is not near.
    "deleteWhen": f"{(dt.datetime.now().hour + 12) % 24:02d}",
}  # fmt: skip


@pytest.fixture
def cluster():
    running = LocalCluster(brokers=1, broker_config=SMALL_FILES).start(timeout_s=600)
    make_topic(running, "t", queues=2)
    yield running
    running.stop()


def test_planted_faults_delays_and_retention(cluster, tmp_path):
    servers, ledger = cluster.name_server, tmp_path / "ledger"
    checked = ("--ledger", str(ledger))
    run(servers, ledger, context())
    with Producer(nameServer=servers) as producer, Admin(nameServer=servers) as admin:
        make_topic(cluster, "filler")
        for _ in range(4):
            producer.send(Message("filler", os.urandom(FILE_BYTES // 3)))
        in_an_hour = int(time.time() * 1000) + 3_600_000
        delays = [*[None] * 100, *[18] * 100, *[1] * 50, *[None] * 50]
        times = [*[None] * 250, *[in_an_hour] * 50]
        run(
            servers, ledger, context(epoch=1, task_attempt_id=1), 2, delay_level=delays,
            delivery_timestamp=times,
        )  # fmt: skip
        until(lambda: admin.count("t") == 450, poll_s=0.2)
        sums = {"topic": "t", "acknowledged": 600, "adds_up": True, "not_due": 150}
        assert verified(servers, *checked) == {**sums, "found": 450}

        cluster.admin("deleteExpiredCommitLog", "-n", servers)
        until(lambda: admin.count("t") == 150, poll_s=0.2)
        assert verified(servers, *checked) == {**sums, "found": 150, "expired": 300}

        run(servers, ledger, context(epoch=2, task_attempt_id=2), 3)
        # A broker shows stored messages in their queues a moment later.
        until(lambda: admin.count("t") == 450, poll_s=0.2)
        messages = sorted(admin.read_topic("t"), key=lambda message: message.commit_log_offset)
        cut_log(cluster, messages[-1])
        kept = next(m for m in messages[::-1] if m.queue_id != messages[-1].queue_id)
        queue = MessageQueue("t", "broker-a", kept.queue_id)
        again = {"body": ["again"], "message_id": [kept.message_id], "broker_name": ["broker-a"]}
        with TableProducer(nameServer=servers, topic="t") as tables:
            tables.send(pa.table({**again, "queue_id": [kept.queue_id]}))
        producer.send(Message("t", b"somebody else's"), queue=queue)
    assert verified(servers, *checked, code=1) == {
        "topic": "t", "acknowledged": 900, "found": 449, "expired": 300, "not_due": 150,
        "missing": 1, "twice": 1, "foreign": 1,
    }  # fmt: skip


def cut_log(cluster, first):
    """Let the broker lose its log from this message on."""
    (broker,) = cluster.brokers
    broker.kill()
    begin = first.commit_log_offset % FILE_BYTES
    name = f"{first.commit_log_offset - begin:020d}"
    with (broker.spec.folder / "store" / "commitlog" / name).open("r+b") as log:
        log.seek(begin)
        log.write(bytes(FILE_BYTES - begin))
    broker.restart(300)
