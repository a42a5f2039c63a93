"""Groups of single messages at real brokers, read by the official Java client."""

import random
from typing import Any

import pyarrow as pa
import pytest

from rocket_sink.cluster import DEFAULT_VERSION
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.wire.codes import SysFlag
from tests.clusters import make_topic, repair
from tests.java_client import FOLDER, GENERATIONS, read_with_java, run_java
from tests.producer.waiting import until
from tests.task.one_task import CTX, run_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROWS = 3000
TYPE = "message.type"
HOSTILE = 'a "quoted" \\ back\\slash é 中 \U0001f600'


def read(cluster, topic, version):
    """Return all rows, once the brokers have delivered them."""
    messages = []

    def are_all_there():
        messages[:] = read_with_java(cluster, topic, version)
        return len(messages) >= ROWS

    until(are_all_there, 60, 0.5)
    return messages


@pytest.mark.parametrize(
    ("column", "value", "version"),
    [("delay_level", 1, GENERATIONS[0]), ("delay_ms", 1500, GENERATIONS[2])],
)
def test_java_reads_what_was_sent_in_groups(local_cluster, tmp_path, column, value, version):
    repair(local_cluster)
    topic = f"groups-{column.replace('_', '-')}"
    make_topic(local_cluster, topic)
    bodies = [b"%d " % n * (2000 if n % 100 == 0 else 5) for n in range(ROWS)]
    kinds: dict[str, Any] = {"delay_level": pa.int32(), "delay_ms": pa.int64()}
    columns = {
        "body": bodies,
        column: pa.array([value] * ROWS, kinds[column]),
        "tags": ["even" if n % 2 == 0 else None for n in range(ROWS)],
        "keys": [[f"key-{n}", HOSTILE.split()[0]] for n in range(ROWS)],
        "properties": pa.array(
            [[("hostile", HOSTILE), (HOSTILE, str(n))] for n in range(ROWS)],
            pa.map_(pa.string(), pa.string()),
        ),
        "flag": pa.array(range(ROWS), pa.int32()),
        "traceparent": [f"00-{n + 1:032x}-{n + 1:016x}-01" for n in range(ROWS)],
    }
    parsed = SinkOptions.parse(
        nameServer=local_cluster.name_server, topic=topic, ledger=str(tmp_path)
    )
    total = run_task(parsed, CTX, columns)
    if column == "delay_ms" and local_cluster.version < "5":
        assert (total.acked, total.dead, total.unknown) == (0, ROWS, 0)
        assert read_with_java(local_cluster, topic, version) == [], "it would deliver at once"
        return
    assert (total.acked, total.duplicates_possible) == (ROWS, 0)
    messages = read(local_cluster, topic, version)
    assert len(messages) == len({message.message_id for message in messages}) == ROWS
    for message in messages:
        n = int(message.properties[HOSTILE])
        assert message.has_body(bodies[n]) and message.properties["hostile"] == HOSTILE
        assert message.properties["traceparent"] == columns["traceparent"][n]
        assert (message.tags, message.keys) == (
            "even" if n % 2 == 0 else None,
            f"key-{n} {HOSTILE.split()[0]}",
        )


