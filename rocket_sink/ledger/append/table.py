"""Creation of the Delta table, checks before each use, and questions about its commits.

The ledger's id is Delta's own id of the table. Folds name their transactions by this id. So a fold
into a new table at the path of a deleted one is never taken for a fold into the old table, and no
rows are skipped."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from rocket_sink.errors import CheckpointError, LedgerError
from rocket_sink.forks import ForkLock
from rocket_sink.ledger.append.delta_rs import (
    added_rows,
    check_named,
    create_table,
    damaged,
    data_files,
    has_commits,
    last_version,
    newest_for_readers,
    open_any,
    open_table,
    selected_rows,
    try_commit,
    uncounted,
)
from rocket_sink.ledger.append.exclusive import store_refuses
from rocket_sink.ledger.append.links import check_links
from rocket_sink.ledger.lock import ledger_lock
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath, check_encoding, failing, first_line
from rocket_sink.ledger.schema import COLUMNS, SCHEMA_VERSION, STATS_COLUMNS, VERSION_PROPERTY
from rocket_sink.ledger.storage import is_classic
from rocket_sink.ledger.token import TOKENS, LedgerToken, token_names, worker_and_user
from rocket_sink.net import log

if TYPE_CHECKING:
    from deltalake import DeltaTable as RustTable
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_LOG: Final = log.logger(__name__)
_MAKER_LOCK: Final = "create.lock"
_MAKER_WAIT_S: Final = 120.0
_CONFLICT: Final = re.compile(
    r"DELTA_(METADATA|PROTOCOL)_CHANGED|DELTA_CONCURRENT_|(Metadata|Protocol)ChangedException"
    r"|Concurrent\w*Exception"
)
"""Texts of Delta's errors when another commit came first."""
_AWAY: Final = re.compile(r"AccessDenied|Forbidden|SocketTimeout|ConnectException|UnknownHost")
"""Words of errors about the store, which say nothing about the table."""
_SESSIONS: Final = {
    "JavaPackage": "this Spark session has no Delta Lake, by which the ledger is made and read: "
    "start it with rocket_sink.build_session, or give spark-submit --packages "
    "io.delta:delta-spark_... of its Spark version",
    "DELTA_CONFIGURE_SPARK_SESSION": "this Spark session has Delta's jar without its settings: set "
    "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension and "
    "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog before it "
    "starts, or start it with rocket_sink.build_session",
    "stopped SparkContext": "this Spark session was stopped: begin a new one",
    "DELTA_VERSION_NOT_FOUND": "the table has no such version, or has it no more",
}
"""{part of an error's text: advice}, for sessions and versions that cannot be read."""
PROPERTIES: Final = {
    # Rows cannot be changed or deleted, except by `upkeep.rewrite`.
    "delta.appendOnly": "true",
    # Keep commits, and the files that they replaced, for readers that stop (`upkeep.growth`).
    "delta.logRetentionDuration": "interval 2 days",
    # Name replaced files in checkpoints for a shorter time, because the names make up the log.
    "delta.deletedFileRetentionDuration": "interval 6 hours",
    # Spark's Delta would write a checkpoint of all files each ten commits, and keep it as long.
    "delta.checkpointInterval": "100",
    "delta.dataSkippingStatsColumns": ",".join(STATS_COLUMNS),
}


class _Identity(NamedTuple):
    """Delta's id of a table, and the version of its ledger schema; None if it has no version."""

    ledger_id: str
    version: str | None


def open_direct(spark: SparkSession, place: LedgerPath) -> RustTable | None:
    """Open the table for reading by delta-rs; return None if Spark's Delta must read it. A client
    of Spark Connect gets None, because the client may be on another host than the driver."""
    return newest_for_readers(place) if is_classic(spark) else None


def open_for_commits(spark: SparkSession, place: LedgerPath) -> RustTable | None:
    """Open the table if this application commits by delta-rs; None if it commits by Spark's Delta.
    Raise LedgerError if the application commits by delta-rs, and the store cannot be read now; also
    for a local folder in which two commits could overwrite each other (`check_commits`)."""
    if not is_classic(spark):
        return None
    if place.is_local:
        check_commits(place)
        return open_table(place)
    return open_table(place, must=True) if _may_commit(spark, place) else None


