"""`rocket-sink send` exits 0 only when every message was acknowledged."""

from __future__ import annotations

import pytest

from rocket_sink.cli import main
from rocket_sink.testing import Answer, FakeCluster


def test_one_refused_message_among_others_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("orders", queues=1)
        command = ["send", "-n", cluster.name_server, "-t", "orders", "a", "b", "c"]
        assert main(command) == 0
        assert capsys.readouterr().err == "3 sent\n"
        cluster.brokers[0].on_send(Answer(13, "no"), times=1)
        assert main(command) == 1
        assert capsys.readouterr().err.endswith("2 sent, 1 failed\n")
        assert len(cluster.messages("orders")) == 5
