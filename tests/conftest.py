"""Shared set-up: JVMs tuned for small plans (`tests.jvms`), hypothesis without time limits, one
real cluster, slow files first, everything else in a drawn order and in another zone than UTC.

The optimising compiler and whole-stage code generation pay off over millions of rows. Over the few
rows of a test they take most of its CPU time (the ledger's views: twice as much with them). Plans
that adapt, partitions and parallel collection of garbage cost as well (`ledger/test_fold.py`: 113 s
of CPU with them, 81 s without).
"""

import contextlib
import locale
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings

from rocket_sink.cluster import LocalCluster
from rocket_sink.errors import ClusterError
from rocket_sink.net import log
from tests.clusters import TRANSACTIONS, kept_logs, rest, two_brokers, wake
from tests.jvms import SMALL_PLANS, fetch_packages, quick_brokers, submit_args
from tests.short import is_long

# The cores of a build machine are shared, so no example has a time limit.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Container images disable bytecode files for their one process. The tests start hundreds, and each
# would compile PySpark anew: 2.7 seconds of CPU instead of 0.9.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# UTC hides a local time that is taken for UTC. `.ci/long` runs in a third zone.
os.environ.setdefault("TZ", "Asia/Shanghai")
time.tzset()
# A machine may not have the locale of its environment.
with contextlib.suppress(locale.Error):
    locale.setlocale(locale.LC_ALL, "")

_SEED = os.environ.get("PYTHONHASHSEED", "random")
if _SEED == "random":
    # Workers of xdist, and all processes that tests start, take the seed for their hashes.
    _SEED = os.environ["PYTHONHASHSEED"] = str(secrets.randbelow(2**32))

