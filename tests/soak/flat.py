"""Samples memory, threads and files, and judges which are flat and which grow. The judging is pure.

The rule leaves out the first three minutes of a process's life, and the first ten of a JVM's
memory, in which it compiles. (A folder's life is the whole run.) One line is fitted to all lives of
a kind, with a level of its own for each life, so that restarts of a process hide no growth. The
growth is the line's rise over the run, less twice its standard error. It may be 15 % of the mean,
or the measure's floor if that is more.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import asdict, dataclass

import psutil

_SHARE = 0.15
WARM_S = 180.0
WARM_JVM_S = 600.0
"""14 drivers' lives had 1,420 MB after five minutes, 1,445 after ten, 1,445 after twenty."""
_FEWEST = 5
"""The fewest samples of a life that counts."""
_MB = 1 << 20
FLOORS = {
    "memory MB": 30.0, "heap in use MB": 20.0, "threads": 8.0, "open files": 12.0,
    "processes": 4.0, "spool files": 40.0, "spool folders": 20.0, "checkpoint files": 40.0,
    "other ledger files": 20.0,
}  # fmt: skip
_OF_JVMS = 100.0
"""The floor of a JVM's memory in MB, for compiled code and the like: its heap has its full size
from the start. The part of the driver's heap in use is a measure of its own."""
UNJUDGED = ("table files",)
"""Measures that grow by design: the ledger is a table that is only appended to."""


@dataclass(frozen=True)
class Sample:
    """A value of a measure at a time, of one life."""

    at_s: float
    what: str
    measure: str
    life: Hashable
    value: float


@dataclass(frozen=True)
class Flat:
    """A verdict on one measure.

    Attributes:
        first, last: means of the first and the last fifth of the samples.
        growth: the growth over the run, as defined above.
        judged: False if there are too few samples, or if the growth is by design.
    """

    what: str
    measure: str
    lives: int
    samples: int
    first: float
    last: float
    growth: float
    limit: float
    judged: bool

    @property
    def grows(self):
        return self.judged and self.growth > self.limit


def judge(samples, run_s):
    """Return a verdict on each measure of each kind of thing."""
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.what, sample.measure].append(sample)
    return [_judged(what, measure, group, run_s) for (what, measure), group in groups.items()]


def _judged(what, measure, group, run_s):
    lives = defaultdict(list)
    for sample in group:
        lives[sample.life].append(sample)
    of_jvm = measure == "memory MB" and "JVM" in what
    warm_s = WARM_JVM_S if of_jvm else WARM_S
    used = [
        [sample for sample in life if sample.at_s >= life[0].at_s + warm_s]
        for life in lives.values()
    ]
    used = [life for life in used if len(life) >= _FEWEST]
    points = sorted((sample for life in used for sample in life), key=lambda sample: sample.at_s)
    floor = _OF_JVMS if of_jvm else FLOORS.get(measure, 0.0)
    if not points:
        values = [sample.value for sample in group]
        return Flat(what, measure, len(lives), 0, values[0], values[-1], 0.0, floor, False)
    fifth = max(1, len(points) // 5)
    mean = _mean([sample.value for sample in points])
    return Flat(
        what, measure, len(used), len(points),
        first=_mean([sample.value for sample in points[:fifth]]),
        last=_mean([sample.value for sample in points[-fifth:]]),
        growth=_growth(used, run_s), limit=max(floor, _SHARE * mean),
        judged=measure not in UNJUDGED,
    )  # fmt: skip


def _growth(lives, run_s):
    moments = [
        (sample.at_s - _mean([x.at_s for x in life]), sample.value - _mean([x.value for x in life]))
        for life in lives for sample in life
    ]  # fmt: skip
    spread = sum(time_s * time_s for time_s, _ in moments)
    freedom = len(moments) - len(lives) - 1
    if spread == 0 or freedom < 1:
        return 0.0
    slope = sum(time_s * value for time_s, value in moments) / spread
    residual = sum((value - slope * time_s) ** 2 for time_s, value in moments)
    error = math.sqrt(residual / freedom / spread)
    return max(0.0, slope - 2 * error) * run_s


def _mean(values):
    return sum(values) / len(values)


def as_rows(verdicts):
    """Return the verdicts as rows for JSON."""
    rows = []
    for verdict in verdicts:
        row = {**asdict(verdict), "grows": verdict.grows}
        rows.append({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
    return rows


def look(spark, lanes, at_s):
    """Yield samples of everything as it is now; a process that dies meanwhile is left out."""
    workers = 0
    for kind, process in spark.processes():
        workers += kind == "Python worker"
        with contextlib.suppress(psutil.Error):
            life = (process.pid, process.create_time())
            with process.oneshot():
                values = {
                    "memory MB": process.memory_info().rss / _MB,
                    "threads": process.num_threads(), "open files": process.num_fds(),
                }  # fmt: skip
            for measure, value in values.items():
                yield Sample(at_s, kind, measure, life, value)
    with contextlib.suppress(OSError):
        status = spark.status()
        yield Sample(at_s, "driver's JVM", "heap in use MB", status["pid"], status["heap"] / _MB)
        yield Sample(at_s, "Python worker", "processes", status["pid"], workers)
    for lane in lanes:
        with contextlib.suppress(OSError):
            for measure, value in _files(lane).items():
                yield Sample(at_s, lane.name, measure, lane, value)


def _files(lane):
    ledger = lane / "ledger"
    spool = list((ledger / "_spool").rglob("*"))
    folders = sum(path.is_dir() for path in spool)
    table = others = 0
    for path in ledger.rglob("*"):
        top = path.relative_to(ledger).parts[0]
        if top == "_delta_log" or top.startswith("kind="):
            table += path.suffix != ".crc"
        elif top != "_spool":
            others += 1
    return {
        "spool files": len(spool) - folders, "spool folders": folders,
        "checkpoint files": sum(file.is_file() for file in (lane / "checkpoint").rglob("*")),
        "other ledger files": others, "table files": table,
    }  # fmt: skip
