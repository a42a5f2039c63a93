"""The lanes, their no-op twins, and their cases.

A new lane is a new line in `LANES`; its twin reads the same rows in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from benchmarks.figures import Case
from benchmarks.rows import ALL_DIFFERENT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    Options: TypeAlias = "dict[str, Any]"
    Writer: TypeAlias = "DataStreamWriter"

GROUP: Final = "Spark lanes"


@dataclass(frozen=True)
class Lane:
    """A lane, with exactly one of `writer` (streams) and `run` (batches).

    `twin` is the name of its no-op lane; "" for a no-op lane.
    """

    name: str
    twin: str = ""
    writer: Callable[[DataFrame, Options], Writer] | None = None
    run: Callable[[DataFrame, Options], None] | None = None

    @property
    def sends(self) -> bool:
        """False for a no-op lane."""
        return bool(self.twin)


@dataclass(frozen=True)
class Kind:
    """The columns and options that make rows single messages or epochs small.

    Args:
        columns: further ones, as SQL.
        epoch_rows: as `Load.epoch_rows`.
    """

    title: str = ""
    columns: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    epoch_rows: int = 0


DELAY_LEVEL: Final = 3
"""10 s: brokers deliver after most of a run, for all senders alike."""
PLAIN: Final = Kind()
DELAYED: Final = Kind("delayed", (f"{DELAY_LEVEL} AS delay_level",))
TRANSACTIONAL: Final = Kind("transactional", options={"delivery": "transactional"})
SMALL_EPOCHS: Final = Kind("epochs of 200 rows", epoch_rows=200)
COMPRESSED_BYTES: Final = 16 * 1024
"""Size of bodies that single messages compress."""


@dataclass(frozen=True)
class LaneCase:
    """A case of a lane; without `ledger` the lane writes none."""

    lane: Lane
    case: Case
    ledger: bool = True
    kind: Kind = PLAIN


def _foreach(frame: DataFrame, options: Options) -> Writer:
    from rocket_sink.spark.sink import RocketSink

    return RocketSink(**options).stream(frame)


def _foreach_rows(frame: DataFrame, options: Options) -> Writer:
    from rocket_sink.spark.sink import RocketSink

    return frame.writeStream.foreach(RocketSink(**options))


def _foreach_nothing(frame: DataFrame, options: Options) -> Writer:
    from benchmarks.lanes.twins import Nothing

    return frame.writeStream.foreach(Nothing())


def _source_stream(frame: DataFrame, options: Options) -> Writer:
    from rocket_sink.spark.checks.queries import FORMAT
    from rocket_sink.spark.datasource import register

    register(frame.sparkSession, ledger=options.get("ledger", ""))
    return frame.writeStream.format(FORMAT).options(**options)


def _source_batch(frame: DataFrame, options: Options) -> None:
    from rocket_sink.spark.checks.queries import FORMAT
    from rocket_sink.spark.datasource import register

    register(frame.sparkSession)
    frame.write.format(FORMAT).mode("append").options(**options).save()


def _nothing_stream(frame: DataFrame, options: Options) -> Writer:
    return frame.writeStream.format(_nothing_source(frame))


def _nothing_batch(frame: DataFrame, options: Options) -> None:
    frame.write.format(_nothing_source(frame)).mode("append").save()


def _nothing_source(frame: DataFrame) -> str:
    from benchmarks.lanes.twins import FORMAT, NothingSource

    frame.sparkSession.dataSource.register(NothingSource)
    return FORMAT


def _write_batch(frame: DataFrame, options: Options) -> Writer:
    from rocket_sink.spark.sink import RocketSink

    return frame.writeStream.foreachBatch(RocketSink(**options).write_batch)


def _write_batch_once(frame: DataFrame, options: Options) -> Writer:
    return _write_batch(frame, {**options, "delivery": "effectively_once"})


def _write(frame: DataFrame, options: Options) -> None:
    from rocket_sink.spark.sink import RocketSink

    RocketSink(**options).write(frame)


def _drain(frame: DataFrame, options: Options) -> None:
    from benchmarks.lanes.twins import drain

    _noop(frame.mapInArrow(drain, "nothing int"), options)


def _noop(frame: DataFrame, options: Options) -> None:
    frame.write.format("noop").mode("append").save()


def _drain_stream(frame: DataFrame, options: Options) -> Writer:
    return frame.writeStream.foreachBatch(lambda batch, _: _drain(batch, options))


def _noop_stream(frame: DataFrame, options: Options) -> Writer:
    return frame.writeStream.format("noop")


LANES: Final = (
    Lane("foreach-nothing", writer=_foreach_nothing),
    Lane("foreach", "foreach-nothing", writer=_foreach),
    Lane("foreach-rows", "foreach-nothing", writer=_foreach_rows),
    Lane("source-stream-nothing", writer=_nothing_stream),
    Lane("source-stream", "source-stream-nothing", writer=_source_stream),
    Lane("source-batch-nothing", run=_nothing_batch),
    Lane("source-batch", "source-batch-nothing", run=_source_batch),
    Lane("write_batch-nothing", writer=_drain_stream),
    Lane("write_batch", "write_batch-nothing", writer=_write_batch),
    Lane("write_batch-once", "write_batch-nothing", writer=_write_batch_once),
    Lane("write-nothing", run=_drain),
    Lane("write", "write-nothing", run=_write),
    Lane("noop-stream", writer=_noop_stream),
    Lane("noop-batch", run=_noop),
)
SENDING: Final = (
    "foreach", "foreach-rows", "source-stream", "source-batch", "write_batch", "write_batch-once",
    "write",
)  # fmt: skip
NOOPS: Final = ("noop-stream", "noop-batch")


def lane_named(name: str) -> Lane:
    """The lane of that name.

    Raises:
        KeyError: there is none.
    """
    return {lane.name: lane for lane in LANES}[name]


def lane_cases(
    names: Iterable[str],
    orderings: Iterable[str],
    keys: Iterable[int],
    bodies: Iterable[int],
    *,
    peers: Callable[[int], tuple[str, ...]] = lambda body: (),
    without_ledger: bool = False,
) -> list[LaneCase]:
    """Combine every lane with every ordering, number of keys and body size, after its twin.

    Rows of `none` have no sharding key. A no-op lane has no ordering: it is run once per body size
    and number of keys. `peers`: further cases to compare with.
    """
    names, keys = list(names), list(keys)
    cases: dict[str, LaneCase] = {}
    for body in bodies:
        for name in names:
            lane = lane_named(name)
            for ordering in orderings if lane.sends else ("none",):
                for number in (0,) if ordering == "none" else keys:
                    for lane_case in _with_twin(lane, ordering, number, body, peers(body)):
                        cases.setdefault(lane_case.case.name, lane_case)
                    if without_ledger and lane.sends:
                        bare = _bare(cases[_title(lane.name, ordering, number, body)])
                        cases.setdefault(bare.case.name, bare)
    return list(cases.values())


def single_cases(peers: Callable[[str, int], tuple[str, ...]]) -> list[LaneCase]:
    """Rows that share no batch, and small epochs, each behind its twin.

    Args:
        peers: further cases to compare with, by the kind's title and the size of bodies.
    """
    wanted = (
        ("source-stream", DELAYED, 256),
        ("source-stream", DELAYED, COMPRESSED_BYTES),
        ("write", TRANSACTIONAL, 256),
        ("write_batch", SMALL_EPOCHS, 256),
    )
    cases = []
    for name, kind, body in wanted:
        lane = lane_named(name)
        twin = _of_kind(_case(lane_named(lane.twin), "none", 0, body, ()), kind)
        against = (twin.case.name, *peers(kind.title, body))
        cases += [twin, _of_kind(_case(lane, "none", 0, body, against), kind)]
    return cases


def _of_kind(made: LaneCase, kind: Kind) -> LaneCase:
    words = made.case.name.split(" ", 1)
    name = f"{words[0]} {kind.title} {words[1]}"
    return replace(made, case=replace(made.case, name=name), kind=kind)


def _with_twin(
    lane: Lane, ordering: str, keys: int, body: int, peers: tuple[str, ...]
) -> list[LaneCase]:
    if not lane.sends:
        return [_case(lane, "none", keys, body, ())]
    twin = _case(lane_named(lane.twin), "none", keys, body, ())
    return [twin, _case(lane, ordering, keys, body, (twin.case.name, *peers))]


def _case(lane: Lane, ordering: str, keys: int, body: int, against: tuple[str, ...]) -> LaneCase:
    name = _title(lane.name, ordering, keys, body)
    return LaneCase(lane, Case(name, GROUP, against, ordering, body, keys))


def _bare(case: LaneCase) -> LaneCase:
    """Return the case without its ledger, to be compared with the case that has it."""
    old = case.case
    new = Case(f"{old.name} no-ledger", GROUP, (old.name,), old.ordering, old.body_bytes, old.keys)
    return LaneCase(case.lane, new, ledger=False)


def _title(lane: str, ordering: str, keys: int, body: int) -> str:
    parts = [lane]
    if ordering != "none":
        parts.append(ordering)
    if keys:
        parts.append("all keys" if keys == ALL_DIFFERENT else f"{keys} keys")
    return " ".join([*parts, f"{body} B"])
