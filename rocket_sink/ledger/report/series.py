"""Series for the charts of a report's page: sums by time, broker, topic and queue. Each list has a
limit, so a page is small even if the ledger is large. Time is divided into at most `_STEPS` steps,
and each step keeps the epochs and attempts that failed or took longest."""
# ruff: noqa: S608 (the SQL has our own names; texts of users are checked or hexadecimal)

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rocket_sink.ledger.schema import UNPARKED
from rocket_sink.ledger.sql import (
    BROKER,
    REQUESTS,
    STORED,
    Scoped,
    class_of,
    is_text,
    latencies,
    micros,
    percentile,
)

_STEPS: Final = 96
_STEPS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600,
                   43_200, 86_400)  # fmt: skip
"""Lengths of a step (s) that suit a time axis; longer ones are whole days."""
_TOPICS: Final = 12
_BROKERS: Final = 24
_OTHERS: Final = "(others)"
_TOPIC: Final = "coalesce(topic, '-')"
_QUEUES: Final = 240
_ISOLATIONS: Final = 400
_PER_STEP: Final = 6
"""Limit of `behind` per step and broker, and of `failures` per step, broker and error."""
_BEHIND: Final = 2000
_FAILURES: Final = 800
_EPOCHS: Final = 1500
_REMARK: Final = 160


COLUMNS: Final = {
    "cells": ("step", "broker", "topic", "outcome", "requests", "messages", "bytes", "wait_ms",
              "connect_ms", "broker_ms", "retry_ms", "strict_ms"),
    "heat": ("step", "broker", "answers", "p50", "p95", "p99", "p99.9", "longest"),
    "latency": ("broker", "topic", "answers", "p50", "p95", "p99", "p99.9", "longest"),
    "letters": ("step", "reason", "given", "settled", "bytes"),
    "queues": ("topic", "broker", "queue", "messages", "requests"),
    "isolations": ("broker", "topic", "cause", "since", "until", "reachable"),
    "behind": ("step", "broker", "topic", "query", "epoch", "requests", "failed", "messages",
               "longest", "partition", "message_id", "attempt"),
    "failures": ("at", "step", "broker", "topic", "queue", "query", "epoch", "partition",
                 "attempt", "outcome", "error", "code", "rtt", "message_id", "remark"),
    "epochs": ("query_id", "epoch", "at", "rows_in", "dead", "unknown", "adds_up"),
}  # fmt: skip
"""{series: names of the values in its rows}"""
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Series:
    """`rows` has lists of rows by the names in `COLUMNS`, which names the values in a row. Times
    are ms since 1970, or the number of a step: step n begins at n times `step_ms`.

    Lists:
        cells: numbers of sent messages, and how their time was spent.
        heat, latency: percentiles (ms) by step and broker, and by broker and topic.
        letters: in each step, dead letters that were given up, and those that were settled.
        behind: for each step and broker, the epochs with the most failures or the longest sends.
            Each row names partition, message and attempt of its longest send.
        failures: the first failed attempts of each step, broker and error.
        epochs: the epochs of `behind`, and those that do not add up.
    """

    step_ms: int
    first_ms: int
    last_ms: int
    rows: Mapping[str, Rows]


