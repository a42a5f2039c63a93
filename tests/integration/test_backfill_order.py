"""A backfill while a real broker is away; RocketMQ's own tool counts the messages of queues."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rocket_sink.cluster import LocalCluster
from tests.clusters import make_topic
from tests.run_command import Done, run_command
from tests.spark.backfill.test_homes import home

from .lanes import LANES

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(1800)]

TOPIC = "ordered"
KEYS = [f"key-{n}" for n in range(32)]
_ROW = re.compile(r"^(broker-\w+)\s+(\d+)\s+\d+\s+(\d+)\s", re.MULTILINE)


def stored(cluster: LocalCluster) -> Counter[tuple[str, int]]:
    """Return the messages per queue by `mqadmin topicStatus`."""
    queue_rows = _ROW.findall(cluster.admin("topicStatus", "-t", TOPIC))
    return Counter({(broker, int(queue)): int(count) for broker, queue, count in queue_rows})


def backfill(spark: Any, cluster: LocalCluster, ledger: Path, *more: str) -> Done:
    return run_command(
        "backfill", "--ledger", str(ledger), "-n", cluster.name_server,
        "-O", "sendMsgTimeout=60s", *more, spark=spark,
    )  # fmt: skip


def test_keys_wait_for_their_broker(spark: Any, cluster: LocalCluster, tmp_path: Path) -> None:
    make_topic(cluster, TOPIC)
    lane = next(lane for lane in LANES if lane.name == "foreach_batch")
    source, ledger = tmp_path / "in", tmp_path / "ledger"
    options = {
        "nameServer": cluster.name_server, "topic": TOPIC, "ledger": str(ledger),
        "ordering": "strict", "orderWaitMs": "2s", "connectTimeoutMs": "20s",
        "pollNameServerInterval": "500",
    }  # fmt: skip

    def epoch(name: str) -> None:
        rows = [(f"{name} {key}", key) for key in KEYS]
        frame = spark.createDataFrame(rows, "body string, sharding_key string")
        frame.repartition(2, "sharding_key").write.mode("append").parquet(str(source))
        lane.run(spark, source, tmp_path / "checkpoint", options)

    epoch("first")
    homes = Counter(map(home, KEYS))
    away = next(broker for broker in cluster.brokers if broker.name == "broker-b")
    waiting = sum(count for (broker, _), count in homes.items() if broker == "broker-b")
    away.kill()
    try:
        epoch("second")
        dry = backfill(spark, cluster, ledger, "--dry-run", "--json")
        assert dry.code == 0, dry.err
        plan = dry.json()
        assert (plan["selected"], plan["waiting"]) == (waiting, {"broker-b": waiting})
        assert len(plan["sample"]) == 5
        refused = backfill(spark, cluster, ledger)
        assert refused.code == 1
        assert f"{waiting} wait for broker-b" in refused.err
        assert f"{waiting} pending" in refused.err
        assert "--move-keys" in refused.err
    finally:
        away.restart()
    assert +stored(cluster) == homes + Counter(
        {queue: count for queue, count in homes.items() if queue[0] == "broker-a"}
    ), "the living broker has the second epoch of its own keys, and nothing else"

    last = backfill(spark, cluster, ledger, "--json")
    assert last.code == 0, last
    done = last.json()
    assert (done["resent"], done["pending"], done["moved"]) == (waiting, 0, 0), last
    assert +stored(cluster) == homes + homes
