"""`rocket-sink tail` as users type it, on the scripted cluster."""

from __future__ import annotations

import json

import pytest

from rocket_sink import Message, Producer, cli
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.testing import FakeCluster


def test_without_follow_it_shows_what_was_acknowledged_a_moment_ago(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker acknowledges before it shows: readers wait until it is level."""
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", 1)
        answers = [7, 7, 0]

        def behind_bytes(_: Admin, topic: str) -> int:
            behind = answers.pop(0)
            if not behind:
                with Producer(nameServer=cluster.name_server) as producer:
                    producer.send(Message(topic, b"late"))
            return behind

        monkeypatch.setattr(Admin, "dispatch_behind_bytes", behind_bytes)
        arguments = ["-n", cluster.name_server, "-t", "t", "--from-start", "--no-follow", "--json"]
        assert cli.main(["tail", *arguments]) == 0
    shown = [json.loads(line)["body"] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["late"] and not answers
