"""The reader and dead-letter topics on a real broker, which makes the dead letters itself."""

import contextlib
from collections import Counter
from typing import Any

import pytest
from pyspark.sql import datasource

from rocket_sink import register
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.producer import Producer
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.requests import request
from tests.clusters import make_topic
from tests.producer.waiting import until
from tests.run_command import run_command

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(900)]

TOPIC, GROUP = "dlq-orders", "dlq-billing"
PATIENT = {"sendMsgTimeout": "60s", "connectTimeoutMs": "20s"}


def give_up(admin, message):
    """Send a message back like a consumer after too many failures.

    The request is ConsumerSendMsgBackRequestHeader.
    """
    frame = request(
        RequestCode.CONSUMER_SEND_MSG_BACK,
        {
            "offset": message.commit_log_offset, "group": GROUP, "delayLevel": -1,
            "originMsgId": message.offset_message_id, "originTopic": TOPIC, "unitMode": False,
            "maxReconsumeTimes": 16,
        },
    )  # fmt: skip
    host, port = message.store_host
    admin._call("broker", f"{host}:{port}", frame, {0})


def wait_for(count, read):
    items: list[Any] = []

    def are_there():
        with contextlib.suppress(Exception):
            items[:] = read()
        return len(items) >= count

    until(are_there, 60, 0.2)
    return items


def dlq(cluster, verb):
    done = run_command("dlq", verb, "-n", cluster.name_server, "-g", GROUP, "--json")
    assert done.code == 0, done.err
    return done


def test_the_way_of_a_dead_letter(cluster):
    options = SinkOptions.parse(nameServer=cluster.name_server, **PATIENT)
    with Admin(options, timeout_s=20) as admin, Producer(options) as producer:
        admin.create_topic(TOPIC, queues=4)
        wait_for(8, lambda: admin.queues(TOPIC))
        for number in range(10):
            producer.send(
                Message(TOPIC, f"body {number}".encode(), keys=[f"k{number}"], tags="t",
                        sharding_key=f"s{number}", properties={"color": "red"})
            )  # fmt: skip
        stored = wait_for(10, lambda: admin.read_topic(TOPIC))
        assert len(stored) == 10
        given_up = stored[:3]
        for message in given_up:
            give_up(admin, message)
        assert len(wait_for(3, lambda: admin.read_topic(f"%DLQ%{GROUP}"))) == 3

        shown = dlq(cluster, "list").lines()
        ids = {message.message_id for message in given_up}
        assert {row["message_id"] for row in shown} == ids
        assert {row["topic"] for row in shown} == {TOPIC}
        assert {row["properties"]["ORIGIN_MESSAGE_ID"] for row in shown} == {
            message.offset_message_id for message in given_up
        }
        done = dlq(cluster, "resend").json()
        assert (done["resent"], done["already"], done["failed"]) == (3, 0, 0)
        assert len(wait_for(13, lambda: admin.read_topic(TOPIC))) == 13
        # The index shows a message a moment after its queue does.
        wait_for(6, lambda: [m for i in ids for m in admin.query_by_unique_key(TOPIC, str(i))])
        done = dlq(cluster, "resend").json()
        assert (done["resent"], done["already"]) == (0, 3)
        copies = [m for m in admin.read_topic(TOPIC) if "ROCKET_SINK_RESENDS" in m.properties]
        assert {m.body for m in copies} == {m.body for m in given_up}
        kept = ("UNIQ_KEY", "KEYS", "TAGS", "__SHARDINGKEY", "color")
        assert {tuple(m.properties[n] for n in kept) for m in copies} == {
            tuple(m.properties[n] for n in kept) for m in given_up
        }
        assert not {"RETRY_TOPIC", "ORIGIN_MESSAGE_ID"} & {n for m in copies for n in m.properties}


def test_spark_reads_what_is_stored(cluster, spark):
    """Read the two topics of the test above, one of them a dead-letter topic."""
    register(spark)

    def read(topic, **more):
        reader = spark.read.format("rocketmq").options(nameServer=cluster.name_server, topic=topic)
        return reader.options(**more).load()

    with Admin(nameServer=cluster.name_server) as admin:
        stored = list(admin.read_topic(TOPIC))
        times = sorted(message.store_ms for message in stored)
    rows = read(TOPIC, maxMessagesPerPartition=2).collect()
    assert Counter(
        (r.queue_id, r.queue_offset, bytes(r.body), r.message_id,
         round(r.store_timestamp.timestamp() * 1000))
        for r in rows
    ) == Counter(
        (m.queue_id, m.queue_offset, m.body, m.message_id, m.store_ms) for m in stored
    )  # fmt: skip
    assert len(rows) == 13
    between = read(TOPIC, startTimestamp=times[3], endTimestamp=times[9])
    assert between.count() == sum(times[3] <= ms < times[9] for ms in times)
    letters = read(f"%DLQ%{GROUP}").selectExpr(
        "cast(body AS string) AS text", "system_properties['RETRY_TOPIC'] AS origin",
        "reconsume_times", "keys",
    )  # fmt: skip
    letter_rows = letters.collect()
    assert [(row.origin, row.reconsume_times) for row in letter_rows] == [(TOPIC, 1)] * 3


TAGS = ("Aa", "BB", "other")
"""The first two have equal hash codes, which is all that brokers compare."""


@pytest.mark.parametrize(
    ("condition", "scanned", "rows"),
    [
        ("tags = 'other'", 20, 20), ("tags IN ('other', 'Aa')", 60, 40),
        ("tags = 'Aa' AND queue_id >= 0", 40, 20), ("tags = 'Aa' OR queue_id < 0", 60, 20),
        ("tags LIKE 'oth%'", 60, 20), ("tags = 'none'", 0, 0),
        ("store_timestamp > current_timestamp() + INTERVAL 1 HOUR", 0, 0),
        ("store_timestamp > current_timestamp() - INTERVAL 1 HOUR", 60, 60),
    ],
)  # fmt: skip
def test_filters_of_a_query_narrow_what_is_pulled(cluster, spark, condition, scanned, rows):
    if not hasattr(datasource, "EqualTo"):
        pytest.skip("this Spark passes no filters to a reader in Python")
    topic = "filtered"
    with Admin(nameServer=cluster.name_server) as admin:
        if topic not in admin.topics():
            make_topic(cluster, topic, 1)
            with Producer(nameServer=cluster.name_server, **PATIENT) as producer:
                for number in range(60):
                    producer.send(Message(topic, b"%d" % number, tags=TAGS[number % 3]))
            assert admin.await_dispatched(topic)
    register(spark)
    frame = spark.read.format("rocketmq").options(nameServer=cluster.name_server, topic=topic)
    frame = frame.load().where(condition)
    assert len(frame.collect()) == rows
    (scan,) = seq(frame._jdf.queryExecution().executedPlan().collectLeaves())
    assert scan.metrics().apply("numOutputRows").value() == scanned


def seq(scala):
    return [scala.apply(index) for index in range(scala.size())]
