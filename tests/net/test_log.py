"""Texts of peers reach a log escaped, and a flood of them is cut to a few lines."""

import ast
import io
import logging
import os
import signal
from pathlib import Path

import pytest

import rocket_sink
from rocket_sink.net import log
from rocket_sink.net.log import BURST

PACKAGE = Path(rocket_sink.__file__).parent
HOSTILE = "\x1b]52;c;eA==\x07\x9b2J\u202e\r\n2026-01-01 ERROR forged\u2028x\x00"


@pytest.fixture
def written():
    """The text that an ordinary handler writes for the whole package."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.getLogger("rocket_sink").addHandler(handler)
    yield stream
    logging.getLogger("rocket_sink").removeHandler(handler)


def test_all_modules_take_their_loggers_here():
    modules = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        # PySpark's own loggers are only told to be silent.
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "logging.getLogger"
    }
    assert modules == {"net/log.py"}


def test_each_logger_writes_one_printable_line(written):
    logger = log.logger("rocket_sink.test")
    logger.warning("from %s: %r %d", HOSTILE, Unclean(), 3, extra={"peer": HOSTILE})
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("it raised %s", HOSTILE)
    first, second, *trace = written.getvalue().rstrip("\n").split("\n")
    assert "WARNING rocket_sink.test from \\x1b]52;c" in first and first.endswith(" 3")
    assert " it raised \\x1b]52" in second
    assert "Traceback" in trace[0] and "ValueError" in "".join(trace)
    for line in (first, second, *trace):
        assert line.isprintable(), line
    assert all(line.startswith("  ") for line in trace)


class Unclean:
    def __repr__(self):
        return HOSTILE


def test_the_number_of_suppressed_records_is_logged(written):
    logger = log.logger("rocket_sink.test")
    for number in range(5000):
        logger.warning("frame %d", number, extra={"peer": "10.0.0.1:10911"})
    logger.error("frame %d", 7)
    log.flush()
    lines = written.getvalue().splitlines()
    assert len(lines) == BURST + 2 and not log._GUARD._counts, "a count is no record of a kind"
    assert f"frame {BURST - 1} (more of these are only counted for 10 s)" in lines[BURST - 1]
    assert lines[-1].endswith(
        f"{5000 - BURST:,} more of these from 10.0.0.1:10911 were not logged; the last logged: "
        f"frame {BURST - 1}"
    )
    assert "WARNING" in lines[-1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_is_not_stuck_behind_its_parents_lock(written):
    """A thread of the parent may hold the handler's lock at the fork."""
    logger = log.logger("rocket_sink.test")
    with log._GUARD._lock:
        child = os.fork()
        if not child:
            signal.alarm(60)  # The alarm ends a child that waits for ever.
            logger.warning("in the child")
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
