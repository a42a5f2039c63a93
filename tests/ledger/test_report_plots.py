"""The figures that notebooks draw."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.report import Scope, figures

from .night import night


def test_figures_of_a_report_are_charts_of_its_series(tmp_path: Path) -> None:
    quick = open_quick(night(tmp_path / "ledger"))
    assert quick is not None
    report = figures(quick.query, quick.path, Scope(), series=True)
    charts = {name: getattr(report, name)().to_dict() for name in dir(report) if "plot_" in name}
    assert set(charts) == {
        "plot_rows", "plot_latency", "plot_heat", "plot_failures", "plot_dead_letters",
    }  # fmt: skip
    assert report.series is not None
    rows = charts["plot_rows"]["data"]["values"]
    assert sum(row["messages"] for row in rows) == sum(
        row[5] for row in report.series.rows["cells"]
    )
    assert min(row["at"] for row in rows) <= report.series.first_ms
    spent = charts["plot_heat"]["layer"][1]["data"]["values"]
    assert {row["broker"] for row in spent} == {row[0] for row in report.series.rows["isolations"]}
    failed = charts["plot_failures"]["data"]["values"]
    assert sum(row["attempts"] for row in failed) == sum(error.attempts for error in report.errors)


def test_figures_need_a_report_with_charts(tmp_path: Path) -> None:
    quick = open_quick(night(tmp_path / "ledger"))
    assert quick is not None
    with pytest.raises(ConfigurationError, match="charts=True"):
        figures(quick.query, quick.path, Scope()).plot_rows()


def test_a_notebook_draws_figures_without_a_network(tmp_path: Path) -> None:
    quick = open_quick(night(tmp_path / "ledger"))
    assert quick is not None
    report = figures(quick.query, quick.path, Scope(), series=True)
    for chart in (report.plot_rows(), report.plot_heat().properties(height=200)):
        forms = chart._repr_mimebundle_()
        frame = html.unescape(forms["text/html"])
        assert "Redistributions in binary form" in frame and len(frame) > 500_000
        assert not re.search(r"<(script|link)[^>]*(src|href)=", frame)
