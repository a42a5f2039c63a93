"""Numeric sharding keys go to the queues that the official Java producer chooses."""

import pyarrow as pa
import pytest

from rocket_sink.message import Message
from rocket_sink.producer.producer import Producer
from rocket_sink.task.table_producer import TableProducer
from tests.clusters import make_topic
from tests.java_client import FOLDER, GENERATIONS, read_with_java, run_java

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SMALL = [*range(25), 1001, 123_456_789, 2**31 - 1]
NUMBERS = [
    *SMALL, -1, -2, -1001, -(2**31), 2**31, 2**32 - 1, 2**32, 2**32 + 7, -(2**32),
    1_700_000_000_123, 10**18, 2**63 - 1, -(2**63),
]  # fmt: skip
PATIENT = {"sendMsgTimeout": "60s"}


def java_places(real, topic, kind, numbers):
    arguments = (real.name_server, topic, kind)
    lines = "".join(f"{number}\n" for number in numbers)
    sent = run_java(FOLDER / "SendNumbers.java", *arguments, version=GENERATIONS[0], lines=lines)
    return {text: (broker, int(queue)) for _, text, broker, queue in sent}


def stored_places(real, topic, prefix):
    return {
        message.keys.removeprefix(prefix): (message.broker_name, message.queue_id)
        for message in read_with_java(real, topic)
        if message.keys is not None and message.keys.startswith(prefix)
    }


def test_numbers_go_where_java_sends_them(real):
    topic = "sharded-numbers"
    make_topic(real, topic)
    by_kind = {kind: java_places(real, topic, kind, NUMBERS) for kind in ("String", "Long")}
    assert by_kind["String"] != by_kind["Long"]
    for sharding_hash, kind in (("java", "String"), ("java_long", "Long")):
        options = {"nameServer": real.name_server, "shardingHash": sharding_hash, **PATIENT}
        single, table = f"{kind}-one-", f"{kind}-table-"
        with Producer(**options) as producer:
            for number in NUMBERS:
                text = str(number)
                producer.send(Message(topic, b"x", keys=[single + text], sharding_key=text))
        with TableProducer(topic=topic, **options) as rows:
            keys = [f"{table}{number}" for number in NUMBERS]
            columns = {"body": [b"x"] * len(NUMBERS), "keys": keys}
            result = rows.send(pa.table({**columns, "sharding_key": pa.array(NUMBERS, pa.int64())}))
        assert not result.dead_letters.num_rows
        assert stored_places(real, topic, single) == by_kind[kind]
        assert stored_places(real, topic, table) == by_kind[kind]
    integers = java_places(real, topic, "Integer", SMALL)
    assert integers == {text: by_kind["Long"][text] for text in integers}
