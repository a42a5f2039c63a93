"""Ctrl-C in commands that run Spark, with a JVM of their own: one line, and no process is left."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import psutil
import pytest

from tests.jvms import submit_args
from tests.ledger.night import night
from tests.producer.waiting import until

pytestmark = pytest.mark.spark

DEADLINE_S = 180.0
wait_for = partial(until, timeout_s=DEADLINE_S, poll_s=0.05)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    return night(tmp_path_factory.mktemp("night") / "ledger")


@contextmanager
def started(temporary, *arguments):
    """Start a command in a process group of its own, like a shell on a terminal."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rocket_sink.cli", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={
            **os.environ, "TMPDIR": str(temporary),
            "PYSPARK_SUBMIT_ARGS": submit_args(f"-Djava.io.tmpdir={temporary}"),
        },
    )  # fmt: skip
    try:
        yield process
    finally:
        for member in of_session(process.pid):
            member.kill()
        process.communicate()


def of_session(leader):
    """Return the running processes of the leader's session, also those whose parent is gone."""
    running = []
    for process in psutil.process_iter(["name"]):
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
        except (OSError, psutil.Error):
            continue
    return running


def press_ctrl_c(process):
    """Interrupt the whole group like a terminal, and return the exit code and standard error.

    Without the line about the start of Spark. The last line begins with a new line, because a
    terminal has shown ^C.
    """
    os.killpg(process.pid, signal.SIGINT)
    _, error_text = process.communicate(timeout=DEADLINE_S)
    assert of_session(process.pid) == []
    return process.returncode, error_text.removeprefix("starting Spark ...\n").removeprefix("\n")


def test_while_the_jvm_starts(ledger, tmp_path):
    with started(tmp_path, "report", "--ledger", ledger, "--fold") as process:
        wait_for(lambda: any(m.info["name"] == "java" for m in of_session(process.pid)))
        assert press_ctrl_c(process) == (130, "rocket-sink: stopped\n")
    assert [path.name for path in tmp_path.glob("rocket-sink-spark-*")] == []


@pytest.mark.slow
def test_while_spark_is_at_work(ledger, tmp_path):
    """Interrupt a query that takes hours: only the end of its JVM ends it."""
    count = "aggregate(sequence(1, 1000000 + length(query_id)), 0L, (sum, n) -> sum + n)"
    hours = f"aggregate(sequence(1, 1000000), 0L, (sum, n) -> sum + {count})"
    with started(
        tmp_path, "ledger", "show", "sends", "--ledger", ledger, "--master", "local[1]",
        "--where", f"{hours} > 0",
    ) as process:  # fmt: skip
        while not process.stderr.readline().startswith("ledger show: "):
            assert process.poll() is None
        assert press_ctrl_c(process) == (130, "rocket-sink: stopped\n")
