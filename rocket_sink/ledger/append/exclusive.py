"""Whether two drivers may append to a table on S3 at once, by Spark's Delta.

A commit is a file of the table's log that must not be there before. Delta's log store for S3
(`S3SingleDriverLogStore`) looks and then writes: of two drivers that have both looked, the second
one overwrites the commit of the first, and its rows are in no version of the table. S3 could refuse
that (`If-None-Match`), but S3A 3.5.0 asks for it only where a caller names the option, which that
log store does not, whatever `fs.s3a.performance.flags` says. A later one may: so it is tried, by
the session's own file system. Two streams make one new object, and the second one has to fail.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from rocket_sink.ledger.path import LedgerPath
from rocket_sink.net import log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG: Final = log.logger(__name__)
_SCHEMES: Final = ("s3a", "s3", "s3n")
_OWN_STORE: Final = "io.delta.storage.S3SingleDriverLogStore"

_known: dict[tuple[str, str], bool] = {}
"""What was found, by application and bucket."""


def warn_if_shared(spark: SparkSession, place: LedgerPath) -> None:
    """Log once per bucket when a second driver could overwrite this one's commits.

    Nothing is known of other stores, of a log store that is set in the session, and of one that
    cannot be tried: a commit tells then.
    """
    parts = urlsplit(place.uri)
    if parts.scheme not in _SCHEMES:
        return
    key = str(spark.sparkContext.applicationId), f"{parts.scheme}://{parts.netloc}"
    if key in _known:
        return
    found = commits_exclusively(spark, place)
    if found is None:
        return
    _known[key] = found
    if not found:
        _LOG.warning(
            "only this driver may append to the ledger %s: of two that append at once one "
            "overwrites the commit of the other, whose rows are lost. Delta's log store for S3 "
            "(S3SingleDriverLogStore) is for one driver; fold, park and backfill in this one, or "
            "while it is stopped",
            place.uri,
        )


def commits_exclusively(spark: SparkSession, place: LedgerPath) -> bool | None:
    """Whether the session's S3A refuses to make a file that is there; None: it cannot be told."""
    scheme = urlsplit(place.uri).scheme
    store = spark.conf.get(f"spark.delta.logStore.{scheme}.impl", None) or _OWN_STORE
    if store != _OWN_STORE or spark.conf.get("spark.delta.logStore.class", None):
        return None
    try:
        return _is_refused(spark, f"{place.uri}/_tries/{uuid.uuid4().hex}")
    except Exception:
        # No right to write there, or a file system without such streams.
        return None


def _is_refused(spark: SparkSession, uri: str) -> bool:
    from py4j.protocol import Py4JJavaError

    session: Any = spark
    path = session._jvm.org.apache.hadoop.fs.Path(uri)
    files = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
    first, second = files.create(path, False), files.create(path, False)
    try:
        first.close()
        try:
            second.close()
        except Py4JJavaError:
            return True
        return False
    finally:
        with contextlib.suppress(Py4JJavaError):
            files.delete(path, False)
