"""jobs/report.py under spark-submit, with a JVM of its own, which makes it slow."""

import json
import subprocess
from pathlib import Path

import pyspark
import pytest

from tests.integration.test_spark_submit import ROOT, environment
from tests.jvms import SMALL_PLANS, delta_package, submit_words
from tests.ledger.night import night
from tests.run_command import run_command

pytestmark = [pytest.mark.slow, pytest.mark.spark]

SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"


def test_spark_says_what_duckdb_says(tmp_path):
    ledger, page = night(tmp_path / "ledger"), tmp_path / "report.html"
    command = [
        str(SUBMIT), "--master", "local[1]", "--packages", delta_package(),
        *submit_words(conf={**SMALL_PLANS, "spark.ui.enabled": "false"}),
        str(ROOT / "jobs" / "report.py"), "--ledger", ledger, "--html", str(page), "--json",
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    quick = run_command("report", "--ledger", ledger, "--json").json()
    # spark-submit puts a Python job's standard error into standard output, too.
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report == quick
    assert report["verdict"][0]["name"] == "broker_left_route"
    assert "broker-b left the route" in page.read_text()
    assert page.stat().st_size < 2_000_000
