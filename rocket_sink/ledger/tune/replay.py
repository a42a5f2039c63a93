"""A replay of recorded attempts through a fault table with other thresholds.

Each host has its own fault table. If an attempt begins while its broker is isolated, it moves to
the free broker whose last answer was quickest. It then takes as long as that answer, and later
recorded attempts of its request are skipped. Isolations end by time alone.

The record cannot tell how slow a broker would have been for requests that avoided it, or how the
moved load would have slowed other brokers."""
# ruff: noqa: S608 (the SQL has our own names; texts of users are checked or hexadecimal)

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow.compute as pc

from rocket_sink import errors
from rocket_sink.ledger.sql import BROKER, GROUP_SHARES, STORED, Scoped
from rocket_sink.routing.fault import FAILING, SLOW, FaultProfile, FaultTable

_REQUEST: Final = "concat_ws('/', run_id, epoch, partition, task_attempt_id, worker, request)"
_ORDER: Final = ("start_s", "nth", "broker", "worker", "request", "wait_ms", "rtt_ms", "messages")
"""Columns that sort the attempts. They must make the order unique, because Spark and DuckDB return
equal rows in any order, and a replay must give the same result each time."""
_GROUP: Final = tuple(column for column, _ in GROUP_SHARES if column != "rtt_ms")
_FRESH_S: Final = 60.0
"""Attempts move only to a broker whose last answer is not older than this."""


@dataclass(frozen=True)
class Attempts:
    """Attempts in the order of their starts: one array per column, and two lists of names.

    Attributes:
        start_s: seconds since 1970.
        wait_ms, rtt_ms: until the request was on the wire, and from there to its end.
        group_ms: for each attempt p50, p95 and p99 of its group's answers; NaN without a group.
        broker, host: indices into `brokers` and `hosts`. Workers of a host share one fault table.
        process: a number per worker process.
        stored: acknowledged.
        isolates: a failure for which the broker is isolated.
        request: number that a request's attempts share; -1: the first attempt stored the message.
    """

    start_s: Any
    wait_ms: Any
    rtt_ms: Any
    group_ms: Any
    messages: Any
    bytes: Any
    frames: Any
    broker: Any
    host: Any
    process: Any
    stored: Any
    isolates: Any
    request: Any
    brokers: Sequence[str]
    hosts: Sequence[str]

    def __len__(self) -> int:
        return len(self.start_s)

    def bytes_in_flight(self) -> np.ndarray:
        """Return the bytes on the way from the process at the hand-over of each attempt, with the
        attempt's own bytes."""
        handed_s = self.start_s + self.wait_ms / 1000
        ended_s, result = handed_s + self.rtt_ms / 1000, np.zeros(len(self), "int64")
        for process in np.unique(self.process):
            rows = np.flatnonzero(self.process == process)
            sums = []
            for times in (handed_s[rows], ended_s[rows]):
                order = np.argsort(times, kind="stable")
                before = np.searchsorted(times[order], handed_s[rows], "right")
                sums.append(np.concatenate(([0], np.cumsum(self.bytes[rows][order])))[before])
            result[rows] = sums[0] - sums[1]
        return result


