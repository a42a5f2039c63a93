"""Checks that the driver makes for a write: its session, its ledger, its error budget.

The driver refuses session settings that break a sink's promises, and warns of settings that weaken
them. Tasks get the token of the ledger's folder (`ledger.token`), and look for it before they send.

The driver checks an epoch's error budget (`maxEpochFailures`) after its tasks. If more failed, the
write fails, but messages stay sent and dead letters stay in the ledger. After a restart, the data
source runs the epoch again; foreachBatch goes on with the next epoch: the ledger has this one.
foreach runs nothing on the driver then, so it has no such budget."""

from __future__ import annotations

import contextlib
import functools
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from rocket_sink.errors import (
    ColumnError,
    ConfigurationError,
    DeliveryError,
    LedgerError,
    NameServerUnavailableError,
    OptionError,
    PermissionDeniedError,
    RocketSinkError,
    SendError,
    TlsRefusedError,
)
from rocket_sink.ledger.append.named import located
from rocket_sink.ledger.append.table import (
    ensure_table,
    has_executors,
    ledger_token,
    rows_of_epoch,
)
from rocket_sink.ledger.epoch_starts import last_begun, unrecorded_epoch
from rocket_sink.ledger.path import (
    LedgerPath,
    check_encoding,
    first_line,
    path_part,
    resolve_path,
)
from rocket_sink.ledger.schema import EPOCH
from rocket_sink.ledger.storage import active_session, is_classic
from rocket_sink.ledger.token import LedgerToken, may_hand_over
from rocket_sink.net import log
from rocket_sink.options import SinkOptions, constructor_options
from rocket_sink.producer.engine.limits import is_limited
from rocket_sink.rows.contract import ColumnPlan, resolve_columns
from rocket_sink.spark.context import PENDING, PLAN, UNRECORDED
from rocket_sink.spark.plans import input_folders, plan_digest, schema_of
from rocket_sink.spark.session import PUSHDOWN
from rocket_sink.task.totals import exceeds

_LOG: Final = log.logger(__name__)
FORMAT: Final = "rocketmq"
_BATCH_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_ASK_AGAIN_S: Final = 60.0
CONTINUOUS: Final = (
    "trigger(continuous=...) does not work with rocket-sink, since Spark hands no rows to Python "
    "there, and nothing is sent. Use trigger(processingTime=...) or trigger(availableNow=True)"
)
_OTHER_LEDGER: Final = (
    "the checkpoint shows that epoch %s was begun before, but the ledger %s has no record of that "
    "run, or none of the epoch before: that run used another ledger, appId, lane or ledgerVia, or "
    "failed before it came to the sink; the ledger was restored from a backup; the epoch before "
    "had no rows; or the checkpoint is a copy without the file `metadata`, which the ledger "
    "refuses if a query has an appId from its first start on. The rows of the epoch count as "
    "possible duplicates"
)
_UPDATE: Final = (
    'Spark gives a Python data source no rows in outputMode("update"), and nothing is sent. Use '
    "foreach(sink) or foreachBatch(sink.write_batch), which take that mode"
)


def check_session(options: SinkOptions, session: SparkSession | None = None) -> None:
    """Warn once of settings that weaken the sink's promises. Raise a ConfigurationError if
    spark.speculation is on without `allowSpeculation`, if the session was stopped, or if its Java
    cannot use the ledger's path."""
    session = session or active_session()
    if session is None:
        return
    if is_classic(session) and getattr(session.sparkContext, "_jsc", session) is None:
        raise ConfigurationError(
            "the Spark session of this frame was stopped: begin a new session, and make the frame "
            "again with it"
        )
    check_encoding(session, options.ledger)
    warn_of_settings(session)
    refuse_speculation(options, is_on=speculates(session))


