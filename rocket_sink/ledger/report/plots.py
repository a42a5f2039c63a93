"""The main charts of the report page for notebooks, made by altair (Vega-Lite's Python library).

Jupyter, VS Code and Databricks draw them. A notebook that cannot draw Vega-Lite gets an iframe that
contains Vega, so that nothing is loaded from a network.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.report.page import chart_library
from rocket_sink.ledger.report.series import COLUMNS, Series
from rocket_sink.ledger.report.values import ErrorFigures

if TYPE_CHECKING:
    import altair


def latency_heat(series: Series) -> altair.LayerChart:
    """Draw p99 (ms) of the times to an answer, by broker and time. Red lines mark isolations."""
    alt = _altair()
    heat = (
        _chart()(_data(series, "heat", end=True))
        .mark_rect()
        .encode(
            x=alt.X("at:T", title=None), x2="end:T", y=alt.Y("broker:N", title=None),
            color=alt.Color("p99:Q", title="p99 ms", scale=alt.Scale(type="symlog")),
            tooltip=["broker:N", "at:T", "answers:Q", "p50:Q", "p99:Q", "longest:Q"],
        )
    )  # fmt: skip
    isolated = (
        _chart()(_data(series, "isolations"))
        .mark_rule(color="#c62828", strokeWidth=3)
        .encode(x="since:T", x2="until:T", y="broker:N", tooltip=["broker:N", "cause:N", "since:T"])
    )
    layers = _offline(alt.LayerChart)(layer=[heat, isolated])
    chart: altair.LayerChart = layers.properties(width=_WIDTH)
    return chart


def latency_by_broker(series: Series) -> altair.Chart:
    """Draw p50, p95, p99 and p99.9 (ms) of the times to an answer, by broker and topic."""
    alt = _altair()
    # Vega-Lite would read a dot in a field's name as a path.
    shares = ["p50", "p95", "p99", "p999"]
    rows = _rows(series, "latency")
    for row in rows:
        row["p999"] = row.pop("p99.9")
    chart: altair.Chart = (
        _chart()(alt.Data(values=rows))
        .transform_fold(shares, as_=["share", "ms"])
        .mark_point(filled=True, size=60)
        .encode(
            x=alt.X("ms:Q", title="ms", scale=alt.Scale(type="log")),
            y=alt.Y("broker:N", title=None), row=alt.Row("topic:N"),
            color=alt.Color("share:N", title=None, sort=shares),
            tooltip=["broker:N", "topic:N", "share:N", "ms:Q", "answers:Q"],
        )
        .properties(width=_WIDTH)
    )  # fmt: skip
    return chart


def failures_by_class(errors: Sequence[ErrorFigures]) -> altair.Chart:
    """Draw failed attempts by error."""
    alt = _altair()
    rows = [{"error": row.error_code, "attempts": row.attempts} for row in errors]
    return _bars(
        alt.Data(values=rows), x=alt.X("attempts:Q", title="failed attempts"),
        y=alt.Y("error:N", title=None, sort="-x"), tooltip=["error:N", "attempts:Q"],
    )  # fmt: skip


_WIDTH: Final = 640


def over_time(series: Series, name: str, amount: str, colour: str, title: str) -> altair.Chart:
    """Draw the sums of the column `amount` of a series, by time and by the column `colour`."""
    alt = _altair()
    return _bars(
        _data(series, name, end=True), x=alt.X("at:T", title=None), x2="end:T",
        y=alt.Y(f"sum({amount}):Q", title=title), color=alt.Color(f"{colour}:N", title=None),
        tooltip=["at:T", f"{colour}:N", f"sum({amount}):Q"],
    )  # fmt: skip


def _bars(data: Any, **channels: Any) -> altair.Chart:
    bars: altair.Chart = _chart()(data).mark_bar().encode(**channels).properties(width=_WIDTH)
    return bars


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


@functools.cache
def _chart() -> type[Any]:
    return _offline(_altair().Chart)


def _data(series: Series, name: str, *, end: bool = False) -> Any:
    rows = _rows(series, name)
    for row in rows if end else ():
        row["end"] = row["at"] + series.step_ms
    return _altair().Data(values=rows)


def _rows(series: Series, name: str) -> list[dict[str, Any]]:
    """Return the rows of a series; the column `step` becomes `at`, in ms since 1970."""
    rows = [dict(zip(COLUMNS[name], row, strict=True)) for row in getattr(series, name)]
    for row in rows:
        if "step" in row and "at" not in row:
            row["at"] = row.pop("step") * series.step_ms
    return rows
