"""Delayed messages of a broker that is killed: those of this sink fare as those of Java's client.

A broker notes from time to time up to where it has read delayed messages, and has delivered them by
level. After a kill it goes on from its last note, so it delivers some messages twice, under the
same id. Here it makes no note, so it delivers nearly all twice."""

import time
from collections import Counter

import pyarrow as pa
import pytest

from rocket_sink.cluster import LocalCluster
from rocket_sink.task.table_producer import TableProducer
from tests.clusters import make_topic, read_topic
from tests.java_client import FOLDER, GENERATIONS, run_java
from tests.producer.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
COUNT = 200
TOPICS = ("by-java", "by-sink")
NO_NOTES = {"flushDelayOffsetInterval": "3600000"}


@pytest.mark.timeout(1200)
def test_a_killed_broker_repeats_the_delayed_messages_of_any_client():
    """The broker is killed after it has delivered the messages of a level."""
    column, delay = "delay_level", 3
    with LocalCluster(brokers=1, broker_config=NO_NOTES) as cluster:
        server, (broker,) = cluster.name_server, cluster.brokers
        for topic in TOPICS:
            make_topic(cluster, topic)
        arguments = (server, TOPICS[0], column, str(delay), str(COUNT))
        run_java(FOLDER / "SendDelayed.java", *arguments, version=GENERATIONS[0])
        table = pa.table({"body": [b"x"] * COUNT, column: [delay] * COUNT})
        with TableProducer(nameServer=server, topic=TOPICS[1]) as producer:
            assert producer.send(table).summary.acked == COUNT

        def are_delivered(times):
            time.sleep(1.0)
            ids = [Counter(m.message_id for m in read_topic(server, topic)) for topic in TOPICS]
            # The broker may not have read the last messages before the kill.
            return all(len(n) == COUNT and sorted(n.values())[COUNT // 10] == times for n in ids)

        until(lambda: are_delivered(1), 300)
        broker.kill()
        broker.spawn()
        broker.wait_ready(300)
        until(lambda: are_delivered(2), 600)
        kept = Counter(message.message_id for message in read_topic(server, "SCHEDULE_TOPIC_XXXX"))
    assert len(kept) == 2 * COUNT and set(kept.values()) == {1}, "each client sent each once"