def check_rights(options: SinkOptions) -> None:
    """Raise a ConfigurationError if `delivery` cannot work: this user may not look messages up, or
    there is a proxy, behind which nobody can. A repeated epoch of effectively_once would fail for
    ever. If no broker answers, the first send reports it. Check every `_ASK_AGAIN_S` only."""
    if options.delivery == "at_least_once":
        return
    # Import here: most processes that plan or commit an epoch do not get here.
    from rocket_sink.producer.admin.admin import Admin, proxy_error
    from rocket_sink.producer.engine.shared_state import local_directory

    # Keep the time in a file: Spark plans each epoch of a data source in a new process, and a
    # frozen broker would delay each epoch by the time-out.
    stamp = None
    with contextlib.suppress(OSError):
        stamp = local_directory() / f"rocket-sink-{options.digest[:24]}.asked"
        if stamp.exists() and time.time() - stamp.stat().st_mtime < _ASK_AGAIN_S:
            return
    try:
        with Admin(options, timeout_s=2.0) as admin:
            if proxy := admin.proxy():
                raise proxy_error(options.delivery, proxy)
            if options.delivery == "effectively_once" and options.access_key and options.topic:
                admin.query_by_unique_key(options.topic, "-", max_messages=1)
    except PermissionDeniedError as error:
        raise ConfigurationError(
            f"delivery=effectively_once looks messages of the topic {options.topic!r} up by their "
            f"ids, which this user may not: {error}"
        ) from error
    except ConfigurationError:
        raise
    except RocketSinkError as error:
        _LOG.info("cannot tell whether the user may look messages up: %s", error)
    if stamp is not None:
        with contextlib.suppress(OSError):
            stamp.touch(0o600)


_reached: Final[set[str]] = set()
"""Digests of the options whose name servers have answered this process."""
_PAUSES_S: Final = (1.0, 2.0)
"""Pauses between tries: the name servers may be starting."""


def check_reachable(options: SinkOptions, session: SparkSession | None) -> None:
    """Raise a NameServerUnavailableError or TlsRefusedError if no name server answers; otherwise
    tasks would wait for minutes and fail with long traces. If the driver gets no answer, an
    executor tries, because only executors have to reach the name server.

    Workers warn of a missing topic when they send to it. If their logs are on other hosts, warn of
    it here, too."""
    if not is_classic(session) or options.digest in _reached:
        return
    assert session is not None
    answer = name_server_answer(options)
    if has_executors(session):
        if isinstance(answer, SendError):
            answer = session.sparkContext.parallelize([options], 1).map(name_server_answer).first()
        if isinstance(answer, str) and answer:
            _LOG.warning("%s", answer)
    if isinstance(answer, SendError):
        raise answer
    _reached.add(options.digest)


def name_server_answer(options: SinkOptions) -> SendError | str:
    """Return an error if no name server answers here in some seconds, else the warning of a missing
    topic; it is empty if the topic exists."""
    from rocket_sink.producer.admin.admin import Admin

    for pause_s in (*_PAUSES_S, None):
        try:
            with Admin(options, timeout_s=2.0) as admin:
                return admin.check_name_servers()
        except (NameServerUnavailableError, TlsRefusedError) as error:
            if pause_s is None:
                return error.with_traceback(None)
            time.sleep(pause_s)
    raise AssertionError


def speculates(session: Any) -> bool:
    """Return whether spark.speculation is on in the session's application."""
    return setting(session, "spark.speculation").lower() == "true"


def pushes_filters(session: Any) -> bool:
    """Return whether the session passes the filters of queries to data sources in Python."""
    return setting(session, PUSHDOWN).lower() == "true"


def refuse_speculation(options: SinkOptions, *, is_on: bool) -> None:
    """Raise a ConfigurationError if spark.speculation is on, and `allowSpeculation` is not."""
    if is_on and not options.allow_speculation:
        raise ConfigurationError(
            "spark.speculation is on: Spark runs a second copy of a slow task, and both copies "
            "send their rows. Set spark.speculation=false, or accept doubled messages with "
            "allowSpeculation=true"
        )


