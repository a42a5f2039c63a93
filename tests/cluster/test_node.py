"""Processes and their guard, with small stand-ins for the JVMs."""

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import psutil
import pytest

from rocket_sink.cluster import LocalCluster
from rocket_sink.cluster import guard as guards
from rocket_sink.cluster import node as nodes
from rocket_sink.cluster.guard import Guard
from rocket_sink.cluster.node import NameServer, Node, NodeSpec, PortTakenError
from rocket_sink.cluster.probe import Probe, ProbeFailed, accepts
from rocket_sink.errors import ClusterError
from tests.producer.waiting import until

ROOT = Path(__file__).parents[2]


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def spec(folder, script, settings=None):
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
    assert repr(node) == "<Node broker-a 127.0.0.1:1 running>"
    with pytest.raises(ClusterError, match="runs already"):
        node.spawn()
    node.freeze()
    until(lambda: process.status() == psutil.STATUS_STOPPED)
    assert node.alive
    node.thaw()
    until(lambda: process.status() != psutil.STATUS_STOPPED)
    node.freeze()
    node.kill()
    assert repr(node) == "<Node broker-a 127.0.0.1:1 not running>"
    node.kill()
    with pytest.raises(ClusterError, match="restart"):
        node.freeze()


@pytest.mark.parametrize(("grace_s", "by"), [(60, signal.SIGTERM), (0, signal.SIGKILL)])
def test_stop_ends_a_frozen_process_and_is_safe_to_repeat(grace_s, by, node, monkeypatch):
    assert 15 < nodes._GRACE_S < 60, "brokers take some 15 s"
    process = node._process
    node.freeze()
    if not grace_s:
        monkeypatch.setattr(node, "thaw", lambda: None)
    node.stop(grace_s)
    node.stop()
    assert process.returncode == -by


def test_cpu_seconds_outlive_each_end(tmp_path, guard, monkeypatch):
    node = Node(spec(tmp_path, "import time; time.sleep(60)"), guard.join)
    process = MagicMock()
    process.return_value.cpu_times.return_value = SimpleNamespace(user=2, system=1)
    monkeypatch.setattr("rocket_sink.cluster.node.psutil.Process", process)
    assert node.cpu_s() == 0
    for seconds, end in ((3, node.kill), (6, node.stop)):
        node.spawn()
        assert node.cpu_s() == seconds
        end()
        assert node.cpu_s() == seconds
    process.side_effect = psutil.NoSuchProcess(1)
    node.spawn()
    assert node.cpu_s() == 6 and process.call_args.args == (node.pid,)
    node.kill()


def test_a_released_process_goes_on(node, recwarn):
    process = psutil.Process(node.pid)
    node.release()
    node.release()
    assert not node.alive
    node._process = None
    gc.collect()
    # The collection also frees what other tests left, with warnings of their own.
    assert process.is_running() and not [w for w in recwarn if str(process.pid) in str(w.message)]
    process.kill()


def test_a_restart_waits_until_the_process_serves(tmp_path, guard, monkeypatch):
    serves = 'import time; print("The Name Server boot success", flush=True); time.sleep(60)'
    node = NameServer(spec(tmp_path, serves), guard.join)
    node.spawn()
    before = node.pid
    with monkeypatch.context() as patched:
        waited = MagicMock()
        patched.setattr(node, "wait_ready", waited)
        node.restart()
    node.restart(7)
    assert waited.call_args.args == (120,) and node.alive and node.pid != before
    node.kill()


def test_another_process_at_the_port_does_not_make_a_name_server_ready(tmp_path, guard):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        binds = f"import socket; socket.create_server(('127.0.0.1', {port}))"
        server = NameServer(replace(spec(tmp_path, binds), port=port), guard.join)
        server.spawn()
        with pytest.raises(PortTakenError, match="ended with code 1"):
            server.wait_ready(100)


SHOWS = """
import os, sys
print([name for name, value in os.environ.items() if value == "-Xmx1m"])
print(os.environ["CLASSPATH"], sys.argv[1:], sys.stdin.read(), file=sys.stderr)
open("private", "w")
print("x" * 40_000)
"""


