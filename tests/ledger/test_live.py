"""What comes into a ledger while one looks on: sums, metrics, dashboard and alert rules."""

from __future__ import annotations

import datetime as dt
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from rocket_sink.errors import Outcome
from rocket_sink.ledger import live
from rocket_sink.ledger.live import METRICS, LiveFigures, register
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import isolation_rows, send_rows
from rocket_sink.ledger.views import OUTCOMES
from rocket_sink.routing.fault import Isolation

from .night import store
from .values import accounts, attempt, context, letter

ROOT = Path(__file__).parents[2]
CONTEXT = context()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MOST_OFTEN_S", 0.0)


def followed(folder: Path, **more: Any) -> LiveFigures:
    return LiveFigures(resolve_path(folder), **more)


def minute() -> list[pa.RecordBatch]:
    """4 attempts: 7 messages stored at once, 7 at the second try, a wait without a broker."""
    sent = [
        attempt(rtt_ms=2.0),
        attempt(broker_name="broker-b", outcome=Outcome.UNKNOWN, error_code="TIMEOUT",
                response_code=None, rtt_ms=3000.0),
        attempt(attempt=2, rtt_ms=4.0),
        attempt(broker_name="", outcome=Outcome.NOT_SENT, error_code="NO_BROKER", wire_bytes=0,
                response_code=None),
    ]  # fmt: skip
    isolation = Isolation("broker-b", "TIMEOUT", 3000.0, 0.0, 30.0, reachable=False)
    return [
        send_rows(sent, CONTEXT),
        isolation_rows([isolation], CONTEXT, now_s=0.0),
        accounts(CONTEXT, acked=14, dead=1, duplicates_possible=7),
        letter(CONTEXT),
    ]


def test_only_what_comes_is_counted_and_once(tmp_path: Path) -> None:
    store(tmp_path, minute())
    found = followed(tmp_path)
    assert not found.refresh()
    assert not found.rows
    for times in (1, 2):
        store(tmp_path, minute())
        assert found.refresh()
        assert not found.refresh()
        assert found.rows["acked"] == 14 * times
        assert found.duplicates_possible == 7 * times
        a, b, none = (found.brokers[name] for name in ("broker-a", "broker-b", "-"))
        assert (a.messages, a.requests, a.retries, a.body_bytes) == (
            14 * times, 2 * times, times, 1400 * times,
        )  # fmt: skip
        assert dict(b.failures) == {"TIMEOUT": times}
        assert (b.messages, b.requests) == (0, times)
        assert dict(none.failures) == {"NO_BROKER": times}
        assert none.requests == 0
        assert dict(b.isolations) == {"TIMEOUT": times}
        assert b.is_isolated()
        assert not a.is_isolated()
    DeltaTable(tmp_path).optimize.compact()
    assert not found.refresh()
    assert found.rows["acked"] == 28


def test_a_ledger_that_is_not_there_yet_is_followed_from_its_first_row(tmp_path: Path) -> None:
    found = followed(tmp_path / "later")
    assert not found.refresh()
    store(tmp_path / "later", minute())
    found.refresh()
    assert found.rows["dead"] == 1


def test_other_runs_are_left_out(tmp_path: Path) -> None:
    found = followed(tmp_path)
    found.run_id = "run-2"
    store(tmp_path, [*minute(), accounts(context(run_id="run-2"), acked=3)])
    found.refresh()
    assert found.rows["acked"] == 3
    assert not found.brokers


def test_pending_letters_are_counted_when_they_may_have_changed(tmp_path: Path) -> None:
    asked: list[int] = []

    def pending() -> dict[str, int]:
        asked.append(1)
        return {"transport": len(asked)}

    found = followed(tmp_path, pending=pending)
    found.refresh()
    assert found.pending == {"transport": 1}
    store(tmp_path, [send_rows([attempt()], CONTEXT)])
    found.refresh()
    assert len(asked) == 1
    store(tmp_path, [letter(CONTEXT)])
    found.refresh()
    assert found.pending == {"transport": 2}


def test_an_error_is_logged_and_the_rows_come_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = followed(tmp_path)
    store(tmp_path, minute())
    commit = tmp_path / "_delta_log" / f"{0:020}.json"
    text = commit.read_text()
    commit.write_text(text[:-9])
    assert not found.refresh()
    assert "cannot be followed now" in caplog.text
    commit.write_text(text)
    found.refresh()
    assert found.rows["acked"] == 14


def test_a_file_that_is_gone_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = followed(tmp_path)
    store(tmp_path, minute())
    [sends] = (tmp_path / "kind=send").iterdir()
    sends.unlink()  # as VACUUM after OPTIMIZE
    store(tmp_path, [accounts(CONTEXT, acked=3)])
    assert found.refresh()
    assert f"{sends} is gone" in caplog.text
    assert found.rows["acked"] == 17
    assert not found.refresh()


