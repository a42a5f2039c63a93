"""conf/prometheus-alerts.yml and the dashboard's queries, judged by Prometheus's own promtool."""

import json
import re
import shutil
import subprocess
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest

from rocket_sink.errors import ConnectError
from rocket_sink.ledger.query.live import METRICS, Standing, register
from rocket_sink.net.telemetry import ClientMetrics

from .night import store
from .test_live import followed, minute

ROOT = Path(__file__).parents[2]
RULES = ROOT / "conf" / "prometheus-alerts.yml"
CASES = Path(__file__).with_name("alerts.yml")
DASHBOARD = ROOT / "conf" / "grafana-dashboard.json"
WIDTH = 24
"""The number of columns of a Grafana dashboard."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="no promtool: with_promtool of .ci/install, which .ci/run calls, fetches it",
)


def promtool(*arguments):
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def panels():
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


def queries():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def rules():
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@needs_promtool
def test_the_rules_are_rules():
    assert "8 rules found" in promtool("check", "rules", RULES)


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then():
    assert "SUCCESS" in promtool("test", "rules", CASES)


def test_each_alert_has_a_case():
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    tried = Counter(
        (case_rule["alertname"], bool(case_rule["exp_alerts"]))
        for case in cases
        for case_rule in case["alert_rule_test"]
    )
    for rule in rules():
        assert tried[rule["alert"], True] and tried[rule["alert"], False], rule["alert"]


@needs_promtool
def test_the_dashboards_queries_are_queries(tmp_path):
    recorded = []
    for number, text in enumerate(queries()):
        text = text.replace("$__rate_interval", "5m").replace("$ledger", ".*")
        assert "$" not in text
        recorded.append({"record": f"rocket_sink:panel:{number}", "expr": text})
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in promtool("check", "rules", file)


def test_the_dashboard_can_be_drawn():
    """Find errors that Grafana accepts silently: ids, places, labels that no query has."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert dashboard["uid"] and dashboard["schemaVersion"] >= 36
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text(encoding="utf-8")))
    assert used <= variables | {"__rate_interval", "__all"}
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH, panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) >= 1, panel["title"]
        for target in panel["targets"]:
            kept = re.findall(r"by \(([\w, ]+)\)", target["expr"])
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert not kept or any(label in labels for labels in kept), (panel["title"], label)
    for one, other in combinations(panels(), 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


def test_dashboard_and_alert_rules_name_metrics_that_are(tmp_path):
    """Compare them with the names that Prometheus gives the metrics of ledgers and clients, and the
    labels of the clients."""
    figures = followed(tmp_path, standing=lambda: Standing({"transport": 5}, 3))
    store(tmp_path, minute())
    registry, reader = CollectorRegistry(), PrometheusMetricReader()
    registry.register(reader._collector)
    provider = MeterProvider([reader])
    register(provider.get_meter("test"), {figures.place: figures})
    clients = ClientMetrics(provider)
    clients.record("orders", 1, 0.1, address="h:1", result=None, error=ConnectError("no"))
    text = generate_latest(registry).decode()
    provider.shutdown()
    of_ledgers = set(re.findall(r"^rocket_sink_\w+(?=\{)", text, re.MULTILINE))
    assert len(of_ledgers) == len(METRICS)
    of_clients = re.findall(r"^messaging_\w+(?=\{)|\b(?:messaging_\w+|error_type)(?==)", text, re.M)
    shown, alerted = (
        set(re.findall(r"\b(?:rocket_sink|messaging)_\w+|\berror_type", " ".join(texts)))
        for texts in (queries(), [rule["expr"] for rule in rules()])
    )
    assert shown | alerted <= of_ledgers | {*of_clients}
    assert "messaging_client_operation_duration_seconds_count" in shown & alerted
    assert of_ledgers - shown - alerted <= {"rocket_sink_isolations_total"}


def test_each_alert_names_a_page_with_that_heading():
    for rule in rules():
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {
            re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")
            for heading in headings
        }
        assert not anchor or anchor in anchors, rule["alert"]


def overlap(one, other):
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size]
        for at, size in (("x", "w"), ("y", "h"))
    )