def refuse_query(
    session: Any, query_id: str, ledgers: Iterable[str], *, is_late: bool = False
) -> tuple[SinkOptions, str, Any] | None:
    """Make a query fail before its first epoch if it would lose rows or read its own files, if its
    columns do not fit, or if no name server answers. `ledgers` are URIs of the session's ledgers.
    `is_late`: the query may have begun an epoch already.

    Return the options, the lane (`datasource` or `foreach`) and the plan of a query that may run.
    Return None for a failed query, for foreachBatch, for hidden or illegal options, and without the
    sink. Under a continuous trigger Spark commits epochs whose rows nobody has sent: it calls no
    `write` of a Python data source, and Python's foreach fails in a thread that nobody watches."""
    running = session._jsparkSession.streams().get(query_id)
    query = running.streamingQuery() if running is not None else None
    if query is None:
        return None
    sink = query.sink()
    kind = sink.getClass().getSimpleName()
    foreach = _foreach_sink(sink.writer()) if kind == "ForeachWriterTable" else None
    is_source = kind == "PythonTable" and sink.name() == FORMAT
    if not (foreach or is_source or kind == "ForeachBatchSink"):
        return None
    _refuse_objects(session)
    lane = "datasource" if is_source else "foreach"
    options = _source_options(query) if is_source else foreach.options if foreach else None
    # Spark hides these methods. If a version lacks them, tasks compare less.
    with contextlib.suppress(Exception):
        settings = query.sparkSessionForStream().conf()
        _tell_tasks(query, settings, is_late=is_late)
        if options is not None:
            run_id, pending = query.runId().toString(), settings.get(PENDING, "")
            settings.set(UNRECORDED, unrecorded_by(options, session, query_id, run_id, pending))
    # A foreach sink shows its ledger. Another query may write to any ledger of the session.
    own = [foreach.options.ledger] if foreach is not None else ledgers
    files = [("ledger", ledger) for ledger in ledgers if ledger in own]
    files.append(("checkpoint", query.resolvedCheckpointRoot()))
    plan = query.analyzedPlan()
    reason = _own_input(plan, files)
    if foreach is not None and foreach.plan is None:
        reason = reason or _wrong_columns(plan, foreach.options)
    if query.getClass().getSimpleName() == "ContinuousExecution":
        reason = CONTINUOUS
    if is_source and query.outputMode().toString() == "Update":
        reason = _UPDATE
    if options is not None and not reason:
        with contextlib.suppress(ColumnError):  # the lane itself refuses wrong columns
            reason = _chance(options, resolve_columns(schema_of(plan), options), plan)
    if options is not None and not reason:
        try:
            check_reachable(options, session)
        except SendError as error:
            reason = str(error)
    if not reason:
        return (options, lane, plan) if options is not None else None
    if kind == "ForeachBatchSink":
        # Spark hides the query's function, which may not be ours: let `write_batch` raise.
        refused_runs[query.runId().toString()] = reason
        return None
    _LOG.error("the query %s is ended: %s", query_id, reason)
    # Cancel the jobs to let the query fail: `stop` would end it as if it had succeeded.
    jobs = session.sparkContext._jsc.sc()
    jobs.cancelJobGroupAndFutureJobs(query.runId().toString(), reason)
    return None


def refuse_chance(options: SinkOptions, columns: ColumnPlan, plan: Any) -> None:
    """Raise a ConfigurationError if the ids of effectively once would depend on chance: the plan
    computes something anew in each run, and rows have no `message_id`."""
    if reason := _chance(options, columns, plan):
        raise ConfigurationError(reason)


def _chance(options: SinkOptions, columns: ColumnPlan, plan: Any) -> str:
    """Return an error text if a replay would give the rows other ids (`refuse_chance`)."""
    is_known = options.delivery != "effectively_once" or columns.source("message_id") is not None
    if is_known or plan.deterministic():
        return ""
    return (
        "delivery=effectively_once knows a row again by its content, but this query computes it "
        "anew in each run: uuid(), rand(), monotonically_increasing_id(), or a Python function "
        "that is marked nondeterministic. After a crash all rows of the epoch would be sent again. "
        "Compute such values before, or give each row a message_id that comes from the source"
    )