def check_commits(place: LedgerPath) -> None:
    """Raise LedgerError if a local folder has no hard links, or cannot be written."""
    if place.is_local:
        with failing(f"cannot commit to the ledger {place}", place.uri):
            check_links(place.root)


def is_table(spark: SparkSession, place: LedgerPath) -> bool:
    """Return whether there is a Delta table, of any schema. Raise LedgerError if only Spark's Delta
    can tell, and the session does not have it."""
    if open_direct(spark, place) is not None:
        return True
    if is_classic(spark) and place.is_local:
        return has_commits(place)
    if is_classic(spark) and not has_delta(spark):
        if _may_commit(spark, place):
            return False
        raise LedgerError(no_delta(place), path=place.uri)
    with reading(place):
        return bool(_delta_table().isDeltaTable(spark, place.uri))


def ensure_table(spark: SparkSession, place: LedgerPath) -> str:
    """Make the table if it does not exist; return the ledger's id. Raise LedgerError as
    `check_table` does, and if the table cannot be made."""
    identity = _identity(spark, place) if is_table(spark, place) else None
    if identity is None or identity.version is None:
        identity = _make(spark, place)
    return _checked(place, identity)


def check_table(spark: SparkSession, place: LedgerPath) -> str:
    """Check that the table exists and has this schema version; return the ledger's id. Raise
    LedgerError, which says what to do, for no table, no ledger, or another version."""
    identity = _identity(spark, place)
    if identity.version is None and _has_our_columns(spark, place):
        # The table has no version yet: another process is between the two steps of `_make`.
        return identity.ledger_id
    return _checked(place, identity)


def _checked(place: LedgerPath, identity: _Identity) -> str:
    version = identity.version
    if version is None:
        raise LedgerError(
            f"the Delta table at {place} is not a ledger of rocket-sink; give another folder "
            "as ledger",
            path=place.uri,
        )
    if version != str(SCHEMA_VERSION):
        raise LedgerError(
            f"the ledger at {place} has schema version {version}, this rocket-sink knows "
            f"{SCHEMA_VERSION}: install the rocket-sink that wrote it, or begin a new ledger",
            path=place.uri, version=version,
        )  # fmt: skip
    return identity.ledger_id


def read_table(spark: SparkSession, place: LedgerPath, version: int | None = None) -> DataFrame:
    """Return all rows, of a version of the table or of the newest one. `check_table` may raise
    LedgerError."""
    check_encoding(spark, str(place))
    check_table(spark, place)
    table = open_direct(spark, place) if version is None else None
    if version is not None and not has_delta(spark):
        raise LedgerError(no_delta(place), path=place.uri)
    if table is not None:
        files = [name for names in data_files(place, table).values() for name in names]
        if not has_delta(spark):
            return _read_files(spark, place, files)
    with reading(place):
        reader = spark.read.format("delta")
        if version is not None:
            reader = reader.option("versionAsOf", version)
        rows = reader.load(place.uri)
        if table is None:
            check_named(place.uri, map(partial(_below, place.uri), rows.inputFiles()))
    return rows


def rows_of_epoch(
    spark: SparkSession, place: LedgerPath, kinds: Sequence[str], query_id: str, epoch: int,
    columns: Sequence[str], before: str = "",
) -> pa.Table:  # fmt: skip
    """Return columns of an epoch's rows. delta-rs reads them if it can open the table, because a
    Spark job takes a second or more. Raise LedgerError if there is no ledger, or if it cannot be
    read; the text of an unreadable ledger begins with `before`."""
    from pyarrow.dataset import field

    table = open_direct(spark, place)
    if table is not None:
        is_of_epoch = (field("query_id") == query_id) & (field("epoch") == epoch)
        return selected_rows(table, field("kind").isin(kinds) & is_of_epoch, columns, before)
    rows = read_table(spark, place)
    with reading(place, before):
        rows = rows.where((rows.query_id == query_id) & (rows.epoch == epoch))
        return rows.where(rows.kind.isin(*kinds)).select(*columns).toArrow()


