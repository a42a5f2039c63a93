"""The start of a streaming query's run, as Spark shows it to the session's listener: queries that
would lose rows are refused, the ledger notes the start, and tasks are told of an earlier run."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from rocket_sink.errors import ColumnError, ConfigurationError, LedgerError, SendError
from rocket_sink.ledger.append.table import rows_of_epoch
from rocket_sink.ledger.epoch_starts import last_begun, unrecorded_epoch
from rocket_sink.ledger.path import LedgerPath, path_part, resolve_path
from rocket_sink.ledger.schema import EPOCH
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import ColumnPlan, resolve_columns
from rocket_sink.spark.checks.context import PENDING, PLAN, UNRECORDED
from rocket_sink.spark.checks.driver_options import read_options
from rocket_sink.spark.checks.own_input import own_input_error
from rocket_sink.spark.checks.plans import plan_digest, schema_of
from rocket_sink.spark.checks.reach import check_reachable

_LOG: Final = log.logger(__name__)
FORMAT: Final = "rocketmq"
CONTINUOUS: Final = (
    "trigger(continuous=...) does not work with rocket-sink, since Spark hands no rows to Python "
    "there, and nothing is sent. Use trigger(processingTime=...) or trigger(availableNow=True)"
)
_UPDATE: Final = (
    'Spark gives a Python data source no rows in outputMode("update"), and nothing is sent. Use '
    "foreach(sink) or foreachBatch(sink.write_batch), which take that mode"
)
_OTHER_LEDGER: Final = (
    "the checkpoint shows that epoch %s was begun before, but the ledger %s has no record of that "
    "run, or none of the epoch before: that run used another ledger, appId, lane or ledgerVia, or "
    "failed before it came to the sink; the ledger was restored from a backup; the epoch before "
    "had no rows; or the checkpoint is a copy without the file `metadata`, which the ledger "
    "refuses if a query has an appId from its first start on. The rows of the epoch count as "
    "possible duplicates"
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
    reason = own_input_error(plan, files)
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
