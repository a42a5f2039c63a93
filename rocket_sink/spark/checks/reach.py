"""Checks of name servers and brokers before a write: whether they answer, and what a user may."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from pyspark.sql import SparkSession

from rocket_sink.errors import (
    ConfigurationError,
    NameServerUnavailableError,
    PermissionDeniedError,
    RocketSinkError,
    SendError,
    TlsRefusedError,
)
from rocket_sink.ledger.append.table import has_executors
from rocket_sink.ledger.storage import is_classic
from rocket_sink.net import log
from rocket_sink.options import SinkOptions

_LOG: Final = log.logger(__name__)
_ASK_AGAIN_S: Final = 60.0


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
