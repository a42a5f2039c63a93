"""Flags of commands that start Spark, and the Spark session of these commands."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click
import psutil

from rocket_sink.commands.common.base import debug_wanted, pairs_option, together
from rocket_sink.commands.common.output import note
from rocket_sink.errors import RocketSinkError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STDERR: Final = 2
_JVM_ENDS_S: Final = 5.0
_SMALL_PLANS: Final = {
    # Use C1 only and no code generation: compilers would take half of the CPU time of a command
    # that reads a ledger. C1's code cache is small by default, and a JVM whose cache is full prints
    # to standard output.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


spark_options: Final = together(
    click.option("--master", metavar="URL",
                 help="Spark master. Default: spark-submit's, else local[*]."),
    pairs_option("--spark-conf", help="Spark setting; repeatable."),
    click.option("--package", "packages", multiple=True, metavar="GROUP:ARTIFACT:VERSION",
                 help="Maven package for Spark to load; repeatable."),
)  # fmt: skip


@contextlib.contextmanager
def spark_session(
    name: str,
    *,
    master: str | None = None,
    spark_conf: Mapping[str, str] | None = None,
    packages: Iterable[str] = (),
    small: bool = False,
) -> Iterator[SparkSession]:
    """Yield a session with Delta (`rocket_sink.spark.session`) from a command's flags. `small` sets
    Spark for many plans over few rows; --spark-conf overrides these settings. Spark's log goes to a
    file. If an error that is not rocket-sink's own ends the command, a note names the file, else it
    is removed. Under spark-submit and with --debug the log goes to standard error."""
    from rocket_sink.spark.session import build_session

    conf = {**(_SMALL_PLANS if small else {}), **(spark_conf or {})}
    note("starting Spark ...")
    with _log_file() as log, _no_jvm_left() as end:
        with _jvm_output_to(log):
            spark = build_session(
                f"rocket-sink {name}", master=master, conf=conf, packages=tuple(packages)
            )
        _handle_sigint(end)  # A new session has set its own handler, which only cancels jobs.
        try:
            with _quiet_loggers(shows_plans=log is None):
                yield spark
        except BaseException as error:
            # After Ctrl-C do not call Spark's JVM, which may be busy, or gone.
            if not (end.came or isinstance(error, KeyboardInterrupt)):
                spark.stop()
            raise
        else:
            spark.stop()


@contextlib.contextmanager
def _quiet_loggers(*, shows_plans: bool) -> Iterator[None]:
    """Silence loggers in this context that repeat what commands print: `spark.console`, with a
    query's figures, and PySpark's loggers of failed queries, except with `shows_plans`. PySpark's
    write the whole plan and Java's trace to standard error, even if the root logger is silent."""
    from pyspark.logger import PySparkLogger

    from rocket_sink.spark import console

    names = () if shows_plans else ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
    with contextlib.ExitStack() as stack:
        for logger in (console.LOG, *map(PySparkLogger.getLogger, names)):
            stack.callback(setattr, logger, "disabled", logger.disabled)
            logger.disabled = True
        yield


class _CtrlC:
    """A handler of SIGINT that ends all child processes started since the handler was made, then
    raises KeyboardInterrupt. Otherwise a JVM would first finish its start or its job: Spark's code
    catches the exception, and waits for the running call until the JVM is gone."""

    def __init__(self) -> None:
        self.came = False
        self._earlier = {child.pid for child in psutil.Process().children()}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        # Silence threads that have lost their JVM: they would log errors.
        logging.disable(logging.CRITICAL)
        self.end_children()
        raise KeyboardInterrupt

    def end_children(self) -> None:
        children = psutil.Process().children(recursive=True)
        new_children = [process for process in children if process.pid not in self._earlier]
        for child in new_children:
            with contextlib.suppress(psutil.Error):
                child.terminate()
        _, alive = psutil.wait_procs(new_children, timeout=_JVM_ENDS_S)
        for child in alive:
            with contextlib.suppress(psutil.Error):
                child.kill()


@contextlib.contextmanager
def _no_jvm_left() -> Iterator[_CtrlC]:
    """End all processes that were started in this context if Ctrl-C is pressed."""
    end = _CtrlC()
    earlier = _handle_sigint(end)
    try:
        yield end
    except BaseException as error:
        if end.came or isinstance(error, KeyboardInterrupt):
            end.end_children()
            raise KeyboardInterrupt from None
        raise
    finally:
        if earlier is not None:
            _handle_sigint(earlier)


def _handle_sigint(handler: Any) -> Any:
    """Set SIGINT's handler and return the old one; outside of the main thread only return None."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def _log_file() -> Iterator[Path | None]:
    if "PYSPARK_GATEWAY_PORT" in os.environ or debug_wanted(sys.argv):
        yield None
        return
    handle, name = tempfile.mkstemp(prefix="rocket-sink-spark-", suffix=".log")
    os.close(handle)
    log = Path(name)
    try:
        yield log
    except BaseException as error:
        # Name the log only for foreign errors: rocket-sink's own say what is wrong, and a user who
        # stopped the command needs no log.
        if isinstance(error, Exception) and not isinstance(error, RocketSinkError):
            note(f"Spark's log: {name}")
        else:
            log.unlink(missing_ok=True)
        raise
    log.unlink(missing_ok=True)


@contextlib.contextmanager
def _jvm_output_to(log: Path | None) -> Iterator[None]:
    """Let a JVM that starts in this context inherit the file as its standard error."""
    if log is None:
        yield
        return
    sys.stderr.flush()
    saved_stderr = os.dup(_STDERR)
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), _STDERR)
            yield
    finally:
        os.dup2(saved_stderr, _STDERR)
        os.close(saved_stderr)
