"""A ledger in a store that only Spark knows (oss:, obs:, dbfs:): what works, and what says no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from rocket_sink.testing import FakeCluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).parents[2]


def test_lanes_that_need_no_files_work_and_the_others_say_why(tmp_path: Path) -> None:
    with FakeCluster(brokers=1) as cluster:
        names = ("foreach", "foreach_batch", "write", "source_stream", "source_batch", "backfill",
                 "strict", "strict-write", "hold", "once", "named")  # fmt: skip
        for name in names:
            cluster.create_topic(name)
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.spark_only", cluster.name_server,
             str(tmp_path)],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=1500,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(next(ln for ln in done.stdout.splitlines() if ln.startswith("{")))
        for name in names:
            stored = len(cluster.messages(name))
            if name in ("foreach_batch", "write"):
                assert (found[name], stored) == ("", 75), found[name]
            else:
                assert "pyarrow, by which tasks write them, has no file system" in found[name], name
                assert "foreachBatch and sink.write can use this ledger" in found[name], name
                assert not stored, name
        for name, option in {"strict": "ordering=strict", "hold": "onPendingKey=hold",
                             "strict-write": "ordering=strict", "named": "appId",
                             "once": "delivery=effectively_once"}.items():  # fmt: skip
            assert f"{option}: small files beside the table" in found[name]
    assert found["dead"] == "50"
    # Hadoop's view wrote local files: delta-rs reads them as what they are.
    rows = DeltaTable(tmp_path / "ledger").to_pyarrow_dataset().to_table()
    assert pc.sum(rows.filter(pc.equal(rows["kind"], "epoch"))["rows_in"]).as_py() == 200
    assert sorted(path.name for path in (tmp_path / "ledger").glob("_*")) == ["_delta_log"]
