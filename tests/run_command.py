"""Commands in the test's own process, with its Spark session: a JVM takes longer than most."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from typing import Any, NamedTuple, TextIO
from unittest import mock

from rocket_sink import cli


class Done(NamedTuple):
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Of --json."""
        return json.loads(self.out)

    def lines(self) -> list[Any]:
        """Of --json, where it is one document per line."""
        return [json.loads(line) for line in self.out.splitlines()]


def run_command(
    *arguments: str,
    spark: Any = None,
    stdin: str = "",
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> Done:
    """Run a command line; `spark` is the session that it is given in place of one of its own.

    `out` and `err` take what it writes, for those who look meanwhile, or are a terminal.
    """
    out, err = out or io.StringIO(), err or io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        stack.enter_context(mock.patch("sys.stdin", given))
        # Log records, too, as without a logging configuration.
        logged = logging.StreamHandler(err)
        logged.setLevel(logging.WARNING)
        logging.getLogger().addHandler(logged)
        stack.callback(logging.getLogger().removeHandler, logged)
        made = "rocket_sink.spark.session.build_session"
        missing = None if spark else AssertionError("this command starts Spark: give it a session")
        stack.enter_context(mock.patch(made, return_value=spark, side_effect=missing))
        if spark is not None:
            stack.enter_context(mock.patch.object(spark, "stop"))
        code = cli.main(arguments)
    return Done(code, *(to.getvalue() if isinstance(to, io.StringIO) else "" for to in (out, err)))
