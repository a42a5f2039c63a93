"""The arguments of `python -m benchmarks`, as plans."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from benchmarks.faults import Schedule
    from benchmarks.run import Plan
    from benchmarks.scale import Scaling

LANES: Final = (
    "foreach",
    "foreach-rows",
    "source-stream",
    "source-batch",
    "write_batch",
    "write_batch-once",
    "write",
)
ORDERINGS: Final = ("none", "best_effort", "strict")
_DEFAULT_LANES: Final = ("foreach", "source-stream", "write_batch")
_ALL: Final = -1
_FULL_BODIES: Final = (100, 256, 1024, 16384)
_FULL_KEYS: Final = (1000, _ALL)


def key_counts(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[int, ...]:
    """A click callback: whole numbers, or `all` (rows whose keys are all different)."""
    counts = []
    for value in values:
        if value != "all" and not (value.isdigit() and int(value)):
            raise click.BadParameter(f"{value!r} is neither a number of keys nor 'all'")
        counts.append(_ALL if value == "all" else int(value))
    return tuple(counts)


@dataclass(frozen=True)
class Arguments:
    """The command's flags, by their names."""

    rows: int
    repeat: int
    brokers: int
    lanes: tuple[str, ...]
    orderings: tuple[str, ...]
    keys: tuple[int, ...]
    bodies: tuple[int, ...]
    full: bool
    without_ledger: bool
    ceiling: bool
    peers: bool
    singles: bool
    kafka: bool
    readers: bool
    faults: bool
    seconds: float
    pause_ms: int | None
    scale: bool
    latency: bool
    scale_by: tuple[str, ...]
    name_server: str
    topic: str

    def __post_init__(self) -> None:
        own = self.full or self.peers or self.kafka or self.faults or self.scale or self.latency
        if self.name_server and (own or self.singles or self.readers):
            raise click.UsageError(
                "--name-server goes with --lane, --ordering, --keys, --body-bytes, "
                "--without-ledger and --ceiling; the other cases start brokers of their own"
            )
        if self.pause_ms is not None and not self.faults:
            raise click.UsageError("--pause-ms belongs to --faults")
        if self.scale_by and not self.scale:
            raise click.UsageError("--scale-by belongs to --scale")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def wants_cases(self) -> bool:
        """Something besides faults, scaling and latencies is to be measured."""
        return self._names_cases or not (self.faults or self.scale or self.latency)

    @property
    def _names_cases(self) -> bool:
        named = self.lanes or self.full or self.ceiling or self.peers or self.kafka or self.singles
        return bool(named or self.readers)

    def plan(self) -> Plan:
        """The selected lanes, ceiling and peers. By default some lanes and the ceiling."""
        from benchmarks.run import Plan

        lanes = self.lanes or (LANES if self.full else ())
        nothing_named = not self._names_cases
        return Plan(
            rows=self.rows,
            repeat=self.repeat,
            brokers=self.brokers,
            bodies=self.bodies or (_FULL_BODIES if self.full else (256,)),
            orderings=self.orderings or (("none", "strict") if self.full else ("none",)),
            keys=self.keys or (_FULL_KEYS if self.full else (1000,)),
            lanes=_DEFAULT_LANES if nothing_named else lanes,
            without_ledger=self.without_ledger,
            ceiling=self.ceiling or self.full or nothing_named,
            java_batches=self.full,
            kafka=self.kafka or self.full,
            peers=self.peers,
            singles=self.singles,
            readers=self.readers,
            name_server=self.name_server,
            topic=self.topic,
        )

    def schedules(self) -> list[Schedule]:
        """The faults, one after the other."""
        from benchmarks.faults import FREEZE, KILL, Schedule

        if self.pause_ms is not None:
            return [Schedule.pause(self.seconds, self.pause_ms / 1000)]
        return [Schedule.of(kind, self.seconds) for kind in (FREEZE, KILL)]

    def scaling(self) -> Scaling:
        """The points of the curves."""
        from benchmarks.scale import Scaling

        return Scaling.of(self.rows, self.repeat, self.scale_by)
