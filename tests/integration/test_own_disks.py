"""Executors with disks of their own prove that the ledger is shared, or send nothing."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rocket_sink.testing import FakeCluster
from tests.ledger.views import view_rows
from tests.python import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not shutil.which("unshare") or os.geteuid() != 0, reason="mount namespaces need root"
    ),
]

EVERY = ("foreach", "foreach_batch", "write", "source_stream", "source_batch", "backfill")
ROWS = 400


CASES = {
    "spool": ("foreach", "source_batch"),
    "own": (*EVERY, "fold", "large_fold", "handed"), "readonly": EVERY,
}  # fmt: skip
"""The disks of `own_disks.py`, and the lanes that use their ledgers.

`spool` is first, because each executor gets tasks only while no other job (such as a fold) runs.
"""


class Played(NamedTuple):
    folder: Path
    cluster: FakeCluster
    found: dict[str, dict[str, Any]]
    """The result of each lane by disk."""

    def of(self, disk):
        assert list(self.found[disk]) == list(CASES[disk])
        return self.found[disk]

    def stored(self, disk, lane):
        return len(self.cluster.messages(f"{disk}-{lane}"))

    def epochs(self, disk):
        return view_rows(self.folder / disk / "ledger", "SELECT * FROM epochs")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disks")
    cases = [(disk, lane) for disk, lanes in CASES.items() for lane in lanes]
    with FakeCluster(brokers=1) as cluster:
        for disk, lane in cases:
            cluster.create_topic(f"{disk}-{lane}")
        words = [f"{disk}:{lane}" for disk, lane in cases]
        module = "tests.integration.own_disks"
        done = run_python("-m", module, cluster.name_server, folder, *words, timeout_s=1500)
        found: dict[str, dict[str, Any]] = {disk: {} for disk in CASES}
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                result = json.loads(line)
                found[result["disk"]][result["lane"]] = result
        yield Played(folder, cluster, found)


def test_nothing_is_sent_by_tasks_that_see_another_folder(played):
    for lane, result in played.of("own").items():
        if lane in EVERY:
            words = "not the one that the driver sees", "mount storage", "set ledgerVia=spark"
            assert all(text in result["error"] for text in words), (lane, result)
            assert not played.stored("own", lane), lane


def test_the_driver_folds_what_only_the_driver_sees(played):
    """Fold rows of a spool on the driver's own disk, and rows that Spark has brought there."""
    own = played.of("own")
    assert not own["fold"]["error"] and not own["fold"]["log"], own["fold"]
    (warning,) = own["large_fold"]["log"]
    assert "the driver reads all files of each fold itself" in warning
    assert not own["large_fold"]["error"] and not own["handed"]["error"], own
    assert not any("ERROR" in line for line in own["handed"]["log"]), own["handed"]
    assert played.stored("own", "handed") == 2 * (ROWS // 2)
    for name in ("foreach", "source_batch"):
        (epoch,) = view_rows(played.folder / "own" / name, "SELECT * FROM epochs")
        sums = epoch.rows_in, epoch.acked, epoch.dead, epoch.missing_rows, epoch.adds_up
        assert sums == (ROWS, ROWS // 2, ROWS // 2, 0, True), name
    assert not list((played.folder / "own").rglob("*.arrow"))


def test_nothing_is_sent_by_tasks_that_cannot_write(played):
    for lane, result in played.of("readonly").items():
        words = "Read-only file system", "let the users of driver and executors write"
        assert all(text in result["error"] for text in words), (lane, result)
        assert not played.stored("readonly", lane), lane


def test_rows_that_went_to_another_spool_are_an_error(played):
    """The ledger's token is there, but rows that Spark handed over are not in the accounts."""
    results = played.of("spool")
    assert not any(result["error"] for result in results.values()), results
    errors = [line for line in results["foreach"]["log"] if line.startswith("ERROR")]
    assert len(errors) == 1 and "lacks" in errors[0] and f"of the {ROWS} rows" in errors[0], results
    wrong = played.epochs("spool")
    assert len(wrong) == len(results)
    for epoch in wrong:
        assert 0 < epoch.missing_rows == ROWS - epoch.rows_in, epoch
        assert not epoch.adds_up and epoch.confirmed
