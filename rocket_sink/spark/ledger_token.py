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
    """For tasks that spool (foreach); None without a ledger.

    A client of Spark Connect may be on any host: its files prove nothing. There the server makes
    the table, and tasks look for that.

    Raises:
        LedgerError: the driver cannot write files to the ledger's folder.
    """
    if not options.ledger:
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


def append_token(options: SinkOptions, place: LedgerPath, *, on_driver: bool) -> LedgerToken | None:
    """For tasks whose rows Spark appends to the table itself (foreachBatch, batch writes).

    A local path must be shared for these, too. In a store Spark proves itself by making the table:
    only what keeps files beside it needs more.

    Args:
        on_driver: this process is beside the driver; a client of Spark Connect need not be.

    Raises:
        LedgerError: an option needs such files and pyarrow cannot write them.
    """
    needed = _needs_files(options)
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


def _needs_files(options: SinkOptions) -> list[str]:
    """Options that keep notes in the ledger's folder, where the lane itself needs none."""
    found = []
    if options.delivery != "at_least_once":
        found.append(f"delivery={options.delivery}")
    if options.ordering == "strict":
        found.append("ordering=strict")
    if options.on_pending_key == "hold":
        found.append("onPendingKey=hold")
    if options.app_id:
        found.append("appId")
    return found
