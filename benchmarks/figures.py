"""Figures of cases, medians over runs, and comparisons."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Protocol


@dataclass(frozen=True)
class Case:
    """A measured case.

    `against` names the cases of the same run that it is compared with, first its no-op twin.
    `group`: its table; `body_bytes` and `keys` describe the rows (keys 0: no sharding key; -1: all
    different).
    """

    name: str
    group: str
    against: tuple[str, ...] = ()
    ordering: str = "none"
    body_bytes: int = 256
    keys: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Figures:
    """The figures of a run of a case, or the medians of several runs.

    CPU is in seconds per million messages: of Spark's JVM, of the processes that send (Spark's
    Python workers, or the whole of a sender without Spark), of the driver's Python, of the brokers.
    Memory is that of the largest sending process; None: not measured. `doubled`: stored messages
    beyond those sent.
    """

    case: str
    messages: int
    seconds: float
    per_s: float
    jvm: float
    client: float
    driver: float
    brokers: float
    start_mb: float | None = None
    peak_mb: float | None = None
    failed: int = 0
    doubled: int = 0

    @property
    def cpu(self) -> float:
        """CPU of all but the brokers, cpu-s/M."""
        return self.jvm + self.client + self.driver

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Figures:
        """The inverse of `as_dict`; fields of later versions are ignored."""
        field_names = {item.name for item in fields(cls)}
        return cls(**{name: figure for name, figure in value.items() if name in field_names})


class Subject(Protocol):
    """A case that can be run."""

    @property
    def case(self) -> Case: ...

    def warm_up(self) -> None:
        """A small run, so that the first measured one starts no processes."""

    def run(self) -> Figures: ...


@dataclass(frozen=True)
class Ratio:
    """A case's figure divided by that of another one in the same run. `what` is msg/s or cpu."""

    case: str
    against: str
    what: str
    value: float

    @property
    def name(self) -> str:
        """The key in a baseline."""
        return f"{self.what}: {self.case} / {self.against}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


SPEED: Final = "msg/s"
CPU: Final = "cpu"


def medians(runs: Iterable[Figures]) -> list[Figures]:
    """Return the median of each figure per case, in the order of first runs."""
    return [_median(same) for same in _by_case(runs).values()]


def _by_case(runs: Iterable[Figures]) -> dict[str, list[Figures]]:
    by_case: dict[str, list[Figures]] = {}
    for run in runs:
        by_case.setdefault(run.case, []).append(run)
    return by_case


def _median(runs: Sequence[Figures]) -> Figures:
    changes: dict[str, Any] = {}
    for item in fields(Figures):
        values = [getattr(run, item.name) for run in runs]
        if item.name != "case" and None not in values:
            middle = statistics.median(values)
            changes[item.name] = round(middle) if isinstance(values[0], int) else middle
    return replace(runs[0], **changes)


def ratios(cases: Iterable[Case], runs: Iterable[Figures]) -> list[Ratio]:
    """Return the ratios of speed and CPU of each case to those it is compared with.

    Each is the median of the rounds' ratios: in a round both cases ran within minutes, and a shared
    machine changes its speed within an hour."""
    by_name = _by_case(runs)
    comparisons: list[Ratio] = []
    for case in cases:
        for name in case.against:
            rounds = list(zip(by_name.get(case.name, ()), by_name.get(name, ()), strict=False))
            if not rounds:
                continue
            speeds = [_divided(subject.per_s, other.per_s) for subject, other in rounds]
            comparisons.append(Ratio(case.name, name, SPEED, statistics.median(speeds)))
            if all(subject.cpu and other.cpu for subject, other in rounds):
                cpus = [_divided(subject.cpu, other.cpu) for subject, other in rounds]
                comparisons.append(Ratio(case.name, name, CPU, statistics.median(cpus)))
    return comparisons


def _divided(one: float, other: float) -> float:
    return one / other if other else float("inf")


@dataclass(frozen=True)
class Change:
    """A ratio compared with the baseline's. `worse`: by more than the tolerance."""

    name: str
    before: float
    now: float
    regress: bool


@dataclass(frozen=True)
class Comparison:
    """Comparison of two results: common ratios, and names that only one has."""

    changes: tuple[Change, ...]
    missing: tuple[str, ...] = field(default=())

    @property
    def regressed(self) -> bool:
        """A ratio is worse by more than the tolerance."""
        return any(change.regress for change in self.changes)


def compare(before: Iterable[Ratio], now: Iterable[Ratio], tolerance: float) -> Comparison:
    """The ratios of two runs; `tolerance` 0.1 allows a tenth less speed, or more CPU."""
    new = {ratio.name: ratio for ratio in now}
    changes, missing = [], []
    for old in before:
        ratio = new.get(old.name)
        if ratio is None:
            missing.append(old.name)
            continue
        worse = old.value / ratio.value if old.what == SPEED else ratio.value / old.value
        changes.append(Change(old.name, old.value, ratio.value, worse > 1 + tolerance))
    return Comparison(tuple(changes), tuple(missing))
