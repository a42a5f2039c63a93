"""Runs commands in the test's own process with its Spark session: a JVM of their own is slow."""

import contextlib
import io
import json
import logging
from typing import NamedTuple
from unittest import mock

from rocket_sink import cli


class Done(NamedTuple):
    """The exit code of a command and the texts that it wrote."""

    code: int
    out: str
    err: str

    def json(self):
        """Return the document that `--json` printed."""
        return json.loads(self.out)

    def lines(self):
        """Return the documents that `--json` printed, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]


class Terminal(io.StringIO):
    """Keeps what is written to it, and says that it is a terminal."""

    def isatty(self):
        return True


def run_command(*arguments, spark=None, stdin="", out=None, err=None):
    """Run a command line; `spark` is used in place of a session that the command would build.

    `out` and `err` take the output: for a test that reads it meanwhile, or for a terminal.
    """
    out, err = out or io.StringIO(), err or io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        typed = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        stack.enter_context(mock.patch("sys.stdin", typed))
        # Log records, too, as without a logging configuration.
        logged = logging.StreamHandler(err)
        logged.setLevel(logging.WARNING)
        logging.getLogger().addHandler(logged)
        stack.callback(logging.getLogger().removeHandler, logged)
        build = "rocket_sink.spark.session.build_session"
        missing = None if spark else AssertionError("this command starts Spark: give it a session")
        stack.enter_context(mock.patch(build, return_value=spark, side_effect=missing))
        if spark is not None:
            stack.enter_context(mock.patch.object(spark, "stop"))
        code = cli.main(arguments)
    return Done(code, *(to.getvalue() if isinstance(to, io.StringIO) else "" for to in (out, err)))