@pytest.mark.skipif(DEFAULT_VERSION < "5.5", reason="brokers know lite topics since 5.5")
def test_java_pops_the_highest_priority_first_and_finds_rows_in_their_lite_topics(
    local_cluster, tmp_path
):
    repair(local_cluster)
    options = {"nameServer": local_cluster.name_server, "ledger": str(tmp_path)}
    with Admin(nameServer=local_cluster.name_server, timeout_s=30.0) as admin:
        for topic, kind in (("priorities", "PRIORITY"), ("sessions", "LITE")):
            admin.create_topic(topic, queues=8, brokers=["broker-a"], attributes={TYPE: kind})
            until(lambda name=topic: name in admin.topics(), 60)
    count = 800
    bodies, priorities = [b"%d" % n for n in range(count)], [n % 8 for n in range(count)]
    columns = {"body": bodies, "priority": priorities}
    total = run_task(SinkOptions.parse(options, topic="priorities"), CTX, columns)
    assert (total.acked, total.dead) == (count, 0)
    arguments = (local_cluster.name_server, "priorities", str(count))
    popped = run_java(FOLDER / "PopTopic.java", *arguments, version="5.5.0")
    assert [int(priority) for _, priority, _ in popped] == sorted(priorities, reverse=True)
    assert sorted(int(body) for _, _, body in popped) == list(range(count))

    names = [f"session-{n % 50}" for n in range(200)]
    sessions = SinkOptions.parse(options, topic="sessions", ordering="strict")
    assert run_task(sessions, CTX, {"body": bodies[:200], "lite_topic": names}).acked == 200
    queues: dict[str, list[int]] = {}
    for message in read_with_java(local_cluster, "sessions", "5.5.0"):
        queues.setdefault(message.properties["INNER_MULTI_DISPATCH"], []).append(
            int(message.body or b"")
        )
    assert queues == {
        f"%LMQ%$sessions$session-{n}": list(range(n, 200, 50)) for n in range(50)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "version", "ordering"),
    [("zlib", "4.9.7", "none"), ("zstd", "5.3.3", "strict"), ("lz4", "5.5.0", "best_effort")],
)
def test_java_reads_compressed_batches(local_cluster, tmp_path, kind, version, ordering):
    """A third of the bodies shrink, a third do not, a third are too short to try."""
    repair(local_cluster)
    topic = f"compressed-{kind}"
    make_topic(local_cluster, topic)
    noise = random.Random(1)
    bodies = [
        (b'{"n": %d, "text": "%s"}' % (n, b"abcdefgh" * 1000), noise.randbytes(8000), b"%d" % n)[
            n % 3
        ]
        for n in range(600)
    ]
    options = SinkOptions.parse(
        nameServer=local_cluster.name_server, topic=topic, ledger=str(tmp_path),
        compressType=f"{kind}-all", ordering=ordering,
    )  # fmt: skip
    keys = [f"key-{n % 7}" for n in range(600)]
    columns = {"body": bodies, "keys": [str(n) for n in range(600)], "sharding_key": keys}
    total = run_task(options, CTX, columns)
    assert (total.acked, total.dead) == (600, 0) and total.requests < 600
    rows = read_with_java(local_cluster, topic, version)
    numbers = [int(row.keys or "") for row in rows]
    assert sorted(numbers) == list(range(600))
    assert all(row.has_body(bodies[n]) for row, n in zip(rows, numbers, strict=True))
    # Readers of 5.x clear the flag COMPRESSED of a body that they have inflated, and keep the kind.
    shrunk = {
        n for row, n in zip(rows, numbers, strict=True) if row.sys_flag & SysFlag.COMPRESSION_MASK
    }
    assert shrunk == set(range(0, 600, 3))
    if ordering != "none":
        for first in range(7):
            own = [n for n in numbers if n % 7 == first]
            assert own == sorted(own)


@pytest.mark.parametrize("column", ["sharding_key", "delay_level"])
def test_mqadmin_finds_the_traces_of_rows(local_cluster, tmp_path, column):
    repair(local_cluster)
    topic = f"traced-{column.replace('_', '-')}"
    make_topic(local_cluster, topic)
    options = SinkOptions.parse(
        nameServer=local_cluster.name_server, topic=topic, ledger=str(tmp_path),
        traceSample=1, producerGroup=f"group-{column[0]}",
    )  # fmt: skip
    columns = {"body": [b"x"] * 700, "message_id": [f"{column}-{n}" for n in range(700)]}
    columns[column] = pa.array([1] * 700, pa.int32()) if "delay" in column else ["one"] * 700
    assert run_task(options, CTX, columns).acked == 700
    for number in (0, 699):  # The ids of all rows take two trace messages.
        query = ("queryMsgTraceById", "-i", f"{column}-{number}")
        until(lambda query=query: f"group-{column[0]}" in local_cluster.admin(*query), 60)
        lines = local_cluster.admin(*query).splitlines()
        (line,) = [line.split() for line in lines if line.startswith("Pub")]
        assert line[-1] == "success", lines
