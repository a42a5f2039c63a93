"""The package's loggers. They clean their records, and limit the number of similar records.

If a program has set up no logging, records get time and level in their text.
A record becomes one printable line (`rocket_sink.text`). Tracebacks are indented, so that none of
their lines looks like a record. At most `BURST` records of one format string and peer are logged in
`EVERY_S` seconds. Further records are only counted; `flush` or a later record logs the count."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from rocket_sink.text import clean, clean_trace

BURST: Final = 10
EVERY_S: Final = 10.0
_KINDS: Final = 1000
"""Limit of counters: each peer has its own, and the network may bring any number of peers."""
_RECORD_CHARS: Final = 4000
_ELSEWHERE: Final = "other peers"
_MORE: Final = f" (more of these are only counted for {EVERY_S:g} s)"


def logger(name: str) -> logging.Logger:
    """Return a module's logger."""
    module_logger = logging.getLogger(name)
    module_logger.addFilter(_GUARD)
    return module_logger


def about(peer: str, module_logger: logging.Logger) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger for records about the peer with this address."""
    return logging.LoggerAdapter(module_logger, {"peer": peer})


_relay: Final = threading.local()


def relay(put: Callable[[Callable[[], object]], None]) -> None:
    """From now on pass the calling thread's records to `put`, which calls the function that logs on
    another thread. A handler may wait for the calling thread, or for a lock whose holder does."""
    _relay.put = put


_has_printed = False
"""Whether `tell` has printed a text, because the program had set up no logging."""


def tell(module_logger: logging.Logger, text: str, *args: object, html: str = "") -> None:
    """Log at INFO. If the program had set up no logging at the first call, print the text to stderr
    with time and level, unless INFO is logged: py4j calls `logging.error`, which makes a handler
    for warnings. Notebooks without logging show `html`."""
    global _has_printed
    if module_logger.disabled:
        return
    has_handlers = module_logger.hasHandlers() and not _has_printed
    is_set_up = has_handlers or module_logger.isEnabledFor(logging.INFO)
    package = logging.getLogger(module_logger.name.partition(".")[0])
    if is_set_up or package.level or module_logger.level or logging.lastResort is None:
        module_logger.info(text, *args)
        return
    record = module_logger.makeRecord(
        module_logger.name, logging.INFO, __file__, 0, text, args, None
    )
    if logging.root.manager.disable >= logging.INFO or not module_logger.filter(record):
        return
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and html else None
    if hasattr(shell, "kernel"):
        ipython.display.display(ipython.display.HTML(html))
    else:
        if module_logger.hasHandlers():
            _stamp(record)
        logging.lastResort.emit(record)
    _has_printed = True


def _stamp(record: logging.LogRecord) -> None:
    """Put time and level into the text, because Python's last resort prints nothing else."""
    at = time.strftime("%H:%M:%S", time.localtime(record.created))
    record.msg = f"{at} {record.levelname} {record.msg}"


def flush() -> None:
    """Log the counts of suppressed records."""
    _log_counts(_GUARD.rest())


def _log_counts(due: list[tuple[Kind, int]]) -> None:
    for kind, suppressed in due:
        where = f" from {kind.peer}" if kind.peer else ""
        text = f"{suppressed:,} more of these{where} were not logged; the last logged: {kind.text}"
        logging.getLogger(kind.logger).log(kind.level, text, extra={"held_back": suppressed})


class Kind(NamedTuple):
    """The key of a counter: the records of one kind are limited together."""

    logger: str
    level: int
    text: str
    peer: str


@dataclass(slots=True)
class Count:
    """The numbers of logged (`passed`) and suppressed (`cut`) records of a kind since `since_s`.
    `shown` is the text of the last logged record."""

    since_s: float
    passed: int = 0
    cut: int = 0
    shown: str = ""


class Guard(logging.Filter):
    """The filter of all loggers of the package, which cleans and limits records. It has counters of
    records by kind, and is thread-safe. A forked child begins without counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Kind, Count] = {}

    def admit(self, kind: Kind) -> tuple[Count | None, list[tuple[Kind, int]]]:
        """Count a record. Return its counter, or None if it has to be suppressed, and the counts of
        suppressed records to log first."""
        with self._lock:
            now_s = self._clock()
            if kind not in self._counts and len(self._counts) >= _KINDS:
                kind = kind._replace(peer=_ELSEWHERE)
            count = self._counts.setdefault(kind, Count(now_s))
            if now_s - count.since_s < EVERY_S and count.passed >= BURST:
                count.cut += 1
                return None, []
            due = self._take(now_s - EVERY_S)
            count = self._counts.setdefault(kind, Count(now_s))
            count.passed += 1
            return count, due

    def rest(self) -> list[tuple[Kind, int]]:
        """Return and reset the counts of suppressed records, each with the last logged text."""
        with self._lock:
            return self._take(self._clock())

    def _take(self, until_s: float) -> list[tuple[Kind, int]]:
        over = [kind for kind, count in self._counts.items() if count.since_s <= until_s]
        counts = [(kind, self._counts.pop(kind)) for kind in over]
        return [(kind._replace(text=c.shown or kind.text), c.cut) for kind, c in counts if c.cut]

    def filter(self, record: logging.LogRecord) -> bool:
        put = getattr(_relay, "put", None)
        if put is not None:
            put(partial(logging.getLogger(record.name).handle, record))
            return False
        if hasattr(record, "held_back"):
            return True
        peer = clean(getattr(record, "peer", ""), 100)
        count, due = self.admit(Kind(record.name, record.levelno, str(record.msg), peer))
        if count is None:
            return False
        is_last = count.passed == BURST
        _log_counts(due)
        text = count.shown = clean(record.getMessage(), _RECORD_CHARS)
        record.msg, record.args = text + (_MORE if is_last else ""), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = clean_trace(logging.Formatter().formatException(record.exc_info))
        if not logging.getLogger(record.name).hasHandlers():
            _stamp(record)
        return True


_GUARD: Final = Guard()
