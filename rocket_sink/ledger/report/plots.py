"""The main charts of the report page for notebooks, made by altair (Vega-Lite's Python library).
Jupyter, VS Code and Databricks draw them. A notebook that cannot draw Vega-Lite gets an iframe that
contains Vega, so that nothing is loaded from a network."""

from __future__ import annotations

import functools
import html
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.report.page import chart_library
from rocket_sink.ledger.report.series import COLUMNS
from rocket_sink.ledger.report.values import Figures

if TYPE_CHECKING:
    import altair


_WIDTH: Final = 640


class Plots(Figures):
    """Figures with methods that draw them."""

    def plot_rows(self) -> altair.Chart:
        """Draw messages over time by outcome, as a figure of altair like all `plot_` methods.

        Raises from all of them:
            ConfigurationError: altair is not installed, or the report was made without `charts`.
        """
        return _over_time(self, "cells", "messages", "outcome", "messages")

    def plot_latency(self) -> altair.Chart:
        """Draw p50, p95, p99 and p99.9 (ms) of the times to an answer, by broker and topic."""
        alt = _altair()
        # Vega-Lite would read a dot in a field's name as a path.
        shares = ["p50", "p95", "p99", "p999"]
        rows = _rows(self, "latency")
        for row in rows:
            row["p999"] = row.pop("p99.9")
        chart: altair.Chart = (
            _chart(rows)
            .transform_fold(shares, as_=["share", "ms"])
            .mark_point(filled=True, size=60)
            .encode(
                x=alt.X("ms:Q", title="ms", scale=alt.Scale(type="log")),
                y=alt.Y("broker:N", title=None), row=alt.Row("topic:N"),
                color=alt.Color("share:N", title=None, sort=shares),
                tooltip=["broker:N", "topic:N", "share:N", "ms:Q", "answers:Q"],
            )
        )  # fmt: skip
        return chart

    def plot_heat(self) -> altair.LayerChart:
        """Draw p99 (ms) of the times to an answer, by broker and time; red lines are isolations."""
        alt = _altair()
        heat = _chart(_rows(self, "heat")).mark_rect().encode(
            x=alt.X("at:T", title=None), x2="end:T", y=alt.Y("broker:N", title=None),
            color=alt.Color("p99:Q", title="p99 ms", scale=alt.Scale(type="symlog")),
            tooltip=["broker:N", "at:T", "answers:Q", "p50:Q", "p99:Q", "longest:Q"],
        )  # fmt: skip
        rules = _chart(_rows(self, "isolations")).mark_rule(color="#c62828", strokeWidth=3)
        isolated = rules.encode(
            x="since:T", x2="until:T", y="broker:N", tooltip=["broker:N", "cause:N", "since:T"]
        )
        chart: altair.LayerChart = _offline(alt.LayerChart)(layer=[heat, isolated])
        return chart

    def plot_failures(self) -> altair.Chart:
        """Draw failed attempts by error."""
        alt = _altair()
        rows = [{"error": row.error_code, "attempts": row.attempts} for row in self.errors]
        chart: altair.Chart = _chart(rows).mark_bar().encode(
            x=alt.X("attempts:Q", title="failed attempts"),
            y=alt.Y("error:N", title=None, sort="-x"), tooltip=["error:N", "attempts:Q"],
        )  # fmt: skip
        return chart

    def plot_dead_letters(self) -> altair.Chart:
        """Draw dead letters over time by reason."""
        return _over_time(self, "letters", "given", "reason", "dead letters given up")


def _over_time(report: Figures, name: str, amount: str, colour: str, title: str) -> altair.Chart:
    alt = _altair()
    chart: altair.Chart = _chart(_rows(report, name)).mark_bar().encode(
        x=alt.X("at:T", title=None), x2="end:T",
        y=alt.Y(f"sum({amount}):Q", title=title), color=alt.Color(f"{colour}:N", title=None),
        tooltip=["at:T", f"{colour}:N", f"sum({amount}):Q"],
    )  # fmt: skip
    return chart


def _chart(rows: list[dict[str, Any]]) -> Any:
    alt = _altair()
    return _offline(alt.Chart)(alt.Data(values=rows), width=_WIDTH)


@functools.cache
def _offline(kind: type[Any]) -> type[Any]:
    """Return a subclass of a chart class whose form for notebooks needs no network."""

    class Offline(kind):  # type: ignore[misc]
        def _repr_mimebundle_(self, *arguments: Any, **more: Any) -> Any:
            bundle = super()._repr_mimebundle_(*arguments, **more)
            forms = bundle[0] if isinstance(bundle, tuple) else bundle
            library = chart_library()
            if forms is None or not library:
                return bundle
            # altair would build Vega's bundle for each chart, which takes seconds.
            specification = self.to_json(indent=None).replace("<", "\\u003c")
            page = (
                f'<div id="chart"></div><script>{library}\n</script>'
                f'<script>vegaEmbed("#chart", {specification}, {{actions: false}})</script>'
            )
            frame = (
                '<iframe sandbox="allow-scripts" style="width:100%;height:420px;border:0" '
                f'srcdoc="{html.escape(page)}"></iframe>'
            )
            return {**forms, "text/html": frame}

    Offline.__name__ = Offline.__qualname__ = kind.__name__
    return Offline


def _altair() -> Any:
    try:
        import altair
    except ImportError as error:
        raise ConfigurationError(
            "figures need altair: pip install altair, or the extra `report`"
        ) from error
    return altair


def _rows(report: Figures, name: str) -> list[dict[str, Any]]:
    """Return the rows of a series; the column `step` becomes `at` and `end`, in ms since 1970."""
    series = report.series
    if series is None:
        raise ConfigurationError(
            "this report has no figures over time: make it by ledger.report(spark, charts=True)"
        )
    rows = [dict(zip(COLUMNS[name], row, strict=True)) for row in series.rows[name]]
    for row in rows:
        if "step" in row:
            row["at"] = row.pop("step") * series.step_ms
            row["end"] = row["at"] + series.step_ms
    return rows