def has_delta(spark: SparkSession) -> bool:
    """Return whether the session has Delta's extension, and therefore its jars."""
    return "DeltaSparkSessionExtension" in str(spark.conf.get("spark.sql.extensions", ""))


def no_delta(place: LedgerPath) -> str:
    """Return the error text for a session without Spark's Delta where only Spark's Delta works."""
    return (
        f"the ledger {place} needs Spark's Delta, which this session does not have: add the "
        "package io.delta:delta-spark and Delta's settings (spark.sql.extensions, "
        "spark.sql.catalog.spark_catalog); rocket_sink.build_session does"
    )


def _read_files(spark: SparkSession, place: LedgerPath, files: Sequence[str]) -> DataFrame:
    if not files:
        return spark.createDataFrame([], _spark_schema())
    reader = spark.read.schema(_spark_schema()).option("basePath", place.uri)
    rows = reader.parquet(*(f"{place.uri}/{file}" for file in files))
    return rows.select(*(column.name for column in COLUMNS))


def _below(uri: str, file: str) -> tuple[str, str]:
    """Return (path below the table's folder, kind) of a file in Spark's list of files."""
    (store, name), (own_store, root) = (_store_and_path(unquote(text)) for text in (file, uri))
    # If the ledger's URI has no host, ignore the default file system's host in Spark's paths.
    if not own_store or store == own_store:
        name = name.removeprefix(f"{root}/")
    return name, name.partition("/")[0].removeprefix("kind=")


def _store_and_path(uri: str) -> tuple[str, str]:
    match = re.fullmatch(r"[\w+.-]+:(?://([^/]*))?(/.*)", uri, re.DOTALL)
    return (match[1] or "", match[2]) if match else ("", uri)


def missing(place: LedgerPath) -> LedgerError:
    """Return the error for a ledger that does not exist."""
    return LedgerError(
        f"there is no ledger at {place}: no query has written to it yet (run one with "
        f"ledger={place}, or `rocket-sink ledger fold` if "
        "tasks have written to its spool), or the path is wrong",
        path=place.uri,
    )


def txn_app_id(query_id: str) -> str:
    """Return the `txnAppId` of a query's foreachBatch epochs; `txnVersion` is the epoch. The id
    contains the query id, which the checkpoint keeps. A new checkpoint counts epochs from 0 again.
    Under the old id Delta would skip these epochs, with their sends."""
    return f"rocket-sink/epochs/{query_id}"


def fold_app_id(ledger_id: str) -> str:
    """Return the `txnAppId` of a ledger's folds; `txnVersion` is the fold's number."""
    return f"rocket-sink/folds/{ledger_id}"


def last_txn_version(spark: SparkSession, place: LedgerPath, app_id: str) -> int | None:
    """Return the last committed `txnVersion` of an app id, or None. Raise LedgerError if the
    session is not a classic one, or if Delta is not on its class path."""
    table = open_direct(spark, place)
    if table is not None:
        return last_version(place, table, app_id)
    if not is_table(spark, place):
        return None
    with reading(place):
        version = _snapshot(spark, place).transactions().get(app_id)
        return int(version.get()) if version.isDefined() else None


def table_version(spark: SparkSession, place: LedgerPath) -> int:
    """Return Delta's newest version of the table."""
    table = open_direct(spark, place)
    if table is not None:
        return int(table.version())
    with reading(place):
        if is_classic(spark):
            return int(_snapshot(spark, place).version())
        return int(_delta_table().forPath(spark, place.uri).history(1).head()["version"])


