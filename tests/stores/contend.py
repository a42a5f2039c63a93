"""Several drivers append to one table at once: who may, and what is lost if they may not.

The server holds the first writer of a version until a second one writes the same: by then both have
seen that the version is free. delta-rs, which takes no part, reads the table.
"""

import contextlib
import threading
from collections import Counter

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq

from rocket_sink import Ledger
from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import resolve_path
from tests.integration.lanes import LANES
from tests.ledger.values import context, sends
from tests.producer.waiting import until
from tests.stores.cases import Judge, stored_keys
from tests.stores.drivers import Work, together

TIMES = 8
"""The appends of each driver."""
_WARNING = "only this driver may append"


def _contended(world, judge, name, works, *, lost_answers=0):
    """Return the figures, and the requests."""
    uri = world.at(name)
    Ledger(uri).create(world.spark)
    is_met = len(works) > 1
    if is_met:
        world.server.let_commits_meet(TIMES)
    world.server.lose_answers(lost_answers)
    with world.server.counted() as requests:
        results = together(works)
    world.server.let_commits_meet(0)
    table = deltalake.DeltaTable(uri, storage_options=world.server.storage_options)
    rows = table.to_pyarrow_dataset().to_table(columns=["partition"])["partition"].to_pylist()
    stored = Counter(rows)
    wanted = Counter()
    for result in results:
        wanted.update({int(number): count for number, count in result["written"].items()})
    lost = sum((wanted - stored).values())
    judge.same("rows lost", lost, 0)
    judge.same("rows more than written", sum((stored - wanted).values()), 0)
    errors = [error for result in results for error in result["errors"]]
    warned = sum(_WARNING in result["log"] for result in results)
    judge.same("appends that failed", errors, [])
    met = Counter(path for path, _, _ in requests.commits)
    figures = {
        "drivers": len(works), "rows": sum(wanted.values()), "rows lost": lost,
        "commits at once": sum(1 for count in met.values() if count > 1),
        "refused by the store": sum(status == "412" for _, _, status in requests.commits),
        "failed appends": len(errors), "warned": warned,
    }  # fmt: skip
    if is_met and not figures["commits at once"]:
        judge.broken.append("no two commits met")
    return figures, requests


def _work(world, name, kind, number, **more):
    return Work(kind, world.server.endpoint, world.at(name), 100 * number, TIMES, **more)


def conditions(world, judge):
    """delta-rs commits if the store respects If-None-Match, and Spark's Delta otherwise.

    Nothing is settled if the store denies the first look.
    """
    figures = {}
    for keeps in (True, False):
        bucket = f"{world.bucket}-{'with' if keeps else 'without'}"
        world.server.make_bucket(bucket)
        place = resolve_path(f"s3a://{bucket}/ledger")
        world.server.conditional = keeps
        try:
            if keeps:
                judge.same("error of a store that denies access", _denied(world, place), "not now")
            _create_when_asked_again(world, place)
            with world.server.counted() as requests:
                for number in range(2):
                    Ledger(place.uri).append(world.spark, sends(context(partition=number), 2))
        finally:
            world.server.conditional = True
        judge.same("commits on condition", [one for _, one, _ in requests.commits], [keeps] * 2)
        figures[f"commits {'with' if keeps else 'without'} conditions"] = len(requests.commits)
        remaining = stored_keys(world.server.client(), bucket, "ledger", "_tries/")
        # S3A makes this folder when the last object in it goes.
        judge.same("objects left of the trial", remaining, ["_tries/"])
    return figures


def _create_when_asked_again(world, place):
    """Make the ledger, like a user who tries again when the store denies access."""

    def is_made():
        with contextlib.suppress(LedgerError):
            Ledger(place.uri).create(world.spark)
            return True

    until(is_made, 30, 0.5, f"{place.uri} cannot be made")


