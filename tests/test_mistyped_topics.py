"""A topic that does not exist: each way to send warns before brokers create it."""

from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest

from rocket_sink import Message, Producer, TableProducer
from rocket_sink.cli import main
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.testing import Answer, Drop, FakeCluster
from rocket_sink.wire.codes import RequestCode


def by_send(servers, topic):
    with Producer(nameServer=servers) as producer:
        producer.send(Message(topic, b"a"))
        producer.send(Message("orders", b"a"))


def by_send_async(servers, topic):
    with Producer(nameServer=servers) as producer:
        producer.send_async(Message(topic, b"a")).result(30)


def by_column(servers, topic):
    with TableProducer(nameServer=servers) as producer:
        producer.send(pa.table({"topic": [topic, "orders"], "body": ["a", "b"]}))


def by_workers(servers, topic):
    """Send by two workers of an executor, which share a file."""
    options = SinkOptions.parse(nameServer=servers)
    with TemporaryDirectory() as folder:
        for _ in range(2):
            engine = SendEngine(options, shared=SharedBrokerState.open(options, directory=folder))
            for each in (topic, "orders"):  # The second answer comes after the list of topics.
                assert engine.publish_info(each).ok
            engine.close()


def by_command(servers, topic):
    assert main(["send", "-n", servers, "-t", topic, "a", "b"]) == 0


@pytest.mark.parametrize("send", [by_send, by_send_async, by_column, by_workers, by_command])
def test_a_mistyped_topic_is_a_warning(caplog, send):
    with FakeCluster(brokers=1) as cluster:
        for topic in ("orders", "TBW102"):
            cluster.create_topic(topic, queues=1)
        send(cluster.name_server, "oders")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("no name server knows the topic oders yet: the first send creates it")
    assert "unless the option createTopic is empty" in warning
    assert warning.endswith("check its name, the nearest existing topic is orders")


@pytest.mark.parametrize("behaviour", [Drop(), Answer(16, "not allowed")])
def test_no_send_waits_for_the_list_of_topics(caplog, behaviour):
    code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
    with FakeCluster(brokers=1) as cluster:
        cluster.on_name_server(code, behaviour, times=None)
        # One look-up may wait longer for a name server than this send has time.
        with Producer(nameServer=cluster.name_server, sendMsgTimeout=900) as producer:
            producer.send(Message("oders", b"a"))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.endswith("; check its name")
