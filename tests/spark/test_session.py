"""The preparations before a JVM starts; the Spark tests use the session itself."""

import locale
import os
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pyspark
import pytest
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from rocket_sink.errors import ConfigurationError
from rocket_sink.java import find_java
from rocket_sink.ledger.storage import active_session
from rocket_sink.spark import session
from tests.jvms import submit_args


@pytest.fixture
def environ(monkeypatch):
    for name in (
        "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONWARNINGS", "PYSPARK_GATEWAY_PORT",
        "SPARK_REMOTE", "SPARK_CONF_DIR", "SPARK_HOME", "MASTER",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    return os.environ  # type: ignore[return-value]


def test_workers_get_this_python_unless_told_otherwise(environ, monkeypatch):
    session.prepare_environment()
    assert environ["PYSPARK_PYTHON"] == environ["PYSPARK_DRIVER_PYTHON"] == sys.executable
    monkeypatch.setenv("PYSPARK_PYTHON", "/other/python")
    session.prepare_environment()
    assert environ["PYSPARK_PYTHON"] == "/other/python"


def test_java_is_found_for_spark(environ, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    session.prepare_environment()
    assert os.path.exists(f"{environ['JAVA_HOME']}/bin/java")


@pytest.mark.parametrize(
    ("names", "is_ascii"),
    [
        ({}, True), ({"LC_ALL": "C", "LANG": "C.UTF-8"}, True), ({"LANG": "xx_XX.UTF-8"}, True),
        ({"LANG": "C.UTF-8"}, False), ({"LC_CTYPE": "C.UTF-8"}, False),
    ],
    ids=["none", "C", "not on this host", "LANG", "LC_CTYPE"],
)  # fmt: skip
def test_the_java_that_starts_has_a_locale_for_all_file_names(
    environ, monkeypatch, names, is_ascii
):
    """Ask Java itself, because only Java knows how it reads the locale."""
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    before = locale.setlocale(locale.LC_ALL)
    command = [str(find_java().executable), "-XshowSettings:properties", "-version"]
    sign = "sun.jnu.encoding = "
    encodings = []
    for prepare in (lambda: None, session.prepare_environment):
        prepare()
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        encodings += [line.strip() for line in text.splitlines() if sign in line]
    assert encodings == [sign + ("ANSI_X3.4-1968" if is_ascii else "UTF-8"), f"{sign}UTF-8"]
    assert environ.get("LC_ALL") == ("C.UTF-8" if is_ascii else None)
    assert locale.setlocale(locale.LC_ALL) == before


def test_inside_spark_submit_the_java_that_runs_is_not_touched(environ, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    session.prepare_environment()
    assert "JAVA_HOME" not in environ


def test_the_pandas_warning_reaches_nobody_and_others_do(environ):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.silence_pandas_warning()
        session.silence_pandas_warning()
        warnings.warn("PySpark does not yet fully support pandas >= 3.0.0. x", FutureWarning, 2)
        warnings.warn("another", FutureWarning, stacklevel=2)
    assert [str(w.message) for w in caught] == ["another"]
    assert environ["PYTHONWARNINGS"].count("pandas") == 1


@pytest.mark.parametrize(
    ("spark", "delta", "wanted"),
    [
        ("4.0.0", "4.0.0", ""), ("4.0.2", "4.4.0", ""), ("4.1.1", "4.1.0", ""),
        ("4.2.0", "4.4.0", ""), ("5.0.0", "5.0.0", ""),
        ("4.2.1", "4.1.0", ">=4.4"), ("4.1.0", "4.0.1", ">=4.2"), ("4.2.0", "4.4.1", ">=4.4"),
    ],
)  # fmt: skip
def test_a_delta_without_jars_for_this_spark_is_refused(spark, delta, wanted):
    if not wanted:
        session._check_pair(spark, delta)
        return
    with pytest.raises(ConfigurationError) as caught:
        session._check_pair(spark, delta)
    for part in (f"pyspark=={spark}", delta, wanted, "!=4.4.1"):
        assert part in str(caught.value)


def test_a_spark_without_pip_is_taken_with_its_own_jars(environ, monkeypatch):
    """Leave Delta to spark-submit's `--packages`; elsewhere say what to install."""
    no_metadata = Mock(side_effect=PackageNotFoundError)
    monkeypatch.setattr(session.importlib.metadata, "version", no_metadata)
    builder = MagicMock()
    with pytest.raises(ConfigurationError, match=f"pip install pyspark=={pyspark.__version__}"):
        session._with_delta(builder, ())
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert session._with_delta(builder, ()) is builder


@pytest.mark.parametrize(
    ("names", "arguments", "master", "lacks"),
    [
        ({}, {}, "local[*]", ""), ({}, {"master": "local[2]"}, "local[2]", ""),
        ({"MASTER": "m"}, {}, None, ""), ({"SPARK_HOME": "/h"}, {}, "local[*]", "log4j2"),
        ({"SPARK_CONF_DIR": "/c"}, {}, "local[*]", "log4j2"),
        ({"PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell"}, {}, None, ""),
        ({"PYSPARK_GATEWAY_PORT": "1"}, {"log_level": "WARN"}, "local[*]", "log4j2 jars"),
        ({"PYSPARK_GATEWAY_PORT": "2"}, {}, None, "log4j2 jars delta"),
        ({"SPARK_REMOTE": "sc://h"}, {}, None, "connect"),
    ],
)  # fmt: skip
def test_the_settings_of_a_session(environ, monkeypatch, names, arguments, master, lacks):
    for name, value in {"PYSPARK_SUBMIT_ARGS": "", **names}.items():
        monkeypatch.setenv(name, value)
    jvm, spark, builders = MagicMock(), MagicMock(), list[Any]()
    if names.get("PYSPARK_GATEWAY_PORT") != "1":
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        loader.loadClass.side_effect = Py4JJavaError("", MagicMock())
        jvm.SparkConf().getAll.return_value = [Mock(_1=lambda: "spark.master")]
    for owner, name, stand_in in (
        (SparkContext, "_jvm", jvm), (SparkContext, "_ensure_initialized", Mock()),
        (SparkSession, "getActiveSession", lambda: None), (session, "_add_jars", Mock()),
        (SparkSession.Builder, "getOrCreate", lambda self: builders.append(vars(self)) or spark),
        (session, "prepare_environment", Mock()), (session, "_check_pair", Mock()),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, stand_in)
    conf = {"spark.ui.enabled": "true"} if names else None
    packages = ("org.example:some:1",)
    if lacks == "connect":
        assert session.build_session(conf=conf) is spark
        assert builders[0]["_options"] == {"spark.app.name": "rocket-sink", **(conf or {})}
        for more in ({"master": "m"}, {"packages": packages}):
            with pytest.raises(ConfigurationError, match="SPARK_REMOTE names a server, which has"):
                session.build_session(**more)
        return
    assert session.build_session(conf=conf, packages=packages, **arguments) is spark
    options = builders[0]["_options"]
    assert (options.get("spark.master"), options["spark.ui.enabled"]) == (
        master, "true" if names else "false",
    )  # fmt: skip
    assert "org.example:some:1" in options["spark.jars.packages"]
    assert ("spark.driver.defaultJavaOptions" in options) is ("log4j2" not in lacks)
    assert (session.DELTA_SETTINGS.items() <= options.items()) is ("delta" not in lacks)
    assert session._add_jars.called is ("jars" not in lacks)
    assert session._check_pair.called and session.prepare_environment.called
    level = arguments.get("log_level", "ERROR")
    assert spark.sparkContext.setLogLevel.mock_calls == [call(level)]
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: "active")
    assert session.build_session() == "active"


@pytest.mark.spark
def test_a_thread_that_has_run_nothing_yet_knows_the_session(spark):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(active_session).result() == spark


@pytest.mark.spark
def test_a_first_session_says_in_one_line_what_it_waits_for():
    """Delta's classes are loaded, although spark-submit knows of no package. Of the lines that any
    start of Spark prints, only Java's own is left; other warnings are printed."""
    script = (
        "from rocket_sink.spark.session import build_session as b; "
        "s = b(master='local[1]'); s.sql('SELECT 1').collect(); "
        "s.sparkContext._jvm.io.delta.tables.DeltaTable.isDeltaTable(s._jsparkSession, '/none'); "
        "s.sparkContext.setLogLevel('WARN'); manager = s._jvm.org.apache.logging.log4j.LogManager; "
        "manager.getLogger('org.apache.spark.util.Utils').warn('a real warning'); "
        "s.stop()"
    )
    environ = {name: value for name, value in os.environ.items() if "PYSPARK" not in name}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**environ, "PYSPARK_SUBMIT_ARGS": submit_args()},
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    assert re.fullmatch(
        r"[0-9:]{8} INFO Spark starts, and Ivy resolves io\.delta:\S+: .* fetches jars\n"
        r"(WARNING: Using incubator modules: jdk\.incubator\.vector\n)?"
        r".* WARN Utils: a real warning\n", done.stdout + done.stderr,
    ), done.stderr  # fmt: skip


@pytest.mark.parametrize(
    ("submitted", "jars", "settings"), [("", "a.jar", ""), ("own.jar", "own.jar,a.jar", "/ivy.xml")]
)
def test_the_java_that_runs_fetches_packages(monkeypatch, caplog, submitted, jars, settings):
    caplog.set_level("INFO")
    jvm, gateway, packages = MagicMock(), MagicMock(), "org.example:some:1"
    monkeypatch.setattr(SparkContext, "_gateway", gateway)
    monkeypatch.setattr(SparkContext, "_jvm", jvm)
    jvm.SparkConf().get = lambda name, default: submitted if name == "spark.jars" else "?"
    spark = jvm.org.apache.spark.util
    maven, place = spark.MavenUtils, spark.DependencyUtils.getIvyProperties()
    place.packagesExclusions.return_value = "a:b,c:d" if submitted else None
    place.ivySettingsPath.return_value = settings
    maven.resolveMavenCoordinates.return_value.mkString.return_value = "a.jar"
    builder = SparkSession.Builder().config("spark.jars.packages", packages)
    session._add_jars(builder)
    assert vars(builder)["_options"] == {"spark.jars": jars}
    assert f"Ivy resolves {packages}: " in caplog.text
    ivy = (maven.loadIvySettings if settings else maven.buildIvySettings).return_value
    name, by, _, is_transitive, _, is_test, _ = maven.resolveMavenCoordinates.call_args.args
    assert (name, by, is_transitive, is_test) == (packages, ivy, True, False)
    assert jvm.PythonUtils.toSeq.mock_calls == [call(["a:b", "c:d"] if submitted else [])]
    assert spark.DependencyUtils.addJarsToClassPath.call_args.args[0] == "a.jar"
    java = MagicMock(**{"toString.return_value": "no answer"})
    java._gateway_client.send_command.return_value = "ys"
    maven.resolveMavenCoordinates.side_effect = Py4JJavaError("", java)
    builder.config("spark.jars.packages", packages)
    with pytest.raises(ConfigurationError, match=f"cannot fetch {packages}: .*no answer"):
        session._add_jars(builder)
    # A missing class of Java is a `JavaPackage` in py4j, which cannot be called.
    maven.resolveMavenCoordinates.side_effect = TypeError("JavaPackage")
    builder = SparkSession.Builder().config("spark.jars.packages", packages)
    session._add_jars(builder)
    assert vars(builder)["_options"] == {"spark.jars.packages": packages}
    assert gateway.shutdown.called and gateway.proc.stdin.close.called
    assert SparkContext._gateway is None and SparkContext._jvm is None


@pytest.mark.spark
def test_a_package_that_cannot_be_fetched_is_named(spark):
    """The JVM of the tests runs: only the packages are resolved again."""
    builder = type(spark).builder.config("spark.jars.packages", "org.example.rocket-sink:none:1")
    with pytest.raises(ConfigurationError, match=r"cannot fetch org\.example\.rocket-sink:none:1"):
        session._add_jars(builder)
