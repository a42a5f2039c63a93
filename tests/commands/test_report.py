"""`rocket-sink report` on a local ledger, without Spark."""

import contextlib
import datetime as dt
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

from rocket_sink.commands.common import spark_input
from rocket_sink.errors import LedgerError
from rocket_sink.ledger.driver.ledger import Ledger
from tests.ledger.night import QUERY, night
from tests.ledger.values import session
from tests.run_command import run_command


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    return night(tmp_path_factory.mktemp("night") / "ledger")


def report(*arguments, code=0):
    done = run_command("report", *arguments)
    assert done.code == code, (done.out, done.err)
    return done


def test_the_report_names_the_killed_broker_and_breaks_no_word(ledger, monkeypatch):
    monkeypatch.setattr("rocket_sink.commands.common.output._PIPE_WIDTH", 60)
    lines = report("--ledger", ledger).out.splitlines()
    assert max(map(len, lines)) <= 60
    text = " ".join(" ".join(lines).split())
    assert text.startswith(
        "broker-b left the route at 2026-03-01 14:15:00 UTC, and nothing was stored there since; "
        "the last attempt failed at 2026-03-01 14:"
    )
    assert "300 rows of 6 keys wait for it; next: start broker-b if it is not back, then" in text
    assert f"`rocket-sink backfill --ledger {ledger} -n HOST:9876`" in text
    assert "2 dead letters are pending that no broker would take (2 data NULL_BODY)" in text
    assert "2 letters are resolved" in text
    words = {"broker-a", "CONNECTION_LOST", "INVALID_QUEUE", "attempts", "superseded"}
    assert words <= set(text.split())


def test_the_short_id_and_the_times_of_sending(ledger):
    """Report on the time before the kill: broker-b is well, and only that time is counted."""
    early = ["--query", QUERY[:8], "--until", "2026-03-01T14:15", "--since", "2026-03-01T14:00"]
    document = report("--ledger", ledger, *early, "--json").json()
    assert document["scope"]["query_id"] == QUERY
    assert [cause["name"] for cause in document["verdict"]] == ["all_is_well"]
    assert document["totals"]["epochs"] == 90
    assert {epoch["epoch"] for epoch in document["epochs"]} == set(range(160, 180))
    naive = {"since": dt.datetime(2026, 3, 1, 14), "until": dt.datetime(2026, 3, 1, 14, 15)}
    assert Ledger(ledger).report(session(), query=QUERY, **naive).totals.epochs == 90
    done = report("--ledger", ledger, "--query", "feedbeef", code=1)
    assert "has no rows of a query 'feedbeef'" in done.err


@pytest.mark.parametrize("start", ["file:", "file://"])
def test_a_ledger_named_by_a_uri_is_the_folder(ledger, start, monkeypatch):
    """Read both forms of a local URI without Spark, as the folder's path."""
    monkeypatch.setattr("rocket_sink.commands.common.ledger_input.spark_session", None)
    wanted = report("--ledger", ledger).out
    assert report("--ledger", start + str(Path(ledger).absolute())).out == wanted


@pytest.mark.parametrize("is_uri", [False, True])
def test_a_missing_ledger(tmp_path, is_uri):
    where = (tmp_path / "x").as_uri() if is_uri else str(tmp_path)
    done = report("--ledger", where, code=1)
    assert done.err == f"rocket-sink: there is no ledger in {where}: check the path\n"


@pytest.mark.parametrize("closed", ["", "_delta_log"])
def test_a_ledger_of_another_user(ledger, closed, monkeypatch):
    """Name the folder that may not be read. Access is faked, because root may read all."""
    folder = Path(ledger, closed)
    monkeypatch.setattr("os.access", lambda path, mode: mode == os.F_OK or Path(path) != folder)
    done = report("--ledger", ledger, code=1)
    assert done.err.endswith(f"cannot be read: this user may not look into {folder}\n")


@pytest.mark.parametrize("defect", ["garbage", "empty", "no commit", "no files"])
def test_a_damaged_ledger_is_one_line(ledger, tmp_path, defect):
    copy = tmp_path / "ledger"
    shutil.copytree(ledger, copy)
    log = copy / "_delta_log" / f"{0:020}.json"
    if defect == "no files":
        shutil.rmtree(copy / "kind=send")
    elif defect == "no commit":
        log.unlink()
    else:
        log.write_text("{" if defect == "garbage" else "")
    done = report("--ledger", str(copy), code=1)
    (line,) = done.err.splitlines()
    assert "cannot" in line and "backup" in line and "<unknown>" not in line