def _tell_tasks(query: Any, settings: Any, *, is_late: bool) -> None:
    """Let the tasks of a query that starts know its plan, and which epoch an earlier run has begun
    and not ended: Spark sends the settings of the query's own session with each job."""
    settings.set(PLAN, plan_digest(query.analyzedPlan()))
    logs = [each.getLatest() for each in (query.offsetLog(), query.commitLog())]
    last_begun, last_ended = (entry.get()._1() if entry.isDefined() else -1 for entry in logs)
    # The pending epoch of a query that runs already may be its own.
    if last_begun > last_ended and not is_late:
        settings.set(PENDING, str(last_begun))


def unrecorded_by(
    options: SinkOptions, session: Any, query_id: str, run_id: str, pending: str, lane: str = ""
) -> str:
    """Note the start of a run of a streaming query in its ledger. If an earlier run has begun the
    `pending` epoch, and the ledger has no record of that run, warn and return that epoch.

    Another `appId` gives the query's rows other ids, and other names in the ledger. A killed epoch
    of foreachBatch or `ledgerVia=spark` leaves records that only these two look at. So a query that
    got another appId, lane or `ledgerVia` starts anew here, also if it had it before. A ledger that
    was restored from a backup lacks the epochs that have ended since.

    `lane` is "foreachBatch", or empty for the other lanes, which leave records in one way."""
    if not options.ledger:
        return ""
    place = resolve_path(options.ledger)
    way = f"{options.app_id}~{lane or options.ledger_via}"
    epoch = unrecorded_epoch(place, query_id, run_id, way, pending)
    query = options.app_id or query_id
    has_earlier = pending not in ("", "0") and epoch != pending
    if has_earlier and _lacks(session, place, query, int(pending) - 1, lane):
        epoch = pending
    if pending and epoch == pending:
        _LOG.warning(_OTHER_LEDGER, epoch, options.ledger)
    return epoch


def _lacks(session: Any, place: LedgerPath, query: str, epoch: int, lane: str) -> bool:
    """Return whether the ledger lacks an epoch that has ended; True if it cannot be read."""
    try:
        if lane:
            return last_begun(place, query) < epoch
        # Import here: this imports pyarrow.fs, and processes that only plan import this module.
        from rocket_sink.ledger.transport.files import spooled_epochs

        # Look into the spool first, because a fold moves its rows into the table.
        if (path_part(query), str(epoch)) in spooled_epochs(place):
            return False
        return not rows_of_epoch(session, place, (EPOCH,), query, epoch, ("epoch",)).num_rows
    except (LedgerError, OSError):
        return True


def _source_options(query: Any) -> SinkOptions | None:
    """Return the options of a query with `format("rocketmq")`; None if Spark hides them, or if they
    are illegal, of which the query itself raises the error."""
    try:
        field = query.getClass().getDeclaredField("extraOptions")
        field.setAccessible(True)
        pairs, options = field.get(query).iterator(), {}
        while pairs.hasNext():
            pair = pairs.next()
            options[pair._1()] = pair._2()
        return read_options(options)
    except Exception:
        return None


def read_options(given: Mapping[str, str]) -> SinkOptions:
    """Return the sink's options, parsed from all options that Spark passes."""
    return on_driver(constructor_options(None, own_options(given)))


def on_driver(options: SinkOptions) -> SinkOptions:
    """Check name servers' addresses; make the ledger's path absolute, because workers' folders
    differ. If the ledger is a table's name, look its location up; make a missing table."""
    _ = options.name_servers
    if not options.ledger:
        return options
    return options.with_(ledger=resolve_path(located(options.ledger, makes=True)).uri)


def own_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options without Spark's own ones."""
    return {name: value for name, value in given.items() if name.lower() not in _SPARKS_OWN}


_SPARKS_OWN: Final = frozenset({"checkpointlocation", "path", "queryname", "outputmode"})


refused_runs: Final[dict[str, str]] = {}
"""The runs of foreachBatch queries that must send nothing: {run id: reason}. A later run of the
query may be sound."""


