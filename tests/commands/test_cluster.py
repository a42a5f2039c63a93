"""`rocket-sink cluster` on clusters that need no Java."""

import os
import shlex
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from rocket_sink import cluster
from rocket_sink.cluster import ClusterState, NodeState
from rocket_sink.commands.common.output import Steps
from tests.docs.checks import check_command
from tests.run_command import run_command

HOME = Path("/home", *["clusters of mine"] * 5)
NODES = tuple(
    NodeState(name, f"127.0.0.1:{port}", os.getpid(), 0.0, "m")
    for port, name in enumerate(("name-server", "broker-a", "broker-b"), 1)
)


class Own(ClusterState):
    """A cluster whose processes are all this one."""

    running = True


class Ended(ClusterState):
    running = False


CUT = Ended(HOME, "5.5.0", NODES[:1], ready=False)


@pytest.mark.parametrize(
    ("state", "code", "advised"),
    [
        (Own(HOME, "5.5.0", NODES), 0, ["topic create NAME", f"cluster down --home '{HOME}'"]),
        (Own(cluster.default_home(), "5.5.0", NODES), 0, ["topic create NAME", "cluster down"]),
        (Ended(HOME, "5.3.3", NODES, 8, "enforcing"), 1, [
            f"cluster up --home '{HOME}' --version 5.3.3 --brokers 2 --queues 8 --tls enforcing"]),
        (Ended(HOME, "5.5.0", NODES), 1, [
            f"cluster up --home '{HOME}' --version 5.5.0 --brokers 2 --queues 4"]),
        (CUT, 1, []),
        (None, 1, []),
    ],
)  # fmt: skip
def test_a_cluster_is_shown_with_commands_for_it(state, code, advised, monkeypatch):
    """Break no line that a user copies, on a narrow terminal either. A start with other settings
    would stop the processes that run."""
    monkeypatch.setattr(cluster, "status", lambda home: state if home == HOME else None)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    done = run_command("cluster", "status", "--home", str(HOME))
    document = run_command("cluster", "status", "--home", str(HOME), "--json").json()
    assert done.code == code and document["running"] is (code == 0)
    lines = [line[2:] for line in done.err.splitlines() if line.startswith("  rocket-sink ")]
    assert lines == [f"rocket-sink {words}" for words in advised]
    for line in lines:
        check_command(shlex.split(line)[1:])
    if state is None:
        assert done.err == f"no cluster runs in {HOME}\n"
        return
    assert f"RocketMQ {state.version} in {state.home}\n" in done.out
    assert "name server: 127.0.0.1:1" in done.out and f"{os.getpid()}" in done.out
    assert ("  export NAMESRV_ADDR=127.0.0.1:1\n" in done.err) is state.running
    assert ("cut short" in done.err) is (state is CUT)


@pytest.mark.parametrize(
    ("words", "home", "brokers", "wanted"),
    [
        ("", cluster.default_home(), 2,
         {"queues": 4, "tls": None, "version": cluster.DEFAULT_VERSION}),
        ("--home mine --brokers 3 --queues 8 --version 4.9.7 --tls permissive", Path("mine"), 3,
         {"queues": 8, "tls": "permissive", "version": "4.9.7"}),
    ],
)  # fmt: skip
def test_up_and_down(words, home, brokers, wanted, monkeypatch):
    up = MagicMock(return_value=Own(home, "5.5.0", NODES))
    monkeypatch.setattr(cluster, "up", up)
    document = run_command("cluster", "up", *words.split(), "--json").json()
    assert [node["name"] for node in document["nodes"]] == [node.name for node in NODES]
    assert up.call_args.args == (home, brokers)
    assert isinstance(up.call_args.kwargs.pop("progress"), Steps)
    assert up.call_args.kwargs == wanted
    place = ("cluster", "down", *words.split()[:2])
    for is_running, lines in (
        (True, ["stopping", "stopped"]),
        (False, [f"no cluster runs in {home}"]),
    ):
        down = MagicMock(return_value=is_running)
        monkeypatch.setattr(cluster, "down", down)
        monkeypatch.setattr(cluster, "status", lambda _, yes=is_running: yes or None)
        shown = run_command(*place).err.splitlines()
        assert [line.partition(" (")[0] for line in shown] == lines
        assert down.call_args.args == (home,) and down.call_args.kwargs["progress"]
        assert run_command(*place, "--json").json() == {"ended": is_running}
