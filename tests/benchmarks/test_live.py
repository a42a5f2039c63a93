"""The benchmarks as people run them: one small case with everything real."""

import json

import pytest

from benchmarks.stored import StoredCount
from tests.clusters import two_brokers
from tests.python import run_python

pytestmark = [
    pytest.mark.slow, pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(900),
]  # fmt: skip
cluster = pytest.fixture(two_brokers, scope="module")


def test_a_lane_beside_its_twin(tmp_path):
    out = tmp_path / "figures.json"
    options = "--rows 2000 --repeat 1 --lane source-batch --ordering strict --keys 10"
    done = run_python("-m", "benchmarks", *options.split(), "--out", out, timeout_s=800)
    results = json.loads(out.read_text())
    middle = {median["case"]: median for median in results["medians"]}
    lane, twin = "source-batch strict 10 keys 256 B", "source-batch-nothing 10 keys 256 B"
    assert {lane, twin} <= set(middle)
    assert middle[lane]["messages"] == middle[twin]["messages"] == 2000
    assert middle[lane]["brokers"] > 0 and middle[lane]["jvm"] > 0 and middle[lane]["client"] > 0
    assert {(ratio["case"], ratio["against"], ratio["what"]) for ratio in results["ratios"]} >= {
        (lane, twin, "msg/s"), (lane, twin, "cpu")
    }  # fmt: skip
    assert lane in done.stdout


def test_a_running_cluster_is_measured_and_keeps_the_messages(cluster, tmp_path):
    cluster.create_topic("measured")
    count, out = StoredCount(cluster.name_server, "measured"), tmp_path / "figures.json"
    count.start()
    options = f"--name-server {cluster.name_server} --topic measured --rows 2000 --repeat 1"
    words = (*options.split(), "--lane", "source-batch")
    run_python("-m", "benchmarks", *words, "--out", out, timeout_s=800)
    middle = {median["case"]: median for median in json.loads(out.read_text())["medians"]}
    assert middle["source-batch 256 B"]["messages"] == 2000
    assert count.check(2000, "the lane") > 0, "warm-ups stay in the topic, too"


def test_single_rows_at_both_paces(tmp_path):
    out = tmp_path / "figures.json"
    run_python("-m", "benchmarks", "--latency", "--rows", "1000", "--out", out, timeout_s=800)
    latencies = json.loads(out.read_text())["latency"]
    lanes = ("foreach", "source-stream", "write_batch")
    assert [(latency["lane"], latency["rows"]) for latency in latencies] == [
        *((lane, 3) for lane in lanes), *((lane, 1000) for lane in lanes),
    ]  # fmt: skip
    for latency in latencies:
        stored, ledger = latency["stored_ms"], latency["ledger_ms"]
        assert 0 <= stored["p50"] <= stored["p95"] <= stored["p99"]
        assert stored["p50"] <= ledger["p50"] <= ledger["p95"] <= ledger["p99"]