def _denied(world, place):
    """Return the error of a write while the store denies access; it goes on denying for 1.5 s."""
    world.server.fail(True, "403 Forbidden")
    text = ""
    try:
        Ledger(place.uri).create(world.spark)
    except LedgerError as error:
        text = "not now" if "cannot be asked now" in str(error) else str(error)
    threading.Timer(1.5, world.server.fail, (False,)).start()
    return text


def two_drivers(world, judge):
    """The one driver appends, the other folds; both write their commits on condition."""
    name = "two-drivers"
    works = [_work(world, name, kind, n) for n, kind in enumerate(("append", "fold"))]
    figures, requests = _contended(world, judge, name, works)
    judge.same("commits without condition", [c for c in requests.commits if not c[1]], [])
    return figures


def one_query_twice(world, judge):
    """Two drivers run one query of each lane on one checkpoint; then one of them runs it again.

    The later run takes the query over, so the other run has to fail. Spark may also fail the run
    that writes an epoch second to the checkpoint.
    """
    failed = 0
    streams = [lane for lane in LANES if lane.streams]
    for lane in streams[-1:] if world.short else streams:
        topic, folder = f"twice-{lane.name}", world.folder / f"twice-{lane.name}"
        (folder / "source").mkdir(parents=True)
        world.cluster.create_topic(topic)
        bodies = [f"{number:04d}" for number in range(200)]
        for first in range(0, 200, 50):
            part = bodies[first : first + 50]
            rows = pa.table({"body": part, "sharding_key": [body[-1] for body in part]})
            pq.write_table(rows, folder / "source" / f"{first:04d}.parquet")
        uri = world.at(topic)
        options = {
            **world.options, "topic": topic, "ledger": uri, "delivery": "effectively_once",
            "ordering": "strict", "requestMaxMessages": 10,
        }  # fmt: skip
        work = Work(lane.name, world.server.endpoint, uri, 0, 1, str(folder), options)
        failed += sum(len(result["errors"]) for result in together([work, work]))
        [again] = together([work])
        judge.same(f"errors of {lane.name}, run alone", again["errors"], [])
        if again["errors"]:
            continue
        Ledger(uri).sync(world.spark)
        stored = Counter(message.body.decode() for message in world.cluster.messages(topic))
        judge.same(f"messages of {lane.name}", stored - Counter(bodies), Counter())
        judge.same(f"missing messages of {lane.name}", Counter(bodies) - stored, Counter())
        epochs = Ledger(uri).epochs(world.spark).collect()
        judge.same(f"rows in of {lane.name}", sum(epoch.rows_in for epoch in epochs), len(bodies))
        judge.same(f"epochs of {lane.name} that add up", all(e.adds_up for e in epochs), True)
    return {"rows of each lane": 200, "runs that failed": failed}


def answers_lost(world, judge):
    """The store has a commit, but its answer is lost: the rows are in once, and no driver fails."""
    name = "answers-lost"
    works = [_work(world, name, "fold", 1)]
    figures, requests = _contended(world, judge, name, works, lost_answers=TIMES // 2)
    lost = sum(status == "500" for _, _, status in requests.commits)
    judge.same("answers lost", lost, TIMES // 2)
    return {**figures, "answers lost": lost}


def store_without_conditions(world, judge):
    """Spark's Delta writes; its log store for S3 is for one driver, as each driver's log says."""
    name = "no-conditions"
    works = [_work(world, name, "append", number) for number in (1, 2)]
    world.server.conditional = False
    try:
        # Rows may be lost there: that is no broken promise.
        figures, _ = _contended(world, Judge(), name, works)
    finally:
        world.server.conditional = True
    judge.same("drivers that warned", figures["warned"], len(works))
    return figures


def two_of_delta_rs(world, judge):
    """Two writers with delta-rs, which writes each commit on condition."""
    name = "delta-rs"
    return _contended(world, judge, name, [_work(world, name, "delta-rs", n) for n in (1, 2)])[0]