def test_the_users_java_options_do_not_reach_it(tmp_path, guard, monkeypatch):
    """The node's files are private. An error shows the last lines of its output and of its log."""
    for name in ("JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "NAMESRV_ADDR"):
        monkeypatch.setenv(name, "-Xmx1m")
    node = Node(spec(tmp_path, SHOWS), guard.join)
    node.spawn()
    until(lambda: not node.alive)
    folder = node.spec.folder
    options, words, _ = (folder / "console.log").read_text().splitlines()
    assert (options, words) == ("[]", f"/x.jar ['-c', '{node.spec.settings_file}'] ")
    assert (folder / "private").stat().st_mode & 0o777 == 0o600
    assert node.log_tail() == "x" * 32_767
    (folder / "rocketmq.log").write_text("".join(f"{number}\n" for number in range(30)))
    assert node.log_tail().split()[1:] == [str(number) for number in range(10, 30)]


def test_settings_are_written_at_each_start_with_mode_0600(tmp_path, guard):
    node = Node(spec(tmp_path, "pass", {"k": "v"}), guard.join)
    file = node.spec.settings_file
    for _ in range(2):
        node.spawn()
        until(lambda: not node.alive)
        assert file.read_text() == "k=v\n"
        assert file.stat().st_mode & 0o077 == 0
        file.write_text("changed by the broker")
        file.chmod(0o666)


def never_ready():
    raise ProbeFailed("not yet")


@pytest.mark.parametrize(
    ("text", "kind"),
    [("the reason", ClusterError), ("BindException: Address already in use", PortTakenError)],
)
def test_a_failed_start_shows_the_log_and_what_to_do(text, kind, tmp_path, guard):
    node = Node(spec(tmp_path, f"print('{text}'); raise SystemExit(3)"), guard.join)
    node.spawn()
    with pytest.raises(ClusterError, match=rf"(?s)ended with code 3.*{text}") as caught:
        node.wait_for(never_ready, 60)
    assert str(tmp_path) in str(caught.value) and type(caught.value) is kind


def test_a_slow_start_ends_at_its_time(node, tmp_path):
    with pytest.raises(ClusterError, match=r"not ready after 0 s: not yet"):
        node.wait_for(never_ready, 0.2)
    with pytest.raises(ClusterError, match="was not started"):
        Node(spec(tmp_path, ""), dict).wait_for(never_ready, 60)


def test_closing_the_guard_ends_the_group(node, guard):
    guard.close()
    guard.close()
    until(lambda: not node.alive)


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 11, 0)])
def test_the_guard_is_a_process_of_its_own(version, monkeypatch):
    """The guard reads neither the user's modules nor their folders, and holds no pipe of the
    command."""
    popen, setpgid = MagicMock(), MagicMock()
    own_sys = SimpleNamespace(version_info=version, executable="python")
    monkeypatch.setattr(guards, "sys", own_sys)
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(os, "setpgid", setpgid)
    process, guard = popen.return_value, Guard()
    process.pid, process.poll.return_value = 7, None
    guard.join()
    for leader, joined in ((7, guard.join()), (0, popen.call_args.kwargs)):
        if version < (3, 11):
            joined.pop("preexec_fn")()
            assert setpgid.call_args == call(0, leader)
        else:
            assert joined.pop("process_group") == leader
    command = ["python", "-I", "-S", guards.__file__, str(os.getpid())]
    popen.assert_called_once_with(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    process.poll.return_value = -9
    guard.join()
    assert popen.call_count == 2, "a guard that was killed is replaced"
    process.wait.side_effect = [subprocess.TimeoutExpired("guard", 10), 0]
    guard.close()
    assert process.stdin.close.called and process.kill.called
    assert process.wait.call_args_list == [call(10), call()]


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
    make = MagicMock(side_effect=error("now"))
    monkeypatch.setattr("rocket_sink.cluster.local.Runtime.make", make)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(error):
        LocalCluster(1).start()
    assert len(list(tmp_path.iterdir())) == kept
