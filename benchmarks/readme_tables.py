"""The tables of docs/benchmarks.md, made from results files of `python -m benchmarks --out`.

    python -m benchmarks.readme_tables [RESULTS.json ...]

Without arguments, the command reads the results files in `conf/` (`FILES`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final, NamedTuple

from benchmarks.curves import curves_of, lines_of
from benchmarks.figures import CPU, SPEED, Case, Figures, ratios
from benchmarks.results import Results, read_results
from tools.marked import with_marked

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "benchmarks.md"
CHART: Final = ROOT / "docs" / "pictures" / "lanes.svg"
FILES: Final = tuple(
    ROOT / "conf" / f"benchmark-{name}.json"
    for name in ("lanes", "producers", "singles", "latency", "faults", "scale", "readers")
)
"""The runs of the page, A to G. The first three are the baselines, too."""
LANES_MARK: Final = "<!-- lanes: made by `python -m benchmarks.readme_tables` -->"
LANES_END: Final = "<!-- /lanes -->"
_SOURCE: Final = "source-stream"
_KAFKA: Final = "Spark's Kafka sink, stream"
_LANES: Final = {
    _SOURCE: 'data source, `format("rocketmq")`',
    "write_batch": "foreachBatch, `write_batch`",
    "foreach": "foreach, `sink.stream(rows)`",
    "foreach-rows": "foreach row by row, `foreach(sink)`",
    _KAFKA: 'Spark to Kafka, `format("kafka")`',
}
"""{case of `benchmarks.lanes`: its name on the page}, without the size of bodies."""
START_MARK: Final = "<!-- figures: made by `python -m benchmarks.readme_tables` -->"
END_MARK: Final = "<!-- /figures -->"


def markdown(results: Results) -> str:
    """The figures of one results file as Markdown."""
    machine = results.machine
    head = (
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gb']} GB, Python "
        f"{machine['python']}, Java {machine['java']}, Spark {machine['pyspark']}, RocketMQ and "
        f"its Java client {machine['rocketmq']}, {str(machine['at'])[:10]}."
    )
    parts = [head, *_groups(results)]
    if missing := [*results.absent, *results.failed]:
        parts.append("Not measured: " + ", ".join(missing) + ".")
    if results.faults:
        parts.append(_faults(results.faults))
    if results.scale:
        parts.append(_curves(results.scale))
    if results.latency:
        parts.append(_latency(results.latency))
    return "\n\n".join(parts) + "\n"


class LaneFigures(NamedTuple):
    """A streaming lane of a run: its name on the page, the medians, and ratios of the rounds."""

    name: str
    figures: Figures
    rate: float
    """The rate beside the data source's."""
    cpu: float
    """The CPU beside the data source's."""
    cpu_beside_kafka: float


def lane_figures(results: Results) -> Iterator[LaneFigures]:
    """Yield the figures of each streaming lane without order, with bodies of 256 bytes."""
    middle = {item.case: item for item in results.medians}
    source, kafka = f"{_SOURCE} 256 B", f"{_KAFKA} 256 B"
    for lane, name in _LANES.items():
        case = f"{lane} 256 B"
        if case in middle:
            beside = ratios([Case(case, "", (source, kafka))], results.runs)
            values = {(item.against, item.what): item.value for item in beside}
            yield LaneFigures(
                name, middle[case], values[source, SPEED], values[source, CPU], values[kafka, CPU]
            )


def chart(results: Results) -> str:
    """Return the page's chart as SVG: a bar for the rate of each streaming lane. It looks the same
    on GitHub and in the site, in light and in dark."""
    lanes = [*lane_figures(results)]
    most = max((lane.figures.per_s for lane in lanes), default=1.0)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {40 + 34 * len(lanes)}" '
            'font-family="sans-serif" font-size="14">'
        ),
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<text x="12" y="24" fill="#1f2933">Streams of rows of 256 bytes, rows a second</text>',
    ]
    for number, lane in enumerate(lanes):
        y, width = 40 + 34 * number, 420 * lane.figures.per_s / most
        name = escape(lane.name.replace("`", "").split(",")[0])
        colour = "#7b8794" if lane is lanes[-1] else "#2563a8"
        parts += [
            f'<text x="12" y="{y + 17}" fill="#1f2933">{name}</text>',
            f'<rect x="190" y="{y + 2}" width="{width:.0f}" height="20" fill="{colour}"/>',
            (
                f'<text x="{198 + width:.0f}" y="{y + 17}" fill="#1f2933">'
                f"{lane.figures.per_s:,.0f}</text>"
            ),
        ]
    return "\n".join((*parts, "</svg>")) + "\n"


