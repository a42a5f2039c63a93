"""`rocket-sink check` on a broker whose disk is full: it answers, and refuses every message."""

from __future__ import annotations

import json

import pytest

from rocket_sink import cli
from rocket_sink.testing import FakeCluster
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.headers import Frame, response_to


@pytest.mark.parametrize(("used", "exit_code"), [("0.87", 0), ("0.91", 1), ("nothing", 0)])
def test_a_full_disk_is_in_the_way(
    capsys: pytest.CaptureFixture[str], used: str, exit_code: int
) -> None:
    """Report a disk above 0.90: brokers refuse to write with any setting (5.3.3)."""

    def figures(request: Frame) -> Frame:
        # AdminBrokerProcessor.getBrokerRuntimeInfo answers with a KVTable.
        answer = response_to(request, ResponseCode.SUCCESS)
        answer.body = json.dumps({"table": {"commitLogDiskRatio": used}}).encode()
        return answer

    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", 4)
        [broker] = cluster.brokers
        if used != "nothing":
            broker._handlers[RequestCode.GET_BROKER_RUNTIME_INFO] = figures
        code = cli.main(["check", "-n", cluster.name_server, "-t", "t", "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
    assert code == exit_code
    texts = {finding["what"]: finding["text"] for finding in findings}
    assert ("91% full" in texts[f"broker {broker.name}"]) == bool(exit_code)
