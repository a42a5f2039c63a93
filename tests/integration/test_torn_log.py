"""A broker that is killed while it writes a batch; the tests cut its log by hand."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink.cluster import LocalCluster
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.testing import Drop, FaultProxies
from tests.clusters import make_topic, read_topic
from tests.task.one_task import CTX, run_task

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(3600)]

ROWS = 40
HEAD = 25
PROVES_PROPERTIES = {"enabledAppendPropCRC": "true", "forceVerifyPropCRC": "true"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({}, id="by default"),
        # The broker itself leaves out torn messages.
        pytest.param(PROVES_PROPERTIES, id="proves properties"),
    ],
)
def cluster(request):
    # 5.3.3 appends properties to a batch's messages; 5.5.0 does not.
    running = LocalCluster(brokers=1, version="5.3.3", broker_config=request.param)
    with running.start(timeout_s=600):
        yield running


def body(topic, number):
    return f"{topic}: row {number:04d} of {ROWS}".encode()


def tear(broker, first, name):
    """Write zeros from the middle of this property to the end of the log."""
    files = (broker.spec.folder / "store" / "commitlog").iterdir()
    (path,) = (file for file in files if first in file.read_bytes())
    data = path.read_bytes()
    begin = data.index(name, data.index(first)) + len(name) + 3
    with path.open("r+b") as log:
        log.seek(begin)
        log.write(bytes(len(data.rstrip(b"\0")) - begin))


def send(cluster, topic, ledger, lost):
    """Send a batch whose answer is lost and whose broker is killed in the middle of a message."""
    (broker,) = cluster.brokers
    rows = {"body": [body(topic, i) for i in range(ROWS)], "sharding_key": ["Zürich"] * ROWS}
    with FaultProxies(cluster.name_server) as proxies, ThreadPoolExecutor(1) as thread:
        proxies.of(broker.address).on_send(Drop())
        options = SinkOptions.parse(
            {"nameServer": proxies.name_server, "topic": topic, "ledger": str(ledger),
             "delivery": "effectively_once", "storedCheckTimeout": 300_000, "storedCheckDelay": 500}
        )  # fmt: skip
        summary = thread.submit(run_task, options, CTX, rows)
        with Admin(nameServer=cluster.name_server) as admin:
            while admin.count(topic) < ROWS:
                time.sleep(0.1)
        broker.kill()
        tear(broker, body(topic, HEAD), lost)
        broker.restart(300)
        return summary.result(300)


@pytest.mark.parametrize("lost", [b"UNIQ_KEY", b"__SHARDINGKEY", b"CLUSTER"])
def test_a_message_that_was_being_written_is_sent_again(cluster, tmp_path, lost):
    """Send the message again. By default readers also see its body with the complete properties.

    `CLUSTER` is the broker's own property, which it writes behind the sent ones.
    """
    topic = f"t-{uuid.uuid4().hex[:8]}"
    make_topic(cluster, topic, queues=1)
    summary = send(cluster, topic, tmp_path, lost)
    stored = list(read_topic(cluster.name_server, topic))
    proven = cluster.brokers[0].spec.settings.get("forceVerifyPropCRC") == "true"
    assert [m.body for m in stored if m.torn] == ([] if proven else [body(topic, HEAD)])
    stays = lost == b"CLUSTER" and not proven
    expected = [m for m in stored if stays or not m.torn]
    assert [m.body for m in expected] == [body(topic, i) for i in range(ROWS)]
    assert {m.properties["__SHARDINGKEY"] for m in expected} == {"Zürich"}
    assert (summary.acked, summary.found_stored) == (ROWS, HEAD + stays)
    assert summary.duplicates_possible == (not stays)
