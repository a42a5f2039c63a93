"""Commits to a table on S3 that no other driver can overwrite.

A commit is a file of the table's log that must not exist before. delta-rs writes it with a
condition (`If-None-Match`), which S3 respects. Some other stores with an S3 API ignore the
condition without an error. So `store_refuses` tests a store: it makes an object twice.

Delta's log store for S3 (`S3SingleDriverLogStore`) checks whether the file exists and then writes.
If two drivers check at the same time, the second one overwrites the first one's commit, whose rows
are then in no version of the table. S3A sends the condition only if its caller sets an option. That
log store does not set it, whatever `fs.s3a.performance.flags` says. So only one driver may commit
by this log store, and `warn_if_shared` warns about that."""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.storage import always_refuses, is_s3
from rocket_sink.net import log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG: Final = log.logger(__name__)
_OWN_STORE: Final = "io.delta.storage.S3SingleDriverLogStore"
_CONDITION: Final = "fs.option.create.conditional.overwrite"
"""Option of S3A, from Hadoop 3.4.2 on: write the object only if it does not exist."""

_ENCRYPTION: Final = ("encryption.algorithm", "server-side-encryption-algorithm")
"""Settings of S3A; the second one is the older name."""
_REFUSED: Final = ("Status Code: 412", "FileAlreadyExistsException", "RemoteFileChangedException")
"""Texts of S3A's error for an existing object; Hadoop 3.5.0 has the first and the last one. Other
errors say nothing about conditions."""

_PAUSES_S: Final = (1.0, 2.0, 4.0)
"""Pauses before a test of the store is repeated after an I/O error."""

_LOCAL: Final = (
    "Spark's Delta commits to it, because delta-rs cannot: the table has a feature that delta-rs "
    "does not know (somebody has altered the table), the path has a %, # or ?, or delta-rs is "
    "older than 1.6"
)
_S3: Final = "Delta's log store for S3 (S3SingleDriverLogStore) is for one driver"
_warned: set[tuple[str, LedgerPath]] = set()
"""(application, ledger) pairs for which `warn_if_shared` has logged its warning."""


def store_refuses(spark: SparkSession, place: LedgerPath) -> bool:
    """Return whether the ledger's store can refuse to overwrite an object; False if unknown.

    Azure, Google's store and HDFS always can. For S3 the session's S3A makes the test, from Hadoop
    3.4.2 on. The answer is also False if the session has another log store, or if S3A encrypts with
    a key that delta-rs does not know. Raise LedgerError if the store is out of reach or denies
    access, perhaps only for now."""
    if always_refuses(place.uri):
        return True
    if not is_s3(place.uri) or not _has_own_log_store(spark, place) or _encrypts(spark, place):
        return False
    for pause_s in (*_PAUSES_S, None):
        try:
            return _ask(spark, place)
        except Exception as error:
            if not _may_pass(spark, error):
                _LOG.info("cannot test whether %s refuses a second write: %s", place, error)
                return False
            if pause_s is None:
                raise LedgerError(
                    f"the store of the ledger {place} cannot be asked now whether it refuses a "
                    f"second write: {_java_text(error)}. Nothing was sent; try again. The driver "
                    "needs to write below the ledger's _tries",
                    path=place.uri,
                ) from error
            time.sleep(pause_s)
    raise AssertionError


def _may_pass(spark: SparkSession, error: Exception) -> bool:
    """Return whether the error may be temporary, as I/O errors are."""
    from py4j.java_gateway import is_instance_of
    from py4j.protocol import Py4JJavaError

    gateway = spark.sparkContext._gateway
    return isinstance(error, Py4JJavaError) and is_instance_of(
        gateway, error.java_exception, "java.io.IOException"
    )


def warn_if_shared(spark: SparkSession, place: LedgerPath) -> None:
    """Log once per ledger that a second driver could overwrite commits of this driver's Delta, in a
    local folder and on S3. Log nothing on S3 if the session sets a log store, which may be safe,
    and on other stores, which refuse to overwrite."""
    key = str(spark.sparkContext.applicationId), place
    is_shared = place.is_local or (is_s3(place.uri) and _has_own_log_store(spark, place))
    if key in _warned or not is_shared:
        return
    _warned.add(key)
    _LOG.warning(
        "only this driver may append to the ledger %s: if two drivers append at once, one may "
        "overwrite the other's commit, and that commit's rows are lost. %s. Fold, park and "
        "backfill in this driver, or while it is stopped",
        place, _LOCAL if place.is_local else _S3,
    )  # fmt: skip


def _has_own_log_store(spark: SparkSession, place: LedgerPath) -> bool:
    scheme = urlsplit(place.uri).scheme
    store = spark.conf.get(f"spark.delta.logStore.{scheme}.impl", None) or _OWN_STORE
    return store == _OWN_STORE and not spark.conf.get("spark.delta.logStore.class", None)


def _encrypts(spark: SparkSession, place: LedgerPath) -> bool:
    conf = _hadoop_conf(spark)
    bucket = urlsplit(place.uri).netloc
    return any(
        conf.get(f"{prefix}{name}")
        for prefix in ("fs.s3a.", f"fs.s3a.bucket.{bucket}.")
        for name in _ENCRYPTION
    )


def _hadoop_conf(spark: SparkSession) -> Any:
    session: Any = spark
    return session._jsparkSession.sessionState().newHadoopConf()


def _ask(spark: SparkSession, place: LedgerPath) -> bool:
    """Make an object twice on condition that it is new; return whether the second attempt fails."""
    from py4j.protocol import Py4JJavaError

    session: Any = spark
    path = session._jvm.org.apache.hadoop.fs.Path(f"{place.uri}/_tries/{uuid.uuid4().hex}")
    files = path.getFileSystem(_hadoop_conf(spark))

    def make() -> None:
        files.createFile(path).overwrite(True).must(_CONDITION, True).build().close()

    try:
        make()
        try:
            make()
        except Py4JJavaError as error:
            if not any(word in _java_text(error) for word in _REFUSED):
                raise
            return True
        return False
    finally:
        with contextlib.suppress(Exception):
            files.delete(path, False)


def _java_text(error: Any) -> str:
    return str(error.java_exception.toString())
