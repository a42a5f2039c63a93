"""Groups of single messages at real brokers, read by the official Java client."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rocket_sink.cluster import LocalCluster
from rocket_sink.ledger.records import RunContext
from rocket_sink.options import SinkOptions
from tests.clusters import make_topic, repair
from tests.java_client import GENERATIONS, JavaMessage, read_with_java
from tests.task.one_task import run_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CTX = RunContext("q", "r", 0, 0, 1, 0, 7, 0, worker="w:1", lane="foreach")
ROWS = 3000
HOSTILE = 'a "quoted" \\ back\\slash é 中 \U0001f600'


def read(cluster: LocalCluster, topic: str, version: str) -> list[JavaMessage]:
    """Return all rows, once the brokers have delivered them."""
    until_s = time.monotonic() + 60
    messages = read_with_java(cluster, topic, version)
    while len(messages) < ROWS and time.monotonic() < until_s:
        time.sleep(0.5)
        messages = read_with_java(cluster, topic, version)
    return messages


@pytest.mark.parametrize(
    ("column", "value", "version"),
    [("delay_level", 1, GENERATIONS[0]), ("delay_ms", 1500, GENERATIONS[2])],
)
def test_java_reads_what_was_sent_in_groups(
    local_cluster: LocalCluster, tmp_path: Path, column: str, value: int, version: str
) -> None:
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
        assert (message.tags, message.keys) == (
            "even" if n % 2 == 0 else None,
            f"key-{n} {HOSTILE.split()[0]}",
        )