def rows_of_commit(spark: SparkSession, place: LedgerPath, token: str, since: int) -> int | None:
    """Return the number of rows that the commit with this token has added after the version
    `since`; None if there is no such commit. Raise errors as `delta_rs.added_rows`.

    This process reads the log itself if it can, because Delta's history is a Spark job."""
    newest = table_version(spark, place)
    if newest < since:
        raise FileNotFoundError(f"the log ends before the version {since}")
    if is_classic(spark) and not place.problem:
        return added_rows(place, token, since, newest)
    if newest == since:
        return None
    with reading(place):
        history = _delta_table().forPath(spark, place.uri).history(newest - since).collect()
    metrics = next((row.operationMetrics for row in history if row.userMetadata == token), None)
    if metrics is None:
        if len(history) < newest - since:
            raise FileNotFoundError(f"the log no longer has the version {since + 1}")
        return None
    if "numOutputRows" not in metrics:
        raise uncounted(place)
    return int(metrics["numOutputRows"])


def check_not_ahead(
    spark: SparkSession, place: LedgerPath, query_id: str, first_epoch: int
) -> bool:
    """Raise CheckpointError, which says how to go on, if the ledger has epochs after `first_epoch`,
    the first epoch that the query will run. Return whether the ledger has `first_epoch` itself:
    then the driver died after the append, before Spark noted its end.

    Delta would skip those epochs and their sends without an error."""
    last = last_txn_version(spark, place, txn_app_id(query_id))
    if last is None or last <= first_epoch:
        return last == first_epoch
    raise CheckpointError(
        f"the ledger {place} holds epochs up to {last} of the query {query_id}, but its "
        f"checkpoint starts at epoch {first_epoch}: the checkpoint was restored or cut back. "
        f"Delta would skip the epochs {first_epoch} to {last}, and no row of them would be sent. "
        "Use the checkpoint that belongs to the ledger, or a new checkpoint folder (a new query "
        "id), which sends again whatever its source gives",
        query_id=query_id, ledger_epoch=last, checkpoint_epoch=first_epoch,
    )  # fmt: skip


def _make(spark: SparkSession, place: LedgerPath) -> _Identity:
    """Make the table if needed, set its schema version, and return its identity.

    Several queries may start on one ledger at once. Setting the version makes each append fail that
    runs meanwhile, although `write_batch` has already sent its messages. So only one process should
    set the version: it checks and sets it under a lock. Without the lock (not supported, or not
    free in time), Delta accepts one change, and the other processes read the table again."""
    # Import here, because the processes that plan and commit a stream make no table.
    from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random

    @retry(
        stop=stop_after_attempt(10), wait=wait_random(0, 0.5),
        retry=retry_if_exception(_is_conflict), reraise=True,
    )  # fmt: skip
    def make_once() -> _Identity:
        if not is_table(spark, place):
            _create(spark, place)
        identity = _identity(spark, place)
        if identity.version is None and _has_our_columns(spark, place):
            _set_version(spark, place)
            return identity._replace(version=str(SCHEMA_VERSION))
        return identity

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(LedgerError):
            stack.enter_context(ledger_lock(place, _MAKER_WAIT_S, name=_MAKER_LOCK))
        return make_once()


def _is_conflict(error: BaseException) -> bool:
    return _CONFLICT.search(str(error)) is not None


def _create(spark: SparkSession, place: LedgerPath) -> None:
    """Make the table, without a Spark job if delta-rs makes all commits. Else use an empty write
    and `_set_version`, because Spark's CREATE TABLE refuses a folder that contains a spool."""
    check_commits(place)
    if is_classic(spark) and (place.is_local or _may_commit(spark, place)):
        columns = [pa.field(c.name, c.arrow_type, metadata={"comment": c.comment}) for c in COLUMNS]
        version = {VERSION_PROPERTY: str(SCHEMA_VERSION)}
        is_created = create_table(place, pa.schema(columns), {**PROPERTIES, **version})
        if is_created or is_table(spark, place):
            return
    writer = spark.createDataFrame([], _spark_schema()).write.format("delta").mode("append")
    try:
        writer.options(**PROPERTIES).partitionBy("kind").save(place.uri)
    except Exception as error:
        if not _is_conflict(error) and not is_table(spark, place):
            raise LedgerError(
                f"cannot make the ledger table at {place}: {first_line(error)}. The session "
                "needs Delta's settings (spark.sql.extensions, spark.sql.catalog.spark_catalog); "
                "rocket_sink.build_session sets them",
                path=place.uri,
            ) from error


