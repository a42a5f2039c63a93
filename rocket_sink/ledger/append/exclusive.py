"""Commits to a table on S3 that another driver's commits cannot overwrite.

A commit is a file of the table's log that must not be there before. delta-rs writes it with a
condition (`If-None-Match`), which S3 respects. Some other stores with an S3 API ignore the
condition without an error. So the store is tested: the same object is made twice with the
condition.

Delta's log store for S3 (`S3SingleDriverLogStore`) looks and then writes. If two drivers look at
the same time, the second one overwrites the first one's commit, whose rows are then in no version
of the table. S3A 3.5.0 sends the condition only if the caller sets an option, which that log store
does not, whatever `fs.s3a.performance.flags` says. A later version may, so this is tested, too, if
delta-rs must not commit.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.storage import is_s3
from rocket_sink.net import log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG: Final = log.logger(__name__)
_OWN_STORE: Final = "io.delta.storage.S3SingleDriverLogStore"
_CONDITION: Final = "fs.option.create.conditional.overwrite"
"""Option of S3A from Hadoop 3.4.2 on: the object must not be there when it is written."""

_ENCRYPTION: Final = ("encryption.algorithm", "server-side-encryption-algorithm")
"""Settings of S3A; the second one is the older name."""
_REFUSED: Final = ("Status Code: 412", "FileAlreadyExistsException", "RemoteFileChangedException")
"""Texts of S3A's error for an existing object (3.5.0: the last one, with the first); other errors
mean nothing."""

_PAUSES_S: Final = (1.0, 2.0, 4.0)
"""Pauses after questions that a store did not answer."""

_known: dict[tuple[str, str], bool] = {}
"""Whether Spark's Delta commits exclusively, by application and bucket."""


def store_refuses(spark: SparkSession, place: LedgerPath) -> bool:
    """Return whether the ledger's store can refuse to overwrite an object; False if unknown.

    The session's S3A asks the store, by Hadoop 3.4.2 or later. The answer is also False if the
    session has another log store, or if S3A encrypts with a key that delta-rs does not know.

    Raises:
        LedgerError: the store is away or denies access, which may pass.
    """
    if not is_s3(place.uri) or not _has_own_log_store(spark, place) or _encrypts(spark, place):
        return False
    for pause_s in (*_PAUSES_S, None):
        try:
            return _ask(spark, place, _refuses_on_condition)
        except Exception as error:
            if not _may_pass(spark, error):
                _LOG.info("it cannot be tried how %s takes a commit: %s", place.uri, error)
                return False
            if pause_s is None:
                raise LedgerError(
                    f"the store of the ledger {place.uri} cannot be asked now how it takes a "
                    f"commit: {_java_text(error)}. Nothing was sent; try again. The driver needs "
                    "to write below the ledger's _tries",
                    path=place.uri,
                ) from error
            time.sleep(pause_s)
    raise AssertionError


def _may_pass(spark: SparkSession, error: Exception) -> bool:
    """Return whether this is an I/O error, which may pass; missing features give other errors."""
    from py4j.java_gateway import is_instance_of
    from py4j.protocol import Py4JJavaError

    gateway = spark.sparkContext._gateway
    return isinstance(error, Py4JJavaError) and is_instance_of(
        gateway, error.java_exception, "java.io.IOException"
    )


def warn_if_shared(spark: SparkSession, place: LedgerPath) -> None:
    """Log once per bucket when a second driver could overwrite commits of this one's Delta.

    The answer is not known for other stores, for a log store that is set in the session, and if the
    test fails.
    """
    if not is_s3(place.uri):
        return
    parts = urlsplit(place.uri)
    key = str(spark.sparkContext.applicationId), f"{parts.scheme}://{parts.netloc}"
    if key in _known:
        return
    is_exclusive = commits_exclusively(spark, place)
    if is_exclusive is None:
        return
    _known[key] = is_exclusive
    if not is_exclusive:
        _LOG.warning(
            "only this driver may append to the ledger %s: of two that append at once one "
            "overwrites the commit of the other, whose rows are lost. Delta's log store for S3 "
            "(S3SingleDriverLogStore) is for one driver; fold, park and backfill in this one, or "
            "while it is stopped",
            place.uri,
        )


def commits_exclusively(spark: SparkSession, place: LedgerPath) -> bool | None:
    """Return whether the session's S3A refuses to overwrite a file; None if not testable."""
    if not _has_own_log_store(spark, place):
        return None
    try:
        return _ask(spark, place, _refuses)
    except Exception as error:
        # The session may lack the right to write, or the file system such streams or options.
        _LOG.info("it cannot be tried how %s takes a commit: %s", place.uri, error)
        return None


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


def _ask(spark: SparkSession, place: LedgerPath, ask: Callable[[Any, Any], bool]) -> bool:
    """Call `ask` with the session's file system and a unique path."""
    session: Any = spark
    path = session._jvm.org.apache.hadoop.fs.Path(f"{place.uri}/_tries/{uuid.uuid4().hex}")
    files = path.getFileSystem(_hadoop_conf(spark))
    try:
        return ask(files, path)
    finally:
        with contextlib.suppress(Exception):
            files.delete(path, False)


def _refuses(files: Any, path: Any) -> bool:
    """Let two streams make one new file: S3A looks only when it opens them."""
    first, second = files.create(path, False), files.create(path, False)
    first.close()
    return _is_refused(second.close)


def _refuses_on_condition(files: Any, path: Any) -> bool:
    def make() -> None:
        files.createFile(path).overwrite(True).must(_CONDITION, True).build().close()

    make()
    return _is_refused(make)


def _is_refused(write: Callable[[], None]) -> bool:
    from py4j.protocol import Py4JJavaError

    try:
        write()
    except Py4JJavaError as error:
        if not any(word in _java_text(error) for word in _REFUSED):
            raise
        return True
    return False


def _java_text(error: Any) -> str:
    return str(error.java_exception.toString())
