"""onPendingKey=hold and a driver that is killed between a task's note and the fold.

The killed driver is a process of its own; delta-rs and DuckDB read the results of its rows. This is
a long form: `tests/ledger/test_pending_keys.py` lets go the keys of an attempt that does not count.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rocket_sink import Ledger, RocketSink, build_session
from rocket_sink.testing import Answer, Delay, FakeCluster
from tests.clusters import scripted_cluster

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(900)]

TOPIC = "keys"


def play(spark: Any, name_server: str, folder: str) -> None:
    """Send all present files, with a micro-batch per file, and fold the ledger."""
    sink = RocketSink(
        nameServer=name_server, topic=TOPIC, ledger=f"{folder}/ledger", ordering="strict",
        onPendingKey="hold", sendMsgTimeout="60s", connectTimeoutMs="20s", orderWaitMs="120s",
    )  # fmt: skip
    rows = spark.readStream.schema("body string, sharding_key string")
    rows = rows.option("maxFilesPerTrigger", 1).json(f"{folder}/in")
    writer = rows.repartition(2, "sharding_key").writeStream.foreach(sink)
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    writer.start().awaitTermination()
    Ledger(f"{folder}/ledger").sync(spark)


cluster = scripted_cluster(**{TOPIC: 1})


def start(cluster: FakeCluster, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, __file__, cluster.name_server, str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def rows(folder: Path, name: str) -> None:
    """Write a file with keys of both queues: "a" hashes to 97, "b" to 98."""
    (folder / "in").mkdir(exist_ok=True)
    lines = [f'{{"body": "{name} {key}", "sharding_key": "{key}"}}' for key in "ab"]
    partial = folder / f"{name}.part"
    partial.write_text("\n".join(lines))
    partial.rename(folder / "in" / f"{name}.json")


def test_the_replay_lets_the_keys_go(spark: Any, cluster: FakeCluster, tmp_path: Path) -> None:
    duckdb, deltalake = pytest.importorskip("duckdb"), pytest.importorskip("deltalake")
    rows(tmp_path, "first")
    # One broker refuses a key's messages and the other gives no answer, so the epoch has no end.
    cluster.broker("broker-b").on_send(Answer(13, "no"), times=None)
    cluster.broker("broker-a").on_send(Delay(3600), times=None)
    pending = tmp_path / "ledger" / "_notes" / "pending"
    with start(cluster, tmp_path) as first:
        try:
            while first.poll() is None and not (pending.is_dir() and any(pending.iterdir())):
                time.sleep(0.05)
            assert first.poll() is None, first.stderr.read().decode() if first.stderr else ""
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    [note] = pending.iterdir()
    assert "~0~" in note.name, "of epoch 0, which nobody has confirmed"

    cluster.behave()
    rows(tmp_path, "second")
    play(spark, cluster.name_server, str(tmp_path))
    assert list(pending.iterdir()) == []
    ledger_rows = deltalake.DeltaTable(str(tmp_path / "ledger")).to_pyarrow_dataset()
    session = duckdb.connect()
    session.register("ledger_rows", ledger_rows)
    reasons = "SELECT reason, epoch FROM ledger_rows WHERE kind = 'dead_letter' GROUP BY ALL"
    assert session.sql(reasons).fetchall() == [("data", 0)]
    stored = {message.body.decode() for message in cluster.messages(TOPIC)}
    assert stored == {f"{name} {key}" for name in ("first", "second") for key in "ab"}


if __name__ == "__main__":
    play(build_session("hold", master="local[2]"), *sys.argv[1:])
