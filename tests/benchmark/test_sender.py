"""The senders that run as processes of their own, here in this one, against scripted brokers."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocket_sink.benchmark import sender
from rocket_sink.benchmark.faults import read_numbers
from rocket_sink.benchmark.rows import number_of
from rocket_sink.benchmark.stub_server import StubServers
from rocket_sink.testing import Answer, FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as made:
        made.create_topic("t")
        yield made


@pytest.fixture(autouse=True)
def go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))


def run(capsys: pytest.CaptureFixture[str], name_server: str, **arguments: Any) -> dict[str, Any]:
    words = [f"{name}={value}" for name, value in arguments.items()]
    sender.main([f"nameServer={name_server}", "topic=t", *words])
    ready, printed = capsys.readouterr().out.splitlines()
    assert ready == "READY"
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.mark.parametrize("mode", ["sync", "hash", "async", "autobatch", "batch"])
def test_each_mode_sends_every_number_once(
    mode: str, cluster: FakeCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "numbers"
    found = run(
        capsys, cluster.name_server, mode=mode, messages=50, warmup=7, batch=20, threads=2,
        inflight=9, numbers=path,
    )  # fmt: skip
    assert (found["ok"], found["failed"], found["doubtful"]) == (50, 0, 0)
    assert found["cpu_s"] > 0
    stored = Counter(number_of(message.body) for message in cluster.messages("t"))
    assert stored == Counter([*range(-7, 0), *range(50)])
    assert read_numbers(path) == (set(range(50)), set())


def test_arrow_and_replay_send_batches(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, cluster.name_server, mode="arrow", messages=500, warmup=10)["ok"] == 500
    assert len(cluster.messages("t")) == 510
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    replayed = run(capsys, cluster.name_server, mode="replay", messages=9000)["ok"]
    assert replayed >= 9000
    assert len(cluster.messages("t")) == 510 + replayed


def test_arrow_with_a_ledger_leaves_its_rows_in_a_spool(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "rocket_sink.benchmark.sender_arrow.TemporaryDirectory",
        lambda prefix: contextlib.nullcontext(str(tmp_path)),
    )
    found = run(capsys, cluster.name_server, mode="arrow", messages=500, ledger="yes")
    assert found["ok"] == 500
    assert len(list(tmp_path.glob("_spool/*/*/*.arrow"))) == 1


def test_replay_sends_a_refused_request_again(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.brokers[0].on_send(Answer(2, "busy"), times=2)
    found = run(capsys, cluster.name_server, mode="replay", messages=9000)
    assert len(cluster.messages("t")) == found["ok"] >= 9000


def test_a_failed_send_is_counted_with_its_cause(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for broker in cluster.brokers:
        broker.on_send(Answer(13, "illegal"), times=1)
    found = run(capsys, cluster.name_server, mode="sync", messages=10)
    assert found["ok"] + found["failed"] == 10
    assert found["failed"] == sum(found["causes"].values()) > 0


def test_the_stub_takes_batches_on_many_brokers(capsys: pytest.CaptureFixture[str]) -> None:
    servers = StubServers(30, 2)
    try:
        found = run(capsys, servers.name_server, mode="arrow", messages=60_000)
    finally:
        servers.close()
    assert (found["ok"], found["failed"]) == (60_000, 0)
