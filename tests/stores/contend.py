"""Several drivers append to one table at once: who may, and what is lost where they may not.

The server holds the first writer of a version until a second one writes the same, so that both have
seen that it is free. What the table holds is read by delta-rs, which has no part in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import deltalake

from rocket_sink import Ledger
from tests.stores.cases import Found, Judge, World
from tests.stores.drivers import Work, together
from tests.stores.server import Requests

TIMES: Final = 8
"""Appends of each driver."""
_WARNING: Final = "only this driver may append"


def _contended(world: World, name: str, works: Sequence[Work]) -> tuple[Found, int, Requests]:
    """Figures, rows lost, and what was asked for."""
    uri = world.at(name)
    Ledger(uri).create(world.spark)
    world.server.let_commits_meet(TIMES)
    with world.server.counted() as asked:
        results = together(works)
    world.server.let_commits_meet(0)
    table = deltalake.DeltaTable(uri, storage_options=world.storage_options)
    rows = table.to_pyarrow_dataset().to_table(columns=["partition"])["partition"].to_pylist()
    found = Counter(rows)
    wanted: Counter[int] = Counter()
    for result in results:
        wanted.update({int(number): count for number, count in result["written"].items()})
    judge = Judge()
    lost = sum((wanted - found).values())
    judge.same("rows lost", lost, 0)
    judge.same("rows more than written", sum((found - wanted).values()), 0)
    errors = [error for result in results for error in result["errors"]]
    warned = sum(_WARNING in result["log"] for result in results)
    judge.same("appends that failed", errors, [])
    met = Counter(path for path, _, _ in asked.commits)
    figures = {
        "drivers": len(works), "rows": sum(wanted.values()), "rows lost": lost,
        "commits at once": sum(1 for count in met.values() if count > 1),
        "refused by the store": sum(status == "412" for _, _, status in asked.commits),
        "failed appends": len(errors), "warned": warned,
    }  # fmt: skip
    if not figures["commits at once"]:
        judge.broken.append("no two commits met")
    return (figures, judge.broken), lost, asked


def _work(world: World, name: str, kind: str, number: int, **more: Any) -> Work:
    return Work(kind, world.server.endpoint, world.at(name), 100 * number, TIMES, **more)


def two_drivers(world: World) -> Found:
    """What Delta's log store for S3 does: not promised, and each driver's log says so."""
    name = "two-drivers"
    works = [_work(world, name, "append", number) for number in (1, 2)]
    (figures, _), _, _ = _contended(world, name, works)
    judge = Judge()
    judge.same("drivers that warned", figures["warned"], len(works))
    return figures, judge.broken


def two_of_delta_rs(world: World) -> Found:
    """Two writers with delta-rs, which writes each commit on condition."""
    name = "delta-rs"
    return _contended(world, name, [_work(world, name, "delta-rs", n) for n in (1, 2)])[0]