class _ForeachSink(NamedTuple):
    options: SinkOptions
    plan: ColumnPlan | None
    """The plan of a sink that `RocketSink.stream` made."""


_foreach_sinks: Final[dict[str, _ForeachSink]] = {}
"""The sinks that were pickled for `foreach`, by a mark in the pickled function."""


def note_sink(options: SinkOptions, plan: ColumnPlan | None) -> str:
    """Remember a sink, and return the random mark to be pickled with it."""
    mark = uuid.uuid4().hex
    _foreach_sinks[mark] = _ForeachSink(options, plan)
    return mark


def _foreach_sink(writer: Any) -> _ForeachSink | None:
    """Return the sink of a foreach query; None if the query calls another function."""
    if not _foreach_sinks or writer.getClass().getSimpleName() != "PythonForeachWriter":
        return None
    try:
        fields = {f.getType().getSimpleName(): f for f in writer.getClass().getDeclaredFields()}
        fields["PythonFunction"].setAccessible(True)
        numbers = fields["PythonFunction"].get(writer).command().mkString(",")
    except Exception:
        # This Spark keeps the function elsewhere. Assume that the query uses the sink: to fail a
        # foreign query is better than to lose rows silently.
        return next(iter(_foreach_sinks.values()))
    marks = (mark for mark in _foreach_sinks if ",".join(map(str, mark.encode())) in numbers)
    return next((_foreach_sinks[mark] for mark in marks), None)


def _wrong_columns(plan: Any, options: SinkOptions) -> str:
    """Return an error text if a foreach query's columns do not fit the row contract. Tasks cannot
    check all of it: they see values, and a TIMESTAMP_NTZ value looks like a TIMESTAMP."""
    try:
        resolve_columns(schema_of(plan), options)
    except ColumnError as error:
        return error.text
    return ""


def _refuse_objects(session: Any) -> None:
    """Make `foreachBatch(sink)` raise an error that says what to write instead. A `RocketSink`
    cannot be callable: in `foreach(sink)` Spark would call it for each row."""
    with contextlib.suppress(AttributeError):  # another py4j may keep functions elsewhere
        for proxy in list(session.sparkContext._gateway.gateway_property.pool.dict.values()):
            function = getattr(proxy, "func", None)
            if hasattr(function, "write_batch") and not callable(function):
                proxy.func = _refuse_object


def _refuse_object(*_: Any) -> None:
    raise ConfigurationError(
        "foreachBatch takes a function, and a RocketSink is none: write "
        "foreachBatch(sink.write_batch), or foreach(sink)"
    )


def refuse_own_input(df: DataFrame, ledger: str) -> None:
    """Raise a ConfigurationError if the frame reads a folder that contains the ledger."""
    if ledger and is_classic(df.sparkSession):
        reason = _own_input(df._jdf.queryExecution().analyzed(), [("ledger", ledger)])
        if reason:
            raise ConfigurationError(reason)


def _own_input(plan: Any, files: Iterable[tuple[str, str]]) -> str:
    """Return an error text if the plan reads a folder with one of `files` (name, path), else ""."""
    for folder in input_folders(plan):
        for name, path in files:
            if _reads(_parts(folder), _parts(path)):
                return (
                    f"the {name} {path} is inside {folder}, which this query reads: its files "
                    f"would be sent as rows. Put the {name} into another folder"
                )
    return ""


def _reads(pattern: Sequence[str], place: Sequence[str]) -> bool:
    """Return whether an input folder, or a pattern of folders, includes the folder `place` (parts
    of paths). Spark skips names that begin with `_` or `.`, except partitions (`_a=1`)."""
    below = place[len(pattern) :]
    is_hidden = any(part.startswith(("_", ".")) and "=" not in part for part in below)
    is_inside = len(pattern) <= len(place) and all(map(fnmatchcase, place, pattern))
    return is_inside and not is_hidden


def _parts(path: str) -> tuple[str, ...]:
    path = re.sub("^file:/+", "/", path)
    return PurePosixPath(path if ":/" in path else Path(path).absolute()).parts


