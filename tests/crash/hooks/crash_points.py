"""Moments of the product at which a process of the crash harness stops.

Drivers and workers wrap the functions of rocket_sink that mark a moment. A cell (a folder with the
ledger of its query) arms one point by a file. The n-th process that passes the point takes the
file, writes its ids to `reached.json`, and waits for `go`, which lets it go on or fail. The test
kills a process while it waits.
"""

import contextlib
import functools
import inspect
import json
import os
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

WAIT_S = 900.0
_POLL_S = 0.02


class Planted(Exception):
    """The error of a process that `go` lets fail."""


def passing(ledger, point):
    """Stop here if this point is armed for the query that writes to this ledger."""
    if not ledger:
        return
    cell = Path(unquote(urlsplit(ledger).path)).parent
    armed = cell / "armed.json"
    try:
        wanted = json.loads(armed.read_text())
    except (OSError, ValueError):
        return
    if wanted["point"] != point or _passed(cell) < wanted["count"]:
        return
    with contextlib.suppress(FileNotFoundError):
        # A rename succeeds in only one of two processes at the point.
        armed.rename(cell / f"taken.{os.getpid()}")
        _wait(cell)


def _passed(cell):
    """Count the passes of the point by all processes: a worker may never see a second task."""
    with (cell / "passed").open("ab", buffering=0) as file:
        file.write(b".")
        return file.tell()


def _wait(cell):
    import psutil

    daemon = psutil.Process(os.getppid())
    who = {"worker": os.getpid(), "daemon": daemon.pid, "executor": daemon.ppid()}
    partial = cell / "reached.part"
    partial.write_text(json.dumps(who))
    partial.rename(cell / "reached.json")
    until_s = time.monotonic() + WAIT_S
    while not (cell / "go").exists():
        if time.monotonic() > until_s:
            os._exit(3)
        time.sleep(_POLL_S)
    if (cell / "go").read_text() == "fail":
        raise Planted("the crash harness made this task fail")


def _around(owner, name, point, ledger, *, after=False):
    inner = getattr(owner, name)
    # Fail here rather than in each task, if the function has other parameters by now.
    inspect.signature(ledger).bind(*inspect.signature(inner).parameters)

    @functools.wraps(inner)
    def outer(*args, **named):
        if after:
            result = inner(*args, **named)
            passing(ledger(*args), point)
            return result
        passing(ledger(*args), point)
        return inner(*args, **named)

    setattr(owner, name, outer)


def install():
    """Wrap the functions; each line is a moment of `schedule`."""
    from rocket_sink.ledger.driver import fold
    from rocket_sink.ledger.transport import spool
    from rocket_sink.producer.admin import half_commits
    from rocket_sink.spark import datasource, foreach_batch, transactions
    from rocket_sink.spark.backfill import resend
    from rocket_sink.task import task, totals

    def of_request(body, request):
        return body.options.ledger if request is not None else ""

    def of_own(own, *_):
        return own.options.ledger

    def of_seal(own):
        ctx = own._ctx
        task_of_lane = ctx.partition is not None and ctx.lane in ("foreach", "datasource", "batch")
        return own._place.uri if task_of_lane else ""

    _around(task.RequestSender, "_submit", "request", of_request)
    _around(totals.RowTotals, "check_balance", "answered", lambda own, *_: own._options.ledger)
    _around(spool.SpoolWriter, "seal", "spooled", of_seal, after=True)
    _around(foreach_batch, "_append", "committed", lambda _, to, later: to.place.uri, after=True)
    _around(datasource._Writer, "_confirm", "committed", of_own, after=True)
    committer = half_commits.HalfMessageCommitter
    _around(committer, "ended", "ending", lambda own, *_: own.engine.options.ledger)
    _around(transactions.TransactionCommitter, "_note", "ended", of_own)
    _around(resend.Resender, "_deliver", "letters", of_own)
    _wrap_fold(fold._Folder)


def _wrap_fold(folder):
    begin = folder.__init__

    @functools.wraps(begin)
    def outer(self, *args):
        begin(self, *args)
        self._step = lambda step: passing(self._place.uri, f"fold:{step}")

    folder.__init__ = outer
