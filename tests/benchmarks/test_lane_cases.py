"""The matrix of lanes, orderings, keys and body sizes."""

import click
import pytest

from benchmarks import arguments as benchmark_arguments
from benchmarks.arguments import Arguments
from benchmarks.lanes.cases import LANES, SENDING, lane_cases, lane_named
from benchmarks.peers import cases as peers_cases
from benchmarks.peers.cases import java_batches, java_batches_title, peer_cases


def asked(**changes):
    values = {
        "rows": 1_000_000, "repeat": 1, "brokers": 2, "lanes": (), "orderings": (), "keys": (),
        "bodies": (), "full": False, "without_ledger": False, "ceiling": False, "peers": False,
        "singles": False, "readers": False,
        "kafka": False, "faults": False, "seconds": 32.0, "pause_ms": None, "scale": False,
        "scale_by": (), "latency": False, "name_server": "", "topic": "benchmark", **changes,
    }  # fmt: skip
    return Arguments(**values)


def test_every_sending_lane_has_a_twin_that_runs_in_the_same_way():
    assert tuple(lane.name for lane in LANES if lane.sends) == SENDING == benchmark_arguments.LANES
    for lane in LANES:
        assert (lane.writer is None) != (lane.run is None)
        if lane.sends:
            twin = lane_named(lane.twin)
            assert not twin.sends
            assert (twin.writer is None) == (lane.writer is None)


def test_a_case_stands_behind_a_twin_with_the_same_rows():
    cases = lane_cases(["foreach"], ["none", "strict"], [1000, -1], [100, 256])
    by_name = {lane_case.case.name: lane_case.case for lane_case in cases}
    assert len(by_name) == len(cases) == 2 * (3 + 3)
    order = list(by_name)
    for lane_case in cases:
        if lane_case.lane.sends:
            twin = by_name[lane_case.case.against[0]]
            assert order.index(twin.name) < order.index(lane_case.case.name)
            assert (twin.keys, twin.body_bytes) == (lane_case.case.keys, lane_case.case.body_bytes)
            assert (lane_case.case.keys == 0) == (lane_case.case.ordering == "none")


def test_a_running_cluster_gets_the_lanes_and_refuses_cases_with_brokers_of_their_own():
    plan = asked(name_server="10.0.0.1:9876", topic="t", lanes=("write",), ceiling=True).plan()
    assert (plan.name_server, plan.topic, plan.lanes) == ("10.0.0.1:9876", "t", ("write",))
    for case in ("full", "peers", "singles", "kafka", "faults", "scale", "latency", "readers"):
        with pytest.raises(click.UsageError, match="brokers of their own"):
            asked(name_server="10.0.0.1:9876", **{case: True})


def test_without_a_ledger_is_compared_with_the_one_that_has_it():
    cases = lane_cases(["write"], ["none"], [1000], [256], without_ledger=True)
    assert [lane_case.ledger for lane_case in cases] == [True, True, False]
    assert cases[-1].case.against == (cases[-2].case.name,)


@pytest.mark.parametrize("body_bytes", [20, 100, 256, 1024, 16 * 1024, 4_000_000])
def test_a_batch_of_any_body_size_is_one_message_to_a_broker(body_bytes):
    cases = [*peer_cases(body_bytes, frozenset({"Java"})), java_batches(body_bytes)]
    batches = [case for case in cases if case.arguments["mode"] == "batch"]
    assert {case.who for case in batches} == {"ours", "Java"}
    for case in batches:
        assert 0 < case.arguments["batch"] * (body_bytes + 120) < 4 << 20
    names = [case.case.name for case in cases[:-1]]
    assert len(set(names)) == len(names)
    assert cases[-1].case.name == java_batches_title(body_bytes) in names


def test_full_is_all_of_it_and_nothing_is_a_part():
    full = asked(full=True).plan()
    assert full.load(256).rows == 1_000_000
    assert full.load(16384).rows * 16384 <= full.most_bytes
    # The matrix has seven lanes by three kinds of order by four sizes, the twins of five lanes, and
    # two cases per size that do nothing.
    assert len(full.lane_cases()) == (7 * 3 + 5 * 3 + 2) * 4
    assert full.ceiling and full.java_batches and full.kafka
    small = asked().plan()
    assert small.ceiling and not small.kafka and small.bodies == (256,)
    assert {case.case.ordering for case in small.lane_cases()} == {"none"}


@pytest.mark.parametrize("peers", [False, True])
def test_single_messages_stand_beside_their_twins_and_java(peers):
    plan = asked(singles=True, peers=peers).plan()
    assert plan.singles and plan.spark and not plan.lanes and not plan.ceiling
    others = frozenset({"Java"})
    sent = [*(peer_cases(256, others) if peers else ())]
    sent += [*peers_cases.single_cases(256, others, peers=peers), peers_cases.java_delayed(16384)]
    lanes = plan.single_cases()
    names = [case.case.name for case in (*sent, *lanes)]
    assert len(set(names)) == len(names)
    for lane_case in lanes:
        assert set(lane_case.case.against) <= set(names)
        if lane_case.lane.sends:
            assert lane_named(lane_case.lane.twin) is next(
                case.lane for case in lanes if case.case.name == lane_case.case.against[0]
            )
    assert {case.who for case in sent} == {"ours", "Java"}
    for case in sent:
        assert "gRPC" in str(case.case.against) or set(case.case.against) <= set(names)
