"""The streaming reader on real brokers: Java sends, and the driver is killed again and again."""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pyspark
import pytest
from packaging.version import Version

from rocket_sink.spark.datasource import register
from tests import java_client
from tests.clusters import make_topic
from tests.spark.streams import run

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(3600)]
HERE = Path(__file__).parent
_LAG = re.compile(r"^\S+\s+(broker-\w)\s+(\d+)\s+(\d+)\s+(\d+)\s", re.MULTILINE)


def sent_by_java(cluster, topic, count):
    """Let Java send the numbers below `count`. Return its own count of sends per queue."""
    lines = java_client.run_java(
        java_client.FOLDER / "SendNumbers.java", cluster.name_server, topic, "String",
        version="5.3.3", lines="\n".join(map(str, range(count))), timeout_s=1800,
    )  # fmt: skip
    return Counter((broker, int(queue)) for _, _, broker, queue in lines)


@pytest.mark.skipif(
    Version(pyspark.__version__) < Version("4.2"), reason="a run of one epoch notes no offsets"
)
def test_consoles_show_the_lag_of_the_consumer_group(cluster, spark, tmp_path):
    topic, group = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("t", "g"))
    make_topic(cluster, topic)
    register(spark)
    options = {"nameServer": cluster.name_server, "topic": topic, "startingOffsets": "earliest"}
    options["consumerGroup"] = group

    def lag():
        """Return the sums of the brokers' and of the group's offsets, by `mqadmin`."""
        text = cluster.admin("consumerProgress", "-g", group)
        rows = [row for row in _LAG.findall(text) if topic in text]
        return sum(int(row[2]) for row in rows), sum(int(row[3]) for row in rows)

    for total in (300, 500):
        sent_by_java(cluster, topic, total if total == 300 else 200)
        if total == 500:
            assert lag() == (500, 300)
        reader = spark.readStream.format("rocketmq").options(**options, maxOffsetsPerTrigger=170)
        run(reader.load().writeStream.format("noop"), tmp_path)
        assert lag() == (total, total)


def play_kills(folder, kills, sending, read):
    """Start the driver, kill it `kills` times, and let it end after the sends. Return how many
    kills met an epoch that had begun."""
    draw, met = random.Random(51), 0

    def epochs(kind):
        with contextlib.suppress(OSError):
            names = os.listdir(folder / "checkpoint" / kind)
            return max((int(name) for name in names if name.isdigit()), default=-1)
        return -1

    for life in range(kills + 1):
        if life == kills:
            sending.result()
        before = epochs("commits")
        words = json.dumps({"folder": str(folder), "last": life == kills, "read": read})
        with (folder / f"driver-{life}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.stream_driver", words],
                cwd=HERE.parents[1], stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if life == kills:
            assert process.wait(1800) == 0, (folder / f"driver-{life}.log").read_text()[-3000:]
            break
        until_s = time.monotonic() + 600
        while epochs("commits") == before and process.poll() is None:
            assert time.monotonic() < until_s and not (sending.done() and sending.exception())
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 3))
        assert process.poll() is None, (folder / f"driver-{life}.log").read_text()[-3000:]
        root = psutil.Process(process.pid)
        for member in (*root.children(recursive=True), root):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        met += epochs("offsets") > epochs("commits")
    print(f"{met} of {kills} kills met an open epoch; {epochs('commits') + 1} epochs")
    return met


@pytest.mark.parametrize(
    ("count", "kills"), [(5_000, 2), pytest.param(200_000, 10, marks=pytest.mark.slow)]
)
def test_each_message_is_read_once_over_kills_of_the_driver(cluster, tmp_path, count, kills):
    """Java sends meanwhile. The messages make at least twenty epochs for each kill."""
    topic = f"from-{uuid.uuid4().hex[:8]}"
    make_topic(cluster, topic)
    read = {
        "nameServer": cluster.name_server, "topic": topic, "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(count // (20 * kills)),
    }  # fmt: skip
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sent_by_java, cluster, topic, count)
        met = play_kills(tmp_path, kills, sending, read)
        sent = sending.result()
    assert sent.total() == count and (met > 0 or kills < 10)
    rows = pq.read_table(tmp_path / "rows").to_pylist()
    expected = Counter(
        (broker, queue, offset)
        for (broker, queue), total in sent.items()
        for offset in range(total)
    )
    assert Counter(tuple(row.values()) for row in rows) == expected