os.environ.setdefault("PYSPARK_SUBMIT_ARGS", submit_args())
# Clients of S3 ask the metadata service of a machine in a cloud, and tests send to loopback only.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
_STATE = tempfile.TemporaryDirectory(prefix="rocket-sink-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name


def pytest_addoption(parser):
    group = parser.getgroup("crash harness (tests/crash, -m slow)")
    group.addoption("--crash-seed", type=int, default=1, help="seed of the first schedule")
    group.addoption("--crash-schedules", type=int, default=200, help="schedules to play")
    group.addoption("--crash-only", default="", help="beginning of their names, such as foreach-")
    parser.getgroup("short form (tests/short.py)").addoption(
        "--long", action="store_true", help="whole runs have the long tests, too"
    )


def pytest_configure(config):
    """Leave the long tests out of whole runs: those that name neither files nor a `-k`."""
    option = config.option
    is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS and not option.keyword
    # Workers of xdist parse the same arguments anew.
    if is_whole and not option.long:
        asked = f"({option.markexpr}) and " if option.markexpr else ""
        option.markexpr = f"{asked}(not long or slow)"


def pytest_report_header():
    return (
        f"order drawn by PYTHONHASHSEED={_SEED} (set it to repeat it), TZ={os.environ['TZ']}, "
        f"locale {locale.setlocale(locale.LC_NUMERIC)}"
    )


def pytest_itemcollected(item):
    """Mark what is long."""
    java = any(item.get_closest_marker(name) for name in _NEEDS)
    if is_long(item.nodeid, java=java):
        item.add_marker(pytest.mark.long)


LONGEST = (
    "hosts/test_short_forms.py", "stores/test_short_forms.py", "crash/test_crash.py",
    "integration/test_commands.py", "docs/test_blocks.py", "spark/backfill/test_backfill.py",
    "integration/test_lanes.py", "ledger/test_append.py", "cluster/test_cluster_live.py",
    "ledger/test_fold.py", "integration/test_demo.py", "integration/test_lanes_faults.py",
    "producer/conformance/test_real_cluster.py", "integration/test_transactional.py",
    "spark/test_transactional_epochs.py", "ledger/test_report.py", "ledger/test_pending_keys.py",
    "producer/conformance/test_tls.py", "integration/test_replays.py", "ledger/test_ledger.py",
    "producer/conformance/test_real_modes.py", "producer/conformance/test_bodies.py",
    "integration/test_accounts.py", "ledger/test_making.py",
    "producer/conformance/test_texts.py", "producer/conformance/test_guarded.py",
    "producer/conformance/test_acl.py",
    "integration/test_spark_only.py", "integration/test_executors.py",
    "commands/test_hostile_text.py", "spark/test_effectively_once.py", "ledger/test_spool.py",
)  # fmt: skip
"""The slowest files, slowest first: if one began last, a single worker would run it alone."""
_NEEDS = ("cluster", "spark")


def pytest_collection_modifyitems(items):
    """Run the slowest files first, then the others that need a cluster, Spark, or neither: each of
    these parts in a drawn order. Draw the order of tests in files without Java, too.

    A worker freezes its cluster once no more tests need it.
    """
    order = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    needs = {}
    for item in items:
        need = min((n for n, name in enumerate(_NEEDS) if item.get_closest_marker(name)), default=9)
        needs[item.path] = min(need, needs.get(item.path, need))
    draw = Random(_SEED)
    files = {path: draw.random() for path in sorted(needs)}
    drawn = sorted(
        ((item, draw.random() if needs[item.path] == 9 else 0.0) for item in items),
        key=lambda pair: pair[1],
    )
    drawn.sort(key=lambda pair: (order.get(pair[0].path, len(order)), needs[pair[0].path],
                                 files[pair[0].path]))  # fmt: skip
    items[:] = [item for item, _ in drawn]


_LOCAL = []
"""The worker's own cluster, while it runs."""


def pytest_runtest_setup(item):
    for cluster in _LOCAL:
        # Idle brokers take 7 % of a core each.
        if item.get_closest_marker("cluster") or "local_cluster" in item.fixturenames:
            wake(cluster)
        else:
            rest(cluster)
    if "PYTEST_XDIST_WORKER" in os.environ and item.get_closest_marker("spark"):
        fetch_packages()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Add the logs of real clusters to a failure, because clusters are removed at their end."""
    report = yield
    if report.failed and call.when != "teardown":
        used = {
            id(value): value for value in item.funcargs.values() if isinstance(value, LocalCluster)
        }
        for cluster in used.values():
            with contextlib.suppress(ClusterError, OSError):
                kept = item.funcargs["tmp_path_factory"].mktemp("logs")
                report.sections.append((f"logs of {cluster}", kept_logs(cluster, kept)))
    return report


@pytest.fixture(autouse=True)
def own_health(tmp_path_factory, monkeypatch):
    """Give each test broker health and routes of its own.

    Both are shared by name server, and a test may get the port of an earlier test's name server.
    """
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path_factory.mktemp("local")))
    # A script of the docs sets COLUMNS for its pictures; tables in a pipe take their width from it.
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def closing(request):
    """Return a function that returns its first argument, and closes it at the test's end.

    `close` gets the other arguments. What was made last is closed first.
    """

    def closed_later(item, *limits):
        request.addfinalizer(lambda: item.close(*limits))
        return item

    return closed_later


@pytest.fixture(autouse=True)
def own_log():
    """Let each test log its own records: a limit per kind may be used up by an earlier test."""
    log._GUARD._reset()


@pytest.fixture(scope="session", autouse=True)
def quick_clusters():
    with quick_brokers():
        yield


@pytest.fixture(scope="session")
def local_cluster():
    """Yield the two real brokers of a worker process; tests that need both alive call `repair`."""
    for running in two_brokers(**TRANSACTIONS):
        _LOCAL.append(running)
        yield running
        _LOCAL.clear()


@pytest.fixture(scope="session")
def spark():
    """Return the one session of a run: a JVM keeps the jars of its first session."""
    from rocket_sink.spark.session import build_session

    return build_session(
        "rocket-sink-tests",
        # Two attempts per task let tests see retries.
        master="local[2,2]",
        conf={
            **SMALL_PLANS,
            # The tests do not run in UTC, to show that the session's time zone does not matter.
            "spark.sql.session.timeZone": "America/New_York",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
            # tests/integration/test_spark_only.py uses this scheme, which pyarrow does not know.
            "spark.hadoop.fs.oss.impl": (
                "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme"
            ),
            "spark.hadoop.fs.viewfs.overload.scheme.target.file.impl": (
                "org.apache.hadoop.fs.LocalFileSystem"
            ),
            "spark.delta.logStore.oss.impl": "io.delta.storage.LocalLogStore",
        },
    )
