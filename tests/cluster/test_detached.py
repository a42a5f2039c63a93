"""The state file of `up`: which processes are the cluster's, and which are never signalled."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest

from rocket_sink.cluster import ClusterState, NodeState, detached, down, status, up
from rocket_sink.cluster.detached import _STATE_FILE
from rocket_sink.cluster.layout import MARK_PROPERTY
from rocket_sink.errors import ClusterError

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def start():
    """Return a function that starts a process with a mark."""
    started = []

    def begin(mark="m1"):
        command = [sys.executable, "-c", SLEEP, f"-D{MARK_PROPERTY}={mark}"]
        process = subprocess.Popen(command, start_new_session=True)
        started.append(process)
        # The child shows this process's command line until its exec is done.
        while command[-1] not in psutil.Process(process.pid).cmdline():
            time.sleep(0.01)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def write_state(home, *pids):
    """Write the state of a name server and of brokers with these process ids."""
    nodes = tuple(map(node, ("name-server", "broker-a"), pids, (1, 2)))
    state = ClusterState(home, "5.3.3", nodes)
    plain = {"version": "5.3.3", "nodes": [asdict(node) for node in nodes]}
    (home / _STATE_FILE).write_text(json.dumps(plain))
    return state


def node(name, pid, port=1):
    return NodeState(name, f"127.0.0.1:{port}", pid, 0.0, "m1")


def test_down_ends_what_up_started_and_is_safe_to_repeat(tmp_path, start):
    absent = tmp_path / "absent"
    assert status(absent) is None and down(absent) is False and not absent.exists()
    server, broker = start(), start()
    state = write_state(tmp_path, server.pid, broker.pid)
    assert status(tmp_path) == state
    assert state.running
    assert state.name_server == "127.0.0.1:1"
    assert [each.name for each in state.brokers] == ["broker-a"]
    assert down(tmp_path) is True
    assert server.poll() is not None and broker.poll() is not None
    assert status(tmp_path) is None
    assert down(tmp_path) is False


def test_a_recycled_number_is_never_signalled(tmp_path, start):
    stranger = start("somebody-else")
    write_state(tmp_path, stranger.pid)
    assert status(tmp_path) is None
    assert down(tmp_path) is False
    assert stranger.poll() is None
    assert not (tmp_path / _STATE_FILE).exists()


@pytest.mark.parametrize(("grace_s", "number"), [(60, signal.SIGTERM), (0, signal.SIGKILL)])
def test_a_frozen_process_counts_as_alive_and_can_be_ended(
    grace_s, number, tmp_path, start, monkeypatch
):
    frozen = start()
    psutil.Process(frozen.pid).suspend()
    write_state(tmp_path, frozen.pid)
    assert status(tmp_path).running
    waited = MagicMock(side_effect=psutil.wait_procs)
    monkeypatch.setattr(psutil, "wait_procs", waited)
    assert 15 < detached._GRACE_S < 60, "brokers take some 15 s"
    monkeypatch.setattr(detached, "_GRACE_S", grace_s)
    if not grace_s:
        monkeypatch.setattr(psutil.Process, "resume", lambda process: None)
    assert down(tmp_path) is True
    assert frozen.poll() is not None, "the end of the process was waited for"
    assert [each.kwargs["timeout"] for each in waited.call_args_list] == [grace_s, 10]


def test_one_dead_process_shows(tmp_path, start):
    alive, dead = start(), start()
    dead.kill()
    # The process is dead but stays a zombie, so its number still exists.
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    state = write_state(tmp_path, alive.pid, dead.pid)
    assert status(tmp_path) is not None
    assert not state.running
    plain = state.to_dict()
    assert [each["alive"] for each in plain["nodes"]] == [True, False]
    assert "m1" not in str(plain), "the mark is nobody's business"


@pytest.mark.parametrize("text", ["{", "1", "{}", '{"nodes": [{}]}', "\udcff"])
def test_a_damaged_state_file_is_explained(text, tmp_path):
    (tmp_path / _STATE_FILE).write_text(text, errors="surrogateescape")
    with pytest.raises(ClusterError, match="delete the file"):
        status(tmp_path)


def test_a_home_that_is_no_folder_is_explained(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match="cannot be used: File exists; name another"):
        up(tmp_path / "file")


def test_a_start_that_was_cut_short_is_no_running_cluster(tmp_path, start, monkeypatch):
    """A SIGKILL of `up` leaves this state if only the name server had been started."""
    server = start()
    state = ClusterState(tmp_path, "5.5.0", (node("name-server", server.pid),), ready=False)
    plain = {name: value for name, value in asdict(state).items() if name != "home"}
    (tmp_path / _STATE_FILE).write_text(json.dumps(plain))
    assert status(tmp_path) == state
    assert not state.running

    monkeypatch.setattr(detached.Runtime, "make", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        up(tmp_path)
    assert server.wait(5) is not None


def test_what_a_running_cluster_does_not_have_is_told(tmp_path, start):
    state = write_state(tmp_path, start().pid, start().pid)
    messages = []
    assert up(tmp_path, 1, version="5.3.3", progress=messages.append) == state
    assert not messages
    up(tmp_path, 1, version="5.3.3", tls="enforcing", progress=messages.append)
    up(tmp_path, 1, version="5.3.3", queues=8, progress=messages.append)
    assert up(tmp_path) == state and len(messages) == 2
    assert "4 queues each and TLS disabled" in messages[0]


def test_the_state_file_of_another_user_is_not_to_be_deleted(tmp_path, monkeypatch):
    refuse = MagicMock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ClusterError, match=r"cannot be read: Permission denied.*another user"):
        status(tmp_path)