def read_series(read: Scoped) -> Series:
    """Return the series of the scope."""
    times = " UNION ALL ".join(
        f"SELECT at FROM {view} WHERE {read.where}" for view in ("answered", "letters")
    )
    (span,) = read(f"SELECT min(at) AS first, max(at) AS last FROM ({times}) t")
    first, last = span["first"], span["last"]
    if first is None:
        return Series(1000, 0, 0, {name: [] for name in COLUMNS})
    step_s = step_of((last - first).total_seconds())
    step = f"CAST(floor(unix_micros(at) / {step_s * 1_000_000}) AS BIGINT) AS step"
    broker = f"{_most(read, 'broker_name', BROKER, _BROKERS)} AS broker"
    topic = f"{_most(read, 'topic', _TOPIC, _TOPICS)} AS shown_topic"
    answers = f"(SELECT *, {step}, {broker}, {topic} FROM answered WHERE {read.where}) a"
    behind = _behind(read, answers)
    heat, latency = _latencies(read, step, broker, topic)
    rows = {
        "cells": _cells(read, answers), "heat": heat, "latency": latency,
        "letters": _letters(read, step), "queues": _queues(read), "isolations": _isolations(read),
        "behind": behind, "failures": _failures(read, answers), "epochs": _epochs(read, behind),
    }  # fmt: skip
    return Series(step_s * 1000, micros(first) // 1000, micros(last) // 1000, rows)


def step_of(length_s: float) -> int:
    """Return the length (s) of a step for a chart over this time."""
    least = length_s / _STEPS
    fitting = (step for step in _STEPS_S if step >= least)
    return next(fitting, math.ceil(least / 86_400) * 86_400)


def _most(read: Scoped, column: str, text: str, most: int) -> str:
    """Return the SQL term for the column's text. If there are more than `most` texts, the term
    keeps the most frequent ones and replaces the others by `_OTHERS`."""
    rows = read(
        f"SELECT {column} AS name, count(*) AS requests FROM answered WHERE {read.where} "
        f"GROUP BY 1 ORDER BY requests DESC, name LIMIT {most + 1}"
    )
    if len(rows) <= most:
        return text
    kept = " OR ".join(is_text(column, row["name"]) for row in rows[:most] if row["name"])
    return f"CASE WHEN {kept} THEN {column} ELSE '{_OTHERS}' END"


def _rows(read: Scoped, select: str) -> Rows:
    return [tuple(row.values()) for row in read(select)]


def _cells(read: Scoped, answers: str) -> Rows:
    """Return the sums per step, broker, topic and outcome; a row without bytes on the wire is a
    wait of a strict queue."""
    frames = "coalesce(frames, 1)"
    wait = f"coalesce(queue_wait_ms, 0) * {frames}"
    spent = {
        "wait_ms": f"CASE WHEN attempt = 1 AND wire_bytes > 0 THEN {wait} ELSE 0 END",
        "connect_ms": f"coalesce(connect_ms, 0) * {frames}",
        "broker_ms": f"CASE WHEN {STORED} THEN coalesce(rtt_p50_ms, rtt_ms) * {frames} ELSE 0 END",
        "retry_ms": f"CASE WHEN {STORED} THEN 0 ELSE coalesce(rtt_ms, 0) END "
        f"+ CASE WHEN attempt > 1 AND wire_bytes > 0 THEN {wait} ELSE 0 END",
        "strict_ms": f"CASE WHEN wire_bytes > 0 THEN 0 ELSE {wait} END",
    }
    sums = ", ".join(f"round(sum({text}), 1) AS {name}" for name, text in spent.items())
    return _rows(
        read,
        f"""SELECT step, broker, shown_topic, outcome,
            CAST(sum(CASE WHEN wire_bytes > 0 THEN {frames} ELSE 0 END) AS BIGINT) AS requests,
            CAST(sum(CASE WHEN {STORED} THEN message_count ELSE 0 END) AS BIGINT) AS messages,
            CAST(sum(CASE WHEN {STORED} THEN body_bytes ELSE 0 END) AS BIGINT) AS body_bytes,
            {sums}
        FROM {answers} GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4""",
    )


def _latencies(read: Scoped, step: str, broker: str, topic: str) -> tuple[Rows, Rows]:
    rows = latencies(read.where, step, broker, topic)
    table = read.table(
        f"""SELECT step, broker, shown_topic, class, sum(weight) AS weight, max(ms) AS longest
        FROM (SELECT *, {class_of("ms")} AS class FROM ({rows}) l) c
        GROUP BY GROUPING SETS ((step, broker, class), (broker, shown_topic, class))"""
    )
    by_step: dict[Any, list[tuple[int, float, float]]] = defaultdict(list)
    by_topic: dict[Any, list[tuple[int, float, float]]] = defaultdict(list)
    columns = (table.column(n).to_pylist() for n in range(6))
    for at, name, of_topic, *figures in zip(*columns, strict=True):
        classes = by_topic[name, of_topic] if at is None else by_step[at, name]
        classes.append(tuple(figures))
    return _percentiles(by_step), _percentiles(by_topic)


def _percentiles(groups: dict[Any, list[tuple[int, float, float]]]) -> Rows:
    rows = []
    for key, classes in sorted(groups.items()):
        classes.sort()
        longest = max(most for _, _, most in classes)
        counts = [(number, weight) for number, weight, _ in classes]
        shares = (percentile(counts, share, longest) for share in (0.5, 0.95, 0.99, 0.999))
        answers = round(sum(weight for _, weight in counts))
        rows.append((*key, answers, *(round(ms or 0.0, 3) for ms in shares), round(longest, 3)))
    return rows


def _letters(read: Scoped, step: str) -> Rows:
    """Count per step the letters that were given up, and the letters that were settled. Unparking
    a letter takes back its earlier resolutions, except `resent`."""
    ends = f"""SELECT letter_id, min(at) AS at FROM (
            SELECT letter_id, resolution, at, sequence AS _order,
                max(CASE WHEN resolution = '{UNPARKED}' THEN sequence END)
                    OVER (PARTITION BY letter_id) AS _taken_back
            FROM resolutions
        ) r
        WHERE resolution = 'resent'
            OR resolution <> '{UNPARKED}' AND (_taken_back IS NULL OR _order > _taken_back)
        GROUP BY letter_id"""
    return _rows(
        read,
        f"""SELECT step, reason, CAST(sum(given) AS BIGINT) AS given,
            CAST(sum(settled) AS BIGINT) AS settled, CAST(sum(size) AS BIGINT) AS size
        FROM (
            SELECT {step}, reason, 1 AS given, 0 AS settled, coalesce(body_bytes, 0) AS size
            FROM counted_letters WHERE {read.where}
            UNION ALL
            SELECT {step}, reason, 0 AS given, 1 AS settled, 0 AS size
            FROM (SELECT letter_id, reason FROM counted_letters WHERE {read.where}) c
            JOIN ({ends}) e ON c.letter_id = e.letter_id
        ) b GROUP BY step, reason ORDER BY step, reason""",
    )


def _queues(read: Scoped) -> Rows:
    return _rows(
        read,
        f"""SELECT {_TOPIC} AS topic, {BROKER} AS broker, queue_id,
            CAST(sum(message_count) AS BIGINT) AS messages, {REQUESTS} AS requests
        FROM answered WHERE {STORED} AND {read.where}
        GROUP BY 1, 2, 3 ORDER BY messages DESC, topic, broker, queue_id LIMIT {_QUEUES}""",
    )


def _isolations(read: Scoped) -> Rows:
    return _rows(
        read,
        f"""SELECT DISTINCT broker_name, topic, cause,
            CAST(unix_micros(isolated_from) / 1000 AS BIGINT) AS since,
            CAST(unix_micros(isolated_until) / 1000 AS BIGINT) AS until, reachable
        FROM isolations WHERE {read.where} ORDER BY since DESC LIMIT {_ISOLATIONS}""",
    )


def _behind(read: Scoped, answers: str) -> Rows:
    longest = "coalesce(rtt_ms, 0)"
    # The last attempt wins among equally long ones.
    order = f"{longest} + coalesce(attempt, 1) * 1e-6"
    return _rows(
        read,
        f"""SELECT step, broker, shown_topic, query_id, epoch, requests, failed, messages,
            longest_ms, partition, message_id, attempt
        FROM (
            SELECT *, row_number() OVER (
                PARTITION BY step, broker ORDER BY failed DESC, longest_ms DESC, query_id, epoch
            ) AS _nth
            FROM (
                SELECT step, broker, shown_topic, query_id, epoch,
                    {REQUESTS} AS requests, count(CASE WHEN NOT {STORED} THEN 1 END) AS failed,
                    CAST(sum(CASE WHEN {STORED} THEN message_count ELSE 0 END) AS BIGINT)
                        AS messages,
                    round(max({longest}), 3) AS longest_ms,
                    max_by(coalesce(partition, -1), {order}) AS partition,
                    max_by(coalesce(message_id, ''), {order}) AS message_id,
                    max_by(coalesce(attempt, 1), {order}) AS attempt
                FROM {answers} GROUP BY 1, 2, 3, 4, 5
            ) g
        ) n WHERE _nth <= {_PER_STEP}
        ORDER BY failed DESC, longest_ms DESC, step, broker, shown_topic, query_id, epoch
        LIMIT {_BEHIND}""",
    )


def _failures(read: Scoped, answers: str) -> Rows:
    return _rows(
        read,
        f"""SELECT CAST(unix_micros(at) / 1000 AS BIGINT) AS at_ms, step, broker, shown_topic,
            queue_id, query_id, epoch, partition, attempt, outcome, error_code, response_code,
            round(rtt_ms, 3) AS rtt_ms, message_id, substr(remark, 1, {_REMARK}) AS remark
        FROM (
            SELECT *, row_number() OVER (
                PARTITION BY step, broker, error_code, outcome ORDER BY at, request, attempt
            ) AS _nth
            FROM {answers} WHERE NOT {STORED}
        ) f WHERE _nth <= {_PER_STEP}
        ORDER BY _nth, at_ms, broker, message_id LIMIT {_FAILURES}""",
    )


def _epochs(read: Scoped, behind: Rows) -> Rows:
    """Return up to `_EPOCHS` epochs: those of `_behind`'s rows, and those that do not add up."""
    numbers = sorted({row[4] for row in behind})
    named = f"epoch IN ({', '.join(map(str, numbers))})" if numbers else "false"
    rows = _rows(
        read,
        f"SELECT {', '.join(COLUMNS['epochs'])} FROM epochs "
        f"WHERE {read.where} AND ({named} OR NOT adds_up) ORDER BY adds_up, at DESC, epoch DESC",
    )
    behind_them = {(row[3], row[4]) for row in behind}
    return [row for row in rows if row[:2] in behind_them or not row[-1]][:_EPOCHS]
