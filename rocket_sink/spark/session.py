"""A Spark session that can run the sink: Delta, Java and the right Python. A user's own session
works as well; it needs Delta only where a ledger is written or read."""

from __future__ import annotations

import codecs
import contextlib
import importlib.metadata
import locale
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.path import first_line
from rocket_sink.net import log
from rocket_sink.spark.checks.session_settings import PUSHDOWN

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG: Final = log.logger(__name__)
_OLDEST_DELTA: Final = {(4, 1): (4, 1), (4, 2): (4, 4)}
"""{Spark: the first Delta with jars for it on Maven (`io.delta:delta-spark_4.x_2.13`)}."""
_OLDEST_INSTALLED: Final = (4, 2)
"""The lower bound of delta-spark's version in setup.cfg."""
_DELTA_WITHOUT_JARS: Final = frozenset({"4.4.1"})
_DELTAS: Final = "delta-spark>=4.2,<4.5,!=4.4.1"
"""The range in setup.cfg. Each Delta limits the Spark version, so pip picks a pair that works."""

_PANDAS_WARNING: Final = "PySpark does not yet fully support pandas"

DELTA_SETTINGS: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # The ledger's log is small: the default of 50 partitions costs seconds for each snapshot.
    "spark.databricks.delta.snapshotPartitions": "2",
}
QUIET_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    PUSHDOWN: "true",
}
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")
"""Log4j's configuration of a session's JVM. It is no file in a wheel that Spark ships."""


def build_session(
    app_name: str = "rocket-sink",
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    packages: tuple[str, ...] = (),
    log_level: str = "ERROR",
) -> SparkSession:
    """Return a session with Delta, in UTC, with quiet logs. An active session is returned as it is.
    Under spark-submit without Delta's jars the session has no Delta. With SPARK_REMOTE it is a
    session of that server (Spark Connect), which has its own master, packages and log level.

    Args:
        master: as in spark-submit; None: the master that spark-submit has set, else `local[*]`.
        conf: settings that override `DELTA_SETTINGS` and `QUIET_SETTINGS`.
        packages: further Maven coordinates besides Delta's.

    Raises:
        ConfigurationError: no Java 17 or later, or a Delta that does not fit this Spark; or a
            master or packages with SPARK_REMOTE.
    """
    prepare_environment()
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName(app_name)
    if "SPARK_REMOTE" in os.environ:
        if master is not None or packages:
            raise ConfigurationError(
                "SPARK_REMOTE names a server, which has its own master and packages: give neither, "
                "or unset SPARK_REMOTE"
            )
        return builder.config(map=dict(conf or {})).getOrCreate()
    if master is not None:
        builder = builder.master(master)
    elif "spark.master" not in _submitted_settings() and "MASTER" not in os.environ:
        builder = builder.master("local[*]")
    settings = {**(DELTA_SETTINGS if _delta_is_there() else {}), **QUIET_SETTINGS}
    has_folder = bool({"SPARK_CONF_DIR", "SPARK_HOME"} & os.environ.keys())
    if _java_is_needed() and not has_folder and _LOGGING.is_file():
        # A folder of Spark's settings may have its own file, which this one would replace. Spark
        # puts these options before the user's `extraJavaOptions`, which may name another file.
        settings["spark.driver.defaultJavaOptions"] = (
            f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
        )
    builder = _with_delta(builder.config(map={**settings, **dict(conf or {})}), packages)
    if _java_is_needed():
        _add_jars(builder)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel(log_level)
    return session


def prepare_environment() -> None:
    """Set what a JVM or a worker needs in its environment. `PYSPARK_PYTHON`: Spark does not find a
    virtual environment's Python by itself, and a worker without packages fails late. `JAVA_HOME`:
    only if the caller has no Java. `LC_ALL`: only if Java would know no file names but ASCII. Raise
    a ConfigurationError if there is no Java 17 or later."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    silence_pandas_warning()
    if _java_is_needed():
        from rocket_sink.java import find_java

        os.environ["JAVA_HOME"] = str(find_java().home)
        if _locale_is_ascii():
            os.environ["LC_ALL"] = "C.UTF-8"


def _locale_is_ascii() -> bool:
    """Return whether the environment names no locale, the locale C, or a locale that this host does
    not have. Python has file names in UTF-8 then, and Java in ASCII."""
    before = locale.setlocale(locale.LC_ALL)
    try:
        locale.setlocale(locale.LC_ALL, "")
        return codecs.lookup(locale.nl_langinfo(locale.CODESET)).name == "ascii"
    except locale.Error:
        return True
    except LookupError:
        return False
    finally:
        locale.setlocale(locale.LC_ALL, before)


def silence_pandas_warning() -> None:
    """Keep Spark 4.2's warning about pandas 3 away from users: no pandas code runs here."""
    warnings.filterwarnings("ignore", message=_PANDAS_WARNING, category=FutureWarning)
    filters = [part for part in os.environ.get("PYTHONWARNINGS", "").split(",") if part]
    warning_filter = f"ignore:{_PANDAS_WARNING}:FutureWarning"
    if warning_filter not in filters:
        os.environ["PYTHONWARNINGS"] = ",".join([*filters, warning_filter])


