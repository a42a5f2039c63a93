"""`rocket-sink cluster` on clusters that need no Java."""

import os
import sys
from pathlib import Path

import pytest

from rocket_sink import cli, cluster
from rocket_sink.cluster import ClusterState, NodeState


class Running(ClusterState):
    """A cluster whose processes are all this one."""

    running = True


def test_paths_and_commands_are_whole_lines_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Break no line that a user copies."""
    home = Path("/home", *["clusters of mine"] * 5)
    nodes = [
        NodeState(n, "127.0.0.1:1", os.getpid(), 0.0, "m") for n in ("name-server", "broker-a")
    ]
    monkeypatch.setattr(cluster, "status", lambda _: Running(home, "5.5.0", tuple(nodes)))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["cluster", "status"]) == 0
    out, err = capsys.readouterr()
    assert f"RocketMQ 5.5.0 in {home}\n" in out
    assert "  export NAMESRV_ADDR=127.0.0.1:1\n" in err
    assert f"  rocket-sink cluster down --home '{home}'\n" in err