def test_latencies_are_those_of_the_newest_answers(tmp_path: Path) -> None:
    found = followed(tmp_path)
    store(tmp_path, [send_rows([attempt(rtt_ms=9000.0)], CONTEXT)])
    found.refresh()
    store(tmp_path, [send_rows([attempt(rtt_ms=float(ms)) for ms in range(1, 101)], CONTEXT)])
    found.refresh()
    sums = found.brokers["broker-a"]
    for share in (0.5, 0.95, 0.99):
        assert sums.latency_ms(share) == pytest.approx(100 * share, rel=0.02)
    for files in (range(1, 100), range(100, 101)):  # of one reading
        store(tmp_path, [send_rows([attempt(rtt_ms=float(ms)) for ms in files], CONTEXT)])
    found.refresh()
    assert sum(sums.answers.values()) == 100
    for share in (0.5, 0.95, 0.99):
        assert sums.latency_ms(share) == pytest.approx(100 * share, rel=0.02)


def collected(found: LiveFigures) -> dict[str, dict[tuple[str, ...], float]]:
    """{metric: {attributes without the ledger: value}}."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    register(provider.get_meter("test"), {found.place: found})
    data = json.loads(reader.get_metrics_data().to_json())  # type: ignore[union-attr]
    provider.shutdown()
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for metric in data["resource_metrics"][0]["scope_metrics"][0]["metrics"]:
        for point in metric["data"]["data_points"]:
            assert point["attributes"].pop("ledger") == found.place.uri
            of = tuple(str(value) for value in point["attributes"].values())
            values.setdefault(metric["name"], {})[of] = point["value"]
    return values


def test_metrics_are_the_sums(tmp_path: Path) -> None:
    found = followed(tmp_path, pending=lambda: {"transport": 5})
    store(tmp_path, minute())
    values = collected(found)
    assert set(values) == {metric.name for metric in METRICS}
    assert values["rocket_sink.rows"]["acked",] == 14
    assert values["rocket_sink.messages"]["broker-a",] == 14
    assert values["rocket_sink.failures"]["broker-b", "TIMEOUT"] == 1
    assert values["rocket_sink.broker.isolated"] == {
        ("broker-a",): 0, ("broker-b",): 1, ("-",): 0,
    }  # fmt: skip
    assert values["rocket_sink.dead_letters.pending"] == {("transport",): 5}
    assert values["rocket_sink.send.latency"]["broker-a", "0.5"] == pytest.approx(0.002, rel=0.02)


def test_rows_are_counted_from_zero_on(tmp_path: Path) -> None:
    """Else the first rows of an outcome are no increase, and no alert."""
    rows = collected(followed(tmp_path))["rocket_sink.rows"]
    assert rows == {(outcome,): 0 for outcome in OUTCOMES}


def test_an_isolation_ends(tmp_path: Path) -> None:
    found = followed(tmp_path)
    store(tmp_path, minute())
    found.refresh()
    sums = found.brokers["broker-b"]
    sums.isolated_until = dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=1)
    assert not sums.is_isolated()


@pytest.fixture
def in_prometheus(tmp_path: Path) -> set[str]:
    """The names that Prometheus has for the metrics."""
    found = followed(tmp_path, pending=lambda: {"transport": 5})
    store(tmp_path, minute())
    registry = CollectorRegistry()
    reader = PrometheusMetricReader()
    registry.register(reader._collector)
    provider = MeterProvider([reader])
    register(provider.get_meter("test"), {found.place: found})
    text = generate_latest(registry).decode()
    provider.shutdown()
    return set(re.findall(r"^(rocket_sink_\w+)\{", text, re.MULTILINE))


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\brocket_sink_\w+", text))


def test_dashboard_and_alert_rules_name_metrics_that_are(in_prometheus: set[str]) -> None:
    assert len(in_prometheus) == len(METRICS)
    dashboard = (ROOT / "conf" / "grafana-dashboard.json").read_text(encoding="utf-8")
    panels = json.loads(dashboard)["panels"]
    shown = names_in(" ".join(one["expr"] for panel in panels for one in panel["targets"]))
    alerts = yaml.safe_load((ROOT / "conf" / "prometheus-alerts.yml").read_text(encoding="utf-8"))
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    asked = names_in(" ".join(rule["expr"] for rule in rules))
    assert shown | asked <= in_prometheus
    assert in_prometheus - shown - asked <= {"rocket_sink_isolations_total"}


def test_each_alert_names_a_page_with_that_heading() -> None:
    alerts = yaml.safe_load((ROOT / "conf" / "prometheus-alerts.yml").read_text(encoding="utf-8"))
    for rule in (rule for group in alerts["groups"] for rule in group["rules"]):
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        made = {re.sub(r"[^\w -]", "", one.lower()).strip().replace(" ", "-") for one in headings}
        assert not anchor or anchor in made, rule["alert"]
