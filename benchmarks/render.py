"""Results as tables, for the terminal and for the HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from benchmarks.curves import curve_tables
from benchmarks.figures import CPU, Comparison, Figures
from benchmarks.results import Results
from rocket_sink.commands.common.output import table

if TYPE_CHECKING:
    from rich.console import RenderableType

_FIGURES: Final = (
    "case", "messages", "msg/s", "JVM", "client", "driver", "brokers", "MB", "failed", "doubled",
)  # fmt: skip
_CPU_NOTE: Final = (
    "JVM, client (Spark's Python workers, or a sender's process), driver, brokers: CPU seconds per "
    "million messages. MB: a sending process, at its start and at its peak."
)
_RATIO_NOTE: Final = (
    "msg/s, CPU (JVM, client and driver together): divided by those of the other case in the same "
    "run. added: CPU seconds per million messages beyond the other's."
)


def tables(results: Results) -> Iterator[RenderableType]:
    """Yield the tables of all results."""
    yield Text(_machine_line(results.machine), style="dim")
    if not results.is_complete:
        yield Text(f"not finished: {results.progress}", style="yellow")
    if results.measured:
        yield from _case_tables(results)
    for who, why in results.absent.items():
        yield Text(f"{who}: absent; {why}", style="yellow")
    for case, why in results.failed.items():
        yield Text(f"{case}: failed; {why}", style="red")
    if results.faults:
        yield faults_table(results.faults)
    yield from curve_tables(results.scale)
    if results.latency:
        yield latency_table(results.latency)


def _machine_line(machine: dict[str, Any]) -> str:
    return ", ".join(
        [
            f"{machine['cores']} cores of {machine['processor']}",
            f"{machine['memory_gb']} GB",
            f"Python {machine['python']}",
            f"Java {machine['java']}",
            f"Spark {machine['pyspark']}",
            f"RocketMQ {machine['rocketmq']}",
            str(machine["at"]),
        ]
    )


def _case_tables(results: Results) -> Iterator[RenderableType]:
    middle = {figures.case: figures for figures in results.medians}
    runs = results.settings.get("repeat")
    cases = results.measured
    for group in dict.fromkeys(case.group for case in cases):
        rows = [_figures_row(middle[case.name]) for case in cases if case.group == group]
        numbers = "messages msg/s JVM client driver brokers MB failed doubled"
        yield table(f"{group}, median of {runs}", _FIGURES, rows, numbers=numbers)
    yield Text(_CPU_NOTE, style="dim")
    ratios = list(_ratio_rows(results, middle))
    if ratios:
        names = ("case", "beside", "msg/s", "CPU", "added")
        yield table("Beside each other", names, ratios, numbers="msg/s CPU added")
        yield Text(_RATIO_NOTE, style="dim")


def _figures_row(one: Figures) -> tuple[Any, ...]:
    memory = None
    if one.start_mb is not None and one.peak_mb is not None:
        memory = f"{one.start_mb:,.0f} -> {one.peak_mb:,.0f}"
    cpu = (f"{value:.2f}" for value in (one.jvm, one.client, one.driver, one.brokers))
    return (one.case, one.messages, round(one.per_s), *cpu, memory, one.failed, one.doubled)


def _ratio_rows(results: Results, middle: dict[str, Figures]) -> Iterator[tuple[Any, ...]]:
    pairs: dict[tuple[str, str], dict[str, float]] = {}
    for ratio in results.ratios:
        pairs.setdefault((ratio.case, ratio.against), {})[ratio.what] = ratio.value
    for (case, against), values in pairs.items():
        speed = f"{values['msg/s']:.2f}"
        cpu = f"{values[CPU]:.2f}" if CPU in values else None
        yield case, against, speed, cpu, f"{middle[case].cpu - middle[against].cpu:+.2f}"


def faults_table(faults: list[dict[str, Any]]) -> RenderableType:
    """Return a table with a row per fault and sender."""
    names = ("fault", "sender", "msg/s", "pause s", "failed", "longest send s", "announced",
             "doubled", "lost")  # fmt: skip
    rows = [
        (
            fault["fault"], fault["sender"], round(fault["per_s"]),
            f"{fault['pause_ms'] / 1000:.2f}", fault["failed"],
            f"{fault['longest_ms'] / 1000:.2f}", fault["announced"], fault["doubled"],
            fault["lost"],
        )
        for fault in faults
    ]  # fmt: skip
    title = (
        "Under faults (pause: of all traffic; announced: the sender says it may be stored twice; "
        "lost: acknowledged and not found)"
    )
    numbers = "msg/s pause_s failed longest_send_s announced doubled lost"
    return table(title, names, rows, numbers=numbers)


def latency_table(records: list[dict[str, Any]]) -> RenderableType:
    """Return a table with a row per lane and pace."""
    shares = ("p50", "p95", "p99")
    names = ("rows arrive", "lane", "rows", *(f"{to} {item}" for to in ("stored", "ledger")
             for item in shares))  # fmt: skip
    rows = [
        (item["pace"], item["lane"], item["rows"],
         *(round(item[f"{to}_ms"][share]) for to in ("stored", "ledger") for share in shares))
        for item in records
    ]  # fmt: skip
    title = (
        "From a row's arrival to its store time at the broker, and to the ledger's commit, in ms"
    )
    return table(title, names, rows, numbers=" ".join(name.replace(" ", "_") for name in names[2:]))


def comparison_table(found: Comparison, tolerance: float) -> RenderableType:
    """The comparison with the baseline."""
    rows: list[tuple[str | None, ...]] = [
        (
            change.name, f"{change.before:.3f}", f"{change.now:.3f}",
            f"{(change.now / change.before - 1) * 100:+.0f} %", "REGRESS" if change.regress else "",
        )
        for change in found.changes
    ]  # fmt: skip
    rows += [(name, None, None, None, "not measured now") for name in found.missing]
    return table(
        f"Beside the baseline; {tolerance:.0%} worse is allowed",
        ("ratio", "before", "now", "change", ""), rows, numbers="before now change",
    )  # fmt: skip
