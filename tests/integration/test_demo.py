"""`rocket-sink demo` with fewer rows passes under a freeze and under a kill."""

import re

import pytest

from tests.run_command import run_command

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(1800)]

ROWS = 20_000
"""The rows of four micro-batches; two come after the fault."""


@pytest.mark.parametrize("fault", ["freeze", pytest.param("kill", marks=pytest.mark.slow)])
def test_a_strict_run_passes_with_a_broken_broker(spark, fault, tmp_path):
    out = tmp_path / "demo"
    arguments = ("--rows", str(ROWS), "--fault", fault, "--out", str(out))
    done = run_command("demo", *arguments, spark=spark)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert "PASSED: the accounts add up and nothing is lost" in done.out
    assert re.search(rf"^ distinct rows +{ROWS:,} ", done.out, re.MULTILINE)
    assert re.search(r"^ lost +0", done.out, re.MULTILINE)
    assert "broker-b" in done.err
    assert (out / "ledger" / "_delta_log").is_dir()
    assert not (out / "flights").exists()
