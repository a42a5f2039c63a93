"""`rocket-sink check` with a broker that is away, and with credentials that brokers refuse."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from rocket_sink.ledger.records import in_order, send_rows
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import RequestCode
from tests.ledger.night import at, store
from tests.ledger.values import attempt, context
from tests.run_command import run_command


@pytest.mark.parametrize(("hours", "code"), [(1, 1), (25, 0)])
def test_a_broker_that_the_ledger_knows_is_missed(tmp_path: Path, hours: int, code: int) -> None:
    now = dt.datetime.now(dt.timezone.utc)
    both = [attempt(broker_name=name) for name in ("broker-a", "broker-b")]
    rows = at(send_rows(both, context()), now - dt.timedelta(hours=hours))
    ledger = store(tmp_path / "ledger", in_order([rows], 1 << 32))
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t")
        done = run_command("check", "-n", cluster.name_server, "-t", "t", "-l", ledger, "--json")
    away = [each for each in done.json()["findings"] if each["what"] == "broker broker-b"]
    assert [each["state"] for each in away] == ["fail"] * code
    assert done.code == code and done.json()["ok"] is not bool(code)


@pytest.mark.parametrize("topic", ["t", "not-there-yet"])
def test_a_wrong_password_is_told_also_without_the_topic(topic: str) -> None:
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t")
        refusal = Answer(16, "check signature failed, user=me")
        cluster.brokers[0].on(RequestCode.GET_MAX_OFFSET, refusal, times=None)
        done = run_command("check", "-n", cluster.name_server, "-t", topic, "--json")
    assert done.code == 1
    texts = {each["what"]: each["text"] for each in done.json()["findings"]}
    assert "check signature failed" in texts["broker broker-a"]
    assert "accessKey and secretKey" in texts["broker broker-a"]