def _has_our_columns(spark: SparkSession, place: LedgerPath) -> bool:
    """Return whether the table has our columns. A table without a version is ours if it has them:
    the process that made the table was killed before it set the version."""
    with reading(place):
        columns = spark.read.format("delta").load(place.uri).columns
    return columns == [column.name for column in COLUMNS]


def _set_version(spark: SparkSession, place: LedgerPath) -> None:
    name = place.uri.replace("`", "``")
    setting = f"'{VERSION_PROPERTY}' = '{SCHEMA_VERSION}'"
    spark.sql(f"ALTER TABLE delta.`{name}` SET TBLPROPERTIES ({setting})")


def _spark_schema() -> StructType:
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructType

    schema = StructType()
    for c in COLUMNS:
        schema.add(c.name, from_arrow_type(c.arrow_type), metadata={"comment": c.comment})
    return schema


def _identity(spark: SparkSession, place: LedgerPath) -> _Identity:
    table = open_direct(spark, place)
    if table is not None:
        table_metadata = table.metadata()
        return _Identity(str(table_metadata.id), table_metadata.configuration.get(VERSION_PROPERTY))
    if not is_table(spark, place):
        raise missing(place)
    with reading(place):
        if is_classic(spark):
            metadata = _snapshot(spark, place).metadata()
            version = metadata.configuration().get(VERSION_PROPERTY)
            return _Identity(
                str(metadata.id()), str(version.get()) if version.isDefined() else None
            )
        row = _delta_table().forPath(spark, place.uri).detail().select("id", "properties").head()
        return _Identity(str(row["id"]), row["properties"].get(VERSION_PROPERTY))


def _snapshot(spark: SparkSession, place: LedgerPath) -> Any:
    """Return Delta's newest snapshot, because no public Python API tells a table's transactions."""
    if not is_classic(spark):
        raise LedgerError(
            "a Spark Connect session cannot ask Delta for its transactions; run this with a "
            "classic session (spark-submit, or rocket_sink.build_session)"
        )
    log = spark._jvm.org.apache.spark.sql.delta.DeltaLog  # type: ignore[union-attr]
    return log.forTableWithSnapshot(spark._jsparkSession, place.uri)._2()


def _delta_table() -> Any:
    try:
        from delta.tables import DeltaTable
    except ImportError as error:
        raise LedgerError(
            "the package delta-spark is missing: the ledger is a Delta table"
        ) from error
    return DeltaTable


@contextlib.contextmanager
def reading(place: LedgerPath, before: str = "") -> Iterator[None]:
    """Turn errors of a read by Spark's Delta into a LedgerError; its text begins with `before`."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException, TypeError) as error:
        wrong = next((words for sign, words in _SESSIONS.items() if sign in str(error)), None)
        if wrong is not None:
            raise LedgerError(f"{before}{wrong} (ledger {place})", path=place.uri) from error
        if isinstance(error, TypeError):
            raise
        line = first_line(error)
        if _AWAY.search(line):
            raise LedgerError(
                f"{before}the store of the ledger {place} cannot be asked now: {line}. The store "
                "denies access or cannot be reached; the ledger may be sound. Try again later",
                path=place.uri,
            ) from error
        raise damaged(place, line, before=before) from error


@contextlib.contextmanager
def task_errors(place: LedgerPath) -> Iterator[None]:
    """Raise the `LedgerError` that failed a task. Spark's own error does not tell the reason."""
    try:
        yield
    except Exception as error:
        name, _, text = first_line(error).partition(": ")
        if name != LedgerError.__name__:
            raise
        raise LedgerError(text, path=place.uri) from error


_proved: set[tuple[str, LedgerToken]] = set()
"""(application, token) pairs whose executors have found the token in the ledger's folder. A ledger
that was deleted and made anew has another token."""
_allowed: dict[tuple[str, LedgerPath], bool] = {}
"""{(application, ledger on a store): whether delta-rs commits}. It holds as long as the application
runs: after a change, Spark's Delta could overwrite commits of delta-rs."""
_not_before_s: dict[tuple[str, LedgerPath], float] = {}
"""{(application, ledger): time of the next attempt to reach the store by pyarrow}."""
_LOOK_AGAIN_S: Final = 300.0
_deciding = ForkLock()
"""Lock for `_allowed`, because several queries of a driver may begin at the same time."""


