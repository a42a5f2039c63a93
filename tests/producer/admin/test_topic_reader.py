"""Reading back what was acknowledged a moment ago."""

from __future__ import annotations

import pytest

from rocket_sink.errors import BrokerError, RemoteProtocolError
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.testing import FakeCluster
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.responses import decode_runtime_info
from tests.clusters import read_topic


@pytest.fixture
def lagging(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes by which brokers are behind, one entry for each call; the last one stays."""
    behind = [5, 3, 0]

    def runtime_info(self: Admin, name: str, address: str) -> dict[str, str]:
        return {"dispatchBehindBytes": str(behind.pop(0) if len(behind) > 1 else behind[0])}

    monkeypatch.setattr(Admin, "runtime_info", runtime_info)
    cluster.create_topic("t", 1)
    return behind


def test_it_waits_until_brokers_have_caught_up(cluster: FakeCluster, lagging: list[int]) -> None:
    with Admin(nameServer=cluster.name_server) as admin:
        assert admin.await_dispatched("t")
    assert lagging == [0]


def test_steady_traffic_is_not_waited_for_without_end(
    cluster: FakeCluster, lagging: list[int]
) -> None:
    lagging[:] = [1]
    with Admin(nameServer=cluster.name_server) as admin:
        assert not admin.await_dispatched("t", timeout_s=0.1)


def test_a_broker_in_its_first_second_is_asked_again(
    cluster: FakeCluster, lagging: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    young = [BrokerError("java.util.NoSuchElementException")] * 2
    runtime_info = Admin.runtime_info

    def first_refused(self: Admin, name: str, address: str) -> dict[str, str]:
        if young:
            raise young.pop()
        return runtime_info(self, name, address)

    monkeypatch.setattr(Admin, "runtime_info", first_refused)
    with Admin(nameServer=cluster.name_server) as admin:
        assert admin.await_dispatched("t")
    assert not young
    assert lagging == [0]


def test_a_broker_without_dispatch_figures_is_read_at_once(cluster: FakeCluster) -> None:
    cluster.create_topic("t", 1)
    with Admin(nameServer=cluster.name_server) as admin:
        assert not admin.await_dispatched("t")
    assert list(read_topic(cluster.name_server, "t")) == []


def test_the_brokers_figures_are_texts() -> None:
    answer = Frame(0, {}, b'{"table":{"dispatchBehindBytes":"12","bootTimestamp":"1"}}')
    assert decode_runtime_info(answer)["dispatchBehindBytes"] == "12"
    with pytest.raises(RemoteProtocolError):
        decode_runtime_info(Frame(0, {}, b'{"table":{"dispatchBehindBytes":12}}'))