def read_attempts(read: Scoped, limit: int) -> Attempts:
    """Return the newest `limit` attempts of the scope, without waits of strict queues."""
    kinds = [errors.SendError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    isolating = sorted({kind.code for kind in kinds if kind.isolates is errors.Isolate.BROKER})
    table = read.table(
        f"""SELECT unix_micros(at) / 1e6 AS start_s, worker, {BROKER} AS broker,
            CAST(coalesce(message_count, 0) AS BIGINT) AS messages,
            CAST(coalesce(body_bytes, 0) AS BIGINT) AS bytes,
            CAST(coalesce(frames, 1) AS BIGINT) AS frames, coalesce(queue_wait_ms, 0) AS wait_ms,
            coalesce(rtt_ms, 0) AS rtt_ms, coalesce(attempt, 1) AS nth, {", ".join(_GROUP)},
            {STORED} AS stored, coalesce(error_code, '') IN {tuple(isolating)} AS isolates,
            CASE WHEN attempt > 1 OR NOT {STORED} THEN {_REQUEST} END AS request
        FROM answered
        WHERE broker_name <> '' AND coalesce(wire_bytes, 1) > 0 AND {read.where}
        ORDER BY at DESC LIMIT {limit}"""
    )
    table = table.take(pc.sort_indices(table, [(name, "ascending") for name in _ORDER]))
    # A worker is `host:pid`.
    workers = pc.replace_substring_regex(pc.fill_null(table["worker"], ""), r":\d+$", "")
    encoded = {"broker": table["broker"], "host": workers, "request": table["request"],
               "process": table["worker"]}  # fmt: skip
    codes = {n: pc.dictionary_encode(column).combine_chunks() for n, column in encoded.items()}
    plain = ("start_s", "wait_ms", "rtt_ms", "messages", "bytes", "frames", "stored", "isolates")
    return Attempts(
        **{name: table[name].to_numpy() for name in plain},
        **{n: pc.fill_null(code.indices.cast("int64"), -1).to_numpy() for n, code in codes.items()},
        group_ms=np.column_stack([table[name].cast("float64").to_numpy() for name in _GROUP]),
        brokers=codes["broker"].dictionary.to_pylist(), hosts=codes["host"].dictionary.to_pylist(),
    )  # fmt: skip


class Replayed(NamedTuple):
    """The result of a profile for the recorded attempts. `isolations` and `isolated_s` are sums of
    all hosts. `moved` and `unsent` (last attempt failed) count messages. `latency_ms` has the
    latencies of sent messages, ascending; `weight` has the number of messages up to each."""

    isolations: int
    isolated_s: float
    moved: int
    unsent: int
    latency_ms: np.ndarray
    weight: np.ndarray

    def percentile(self, share: float) -> float | None:
        """Return the latency (ms) that this share of the messages did not exceed, or None."""
        if not len(self.weight) or not self.weight[-1]:
            return None
        return float(self.latency_ms[np.searchsorted(self.weight, share * self.weight[-1])])


class _Ended(NamedTuple):
    at_s: float
    number: int
    host: int
    broker: int
    latency_ms: float
    isolates: bool


class _Brokers:
    """The hosts' fault tables during a replay, with the number and length of the isolations."""

    def __init__(self, attempts: Attempts, profile: FaultProfile | None) -> None:
        self._names = attempts.brokers
        self._tables = [FaultTable(profile) for _ in attempts.hosts if profile]
        self._until_s: dict[tuple[int, int], float] = {}
        self._last_good: dict[int, tuple[float, float]] = {}
        self.isolations = 0
        self.isolated_s = 0.0

    def end(self, attempt: _Ended) -> None:
        """Note the end of an attempt in its host's fault table."""
        at_s, place = attempt.at_s, (attempt.host, attempt.broker)
        if not attempt.isolates:
            self._last_good[attempt.broker] = at_s, attempt.latency_ms
        if not self._tables:
            return
        event = self._tables[attempt.host].update(
            self._names[attempt.broker], attempt.latency_ms, at_s,
            rank=FAILING if attempt.isolates else SLOW,
        )  # fmt: skip
        if event is not None:
            before_s = self._until_s.get(place, 0.0)
            self.isolations += at_s >= before_s
            self.isolated_s += max(0.0, event.until_s - max(at_s, before_s))
            self._until_s[place] = event.until_s

    def instead(self, host: int, broker: int, at_s: float) -> tuple[float, int] | None:
        """Return (latency, number) of the quickest broker that can replace an isolated broker.
        Return None if the broker is not isolated, or no other broker is free."""
        if self._is_free(host, broker, at_s):
            return None
        fresh = (
            (latency_ms, other)
            for other, (answered_s, latency_ms) in self._last_good.items()
            if other != broker and answered_s >= at_s - _FRESH_S
            and self._is_free(host, other, at_s)
        )  # fmt: skip
        return min(fresh, default=None)

    def _is_free(self, host: int, broker: int, at_s: float) -> bool:
        return at_s >= self._until_s.get((host, broker), 0.0)


def replay(attempts: Attempts, profile: FaultProfile | None) -> Replayed:
    """Replay the attempts under a profile; None: as they were recorded."""
    brokers = _Brokers(attempts, profile)
    in_flight: list[_Ended] = []
    moved_requests: set[int] = set()
    failed: dict[int, tuple[float, int]] = {}
    """{request whose attempts failed so far: (duration in ms, messages)}"""
    answers: list[tuple[float, float]] = []
    """(latency in ms, number of messages)"""
    moved = 0
    names = ("start_s", "wait_ms", "rtt_ms", "group_ms", "messages", "frames", "broker", "host",
             "stored", "isolates", "request")  # fmt: skip
    columns = zip(*(getattr(attempts, name).tolist() for name in names), strict=True)
    for number, (start_s, wait_ms, rtt_ms, group_ms, messages, frames, broker, host, stored,
                 isolates, request) in enumerate(columns):  # fmt: skip
        while in_flight and in_flight[0].at_s <= start_s:
            brokers.end(heapq.heappop(in_flight))
        if request in moved_requests:
            continue
        if other := brokers.instead(host, broker, start_s):
            rtt_ms, broker = other
            isolates, stored, frames = False, True, 1
            moved += messages
            moved_requests |= {request} - {-1}
        ended_s = start_s + (wait_ms + rtt_ms) / 1000
        heapq.heappush(in_flight, _Ended(ended_s, number, host, broker, rtt_ms, isolates))
        before_ms = failed.pop(request, (0.0, 0))[0] + wait_ms
        if not stored:
            failed[request] = before_ms + rtt_ms, messages
        elif frames > 1 and group_ms[0] == group_ms[0]:
            parts = zip((*group_ms, rtt_ms), GROUP_SHARES, strict=True)
            answers += [(before_ms + ms, messages * share) for ms, (_, share) in parts]
        else:
            answers.append((before_ms + rtt_ms, messages))
    latency_ms, weight = np.array(sorted(answers), "float64").reshape(-1, 2).T
    unsent = sum(messages for _, messages in failed.values())
    return Replayed(
        brokers.isolations, brokers.isolated_s, moved, unsent, latency_ms, np.cumsum(weight)
    )
