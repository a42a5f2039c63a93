"""Measures `compressType=...-all`: rate, CPU and bytes on the brokers' disks against plain batches.

    python -m benchmarks.compressed                    10,000 rows of 8 KiB, six rounds
    python -m benchmarks.compressed --body words       JSON that shrinks less

Each round sends the same rows by all kinds in turn. Printed are medians of the rounds' ratios to
plain batches, without the first round. Disk bytes are the growth of the commit logs' offsets.
"""

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
import pyarrow as pa

from rocket_sink import TableProducer
from rocket_sink.cluster import LocalCluster
from rocket_sink.commands.common.output import line
from rocket_sink.producer.admin.admin import Admin

KINDS = {"plain": None, "lz4": 5, "zstd-1": 1, "zstd-5": 5, "zlib-1": 1, "zlib-5": 5}
"""Kinds, and their compressLevel."""

BODY_BYTES = 8000
DISTINCT = 1000


def event(draw: random.Random) -> dict[str, Any]:
    """Return an event with few distinct texts, as applications log them."""
    return {
        "eventType": draw.choice(["page_view", "add_to_cart", "purchase", "login"]),
        "userId": draw.randrange(10**6),
        "timestamp": f"2026-11-27T{draw.randrange(24):02d}:{draw.randrange(60):02d}:00Z",
        "device": draw.choice(["ios", "android", "web"]),
        "country": draw.choice(["DE", "CN", "US", "FR"]),
        "amount": round(draw.random() * 100, 2),
    }


def words(draw: random.Random) -> dict[str, Any]:
    """Return an item whose name is drawn from 2,000 words."""
    texts = [f"{pow(7, n, 10**9 + 7):x}" for n in draw.choices(range(2000), k=4)]
    price = round(draw.random() * 100, 2)
    return {"sku": draw.randrange(10**6), "name": " ".join(texts), "price": price}


def body(draw: random.Random, part: Callable[[random.Random], dict[str, Any]]) -> bytes:
    parts: list[dict[str, Any]] = []
    while len(json.dumps(parts)) < BODY_BYTES:
        parts.append(part(draw))
    return json.dumps(parts).encode()


def measure(cluster: LocalCluster, admin: Admin, kind: str, bodies: list[bytes]) -> list[float]:
    """Send the bodies; return rows a second, CPU seconds of client and brokers, and disk bytes."""
    options: dict[str, Any] = {"nameServer": cluster.name_server, "topic": kind}
    level = KINDS[kind]
    if level is not None:
        options |= {"compressType": kind[:4].rstrip("-") + "-all"}
        options |= {"compressLevel": level}
    before, began_s = counters(cluster, admin), time.monotonic()
    with tempfile.TemporaryDirectory() as ledger:
        with TableProducer(**options, ledger=ledger) as producer:
            sent = producer.send(pa.table({"body": bodies}))
        assert sent.summary.acked == len(bodies)
    seconds = time.monotonic() - began_s
    growth = [new - old for new, old in zip(counters(cluster, admin), before, strict=True)]
    return [len(bodies) / seconds, *growth]


def counters(cluster: LocalCluster, admin: Admin) -> list[float]:
    """Return the CPU seconds of this process and of the brokers, and their commit logs' offsets."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    times = [psutil.Process(broker.pid).cpu_times() for broker in cluster.brokers]
    facts = [admin.runtime_info(broker.name, broker.address) for broker in cluster.brokers]
    return [
        own.ru_utime + own.ru_stime,
        sum(time.user + time.system for time in times),
        float(sum(int(fact["commitLogMaxOffset"]) for fact in facts)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compressed", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--body", choices=["event", "words"], default="event")
    arguments = parser.parse_args()
    draw, part = random.Random(1), {"event": event, "words": words}[arguments.body]
    distinct = [body(draw, part) for _ in range(DISTINCT)]
    bodies = [distinct[row % DISTINCT] for row in range(arguments.rows)]
    rounds: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with (
        LocalCluster(brokers=2) as cluster,
        Admin(nameServer=cluster.name_server, timeout_s=30.0) as admin,
    ):
        for kind in KINDS:
            cluster.create_topic(kind)
        for _ in range(arguments.rounds):
            for kind, results in rounds.items():
                results.append(measure(cluster, admin, kind, bodies))
    for kind, results in rounds.items():
        pairs = list(zip(results, rounds["plain"], strict=True))[1:]
        ratios = [statistics.median(new[at] / old[at] for new, old in pairs) for at in range(4)]
        rate, client, brokers, disk = ratios
        line(
            f"{kind:7} rate {rate:.2f}  client's CPU {client:.2f}  brokers' CPU {brokers:.2f}"
            f"  disk {disk:.3f}"
        )


if __name__ == "__main__":
    main()
