"""A Prometheus that scrapes the driver of a real query, set up as docs/operate/metrics.md says."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from benchmarks.ports import free_port
from rocket_sink.testing import FakeCluster
from tests.producer.waiting import until

ROOT = Path(__file__).parents[2]
ROWS = 500
QUERY = """
import pathlib, sys, time
from rocket_sink import Ledger, RocketSink, build_session

folder, name_server, rows = sys.argv[1:]
spark = build_session()
# The last row has no body, and becomes a dead letter.
source = spark.range(int(rows) + 1).selectExpr(f"if(id < {rows}, CAST(id AS STRING), NULL) AS body")
source.repartition(4).write.json(f"{folder}/in")
stream = spark.readStream.schema("body STRING").option("maxFilesPerTrigger", 1).json(f"{folder}/in")
sink = RocketSink(nameServer=name_server, topic="t", ledger=f"{folder}/ledger", foldIntervalMs=500)
query = sink.stream(stream).option("checkpointLocation", f"{folder}/checkpoint").start()
query.processAllAvailable()
pathlib.Path(folder, "sent").touch()
sys.stdin.read()
query.stop()
"""

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="no prometheus: with_promtool of .ci/install, which .ci/run calls, fetches it",
    ),
]


def data_of(port, path, **parameters):
    """Return what Prometheus answers; an empty dictionary while it does not answer."""
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
    except OSError:
        return {}


def asked(port, query):
    """Return {outcome: value} of a query to Prometheus; empty while Prometheus does not answer."""
    series = data_of(port, "query", query=query).get("result", [])
    return {each["metric"].get("outcome", ""): float(each["value"][1]) for each in series}


def alerts(port):
    """Return {alert: (health of its rule, state)}."""
    groups = data_of(port, "rules").get("groups", [])
    return {r["name"]: (r["health"], r["state"]) for group in groups for r in group["rules"]}


def test_prometheus_sees_the_rows_of_a_query(tmp_path):
    page = (ROOT / "docs" / "operate" / "metrics.md").read_text(encoding="utf-8")
    block = re.search(r"## For Prometheus.*?```python\n(.*?)```", page, re.DOTALL)
    of_driver, of_prometheus = free_port(), free_port()
    program = block[1].replace("9464", str(of_driver)) + QUERY
    target = {"targets": [f"127.0.0.1:{of_driver}"]}
    jobs = [{"job_name": "driver", "scrape_interval": "1s", "static_configs": [target]}]
    config = tmp_path / "prometheus.yml"
    rules = [str(ROOT / "conf" / "prometheus-alerts.yml")]
    times = {"evaluation_interval": "1s"}
    config.write_text(json.dumps({"global": times, "rule_files": rules, "scrape_configs": jobs}))
    with FakeCluster(brokers=2) as cluster, (tmp_path / "log").open("w") as log:
        cluster.create_topic("t")
        driver = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), cluster.name_server, str(ROWS)],
            stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip
        prometheus = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
             f"--web.listen-address=127.0.0.1:{of_prometheus}"],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            rows, deadline_s = dict[str, float](), time.monotonic() + 300
            while rows.get("acked") != ROWS and time.monotonic() < deadline_s:
                assert driver.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.5)
                rows = asked(of_prometheus, "rocket_sink_rows_total")
            assert rows == {"acked": ROWS, "degraded": 0, "dead": 1, "unknown": 0, "filtered": 0}
            assert asked(of_prometheus, "sum(rocket_sink_messages_total)") == {"": ROWS}
            # The alert rules take increases, which need a first sample from before the first row.
            assert asked(of_prometheus, 'increase(rocket_sink_rows_total{outcome="acked"}[10m])')
            pending = ("ok", "pending")  # for five minutes, then it fires
            until(lambda: alerts(of_prometheus).get("RocketSinkDeadLettersPending") == pending, 60)
            assert {health for health, _ in alerts(of_prometheus).values()} == {"ok"}
            assert "cannot be followed" not in (tmp_path / "log").read_text()
        finally:
            driver.communicate()
            prometheus.terminate()
            prometheus.wait()
