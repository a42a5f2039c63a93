"""Flags of commands that start Spark, and their session."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import psutil

from rocket_sink.commands.common.base import debug_wanted
from rocket_sink.commands.common.output import note
from rocket_sink.errors import RocketSinkError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STDERR: Final = 2
_JVM_ENDS_S: Final = 5.0
_SMALL_PLANS: Final = {
    # For a ledger's rows, compilation is half of a command's CPU time. With one compiler the JVM's
    # code cache is small by default; when it is full, the JVM prints that on standard output.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def spark_options(function: Decorated) -> Decorated:
    """Add --master, --spark-conf and --package to a command."""
    for decorate in (
        click.option("--package", "packages", multiple=True, metavar="GROUP:ARTIFACT:VERSION",
                     help="Maven package for Spark to load; repeatable."),
        click.option("--spark-conf", multiple=True, metavar="NAME=VALUE",
                     help="Spark setting; repeatable."),
        click.option("--master", metavar="URL",
                     help="Spark master. Default: spark-submit's, else local[*]."),
    ):  # fmt: skip
        function = decorate(function)
    return function


def pairs(texts: Iterable[str], what: str) -> dict[str, str]:
    """{name: value} of `NAME=VALUE` texts; `what` is the flag, for errors."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise click.UsageError(f"{what} wants NAME=VALUE, not {text!r}")
        values[name.strip()] = value
    return values


@contextlib.contextmanager
def spark_session(
    name: str,
    *,
    master: str | None = None,
    spark_conf: Iterable[str] = (),
    packages: Iterable[str] = (),
    small: bool = False,
) -> Iterator[SparkSession]:
    """A session with Delta (`rocket_sink.spark.session`) from a command's flags.

    `small`: settings for many plans over few rows; --spark-conf overrides them. Spark's log goes to
    a file, which is named if the command fails and else removed; under spark-submit and with
    --debug it goes to standard error.
    """
    from rocket_sink.spark.session import build_session

    conf = {**(_SMALL_PLANS if small else {}), **pairs(spark_conf, "--spark-conf")}
    with _log_file() as log, _no_jvm_left():
        with _jvm_output_to(log):
            spark = build_session(
                f"rocket-sink {name}", master=master, conf=conf, packages=tuple(packages)
            )
        try:
            yield spark
        except KeyboardInterrupt:
            raise  # its JVM may be in the midst of anything: see _no_jvm_left
        except BaseException:
            spark.stop()
            raise
        else:
            spark.stop()


@contextlib.contextmanager
def _no_jvm_left() -> Iterator[None]:
    """After Ctrl-C, end the processes that were started since: a JVM that is still starting, or
    waits for its job, would go on for as long as that takes."""
    earlier = {child.pid for child in psutil.Process().children()}
    try:
        yield
    except KeyboardInterrupt:
        ours = [one for one in psutil.Process().children(recursive=True) if one.pid not in earlier]
        for child in ours:
            with contextlib.suppress(psutil.Error):
                child.terminate()
        _, alive = psutil.wait_procs(ours, timeout=_JVM_ENDS_S)
        for child in alive:
            with contextlib.suppress(psutil.Error):
                child.kill()
        raise


@contextlib.contextmanager
def _log_file() -> Iterator[Path | None]:
    if "PYSPARK_GATEWAY_PORT" in os.environ or debug_wanted(sys.argv):
        yield None
        return
    handle, name = tempfile.mkstemp(prefix="rocket-sink-spark-", suffix=".log")
    os.close(handle)
    try:
        yield Path(name)
    except RocketSinkError:
        Path(name).unlink(missing_ok=True)
        raise
    except Exception:
        note(f"Spark's log: {name}")
        raise
    else:
        Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _jvm_output_to(log: Path | None) -> Iterator[None]:
    """A JVM that starts in this context inherits the file as its standard error."""
    if log is None:
        yield
        return
    sys.stderr.flush()
    ours = os.dup(_STDERR)
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), _STDERR)
            yield
    finally:
        os.dup2(ours, _STDERR)
        os.close(ours)
