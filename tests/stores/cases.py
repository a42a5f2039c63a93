"""Uses of a ledger on an object store, judged by the contents of the cluster and of the store.

Each case gets a world and a judge of its promises, and returns figures.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import contextmanager, suppress
from unittest import mock

import deltalake
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from rocket_sink import Ledger
from rocket_sink.errors import LedgerError
from rocket_sink.ledger import lock as lease_module
from rocket_sink.ledger.driver.fold import fold
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.option_spec import Secret
from rocket_sink.testing import FakeCluster
from tests.integration.lanes import LANES
from tests.killed import FOLD_STEPS, Killed, kill_at
from tests.ledger.values import accounts, context, letter, sends, write_spool
from tests.run_command import run_command
from tests.stores.server import SECRET
from tests.stores.session import packages, settings

ROWS = 200
BAD = 10
"""One row in ten has no body: it becomes a dead letter."""
PATIENT = {"sendMsgTimeout": 60_000, "connectTimeoutMs": 20_000}
SHORT_STEPS = (("append", 1), ("appended", 1), ("delete", 2))


class World:
    """A server, a session, a scripted cluster, and one bucket with one ledger."""

    def __init__(self, server, spark, folder, *, short, epochs=0):
        self.server, self.spark, self.folder, self.short = server, spark, folder, short
        self.epochs = epochs
        # A JVM keeps what it knows of a bucket, so each world has a new one.
        self.bucket = f"b{uuid.uuid4().hex[:12]}"
        server.make_bucket(self.bucket)
        self.cluster = FakeCluster(brokers=2)

    @property
    def uri(self):
        return self.at("ledger")

    def at(self, name):
        return str(self.server.uri(self.bucket, name))

    @property
    def options(self):
        return {"nameServer": self.cluster.name_server, "ledger": self.uri, **PATIENT}

    def keys(self, name="ledger", under=""):
        """Return the keys that the store lists below a ledger, without the ledger's own name."""
        return stored_keys(self.server.client(), self.bucket, name, under)

    def close(self):
        self.cluster.close()


def place_on(server, bucket):
    """Return a ledger's path; only Spark's properties say where the store is."""
    properties = {
        name.removeprefix("spark.hadoop."): Secret(value)
        for name, value in settings(server.endpoint).items()
    }
    return LedgerPath(f"s3a://{bucket}/ledger", f"{bucket}/ledger", False, storage=properties)


def stored_keys(client, bucket, name, under=""):
    prefix, keys = f"{name}/{under}", []
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        keys += [item["Key"].removeprefix(f"{name}/") for item in page.get("Contents", [])]
    return keys


class Judge:
    """Gathers the promises that were broken."""

    def __init__(self):
        self.broken = []

    def same(self, what, actual, expected):
        if actual != expected:
            self.broken.append(f"{what}: {actual!r}, not {expected!r}")

    def command(self, world, *words, ledger=""):
        """Run a command on a ledger, by default the world's, which has to succeed."""
        done = run_command(*words, "-l", ledger or world.uri, "--json", spark=world.spark)
        self.same(f"`{' '.join(words[:2])}`", done.code, 0)
        return done


@contextmanager
def quick_locks():
    """Let a lease settle at once, for cases in which no other thread folds: a busy machine makes
    threads of a process, too, slow between look and write."""
    with mock.patch.object(lease_module, "_SETTLE_S", 0.05):
        yield


def _bodies():
    return ["" if number % BAD == 0 else f"{number:06d}" for number in range(ROWS)]


