"""The results of one `python -m benchmarks` as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Case, Figures, Ratio, medians, ratios
from rocket_sink.errors import ConfigurationError
from rocket_sink.plain_files import PlainFiles

RUNS: Final = "runs"
FAULTS: Final = "faults"
SCALE: Final = "scale"
LATENCY: Final = "latency"


@dataclass
class Results:
    """The results of one run; parts that were not selected are empty.

    `absent` is {peer: why it was not measured}, `failed` {case: why it ended}; `faults`,
    `scale` and `latency` hold the records of `benchmarks.faults`, `.scale` and `.latency`.
    `planned` is {part: how many of it there will be}, of the parts begun; a run that was stopped
    has fewer. `on_added` is called after each finished run, fault and point.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    cases: list[Case] = field(default_factory=list)
    runs: list[Figures] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    scale: list[dict[str, Any]] = field(default_factory=list)
    planned: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    latency: list[dict[str, Any]] = field(default_factory=list)
    on_added: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def add(self, part: str, one: Any) -> None:
        """A finished one of `RUNS` (`Figures`), `FAULTS`, `SCALE` or `LATENCY` (records)."""
        getattr(self, part).append(one)
        self.on_added()

    @property
    def progress(self) -> str:
        """Progress of each part begun: "3 of 12 faults"."""
        parts = [
            f"{len(getattr(self, part))} of {all_} {part}" for part, all_ in self.planned.items()
        ]
        return ", ".join(parts) or "nothing begun"

    @property
    def is_complete(self) -> bool:
        """Whether every planned result is present."""
        return all(len(getattr(self, part)) == number for part, number in self.planned.items())

    @property
    def measured(self) -> list[Case]:
        """The cases that were run."""
        names = {figures.case for figures in self.runs}
        return [case for case in self.cases if case.name in names]

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been measured yet."""
        return not (self.runs or self.faults or self.scale or self.latency)

    @property
    def medians(self) -> list[Figures]:
        """The median figures of each case, in the order of the cases."""
        by_name = {figures.case: figures for figures in medians(self.runs)}
        return [by_name[case.name] for case in self.cases if case.name in by_name]

    @property
    def ratios(self) -> list[Ratio]:
        """The medians of the rounds' ratios."""
        return ratios(self.cases, self.runs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": self.machine,
            "settings": self.settings,
            "absent": self.absent,
            "planned": self.planned,
            "failed": self.failed,
            "medians": _dicts(self.medians),
            "ratios": _dicts(self.ratios),
            "faults": self.faults,
            "scale": self.scale,
            "latency": self.latency,
            "cases": _dicts(self.cases),
            "runs": _dicts(self.runs),
        }

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        text = json.dumps(self.as_dict(), indent=1) + "\n"
        whole = path.resolve()
        PlainFiles(str(whole.parent)).write_whole(str(whole), text.encode(), replace=True)


def _dicts(things: Sequence[Any]) -> list[dict[str, Any]]:
    return [thing.as_dict() for thing in things]


def read_results(path: Path) -> Results:
    """The inverse of `write`.

    Raises:
        ConfigurationError: the file cannot be read, or is no results file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        cases = [
            Case(**{**record, "against": tuple(record["against"])}) for record in value["cases"]
        ]
        runs = [Figures.from_dict(record) for record in value["runs"]]
        return Results(
            value["machine"], value["settings"], cases, runs, value["absent"], value["faults"],
            value["scale"], value.get("planned", {}), value.get("failed", {}),
            value.get("latency", []),
        )  # fmt: skip
    except OSError as error:
        raise ConfigurationError(f"cannot read the results {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is no results file of python -m benchmarks --out ({error!r})"
        ) from None