def warn_of_settings(session: Any) -> None:
    """Warn once of each harmful setting."""
    for file in setting(session, "spark.submit.pyFiles").split(","):
        if file.endswith(".whl") and "rocket_sink" in file:
            _warn_once(
                "--py-files %s: Spark copies a .whl to the workers, but puts only .zip, .egg and "
                ".py on their path. Give a copy of it under the name rocket_sink.zip", file,
            )  # fmt: skip
    for prefix in ("spark.python.worker", "spark.sql.execution.pyspark.udf"):
        seconds = setting(session, f"{prefix}.idleTimeoutSeconds")
        kills = setting(session, f"{prefix}.killOnIdleTimeout").lower() == "true"
        if kills and seconds not in ("", "0"):
            _warn_once(
                "%s.killOnIdleTimeout is on, with idleTimeoutSeconds=%s: Spark kills a worker that "
                "hands nothing back for that long, also while it waits for a broker. Its rows are "
                "sent again, and may be there twice. Set %s.killOnIdleTimeout=false",
                prefix, seconds, prefix,
            )  # fmt: skip
    rows = setting(session, _BATCH_ROWS)
    if rows.startswith("-") or rows == "0":
        _warn_once(
            "%s=%s makes one Arrow batch of a whole partition, which must fit into the memory of "
            "the worker. Set it to 10000, as by default", _BATCH_ROWS, rows,
        )  # fmt: skip


@functools.cache
def _warn_once(text: str, *facts: str) -> None:
    _LOG.warning(text, *facts)


def setting(session: Any, name: str) -> str:
    """Return a setting of the session or its application; empty if it is not set."""
    try:
        if is_classic(session):
            # Ask the application first. `getOrCreate` also writes settings into the session that
            # have no effect in a running application, such as spark.speculation.
            value = session.sparkContext.getConf().get(name)
            if value is not None:
                return str(value)
        # The default is None, not "": a Connect server refuses a default of the wrong type.
        return str(session.conf.get(name, None) or "")
    except Exception:
        # A Connect server hides some settings; treat them as not set.
        return ""


def session_setting(session: Any, name: str) -> str:
    """Return the session's own value of a SQL setting, which may differ from its application's."""
    with contextlib.suppress(Exception):
        return str(session.conf.get(name))
    return setting(session, name)


def with_task_rate(
    options: SinkOptions, session: Any = None, *, slots: int | None = None, tasks: int | None = None
) -> SinkOptions:
    """Return the options with `rateTasks` set if a rate limit needs it; call this on the driver.
    Raise an OptionError if a rate limit has no `rateTasks` and the number of slots is unknown.

    Args:
        slots: number of task slots; None: count those of the session.
        tasks: number of the write's tasks, if it is known.
    """
    if not is_limited(options) or options.rate_tasks:
        return options
    slots = task_slots(session or active_session()) if slots is None else slots
    if not slots:
        raise OptionError(
            "options maxMessagesPerSecond and maxBytesPerSecond are divided over the tasks that "
            "run at once, and Spark's task slots cannot be seen from here: set rateTasks to their "
            "number",
            option="rateTasks",
        )
    return options.with_(rateTasks=min(slots, max(1, tasks)) if tasks is not None else slots)


def task_slots(session: Any) -> int:
    """Return how many tasks the session's application runs at once; 0 if Connect hides it."""
    if not is_classic(session):
        return 0
    context = session.sparkContext
    scala = context._jsc.sc()
    try:
        profile = scala.resourceProfileManager().defaultResourceProfile()
        slots = int(scala.maxNumConcurrentTasks(profile))
    except Exception:
        # The method is not public; if it is missing, use the closest public number.
        slots = 0
    return max(1, slots or context.defaultParallelism)


def refuse_budget(options: SinkOptions) -> None:
    """Raise a ConfigurationError if an epoch's budget is set, which foreach cannot keep."""
    if options.max_epoch_failures:
        raise ConfigurationError(
            "maxEpochFailures needs a step on the driver after each epoch, which foreach does not "
            'have: use foreachBatch(sink.write_batch) or format("rocketmq"), or the budget per '
            "task (maxFailures)"
        )