def lanes(world, judge):
    """Every lane writes to the ledger."""
    source = world.folder / "source"
    source.mkdir()
    rows = pa.table({
        "body": _bodies(), "keys": [f"k{number}" for number in range(ROWS)],
        "sharding_key": [f"s{number % 7}" for number in range(ROWS)],
    })  # fmt: skip
    pq.write_table(rows, source / "rows.parquet")
    figures = {}
    wanted = sorted(body.encode() for body in _bodies() if body)
    for lane in LANES:
        options = {**world.options, "topic": f"t-{lane.name}", "foldIntervalMs": 3_600_000}
        with world.server.counted() as asked:
            lane.run(world.spark, source, world.folder / f"checkpoint-{lane.name}", options)
        stored = sorted(message.body for message in world.cluster.messages(f"t-{lane.name}"))
        judge.same(f"messages of {lane.name}", stored == wanted, True)
        figures[f"requests {lane.name}"] = asked.total
    ledger = Ledger(world.uri)
    ledger.sync(world.spark)
    epochs = ledger.epochs(world.spark).collect()
    judge.same("epochs", len(epochs), len(LANES))
    judge.same("epochs that add up", sum(e.adds_up for e in epochs), len(LANES))
    # A foreach epoch is confirmed by an event, which may come after the stream's end.
    confirmed = {epoch.lane for epoch in epochs if epoch.confirmed}
    judge.same("confirmed", {"foreach", "foreach_batch"} <= confirmed, True)
    judge.same("rows in", sum(e.rows_in for e in epochs), ROWS * len(LANES))
    judge.same("acknowledged", sum(e.acked for e in epochs), len(wanted) * len(LANES))
    letters = ledger.dead_letters(world.spark).count()
    judge.same("dead letters", letters, ROWS // BAD * len(LANES))
    judge.same("left in the spool", _spooled(world), [])
    return {"rows": ROWS * len(LANES), "dead letters": letters, **figures}


def _spooled(world, name="ledger"):
    return [key for key in world.keys(name, "_spool/") if key.endswith((".arrow", ".json"))]


@quick_locks()
def readers(world, judge):
    """Spark, delta-rs with DuckDB, views, report and commands all read the same."""
    ledger, spark = Ledger(world.uri), world.spark
    by_spark = Counter(row.kind for row in ledger.rows(spark).select("kind").collect())
    table = deltalake.DeltaTable(world.uri, storage_options=world.server.storage_options)
    session = duckdb.connect()
    session.register("rows", table.to_pyarrow_dataset())
    counted = "SELECT kind, count(*) FROM rows GROUP BY kind"
    kinds = session.sql(counted).fetchall()
    judge.same("rows by kind, by delta-rs and DuckDB", dict(kinds), dict(by_spark))
    judge.same("version", table.version(), ledger.version(spark))
    views = {
        "sends": ledger.sends(spark).count(), "attempts": ledger.attempts(spark).count(),
        "epochs": ledger.epochs(spark).count(),
    }  # fmt: skip
    report = ledger.report(spark)
    shown = judge.command(world, "ledger", "show", "epochs")
    judge.same("epochs of `ledger show`", len(shown.lines()), views["epochs"])
    command = run_command("report", "-l", world.uri, "--json", spark=spark)
    judge.same("`report`", command.code in (0, 1) and bool(command.out), True)
    judge.same("report's unfolded epochs", report.unfolded_epochs, 0)
    judge.same(
        "secrets in texts", SECRET in f"{shown.out}{shown.err}{command.out}{command.err}", False
    )
    return {"rows": sum(by_spark.values()), **views}


@quick_locks()
def letters(world, judge):
    """Park, unpark and backfill dead letters, by the library's commands."""
    spark, ledger, name_server = world.spark, Ledger(world.uri), world.cluster.name_server
    before = ledger.dead_letters(spark).count()
    # The rows have no body, so none of them can be sent; one further letter can be.
    world.cluster.create_topic("later")
    ctx = context(query_id="letters", run_id="letters")
    write_spool(
        resolve_path(world.uri), ctx, letter(ctx, b"sent later", topic="later"),
        accounts(ctx, dead=1),
    )  # fmt: skip
    others = ("--where", "topic <> 'later'")
    judge.command(world, "ledger", "park", *others, "--reason", "no body")
    judge.same("pending when parked", ledger.dead_letters(spark).count(), 1)
    judge.command(world, "backfill", "-n", name_server)
    bodies = [message.body for message in world.cluster.messages("later")]
    judge.same("what the backfill sent", bodies, [b"sent later"])
    ledger.sync(spark)
    judge.same("pending after the backfill", ledger.dead_letters(spark).count(), 0)
    judge.command(world, "ledger", "unpark", *others, "--reason", "again")
    judge.same("pending after unparking", ledger.dead_letters(spark).count(), before)
    judge.command(world, "backfill", "--dry-run", "-n", name_server)
    judge.same("sent twice", len(world.cluster.messages("later")), 1)
    return {"parked": before, "sent": len(bodies)}


@quick_locks()
def maintenance(world, judge):
    """Optimize and vacuum keep the rows, and the spool."""
    spark, ledger = world.spark, Ledger(world.uri)
    place = resolve_path(world.uri)
    before = _counted(world)
    spool(place, 7000)
    removed = ledger.optimize(spark)["files_removed"]
    judge.same("files compacted", removed > 1, True)
    with suppress(LedgerError):
        ledger.vacuum(spark, retain_hours=0)
        judge.broken.append("a vacuum of 0 hours was not refused")
    setting = "spark.databricks.delta.retentionDurationCheck.enabled"
    spark.conf.set(setting, "false")
    try:
        ledger.vacuum(spark, retain_hours=0)
    finally:
        spark.conf.unset(setting)
    judge.same("rows by kind", _counted(world), before)
    judge.same("rows folded afterwards", fold(spark, place).rows, 2)
    stored = world.keys()
    files = len([key for key in stored if key.endswith(".parquet") and "kind=" in key])
    return {"compacted": removed, "files left": files}


@quick_locks()
def removals(world, judge):
    """Expire old rows and erase a key; the store's own list and bytes tell what is left."""
    spark, name = world.spark, "removed"
    uri = world.at(name)
    ledger, place = Ledger(uri), resolve_path(uri)
    for epoch, key in enumerate(("N14228", "N668DN", "N14228")):
        ctx = context(epoch=epoch, task_attempt_id=epoch)
        write_spool(
            place, ctx, sends(ctx, 2), letter(ctx, f"body of {key}".encode(), sharding_key=key),
            accounts(ctx, acked=2, dead=1, first_error=f"no route for {key}"),
        )  # fmt: skip
        fold(spark, place)
    before = _counted(world, name)
    expire = ("ledger", "expire", "--older-than", "0s", "--kind", "send")
    expired = judge.command(world, *expire, ledger=uri)
    kept = before["send"] - expired.json()["rows"]["send"]
    judge.same("sends of the last two epochs", kept, 4)
    judge.same("sends by Spark's Delta", _counted(world, name)["send"], kept)
    erase = ("ledger", "erase", "--where", "sharding_key = 'N14228'", "--reason", "request")
    erased = judge.command(world, *erase, ledger=uri)
    judge.same("letters erased", erased.json()["letters"], 2)
    judge.same("objects with the key", _holding(world, name, "N14228"), [])
    judge.same("other letters", bool(_holding(world, name, "body of N668DN")), True)
    after = _counted(world, name)
    judge.same("letters and accounts", [after[k] for k in _STAY], [before[k] for k in _STAY])
    pending = [row.sharding_key for row in ledger.dead_letters(spark).collect()]
    judge.same("pending afterwards", pending, ["N668DN"])
    return {"expired": before["send"] - kept, "erased": 2}


_STAY = ("dead_letter", "epoch")


def _holding(world, name, text):
    """Return the objects that hold this text. Snappy leaves values of less than a block as they
    are."""
    return [
        key for key in world.keys(name)
        if text.encode()
        in world.server.client().get_object(Bucket=world.bucket, Key=f"{name}/{key}")["Body"].read()
    ]  # fmt: skip


def _counted(world, name="ledger"):
    rows = Ledger(world.at(name)).rows(world.spark).groupBy("kind").count().collect()
    return Counter({row.kind: row["count"] for row in rows})


def spool(place, partition, rows=2, **changes):
    """Write the spool file of a task attempt."""
    ctx = context(partition=partition, **changes)
    write_spool(place, ctx, sends(ctx, rows))


@quick_locks()
def kills(world, judge):
    """A fold dies at each of its steps; the next one completes it."""
    spark, name = world.spark, "killed"
    place = resolve_path(world.at(name))
    expected = Counter()
    steps = SHORT_STEPS if world.short else FOLD_STEPS
    for number, (step, times) in enumerate(steps):
        first = 100 * number
        spool(place, first)
        spool(place, first + 1, rows=3)
        with suppress(Killed):
            fold(spark, place, on_step=kill_at(step, times))
            judge.broken.append(f"no fold died at {step}")
        spool(place, first + 2, rows=1)  # The query goes on meanwhile.
        summary = fold(spark, place)
        expected += Counter({first: 2, first + 1: 3, first + 2: 1})
        rows = Ledger(place.uri).rows(spark).select("partition").collect()
        judge.same(f"rows after {step}", Counter(row[0] for row in rows), expected)
        judge.same(f"left after {step}", _spooled(world, name), [])
        judge.same(f"busy after {step}", summary.busy, False)
    return {"deaths": len(steps), "rows": sum(expected.values())}


def timed(play, world):
    """Return a case's result."""
    began = time.monotonic()
    judge = Judge()
    figures = play(world, judge)
    return {
        "name": play.__name__, "figures": figures, "broken": judge.broken,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def command_line(world, judge):
    """Users start the commands: only the flags say where the store is."""
    place = resolve_path(world.at("commands"))
    spool(place, 1)
    flags = [word for package in packages() for word in ("--package", package)]
    for setting, value in settings(world.server.endpoint).items():
        flags += ["--spark-conf", f"{setting}={value}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    environment["AWS_EC2_METADATA_DISABLED"] = "true"
    commands = ("ledger fold", "ledger show sends", "report", "ledger optimize")
    texts = []
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "rocket_sink.cli", *command.split(), "-l", place.uri, "--json",
             *flags],
            capture_output=True, text=True, check=False, timeout=600, env=environment,
        )  # fmt: skip
        judge.same(f"`{command}`", done.returncode, 0)
        judge.same("secrets in texts", SECRET in done.stdout + done.stderr, False)
        texts.append(done.stdout)
    judge.same("rows folded", json.loads(texts[0] or "{}").get("rows"), 2)
    judge.same("sends shown", len(texts[1].splitlines()), 2)
    judge.same("a report", bool(texts[2]), True)
    return {"commands": len(commands)}
