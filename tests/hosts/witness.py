"""What was stored, as the official Java client reads it, held against what senders were told."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.java_client import read_with_java


@dataclass(frozen=True)
class Stored:
    """A message of the topic; `mode` and `number` are from its key."""

    mode: str
    number: int
    store_ms: int
    queue: tuple[str, int]
    offset: int


@dataclass(frozen=True)
class Told:
    """What a mode was told of its messages.

    Attributes:
        acked: the sender may forget them.
        not_stored: failed, and said not to be stored.
        unknown: failed, and said to be stored perhaps.
        announced: said to be stored twice perhaps. Of a Spark lane its ledger tells only the
            number, `possible`.
        ended_ms: when the last one was handed in.
    """

    acked: Collection[int] = ()
    not_stored: Collection[int] = ()
    unknown: Collection[int] = ()
    announced: Collection[int] = ()
    possible: int | None = None
    degraded: int = 0
    ended_ms: int = 0
    accounted: bool = True


@dataclass(frozen=True)
class Finding:
    """One mode in one case.

    Attributes:
        pause_ms: longest time between two stores, from the fault's beginning to the end of sending.
        failed: an error, or a dead letter.
        lost: acknowledged and not stored.
        denied: said not to be stored, and stored.
        doubled, unannounced: stored more than once, and those of them that nothing said.
        disordered: messages behind a later one of their key.
        back_ms: from a moment that the case names to the first store after it.
    """

    sent: int
    pause_ms: int
    failed: int
    lost: int
    denied: int
    announced: int
    doubled: int
    unannounced: int
    degraded: int
    disordered: int
    accounted: bool
    back_ms: int | None = None


def read(name_server: str, topic: str, *, may_skip: bool = False) -> list[Stored]:
    """All messages of a topic; `may_skip`: its queues have offsets without a message."""
    found = []
    for one in read_with_java(name_server, topic, longest_body=0, may_skip=may_skip):
        mode, _, number = (one.keys or "").partition(".")
        queue = (one.broker_name, one.queue_id)
        found.append(Stored(mode, int(number), one.store_ms, queue, one.queue_offset))
    return found


def finding(
    mode: str,
    told: Told,
    stored: Iterable[Stored],
    since_ms: int,
    *,
    back_at_ms: int | None = None,
    ordered: bool = False,
    keys: int = 8,
) -> Finding:
    """Hold the two against each other; the fault began at `since_ms`.

    `ordered`: message N has the sharding key N modulo `keys`, and keys keep their order.
    """
    mine = [one for one in stored if one.mode == mode]
    times = Counter(one.number for one in mine)
    doubled = {number for number, count in times.items() if count > 1}
    if told.possible is None:
        unannounced = len(doubled - set(told.announced))
    else:
        unannounced = max(0, len(doubled) - told.possible)
    failed = len(told.not_stored) + len(told.unknown)
    return Finding(
        sent=len(told.acked) + failed,
        pause_ms=_pause_ms([one.store_ms for one in mine], since_ms, told.ended_ms),
        failed=failed,
        lost=sum(number not in times for number in told.acked),
        denied=sum(number in times for number in told.not_stored),
        announced=len(told.announced) if told.possible is None else told.possible,
        doubled=len(doubled),
        unannounced=unannounced,
        degraded=told.degraded,
        disordered=_disordered(mine, keys) if ordered else 0,
        accounted=told.accounted,
        back_ms=None if back_at_ms is None else _first_ms(mine, back_at_ms, told.ended_ms),
    )


def _first_ms(stored: Sequence[Stored], from_ms: int, until_ms: int) -> int:
    later = (one.store_ms for one in stored if one.store_ms >= from_ms)
    return min(later, default=until_ms) - from_ms


def _pause_ms(times: Sequence[int], since_ms: int, until_ms: int) -> int:
    inside = sorted(time_ms for time_ms in times if since_ms <= time_ms <= until_ms)
    points = [since_ms, *inside, until_ms]
    return max(after - before for before, after in itertools.pairwise(points))


def _disordered(stored: Sequence[Stored], keys: int) -> int:
    """First copies behind a later one of their key, or in another queue than its first one."""
    last: dict[int, int] = {}
    homes: dict[int, tuple[str, int]] = {}
    seen: set[int] = set()
    wrong = 0
    for one in sorted(stored, key=lambda one: (one.queue, one.offset)):
        if one.number in seen:
            continue
        seen.add(one.number)
        key = one.number % keys
        wrong += homes.setdefault(key, one.queue) != one.queue or one.number < last.get(key, -1)
        last[key] = max(one.number, last.get(key, -1))
    return wrong


def told_by_producer(report: Mapping[str, Any]) -> Told:
    """Of a mode of `load`'s report."""
    kinds: dict[str, list[int]] = {}
    for number, kind, _, _ in report["told"]:
        kinds.setdefault(kind, []).append(number)
    return Told(
        acked=[*kinds.get("acked", []), *kinds.get("degraded", [])],
        not_stored=[*kinds.get("not_sent", []), *kinds.get("rejected", [])],
        unknown=kinds.get("unknown", []),
        announced=[number for number, _, announced, _ in report["told"] if announced],
        degraded=len(kinds.get("degraded", [])),
        ended_ms=report["ended_ms"],
    )


def told_by_lane(report: Mapping[str, Any]) -> Told:
    """Of a lane of `lanes`' report: every row that is no dead letter counts as acknowledged.

    A stream that failed has acknowledged nothing that can be told from here: `accounted` is False.
    """
    letters = {int(key.partition(".")[2]): outcome for key, outcome in report["letters"]}
    written = 0 if report["errors"] else report["written"]
    return Told(
        acked=[number for number in range(written) if number not in letters],
        not_stored=[number for number, outcome in letters.items() if outcome != "unknown"],
        unknown=[number for number, outcome in letters.items() if outcome == "unknown"],
        possible=report["possible"],
        degraded=report["degraded"],
        ended_ms=report["ended_ms"],
        accounted=report["accounted"] and not report["errors"],
    )
