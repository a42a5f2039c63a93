"""Which proof of a shared ledger (`ledger.table`) the lanes take along, made on the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.storage import active_session
from rocket_sink.ledger.table import LedgerToken, ensure_table, first_line, ledger_token
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.spark.session_checks import is_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG: Final = log.logger(__name__)


def spool_token(options: SinkOptions, session: SparkSession | None = None) -> LedgerToken | None:
    """For tasks that spool (foreach); None without a ledger, and where they need not reach it.

    A client of Spark Connect may be on any host: its files prove nothing. There the server makes
    the table, and tasks look for that.

    Raises:
        LedgerError: the driver cannot write files to the ledger's folder.
    """
    if not options.ledger or options.ledger_via == "spark":
        return None
    place = resolve_path(options.ledger)
    session = session or active_session()
    if session is None or is_classic(session):
        return ledger_token(place, spools=True)
    try:
        ensure_table(session, place)
    except Exception as error:
        # Before this look there was, a server without Delta could run the lane: its ledger was
        # folded elsewhere.
        _LOG.warning(
            "the server cannot make the table of the ledger %s (%s): it is not proved that the "
            "workers share its folder with the driver", place.uri, first_line(error),
        )  # fmt: skip
        return None
    return LedgerToken(place.uri, "", spools=True)


def without_files(options: SinkOptions) -> SinkOptions:
    """The options for foreach and the data source, with `ledgerVia=spark` where nothing else does.

    That is a ledger that pyarrow cannot reach on the driver either, as in a store that only Spark
    knows.
    """
    if not options.ledger or options.ledger_via != "auto" or options.using_ledger_files:
        return options
    place = resolve_path(options.ledger)
    return options.with_(ledgerVia="spark") if place.problem else options


def append_token(options: SinkOptions, place: LedgerPath, *, on_driver: bool) -> LedgerToken | None:
    """For tasks whose rows Spark appends to the table itself (foreachBatch, batch writes).

    A local path must be shared for these, too. In a store Spark proves itself by making the table:
    only what keeps files beside it needs more.

    Args:
        on_driver: this process is beside the driver; a client of Spark Connect need not be.

    Raises:
        LedgerError: an option needs such files and pyarrow cannot write them.
    """
    needed = options.using_ledger_files
    if place.problem and needed:
        raise LedgerError(
            f"{', '.join(needed)}: small files beside the table are needed for that, and there can "
            f"be none. {place.problem}",
            path=place.uri,
        )
    if not place.is_local and not needed:
        return None
    if on_driver:
        return ledger_token(place, spools=False)
    return LedgerToken(place.uri, "", spools=False)