def refuse_batch_id(options: SinkOptions) -> None:
    """Raise a ConfigurationError if a stream is to be sent under the id of a batch write."""
    if options.batch_id:
        raise ConfigurationError(
            "batchId names one batch write, and this is a stream, whose epochs the checkpoint "
            "names: leave batchId out"
        )


def check_budget(options: SinkOptions, counts: Mapping[str, Any], epoch: int | None = None) -> None:
    if (error := over_budget(options, counts, epoch)) is not None:
        raise error


def over_budget(
    options: SinkOptions, counts: Mapping[str, Any], epoch: int | None = None
) -> DeliveryError | None:
    """Return an error if more rows of the epoch (None: batch write) failed than is
    allowed. `counts` has the tasks' sums of rows_in, dead and unknown, and the first_error."""
    given_up, rows_in = counts["dead"] + counts["unknown"], counts["rows_in"]
    budget = options.max_epoch_failures
    if not exceeds(given_up, budget, rows_in):
        return None
    where, advice = f" of epoch {epoch}", ""
    if epoch is None:
        where, advice = "", ": backfill them; another write would send the stored rows again"
        if options.delivery == "effectively_once" and (options.batch_id or options.app_id):
            name = "batchId" if options.batch_id else "appId"
            advice = f"; another write under the same {name} sends only rows that are not stored"
    return DeliveryError(
        f"{given_up} of {rows_in} rows{where} could not be sent, more than "
        f"maxEpochFailures={budget} allows: {counts['first_error']}. They are dead letters in "
        f"the ledger{advice}",
        counts={name: counts[name] for name in ("rows_in", "dead", "unknown")},
        first_error=counts["first_error"],
    )


def spool_token(options: SinkOptions, session: SparkSession | None = None) -> LedgerToken | None:
    """Return the token for tasks of foreach, which write spool files; None if they write no files.
    Raise a LedgerError if the driver cannot write files to the ledger's folder. A Spark Connect
    client may be on any host, so its own view of the folder proves nothing. For such a client the
    server makes the table, and tasks check that the table exists."""
    if not options.ledger or options.ledger_via == "spark":
        return None
    place = resolve_path(options.ledger)
    session = session or active_session()
    if session is None or is_classic(session):
        return ledger_token(place, spools=True)
    try:
        ensure_table(session, place)
    except Exception as error:
        # A session elsewhere may still fold the tasks' spool files into the table, so only warn.
        _LOG.warning(
            "the server cannot make the table of the ledger %s (%s): it is not proved that the "
            "workers share its folder with the driver", place, first_line(error),
        )  # fmt: skip
        return None
    return LedgerToken(place.uri, "", spools=True)


def without_files(options: SinkOptions) -> SinkOptions:
    """Return the options for foreach and the data source. If pyarrow cannot reach the ledger from
    the driver, for example in a store that only Spark knows, set `ledgerVia=spark`."""
    if may_hand_over(options) and resolve_path(options.ledger).problem:
        return options.with_(ledgerVia="spark")
    return options


def append_token(options: SinkOptions, place: LedgerPath, *, on_driver: bool) -> LedgerToken | None:
    """Return the token for tasks of foreachBatch and batch writes, whose rows Spark itself appends;
    None in an object store, to which Spark proves its access by making the table, unless an option
    needs files beside the table. Raise a LedgerError if pyarrow cannot write such files.
    `on_driver`: this process is on the driver's host; a Connect client may be elsewhere."""
    needed = options.using_ledger_files
    if place.problem and needed:
        raise LedgerError(
            f"{', '.join(needed)}: small files beside the table are needed, and cannot be written. "
            f"{place.problem}",
            path=place.uri,
        )
    if not place.is_local and not needed:
        return None
    if on_driver:
        return ledger_token(place, spools=False)
    return LedgerToken(place.uri, "", spools=False)
