"""The short forms of `python -m tests.proxies`.

A proxy on a busy machine loses answers of a broker that takes more than 3 s, so that rows are
doubled or without an outcome: these tests allow that, and the command does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.proxy import RocketmqProxy
from rocket_sink.cluster import LocalCluster
from rocket_sink.producer.admin.admin import Admin
from tests.integration.lanes import LANES, Lane
from tests.proxies import faults, lanes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def proxies(
    local_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RocketmqProxy]]:
    folder = tmp_path_factory.mktemp("proxies")
    with (
        RocketmqProxy(local_cluster, folder / "a", print) as one,
        RocketmqProxy(local_cluster, folder / "b", print) as other,
    ):
        yield [one, other]


@pytest.mark.spark
@pytest.mark.parametrize("kind", lanes.TYPES)
@pytest.mark.parametrize("lane", [LANES[0], LANES[3]], ids=lambda lane: lane.name)
def test_every_row_is_stored_once(
    spark: Any, local_cluster: LocalCluster, proxies: list[RocketmqProxy], lane: Lane, kind: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    result = lanes.run_lane(spark, local_cluster, proxies[0].address, lane, kind, 5_000, tmp_path)
    assert not result.missing and result.adds_up and set(result.letters) <= {"unknown"}, result
    # The first batch of a task to a FIFO topic shows that the topic is one.
    assert bool(result.refused) == (kind == "FIFO"), result


def test_a_proxy_is_known_by_its_answers(
    local_cluster: LocalCluster, proxies: list[RocketmqProxy]
) -> None:
    with Admin(nameServer=proxies[0].address, timeout_s=30.0) as admin:
        assert admin.proxy() == proxies[0].address
    with Admin(nameServer=local_cluster.name_server, timeout_s=30.0) as admin:
        assert admin.proxy() is None


def test_a_slow_and_a_killed_proxy_lose_nothing(
    local_cluster: LocalCluster, proxies: list[RocketmqProxy]
) -> None:
    """Kill a proxy, and so run last."""
    result = faults.send_during_faults(local_cluster, proxies, 8_000, 1000, frozen_s=3.0)
    assert not result.lost, result
    assert len(result.by_address) == 2, result
