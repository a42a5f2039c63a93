"""The witness compares messages that the official Java client reads with the senders' answers."""

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from tests.crash.judge import Copy, disordered_rows
from tests.java_client import read_with_java


@dataclass(frozen=True)
class Stored:
    """A message of the topic. `mode` and `number` are from its key."""

    mode: str
    number: int
    store_ms: int
    queue: tuple[str, int]
    offset: int


@dataclass(frozen=True)
class Told:
    """The answers that a mode got for its messages, by number.

    Attributes:
        acked: acknowledged messages.
        not_stored: failed messages that were reported as not stored.
        unknown: failed messages that were reported as possibly stored.
        announced: messages that were reported as possibly stored twice. A Spark lane's ledger has
            only their number, `possible`.
        ended_ms: time at which the last message was submitted.
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
    """The figures of a mode in a case. Counts are numbers of messages.

    Attributes:
        pause_ms: longest time between two stores, from the fault's beginning to the end of sending.
        failed: messages with an error, or dead letters.
        lost: acknowledged but not stored.
        denied: reported as not stored, but stored.
        doubled, unannounced: stored more than once, and those of them that no answer announced.
        disordered: stored behind a later message of their key.
        back_ms: time from a moment that the case names to the first store after it.
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


def read(name_server, topic, **options):
    """Read all messages of a topic; `options` are those of `read_with_java`."""
    messages = []
    for message in read_with_java(name_server, topic, longest_body=0, **options):
        mode, _, number = (message.keys or "").partition(".")
        queue = (message.broker_name, message.queue_id)
        messages.append(Stored(mode, int(number), message.store_ms, queue, message.queue_offset))
    return messages


def finding(mode, told, stored, since_ms, *, back_at_ms=None, ordered=False, keys=8):
    """Compare a mode's answers with the stored messages. The fault began at `since_ms`.

    If `ordered`, message N has the sharding key N modulo `keys`, and keys keep their order.
    """
    own = [message for message in stored if message.mode == mode]
    times = Counter(message.number for message in own)
    doubled = {number for number, count in times.items() if count > 1}
    if told.possible is None:
        unannounced = len(doubled - set(told.announced))
    else:
        unannounced = max(0, len(doubled) - told.possible)
    failed = len(told.not_stored) + len(told.unknown)
    return Finding(
        sent=len(told.acked) + failed,
        pause_ms=_pause_ms([message.store_ms for message in own], since_ms, told.ended_ms),
        failed=failed, lost=sum(number not in times for number in told.acked),
        denied=sum(number in times for number in told.not_stored),
        announced=len(told.announced) if told.possible is None else told.possible,
        doubled=len(doubled), unannounced=unannounced, degraded=told.degraded,
        disordered=_disordered(own, keys) if ordered else 0, accounted=told.accounted,
        back_ms=None if back_at_ms is None else _first_ms(own, back_at_ms, told.ended_ms),
    )  # fmt: skip


def _first_ms(stored, from_ms, until_ms):
    later = (message.store_ms for message in stored if message.store_ms >= from_ms)
    return min(later, default=until_ms) - from_ms


def _pause_ms(times, since_ms, until_ms):
    inside = sorted(time_ms for time_ms in times if since_ms <= time_ms <= until_ms)
    points = [since_ms, *inside, until_ms]
    return max(after - before for before, after in itertools.pairwise(points))


def _disordered(stored, keys):
    """Count first copies behind a later message of their key, or in another queue than the key."""
    return disordered_rows(
        Copy((str(message.number % keys), message.number), "", message.queue, message.offset)
        for message in stored
    )


def told_by_producer(report):
    """Read the answers of a mode from `load`'s report."""
    kinds = {}
    for number, kind, _ in report["told"]:
        kinds.setdefault(kind, []).append(number)
    return Told(
        acked=[*kinds.get("acked", []), *kinds.get("degraded", [])],
        not_stored=[*kinds.get("not_sent", []), *kinds.get("rejected", [])],
        unknown=kinds.get("unknown", []),
        announced=[number for number, _, announced in report["told"] if announced],
        degraded=len(kinds.get("degraded", [])),
        ended_ms=report["ended_ms"],
    )


def told_by_lane(report):
    """Read the answers of a lane from `lanes`' report.

    Every row that is no dead letter counts as acknowledged. The acknowledged rows of a failed
    stream cannot be known from here, so `accounted` is False.
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
