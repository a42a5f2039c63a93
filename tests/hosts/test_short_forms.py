"""The most important cases of bad networks, of replicated brokers and of Spark on hosts.

The long forms are commands: `tests.hosts.networks`, `tests.hosts.replication` and
`tests.hosts.standalone`.
"""

import json

import pytest

from tests.hosts import networks, replication, world
from tests.hosts.standalone import play as standalone
from tests.python import run_python

LACKS = world.missing()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(LACKS), reason=f"no hosts can be made here: {LACKS}"),
]
_NEVER = ("lost", "unannounced", "denied", "disordered", "failed")


def _played(module, *more):
    """Play the short form of a module and return rows by mode, by case."""
    done = run_python("-m", module, "--short", *more, timeout_s=600, may_fail=True)
    # Exit code 1 is a broken promise or a traceback, which prints nothing to standard output.
    assert done.returncode in (0, 1) and done.stdout, done.stderr[-5000:]
    return {case["name"]: case["rows"] for case in json.loads(done.stdout)["cases"]}


def _assert_kept(rows):
    """Check the promises except those about time, because a build machine is busy."""
    for mode, row in rows.items():
        assert {name: row[name] for name in _NEVER} == dict.fromkeys(_NEVER, 0), f"{mode}: {row}"
        assert row["sent"] > 0


def test_bad_networks():
    cases = _played("tests.hosts.networks", "--no-spark")
    assert tuple(cases) == networks.SHORT
    for rows in cases.values():
        _assert_kept(rows)
    assert sum(row["doubled"] for row in cases["drop_out"].values()) > 0, "the fault was there"
    assert sum(row["announced"] for row in cases["hole"].values()) > 0, "the fault was there"


def test_replicated_brokers():
    cases = _played("tests.hosts.replication", "--no-spark")
    assert tuple(cases) == replication.SHORT
    for rows in cases.values():
        _assert_kept(rows)
    assert all(row["degraded"] > 0 for row in cases["frozen"].values())
    assert all(row["degraded"] == 0 for row in cases["failover"].values())


def test_a_worker_host_dies():
    cases = _played("tests.hosts.standalone")
    assert tuple(cases) == standalone.SHORT
    for rows in cases.values():
        assert tuple(rows) == standalone.SHORT_LANES
        assert {lane: row["broken"] for lane, row in rows.items()} == {lane: [] for lane in rows}
    assert sum(row["repeated"] for row in cases["worker_host_once"].values()) > 0, "it had tasks"
