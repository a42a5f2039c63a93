"""The short forms of `python -m tests.proxies`.

A proxy on a busy machine loses answers of a broker that takes more than 3 s, so that rows are
doubled or without an outcome: these tests allow that, and the command does not.
"""

import time

import pytest

from benchmarks.peers.proxy import RocketmqProxy
from rocket_sink import Message, Producer
from rocket_sink.cluster import LocalCluster, conf
from rocket_sink.errors import MessageIllegalError, SendError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from tests.clusters import make_topic
from tests.integration.lanes import LANES
from tests.proxies import faults, lanes
from tests.task.one_task import CTX, run_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def proxies(local_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxies")
    with (
        RocketmqProxy(local_cluster, folder / "a", print) as one,
        RocketmqProxy(local_cluster, folder / "b", print) as other,
    ):
        yield [one, other]


@pytest.mark.spark
@pytest.mark.parametrize("kind", lanes.TYPES)
@pytest.mark.parametrize("lane", [LANES[0], LANES[3]], ids=lambda lane: lane.name)
def test_every_row_is_stored_once(spark, local_cluster, proxies, lane, kind, tmp_path):
    result = lanes.run_lane(spark, local_cluster, proxies[0].address, lane, kind, 5_000, tmp_path)
    assert not result.missing and result.adds_up and set(result.letters) <= {"unknown"}, result
    # The first batch of a task to a FIFO topic shows that the topic is one.
    assert bool(result.refused) == (kind == "FIFO"), result


def test_a_broker_with_a_proxy_in_its_process_is_reached_by_its_own_port(tmp_path):
    """`mqbroker --enable-proxy`: routes of the proxy's remoting port name its gRPC port."""
    with LocalCluster(brokers=1).start(timeout_s=600) as cluster:
        port = conf.choose_ports(1).brokers[0]
        broker = {
            "brokerName": "broker-p",
            "listenPort": str(port),
            "namesrvAddr": cluster.name_server,
        }
        with (
            RocketmqProxy(cluster, tmp_path, print, broker) as proxy,
            Admin(nameServer=cluster.name_server, timeout_s=30.0) as admin,
        ):
            while "broker-p" not in admin.cluster():
                time.sleep(0.2)
            admin.create_topic("t", brokers=["broker-p"])
            while "t" not in admin.topics():
                time.sleep(0.2)
            with Producer(nameServer=cluster.name_server) as producer:
                assert producer.send(Message("t", b"row")).queue.broker_name == "broker-p"
            (address,) = [broker.master for broker in admin.topic_route("t").brokers]
            assert address == f"{conf.LOOPBACK}:{port}"
            with Producer(nameServer=proxy.address) as producer, pytest.raises(SendError) as error:
                producer.send(Message("t", b"row"))
            assert proxy.endpoints in str(error.value)
            assert [message.body for message in admin.read_topic("t")] == [b"row"]


def test_a_proxy_is_known_by_its_answers(local_cluster, proxies):
    with Admin(nameServer=proxies[0].address, timeout_s=30.0) as admin:
        assert admin.proxy() == proxies[0].address
    with Admin(nameServer=local_cluster.name_server, timeout_s=30.0) as admin:
        assert admin.proxy() is None


def test_a_normal_topic_takes_sharding_keys_in_batches_only(local_cluster, proxies, tmp_path):
    make_topic(local_cluster, "normal")
    options = {"nameServer": proxies[0].address, "ledger": str(tmp_path), "ordering": "strict"}
    columns = {"body": [b"1", b"2", b"3"], "sharding_key": ["a", "b", "a"]}
    assert run_task(SinkOptions.parse(options, topic="normal"), CTX, columns).acked == 3
    with (
        Producer(nameServer=proxies[0].address) as producer,
        pytest.raises(MessageIllegalError, match=r"type is NORMAL, .* FIFO\. A proxy takes only"),
    ):
        producer.send(Message("normal", b"4", sharding_key="a"))


def test_a_slow_and_a_killed_proxy_lose_nothing(local_cluster, proxies):
    """Kill a proxy, and so run last."""
    finding, causes, addresses = faults.send_during_faults(local_cluster, proxies, 8.0, 3.0)
    assert not finding.lost, (finding, causes)
    assert len(addresses) == 2, causes
