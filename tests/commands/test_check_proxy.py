"""`rocket-sink check` behind a RocketMQ proxy, which answers few requests to name servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocket_sink import cli
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import RequestCode, ResponseCode


@pytest.mark.parametrize(
    ("delivery", "state"), [("at_least_once", "note"), ("effectively_once", "fail")]
)
def test_the_first_line_says_that_there_is_a_proxy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, delivery: str, state: str
) -> None:
    with FakeCluster(brokers=2) as cluster:
        cluster.create_topic("t", 4)
        unknown = Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "request type 106 not supported")
        cluster.on_name_server(RequestCode.GET_BROKER_CLUSTER_INFO, unknown, times=None)
        address = cluster.name_server
        code = cli.main(["check", "-n", address, "-t", "t", "-O", f"delivery={delivery}", "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
    assert (findings[0]["what"], findings[0]["state"]) == (f"proxy {address}", state)
    assert "RocketMQ proxy" in findings[0]["text"]
    assert code == (state == "fail")
    [topic] = [finding for finding in findings if finding["what"] == "topic t"]
    assert (topic["state"], topic["text"]) == (
        "ok",
        "8 writable queues on 2 of 2 registered brokers",
    )


def test_other_commands_name_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCluster(brokers=1) as cluster:
        unknown = Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "request type 206 not supported")
        cluster.on_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, unknown, times=None)
        assert cli.main(["dlq", "list", "-n", cluster.name_server]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "request type 206 not supported" in text and "docs/deploy/proxy.md" in text
