"""Lite topics of the Spark lanes, as the lite consumers of RocketMQ's gRPC client read them."""

import pytest

from benchmarks.peers.jars import resolve_modules
from benchmarks.peers.proxy import RocketmqProxy
from rocket_sink.cluster import LocalCluster
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from tests.java_client import FOLDER, run_java
from tests.producer.waiting import until
from tests.task.one_task import CTX, run_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

VERSION = "5.5.0"
CLIENT = "rocketmq-client-java-5.2.0"
ROWS = 10
QUOTA = 2_000
"""Lite topics that a consumer may have (lite.sub.client.quota); its default in RocketMQ."""


@pytest.fixture(scope="module")
def lite(tmp_path_factory):
    with (
        LocalCluster(brokers=2, version=VERSION) as cluster,
        RocketmqProxy(cluster, tmp_path_factory.mktemp("proxy"), print) as proxy,
    ):
        yield cluster, proxy


@pytest.mark.parametrize("sessions", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_each_session_is_read_whole_and_in_order_by_its_lite_consumer(lite, sessions, tmp_path):
    cluster, proxy = lite
    topic, group = f"sessions-{sessions}", f"lite-{sessions}"
    with Admin(nameServer=cluster.name_server, timeout_s=30.0) as admin:
        admin.create_topic(topic, queues=8, attributes={"message.type": "LITE"})
        until(lambda: topic in admin.topics(), 60)
    cluster.admin(
        "updateSubGroup", "-c", "DefaultCluster", "-g", group, "-o", "true",
        "--attributes", f"+lite.bind.topic={topic},+lite.sub.client.quota={QUOTA}",
    )  # fmt: skip
    count = sessions * ROWS
    columns = {
        "body": [b"%d" % row for row in range(count)],
        "lite_topic": [f"s{row % sessions}" for row in range(count)],
    }
    options = {"nameServer": cluster.name_server, "ledger": str(tmp_path), "ordering": "strict"}
    assert run_task(SinkOptions.parse(options, topic=topic), CTX, columns).acked == count

    jars = resolve_modules(CLIENT, [f"org.apache.rocketmq:{CLIENT[:-6]}:{CLIENT[-5:]}"], tell=print)
    consumers = -(-sessions // QUOTA)
    arguments = (proxy.endpoints, group, topic, "s", sessions, consumers, count, 1200)
    queues: dict[str, list[int]] = {}
    for _, session, body in run_java(
        FOLDER / "ReadLite.java", *map(str, arguments), version=VERSION, jars=jars, timeout_s=1500
    ):
        queues.setdefault(session, []).append(int(body))
    assert queues == {f"s{n}": list(range(n, count, sessions)) for n in range(sessions)}
