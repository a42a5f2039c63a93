"""Several backfills of a ledger at once, and a killed one: processes and a scripted cluster.

This is a long form. In the short form `tests/crash` kills a backfill in the middle of its letters,
and `tests/spark/backfill/test_backfill.py` runs two at once.
"""

import contextlib
import io
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rocket_sink.testing import FakeCluster
from tests.clusters import scripted_cluster
from tests.run_command import run_command

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(900)]

ROWS = 120
RATE = 20
TOPIC = "old"
Family = list[psutil.Process]
"""The processes of a backfill: the driver, its JVM, the workers of Python."""


cluster = scripted_cluster(**{TOPIC: 4})


def command(cluster: FakeCluster, folder: Path, *more: str) -> list[str]:
    return [
        "backfill", "--format", "json",
        "--path", str(folder / "in"), "--ledger", str(folder / "ledger"),
        "-n", cluster.name_server, "--columns", "body=text, sharding_key=k", "-O", "orderBy=n",
        "-O", "sendMsgTimeout=60s", "-O", "connectTimeoutMs=20s", "--to-topic", TOPIC,
        "--master", "local[2]", "--json", *more,
    ]  # fmt: skip


@contextlib.contextmanager
def stopped_in_the_middle(cluster: FakeCluster, folder: Path) -> Iterator[Family]:
    """Yield a backfill that is suspended in its third chunk. A chunk holds a second's rows."""
    with subprocess.Popen(
        [sys.executable, "-m", "rocket_sink.cli",
         *command(cluster, folder, "--rate", str(RATE))],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        family = [psutil.Process(process.pid)]
        try:
            while len(cluster.messages(TOPIC)) < 2 * RATE + 5 and process.poll() is None:
                time.sleep(0.02)
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            family += family[0].children(recursive=True)
            for member in family[::-1]:
                member.suspend()
            yield family
        finally:
            kill(family)


def kill(family: Family) -> None:
    for member in family[::-1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def test_one_at_a_time_and_what_was_acknowledged_is_not_sent_twice(
    spark: Any, cluster: FakeCluster, tmp_path: Path
) -> None:
    """A backfill works, a second is refused, and a third waits until the first is killed."""
    (tmp_path / "in").mkdir()
    rows = [{"text": f"row {n}", "k": f"k{n % 5}", "n": n} for n in range(ROWS)]
    (tmp_path / "in" / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    output = io.StringIO()

    def kill_once_waited_for(first: Family) -> None:
        while "waits for another backfill" not in output.getvalue() and not has_ended.wait(0.05):
            pass
        kill(first)

    with stopped_in_the_middle(cluster, tmp_path) as first:
        refused = run_command(*command(cluster, tmp_path, "--no-wait"), spark=spark)
        assert refused.code == 1
        assert "at work" in refused.err and f"process {first[0].pid}" in refused.err
        has_ended = threading.Event()
        killer = threading.Thread(target=kill_once_waited_for, args=[first])
        killer.start()
        try:
            done = run_command(*command(cluster, tmp_path), spark=spark, err=output)
        finally:
            has_ended.set()
            killer.join()
    assert done.code == 0, done.err
    assert done.err.count("waits for another backfill") == 1
    report = done.json()
    stored = [message.body.decode() for message in cluster.messages(TOPIC)]
    assert Counter(stored) == {row["text"]: 1 for row in rows}
    before = ROWS - report["pending_before"]
    assert before >= 2 * RATE, "the first run's acknowledged chunks are in the ledger"
    assert report["found"] > 0, "the kill hit no chunk on its way: the brokers were not asked"
    assert report["resent"] + report["found"] + before == ROWS
    by_key: dict[str, list[int]] = {}
    for broker in cluster.brokers:
        for message in broker.store.messages(TOPIC):
            key = message.properties["__SHARDINGKEY"]
            by_key.setdefault(key, []).append(int(message.body.split()[1]))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())

    again = run_command(*command(cluster, tmp_path), spark=spark)
    assert (again.code, again.json()["resent"]) == (0, 0), again.err
    assert len(cluster.messages(TOPIC)) == ROWS
