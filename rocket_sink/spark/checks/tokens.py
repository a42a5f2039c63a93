"""Tokens of a ledger's folder (`ledger.token`), for which tasks look before they send."""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.table import ensure_table, ledger_token
from rocket_sink.ledger.path import LedgerPath, first_line, resolve_path
from rocket_sink.ledger.storage import active_session, is_classic
from rocket_sink.ledger.token import LedgerToken, may_hand_over
from rocket_sink.net import log
from rocket_sink.options import SinkOptions

_LOG: Final = log.logger(__name__)


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
