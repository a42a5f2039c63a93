"""Many epochs on one ledger: the objects that remain beside the table, and the cost of a fold.

The tasks use the store as a task's own modules do: the note of the start, the spool file, the
driver's notes. Spark folds.
"""

from collections import Counter

from rocket_sink.ledger.driver.fold import fold
from rocket_sink.ledger.epoch_starts import EpochStarts, begin_commit, begin_epoch, end_commit
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.pending_keys import PendingKeys
from tests.ledger.values import accounts, confirmed, context, sends, write_spool
from tests.stores.cases import quick_locks

TASKS = 2
PER_FOLD = 25
SHORT_EPOCHS = 300
LONG_EPOCHS = 10_000
FEW = 100
_LATER = 1.5
"""The factor by which a fold after many epochs may cost more requests than one after few. A listing
of more objects has more pages, and every tenth commit writes a checkpoint."""


@quick_locks()
def many_epochs(world, judge):
    """The objects and a fold's requests are as many after all epochs as after a hundred."""
    count = SHORT_EPOCHS if world.short else world.epochs
    place = resolve_path(world.at("many"))
    costs = []
    few = {}
    for epoch in range(count):
        _epoch(place, epoch)
        if epoch % PER_FOLD == PER_FOLD - 1:
            with world.server.counted() as requests:
                summary = fold(world.spark, place)
            judge.same("files of a fold", summary.files, PER_FOLD * (TASKS + 1))
            costs.append(requests.total)
        if epoch == FEW - 1:
            few = beside(world, "many")
    many = beside(world, "many")
    judge.same("objects beside the table", many, few)
    folds = FEW // PER_FOLD
    first, last = _typical(costs[1:folds]), _typical(costs[-folds:])
    if last > _LATER * first:
        judge.broken.append(f"a fold makes {last} requests, {first} in the beginning")
    rows = world.spark.read.format("delta").load(place.uri).where("kind = 'epoch'").count()
    judge.same("accounts", rows, count * (TASKS + 1))
    return {
        "epochs": count, "objects beside the table": sum(many.values()),
        "after 100 epochs": sum(few.values()), "requests of a fold": last,
        "requests of an early fold": first,
    }  # fmt: skip


def _typical(costs):
    """Return the median: some folds write a checkpoint of the table's log."""
    return sorted(costs)[len(costs) // 2]


def _epoch(place, epoch):
    begin_epoch(place, "query", epoch, "at_least_once")
    for task in range(TASKS):
        ctx = context(epoch=epoch, partition=task, task_attempt_id=epoch * TASKS + task)
        EpochStarts(place, ctx).begin({"t": frozenset({"broker-a"})})
        keys = PendingKeys(place)
        keys.held_for(ctx)
        write_spool(place, ctx, sends(ctx, 1), accounts(ctx, acked=1))
        keys.withdraw_earlier()
    begin_commit(place, "query", epoch)
    end_commit(place, "query", epoch)
    ctx = context(epoch=epoch)
    write_spool(place, ctx, confirmed(ctx, TASKS))


def beside(world, name):
    """Return the number of objects by folder, without those of the table."""
    objects = Counter(key.partition("/")[0] for key in world.keys(name) if key.startswith("_"))
    del objects["_delta_log"]
    return dict(objects)


@quick_locks()
def many_writes(world, judge):
    """Each batch write is a query of its own, and leaves nothing when it is done."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rocket_sink import RocketSink, register

    spark, source = world.spark, world.folder / "few"
    source.mkdir()
    pq.write_table(pa.table({"body": ["a", "b"]}), source / "rows.parquet")
    rows = spark.read.parquet(str(source))
    register(spark)
    options = {
        **world.options, "ledger": world.at("writes"), "topic": "w",
        "delivery": "effectively_once",
    }  # fmt: skip
    texts = {name: str(value) for name, value in options.items()}
    counts = []
    place = resolve_path(options["ledger"])
    for _ in range(3):
        RocketSink(**options).write(rows)
        rows.write.format("rocketmq").mode("append").options(**texts).save()
        fold(spark, place)
        counts.append(sum(beside(world, "writes").values()))
    judge.same("objects beside the table after each two writes", counts, counts[:1] * 3)
    judge.same("messages", len(world.cluster.messages("w")), 2 * 2 * 3)
    return {"writes": 2 * len(counts), "objects beside the table": counts[-1]}