def ledger_token(place: LedgerPath, *, spools: bool) -> LedgerToken:
    """Return the ledger's token; make one if there is none. Call this on the driver's host. Raise
    LedgerError if the folder cannot be read or written here, or has no hard links."""
    try:
        if place.is_local:
            check_links(place.root)
        names = token_names(place)
        if not names:
            _refuse_foreign(place)
            names = [uuid.uuid4().hex]
            NoteStore(place, TOKENS).write(names[0], "rocket-sink")
        return LedgerToken(place.uri, min(names), spools, place.storage)
    except OSError as error:
        raise LedgerError(
            f"the driver, in {worker_and_user()}, cannot read and write "
            f"the ledger {place}: {error}. Nothing was sent; {place.remedy}",
            path=place.uri,
        ) from error


def _refuse_foreign(place: LedgerPath) -> None:
    """Raise LedgerError before the first write if the folder is another Delta table. delta-rs makes
    the check, because there may be no Spark session."""
    table = open_any(place)
    if table is None or VERSION_PROPERTY in (metadata := table.metadata()).configuration:
        return
    if [field.name for field in table.schema().fields] != [column.name for column in COLUMNS]:
        _checked(place, _Identity(str(metadata.id), None))


def executors_token(spark: SparkSession, place: LedgerPath) -> LedgerToken | None:
    """Return the token for executors that write data files; None if executors write no data files.
    An executor might write to a disk of its own. The table would then name files that nobody else
    sees, and the fold would delete their rows from the spool."""
    if not has_executors(spark) or not (place.is_local or _may_commit(spark, place)):
        return None
    return ledger_token(place, spools=False)


def prove_executors(spark: SparkSession, place: LedgerPath) -> None:
    """Let executors check the folder, once per application and ledger, before tasks read or write
    it.

    On an executor without the folder Spark's tasks would only report a missing file. Executors that
    start later check the folder in their tasks. Raise LedgerError, which says what to change, if an
    executor has another folder, or cannot write."""
    token = executors_token(spark, place)
    if token is not None:
        _prove(spark, place, token)


def _prove(spark: SparkSession, place: LedgerPath, token: LedgerToken) -> None:
    context = spark.sparkContext
    key = (str(context.applicationId), token)
    if key in _proved:
        return
    tasks = max(2, context.defaultParallelism)
    with task_errors(place):
        context.parallelize(range(tasks), tasks).foreachPartition(lambda _: token.check())
    _proved.add(key)


def _may_commit(spark: SparkSession, place: LedgerPath) -> bool:
    """Return whether delta-rs may commit to a table on a store: the store must refuse to overwrite
    an object. The answer is kept for the application. If pyarrow or delta-rs does not reach the
    store, return False and ask again after `_LOOK_AGAIN_S`. Raise LedgerError if the store cannot
    be asked."""
    key = (str(spark.sparkContext.applicationId), place)
    with _deciding:
        if key not in _allowed and time.monotonic() >= _not_before_s.get(key, 0.0):
            is_exclusive = store_refuses(spark, place)
            if not is_exclusive or _is_reached(spark, place):
                _allowed[key] = is_exclusive
            else:
                _not_before_s[key] = time.monotonic() + _LOOK_AGAIN_S
        return _allowed.get(key, False)


def _is_reached(spark: SparkSession, place: LedgerPath) -> bool:
    try:
        token = ledger_token(place, spools=False)
        token.check()
        if has_executors(spark):
            _prove(spark, place, token)
        try_commit(place)
    except LedgerError as error:
        _LOG.warning("Spark's Delta commits to the ledger %s: %s", place, error)
        return False
    return True


def has_executors(spark: SparkSession) -> bool:
    """Return whether tasks run outside the driver's process. With a local master they do not."""
    return is_classic(spark) and str(spark.sparkContext.master).partition("[")[0] != "local"
