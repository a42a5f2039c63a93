"""conf/prometheus-alerts.yml and the dashboard's queries, judged by Prometheus's own promtool."""

import json
import re
import shutil
import subprocess
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def promtool(*arguments: object) -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


@needs_promtool
def test_the_rules_are_rules():
    assert "8 rules found" in promtool("check", "rules", RULES)


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then():
    assert "SUCCESS" in promtool("test", "rules", CASES)


def test_each_alert_has_a_case():
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"][0]["rules"]
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    tried = Counter(
        (case_rule["alertname"], bool(case_rule["exp_alerts"]))
        for case in cases
        for case_rule in case["alert_rule_test"]
    )
    for rule in rules:
        assert tried[rule["alert"], True] and tried[rule["alert"], False], rule["alert"]


@needs_promtool
def test_the_dashboards_queries_are_queries(tmp_path):
    texts = [target["expr"] for panel in panels() for target in panel["targets"]]
    rules = []
    for number, text in enumerate(texts):
        text = text.replace("$__rate_interval", "5m").replace("$ledger", ".*")
        assert "$" not in text
        rules.append({"record": f"rocket_sink:panel:{number}", "expr": text})
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(texts)} rules found" in promtool("check", "rules", file)


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
    for panel_a, panel_b in combinations(panels(), 2):
        assert not overlap(panel_a["gridPos"], panel_b["gridPos"]), (
            panel_a["title"],
            panel_b["title"],
        )


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size]
        for at, size in (("x", "w"), ("y", "h"))
    )
