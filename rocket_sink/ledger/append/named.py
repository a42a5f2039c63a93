"""A ledger by the name of its table in one of Spark's catalogs: `catalog.schema.table`.

The driver looks the location up once, at the start; everything else works by path. So a name is
never an identity: a table that was dropped and made anew is another ledger, with another path."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from typing import Any, Final

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.table import ensure_table
from rocket_sink.ledger.path import is_table_name, resolve_path
from rocket_sink.ledger.storage import active_session

_known: Final[dict[str, str]] = {}
"""{name: location} in a process without a session, as its driver has looked them up."""


def know_locations(locations: Mapping[str, str]) -> None:
    """Let a process without a session find these tables, and no others: Spark uses its processes
    again, and an earlier session may have found another table of the name."""
    _known.clear()
    _known.update(locations)


def located(ledger: str, spark: Any = None, *, makes: bool = False) -> str:
    """Return the location of the table that `ledger` names; return a path as it is.

    Args:
        spark: the session whose catalogs know the table; None: the active one.
        makes: make a missing table, in a new folder below that of its schema.

    Raises:
        LedgerError: no session, no such table, or no Delta table.
    """
    if not is_table_name(ledger):
        return ledger
    spark = spark or active_session()
    if spark is None:
        if ledger in _known:
            return _known[ledger]
        raise LedgerError(
            f"the ledger {ledger} is the name of a table, which needs a Spark session to be found: "
            'make the session first, for format("rocketmq") call register(spark, ledger=...), or '
            f"give the table's location. A folder of that name is ./{ledger}",
            path=ledger,
        )
    from pyspark.errors import AnalysisException

    name = ".".join(f"`{part}`" for part in ledger.split("."))
    if not spark.catalog.tableExists(name):
        if not makes:
            raise LedgerError(
                f"there is no table {ledger}: a sink makes it. If the session does not have the "
                "catalog, as that of a command, give the table's location",
                path=ledger,
            )
        place = resolve_path(f"{_folder(spark, ledger)}-{uuid.uuid4().hex[:8]}")
        ensure_table(spark, place)
        with contextlib.suppress(AnalysisException):  # Another driver has made the table.
            spark.catalog.createTable(name, place.uri, "delta")
    detail = spark.sql(f"DESCRIBE DETAIL {name}").select("format", "location").head()
    if detail["format"] != "delta":
        raise LedgerError(f"the table {ledger} is no Delta table, so it is no ledger", path=ledger)
    return str(detail["location"])


def _folder(spark: Any, ledger: str) -> str:
    """Return the place of a new table in its schema's folder."""
    catalog, schema, table = ledger.split(".")
    rows = spark.sql(f"DESCRIBE SCHEMA `{catalog}`.`{schema}`").collect()
    folders = [row[1] for row in rows if row[0].lower() == "location" and row[1]]
    if not folders:
        raise LedgerError(
            f"the schema of {ledger} has no location for new tables: write to a ledger by a path, "
            f"then CREATE TABLE {ledger} USING delta LOCATION 'PATH'",
            path=ledger,
        )
    return f"{folders[0].rstrip('/')}/{table}"