def _java_is_needed() -> bool:
    """Return False inside spark-submit (its JVM runs already) and for Spark Connect."""
    return "PYSPARK_GATEWAY_PORT" not in os.environ and "SPARK_REMOTE" not in os.environ


def _submitted_settings() -> set[str]:
    """Return the names of spark-submit's settings. Outside of spark-submit, look only for a master
    in PYSPARK_SUBMIT_ARGS, from which Spark starts its JVM."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        from pyspark import SparkConf, SparkContext

        with contextlib.suppress(Exception):
            SparkContext._ensure_initialized()
            return {name for name, _ in SparkConf().getAll()}
    return {"spark.master"} if "--master" in os.environ.get("PYSPARK_SUBMIT_ARGS", "") else set()


def _delta_is_there() -> bool:
    """Return False if spark-submit has started a JVM without Delta's jars: with Delta's settings it
    would plan no query. delta-rs writes and reads most ledgers without them."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return True
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkContext

    SparkContext._ensure_initialized()
    jvm: Any = SparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        loader.loadClass(DELTA_SETTINGS["spark.sql.extensions"])
    except Py4JJavaError:
        return False
    return True


def _with_delta(builder: SparkSession.Builder, packages: tuple[str, ...]) -> SparkSession.Builder:
    import pyspark  # Ask the module: a Spark that was not installed by pip has no metadata.

    try:
        delta = importlib.metadata.version("delta-spark")
        from delta import configure_spark_with_delta_pip
    except ImportError as error:
        if not _java_is_needed():
            # Another process has started the JVM and chosen its jars, for example by `--packages`.
            return builder
        raise ConfigurationError(
            "the package delta-spark is missing; install the one for this Spark: pip install "
            f"pyspark=={pyspark.__version__} '{_DELTAS}'"
        ) from error
    _check_pair(pyspark.__version__, delta)
    return configure_spark_with_delta_pip(builder, extra_packages=list(packages))


def _add_jars(builder: SparkSession.Builder) -> None:
    """Start Java and resolve the packages in it, because spark-submit would print sixty lines about
    them. The resolver is private to Spark. If it is missing, spark-submit resolves the packages."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark import SparkConf, SparkContext

    settings = vars(builder)["_options"]
    packages = settings.pop("spark.jars.packages")
    log.tell(_LOG, "Spark starts, and Ivy resolves %s: the first time it fetches jars", packages)
    SparkContext._ensure_initialized(conf=SparkConf().setAll(list(settings.items())))
    jvm: Any = SparkContext._jvm
    spark, option = jvm.org.apache.spark.util, jvm.scala.Option.apply
    stream = jvm.java.io.PrintStream(jvm.java.io.ByteArrayOutputStream())
    try:
        place = spark.DependencyUtils.getIvyProperties()
        excluded = (place.packagesExclusions() or "").replace(",", " ").split()
        options = option(place.repositories()), option(place.ivyRepoPath())
        if place.ivySettingsPath():
            ivy = spark.MavenUtils.loadIvySettings(place.ivySettingsPath(), *options, stream)
        else:
            ivy = spark.MavenUtils.buildIvySettings(*options, True, stream)
        jars = spark.MavenUtils.resolveMavenCoordinates(
            packages, ivy, option(None), True, jvm.PythonUtils.toSeq(excluded), False, stream,
        ).mkString(",")  # fmt: skip
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        spark.DependencyUtils.addJarsToClassPath(jars, loader)
    except Py4JJavaError as error:
        raise ConfigurationError(
            f"Spark cannot fetch {packages}: {first_line(error)}. Let this host reach Maven's "
            "registry, or name another one by spark.jars.repositories"
        ) from None
    except (Py4JError, TypeError):
        # spark-submit resolves packages when it starts a JVM. So end this JVM: close its input.
        gateway: Any = SparkContext._gateway
        gateway.shutdown()
        gateway.proc.stdin.close()
        SparkContext._gateway = SparkContext._jvm = None
        builder.config("spark.jars.packages", packages)
        return
    submitted = SparkConf().get("spark.jars", "")
    builder.config("spark.jars", f"{submitted},{jars}" if submitted else jars)


def _check_pair(spark: str, delta: str) -> None:
    """Refuse versions that fail later: at the download of jars, or by methods that the JVM lacks.
    Versions of Spark that are newer than those known here pass."""
    oldest = _OLDEST_DELTA.get(_minor(spark), (4, 0))
    if delta in _DELTA_WITHOUT_JARS or _minor(delta) < oldest:
        major, minor = max(oldest, _OLDEST_INSTALLED)
        raise ConfigurationError(
            f"delta-spark {delta} has no jars for Spark {spark}; install one that has: pip install "
            f"pyspark=={spark} 'delta-spark>={major}.{minor},!=4.4.1'"
        )


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
