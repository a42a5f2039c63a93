"""Settings of the session: the driver refuses those that break a sink's promises, warns of those
that weaken them, and divides rate limits over the session's task slots."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Final

from pyspark.sql import SparkSession

from rocket_sink.errors import ConfigurationError, OptionError
from rocket_sink.ledger.path import check_encoding
from rocket_sink.ledger.storage import active_session, is_classic
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.limits import is_limited

_LOG: Final = log.logger(__name__)
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
"""From Spark 4.1 on: readers in Python get the filters of a query. It is off by default, and Spark
refuses readers that take filters then."""
_BATCH_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"


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