SLEEPS = "import signal, time; signal.signal(15, signal.{}); print(1, flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("moment", "reaction"),
    [("starting", "SIG_DFL"), ("in a job", "SIG_IGN"), ("Spark's own exception", "SIG_DFL")],
)
def test_ctrl_c_leaves_no_process(reaction, moment, monkeypatch):
    """The child process stands for a JVM, which may be busy. Older children stay."""
    started = []
    spark, before = MagicMock(), signal.getsignal(signal.SIGINT)

    def child():
        command = [sys.executable, "-c", SLEEPS.format(reaction)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert started[-1].stdout.readline()

    def start(*_, **__):
        child()
        if moment == "starting":
            signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # PySpark sets its own handler.
        return spark

    child()
    monkeypatch.setattr("rocket_sink.spark.session.build_session", start)
    monkeypatch.setattr(spark_input, "_JVM_ENDS_S", 0.2 if reaction == "SIG_IGN" else 60)
    try:
        with pytest.raises(KeyboardInterrupt), spark_input.spark_session("report"):
            if moment == "in a job":
                signal.raise_signal(signal.SIGINT)
            raise KeyboardInterrupt
        older, new = started
        assert new.wait(60) is not None
        assert older.poll() is None and not spark.stop.called
        assert signal.getsignal(signal.SIGINT) is before
        assert logging.root.isEnabledFor(logging.ERROR) is (moment == "Spark's own exception")
    finally:
        logging.disable(logging.NOTSET)
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("is_submitted", [False, True])
@pytest.mark.parametrize(
    ("error", "stays"), [(None, 0), (GeneratorExit, 0), (LedgerError("x"), 0), (ValueError("x"), 1)]
)
def test_sparks_log_stays_for_errors_that_are_not_ours(
    error, stays, is_submitted, tmp_path, monkeypatch, capfd
):
    """Remove the log after a signal, too: it ends a benchmark by a BaseException."""
    from pyspark.logger import PySparkLogger

    from rocket_sink.spark.console import LOG

    spark, shown = MagicMock(), PySparkLogger.getLogger("SQLQueryContextLogger")

    def start(*_, **__):
        os.write(2, b"the JVM's noise")
        return spark

    build = MagicMock(side_effect=start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("rocket_sink.spark.session.build_session", build)
    monkeypatch.setattr(LOG, "disabled", is_submitted)
    if is_submitted:
        monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    before = LOG.disabled, shown.disabled
    ours = contextlib.suppress(GeneratorExit, LedgerError, ValueError)
    flags = {"master": "m", "packages": ("p",)}
    with ours, spark_input.spark_session("report", spark_conf={"a": "b"}, **flags):
        assert LOG.disabled and shown.disabled is not is_submitted
        if error:
            raise error
    assert (LOG.disabled, shown.disabled) == before
    assert spark.stop.call_count == 1
    assert build.call_args == call("rocket-sink report", conf={"a": "b"}, **flags)
    logs, err = list(tmp_path.iterdir()), capfd.readouterr().err
    assert len(logs) == (0 if is_submitted else stays)
    assert ("the JVM's noise" in err) is is_submitted
    for log in logs:
        assert log.read_text() == "the JVM's noise" and f"Spark's log: {log}\n" in err


def test_the_page_and_the_terminal_agree(ledger, tmp_path):
    page = tmp_path / "report.html"
    done = report("--ledger", ledger, "--html", str(page), "--json")
    assert f"written to {page}" in done.err
    text = page.read_text()
    start = text.index(">", text.index('id="data"')) + 1
    data = json.loads(text[start : text.index("</script>", start)])
    document = done.json()
    assert data["report"] == document
    assert [cause["name"] for cause in document["verdict"]] == [
        "broker_left_route", "letters_refused", "broker_slow", "broker_was_isolated"
    ]  # fmt: skip
    (absence,) = document["absences"]
    place = absence["broker"], absence["left_route"], absence["back_at"]
    assert place == ("broker-b", True, None) and absence["stored_elsewhere"] > 1000
    assert f"rocket-sink verify --ledger {ledger}" in text
