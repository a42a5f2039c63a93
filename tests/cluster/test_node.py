"""Processes and their guard, with small stand-ins for the JVMs."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from rocket_sink.cluster import LocalCluster
from rocket_sink.cluster.guard import Guard
from rocket_sink.cluster.node import Node, NodeSpec, PortTakenError
from rocket_sink.cluster.probe import Probe, ProbeFailed, accepts
from rocket_sink.errors import ClusterError
from tests.producer.waiting import until

ROOT = Path(__file__).parents[2]


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def spec(folder: Path, script: str, settings: dict[str, str] | None = None) -> NodeSpec:
    command = (sys.executable, "-c", script)
    return NodeSpec("broker-a", 1, folder / "broker-a", command, "/x.jar", settings or {})


@pytest.fixture
def guard(closing):
    return closing(Guard())


@pytest.fixture
def node(tmp_path, guard):
    new_node = Node(spec(tmp_path, "import time; time.sleep(60)"), guard.join)
    new_node.spawn()
    yield new_node
    new_node.kill()


def test_freeze_thaw_kill(node):
    process = psutil.Process(node.pid)
    node.freeze()
    until(lambda: process.status() == psutil.STATUS_STOPPED)
    assert node.alive
    node.thaw()
    until(lambda: process.status() != psutil.STATUS_STOPPED)
    node.freeze()
    node.kill()
    assert not node.alive
    node.kill()
    with pytest.raises(ClusterError, match="restart"):
        node.freeze()


def test_stop_ends_a_frozen_process_and_is_safe_to_repeat(node):
    node.freeze()
    node.stop(grace_s=5)
    node.stop()
    assert not node.alive


def test_cpu_seconds_outlive_a_kill(tmp_path, guard):
    busy = Node(spec(tmp_path, "while True: pass"), guard.join)
    assert busy.cpu_s() == 0
    busy.spawn()
    until(lambda: busy.cpu_s() > 0.1)
    before_s = busy.cpu_s()
    busy.kill()
    assert busy.cpu_s() >= before_s
    busy.spawn()
    assert busy.cpu_s() >= before_s
    busy.kill()


def test_a_process_is_not_started_twice(node):
    with pytest.raises(ClusterError, match="runs already"):
        node.spawn()


def test_the_users_java_options_do_not_reach_it(tmp_path, guard, monkeypatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xmx1m")
    script = "import os; print(os.environ.get('JAVA_TOOL_OPTIONS'), os.environ['CLASSPATH'])"
    node = Node(spec(tmp_path, script), guard.join)
    node.spawn()
    until(lambda: not node.alive)
    assert node.log_tail() == "None /x.jar"


def test_settings_are_written_at_each_start_with_mode_0600(tmp_path, guard):
    node = Node(spec(tmp_path, "pass", {"k": "v"}), guard.join)
    file = node.spec.settings_file
    for _ in range(2):
        node.spawn()
        until(lambda: not node.alive)
        assert file.read_text() == "k=v\n"
        assert file.stat().st_mode & 0o077 == 0
        file.write_text("changed by the broker")


def never_ready() -> None:
    raise ProbeFailed("not yet")


def test_a_failed_start_shows_the_log_and_what_to_do(tmp_path, guard):
    node = Node(spec(tmp_path, "print('the reason'); raise SystemExit(3)"), guard.join)
    node.spawn()
    with pytest.raises(ClusterError, match=r"(?s)ended with code 3.*the reason") as caught:
        node.wait_for(never_ready, 10)
    assert str(tmp_path) in str(caught.value)


def test_a_slow_start_ends_at_its_time(node):
    with pytest.raises(ClusterError, match=r"not ready after 0 s: not yet"):
        node.wait_for(never_ready, 0.2)


def test_a_taken_port_has_its_own_error(tmp_path, guard):
    node = Node(spec(tmp_path, "print('BindException: Address already in use')"), guard.join)
    node.spawn()
    with pytest.raises(PortTakenError):
        node.wait_for(never_ready, 10)


def test_closing_the_guard_ends_the_group(node, guard):
    guard.close()
    guard.close()
    until(lambda: not node.alive)


OWNER = """
    import os, sys, time
    from pathlib import Path
    from rocket_sink.cluster.guard import Guard
    from rocket_sink.cluster.node import Node, NodeSpec
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    node = Node(NodeSpec("b", 1, Path(sys.argv[1]), command, "", {}), Guard().join)
    node.spawn()
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(30)  # a forked child keeps the guard's pipe open
        os._exit(0)
    print(node.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["plain", "fork"])
def test_processes_die_with_a_killed_owner(tmp_path, kind):
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path), kind], stdout=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert running(pid)
    owner.kill()
    owner.wait()
    try:
        until(lambda: not running(pid))
    finally:
        owner.stdout.close()
        if kind == "fork":
            os.killpg(owner.pid, signal.SIGKILL)


def test_a_cluster_that_is_not_started_raises():
    cluster = LocalCluster()
    cluster.stop()
    for name in ("name_server", "brokers", "classpath", "home"):
        with pytest.raises(ClusterError, match=r"call start\(\)"):
            getattr(cluster, name)


def test_the_probe_of_an_empty_port():
    assert not accepts("127.0.0.1:1")
    with pytest.raises(ProbeFailed, match=r"127\.0\.0\.1:1 does not answer"):
        Probe().check_broker("127.0.0.1:1", "broker-a", "127.0.0.1:2")


@pytest.mark.parametrize(("error", "kept"), [(KeyboardInterrupt, 0), (ClusterError, 1)])
def test_a_start_that_the_user_stops_leaves_no_folder(error, kept, tmp_path, monkeypatch):
    """A start that fails leaves its folder, because the logs are in it."""

    def stopped(*_: object) -> None:
        raise error("now")

    monkeypatch.setattr("rocket_sink.cluster.local.Runtime.make", stopped)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(error):
        LocalCluster(1).start()
    assert len(list(tmp_path.iterdir())) == kept