def _lanes(results: Results) -> str:
    """The first table of the page."""
    rows = [
        (lane.name, f"{lane.figures.per_s:,.0f}", f"{lane.rate:.2f}", f"{lane.figures.cpu:.1f}",
         f"{lane.cpu:.2f}", f"{lane.cpu_beside_kafka:.2f}")
        for lane in lane_figures(results)
    ]  # fmt: skip
    columns = ("stream", "rows/s", "rate, data source = 1", "CPU s per million rows",
               "CPU, data source = 1", "CPU, Kafka sink = 1")  # fmt: skip
    return _table(columns, rows) + "\n"


def _groups(results: Results) -> Iterator[str]:
    middle = {item.case: item for item in results.medians}
    values = {(item.case, item.against, item.what): item.value for item in results.ratios}
    for group in dict.fromkeys(case.group for case in results.measured):
        rows = [
            (*_figures(middle[case.name]), _beside(case.name, case.against, values))
            for case in results.measured
            if case.group == group
        ]
        names = (group, "msg/s", "JVM", "client", "driver", "brokers", "peak MB",
                 "beside (msg/s, CPU)")  # fmt: skip
        yield _table(names, rows)


def _figures(one: Figures) -> tuple[str, ...]:
    cpu = (f"{value:.2f}" for value in (one.jvm, one.client, one.driver, one.brokers))
    memory = "" if one.peak_mb is None else f"{one.peak_mb:,.0f}"
    return (one.case, f"{one.per_s:,.0f}", *cpu, memory)


def _beside(case: str, against: Iterable[str], values: dict[tuple[str, str, str], float]) -> str:
    parts = []
    for other in against:
        speed, cpu = values.get((case, other, SPEED)), values.get((case, other, CPU))
        if speed is not None:
            parts.append(f"{other}: {speed:.2f}" + ("" if cpu is None else f", {cpu:.2f}"))
    return "; ".join(parts)


def _faults(faults: list[dict[str, Any]]) -> str:
    rows = [
        (
            fault["fault"], fault["sender"], f"{fault['pause_ms'] / 1000:.2f} s",
            str(fault["failed"]), f"{fault['longest_ms'] / 1000:.2f} s", str(fault["doubled"]),
            str(fault["lost"]),
        )
        for fault in faults
    ]  # fmt: skip
    return _table(
        ("one of two brokers", "sender", "pause of all traffic", "failed", "longest send",
         "doubled", "lost"), rows,
    )  # fmt: skip


def _curves(points: list[dict[str, Any]]) -> str:
    rows = []
    for name, some in curves_of(points).items():
        cpu, memory = lines_of(some)
        span = f"{some[0]['x']:,} to {some[-1]['x']:,}"
        values = ", ".join(f"{value:.2f}" for value in cpu.values)
        workers = ", ".join(f"{point['client']:.2f}" for point in some)
        rows.append((name, span, values, workers, f"{cpu.growth:.2f}", f"{memory.growth:.2f}"))
    names = ("over", "span", "CPU", "workers' part", "growth", "growth of memory")
    return _table(names, rows)


def _latency(records: list[dict[str, Any]]) -> str:
    rows = [
        (record["pace"], record["lane"], *(
            " / ".join(f"{value:,.0f}" for value in record[key].values())
            for key in ("stored_ms", "ledger_ms")
        ))
        for record in records
    ]  # fmt: skip
    names = ("rows arrive", "lane", "to the broker, p50 / p95 / p99 ms", "to the ledger")
    return _table(names, rows)


def _table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(names)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def with_figures(text: str, results: Sequence[Results]) -> str:
    """A Markdown text with new figures between its markers. The lanes are of the first results.

    Raises:
        ConfigurationError: the markers are missing.
    """
    tables = "\n".join(
        f"Run {name}: {markdown(run)}" for name, run in zip(ascii_uppercase, results, strict=False)
    )
    text = with_marked(text, LANES_MARK, LANES_END, _lanes(results[0]))
    return with_marked(text, START_MARK, END_MARK, tables)


def main(paths: list[str]) -> None:
    """Write the tables of these results files, or of `FILES`, into the page."""
    results = [read_results(Path(path)) for path in paths or FILES]
    CHART.write_text(chart(results[0]), encoding="utf-8")
    PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
