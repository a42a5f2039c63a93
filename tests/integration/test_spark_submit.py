"""SIGTERM and Ctrl-C of `jobs/stream.py` under spark-submit, as a scheduler or a terminal sends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from delta import configure_spark_with_delta_pip
from pyspark.sql import SparkSession

from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.transport.files import spooled_epochs
from tests.clusters import scripted_cluster
from tests.integration.test_ctrl_c import of_session
from tests.jvms import submit_words
from tests.ledger.views import view_rows

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400.0
cluster = scripted_cluster(1, ticks=1, t=4)


def terminate(process):
    """Signal the JVM alone, as a scheduler does: spark-submit becomes it."""
    process.send_signal(signal.SIGTERM)


def press_ctrl_c(process):
    """Signal Java and Python, as a terminal does."""
    os.killpg(process.pid, signal.SIGINT)


OF_ACCUMULATORS = r"Traceback.*(?:\n .*)+/pyspark/accumulators\.py.*(?:\n .*)+\nEOFError"
"""The trace of PySpark's own server of accumulators (`pyspark/accumulators.py`), which prints it if
Java closes the connection before Python has stopped the session. Ctrl-C ends both at once."""

SUBMIT = [str(Path(sys.executable).parent / "spark-submit"), *submit_words()]
SUBMIT += ["--master", "local[1]"]


def environment():
    """Return the environment of a user, with this repository on the path."""
    names = ("PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    return {**environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(("lane", "end"), [("foreach", terminate), ("datasource", press_ctrl_c)])
def test_a_signal_ends_the_query_with_its_accounts(cluster, tmp_path, lane, end):
    builder = configure_spark_with_delta_pip(SparkSession.builder)
    command = [
        *SUBMIT, "--packages", builder._options["spark.jars.packages"],
        str(ROOT / "jobs" / "stream.py"), "--format", "rate", "--source-option",
        "rowsPerSecond=50", "--trigger", "3 seconds", "--lane", lane,
        "--checkpoint", str(tmp_path / "checkpoint"), "--ledger", str(tmp_path / "ledger"),
        "-n", cluster.name_server, "-t", "ticks",
        "--select", "cast(value AS string) AS body",
    ]  # fmt: skip
    # Spark's log is longer than a pipe.
    with (tmp_path / "out").open("w") as out_file, (tmp_path / "err").open("w") as err_file:
        process = subprocess.Popen(
            command, env=environment(), cwd=tmp_path, start_new_session=True,
            stdout=out_file, stderr=err_file, text=True,
        )  # fmt: skip
    try:
        until_s = time.monotonic() + DEADLINE_S
        while len(cluster.messages("ticks")) < 100:
            assert process.poll() is None, (tmp_path / "err").read_text()
            assert time.monotonic() < until_s
            time.sleep(0.1)
        end(process)
        process.wait(DEADLINE_S)
    finally:
        for member in of_session(process.pid):
            member.kill()
        process.wait()
    # spark-submit writes both streams of Python to its own standard output.
    out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
    sent = len(cluster.messages("ticks"))
    assert process.returncode == 0, err
    assert "stopping after the current micro-batch" in out
    accounts = out.replace(",", "")
    assert re.search(rf"^rows_in {sent} acked {sent} ", accounts, re.MULTILINE), (sent, accounts)
    traces = re.sub(OF_ACCUMULATORS, "", out + err)
    assert "Traceback" not in traces and "\tat " not in traces
    place = resolve_path(str(tmp_path / "ledger"))
    assert not spooled_epochs(place)
    (row,) = view_rows(place.uri.removeprefix("file:"), "SELECT sum(acked) AS acked FROM epochs")
    assert row.acked == sent


SENDS = """
import sys
from rocket_sink import Ledger, RocketSink, build_session

name_server, ledger = sys.argv[1:]
spark = build_session()
rows = spark.range(3).selectExpr("cast(id AS string) AS body")
print(RocketSink(nameServer=name_server, topic="t", ledger=ledger).write(rows).acked)
print(Ledger(ledger).epochs(spark).count())
"""


def test_a_ledger_needs_no_jars_of_delta(cluster, tmp_path):
    """With Delta's settings and without its jars, Spark would plan no query."""
    (tmp_path / "sends.py").write_text(SENDS)
    words = [str(tmp_path / "sends.py"), cluster.name_server, str(tmp_path / "ledger")]
    process = subprocess.run(
        [*SUBMIT, *words], env=environment(), cwd=tmp_path, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert [line for line in process.stdout.splitlines() if line.isdigit()] == ["3", "1"], process
