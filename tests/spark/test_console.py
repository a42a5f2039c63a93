"""A program prints what becomes of its queries and writes, by logging."""

import re

import pytest

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.net import log
from rocket_sink.spark.console import warn_of_losses
from rocket_sink.spark.datasource import register
from tests.clusters import scripted_cluster
from tests.integration.lanes import stream_writer
from tests.python import run_python
from tests.spark.streams import run, stream_of
from tests.spark.test_listener import wait_for

CONSOLE = "rocket_sink.spark.console"
SCRIPT = """\
import logging, sys
from rocket_sink.net import log
exec(sys.argv[1])
log.tell(log.logger("rocket_sink.x"), "%s ended", "it")
logging.shutdown()
"""


@pytest.mark.parametrize(
    ("setting", "printed"),
    [
        ("", "INFO it ended\n"),
        ("logging.basicConfig(level='INFO', format='%(levelname)s %(message)s')",
         "INFO it ended\n"),
        ("logging.basicConfig()", ""),
        ("logging.getLogger('rocket_sink').setLevel('WARNING')", ""),
        ("logging.disable('INFO')", ""),
        ("logging.getLogger('rocket_sink.x').disabled = True", ""),
    ],
)  # fmt: skip
def test_a_bare_script_prints_it_and_a_program_decides(setting, printed):
    result = run_python("-c", SCRIPT, setting)
    stderr = re.sub(r"^[0-9:]{8} (?=INFO)", "", result.stderr)
    assert (result.stdout, stderr) == ("", printed)


def test_a_warning_of_another_library_does_not_hide_later_lines():
    """Print after `logging.error`, too, by which py4j reports a Ctrl-C."""
    script = SCRIPT.replace("logging.shutdown()", "")
    script += "log.logger('rocket_sink.x').warning('it %s', 'waits')\n"
    script += "logging.error('lost')\nlog.tell(log.logger('rocket_sink.x'), 'the end')\n"
    result = run_python("-c", script, "")
    lines = re.sub(r"^\d\d:\d\d:\d\d ", "", result.stderr, flags=re.MULTILINE)
    assert lines == "INFO it ended\nWARNING it waits\nERROR:root:lost\nINFO the end\n"


IN_A_NOTEBOOK = """\
import sys, types
shown = []
display = types.SimpleNamespace(HTML=str, display=shown.append)
sys.modules["IPython"] = types.SimpleNamespace(
    get_ipython=lambda: types.SimpleNamespace(kernel=1), display=display
)
exec(sys.argv[1])
from rocket_sink.spark.console import say_end
counts = {"rows_in": 5000, "acked": 4997, "dead": 3, "degraded": 0, "unknown": 0, "filtered": 0}
say_end("the write <w>", counts, "/ledger")
print(*shown, sep="\\n")
"""


@pytest.mark.parametrize("setting", ["", "import logging; logging.basicConfig(level='INFO')"])
def test_a_notebook_shows_the_accounts_as_a_table(setting):
    result = run_python("-c", IN_A_NOTEBOOK, setting)
    if setting:
        assert (result.stdout, "5,000 rows in" in result.stderr) == ("\n", True)
        return
    cells = re.findall(r"<(?:caption|th|td)[^>]*>([^<]*)", result.stdout)
    assert cells == [
        "the write &lt;w&gt; ended", "rows in", "5,000", "acknowledged", "4,997",
        "dead letters", "3", "ledger", "/ledger",
    ]  # fmt: skip
    assert result.stderr == ""


def test_a_stream_of_losses_is_cut_to_some_warnings(caplog):
    counts = {"rows_in": 9, "dead": 3, "unknown": 0, "first_error": "TOPIC_NOT_FOUND"}
    for epoch in range(1000):
        warn_of_losses(f"epoch {epoch} of the query q", counts, "/ledger")
    log.flush()
    *warnings, count = texts(caplog)
    assert len(warnings) == log.BURST
    assert warnings[-1].startswith(f"3 of 9 rows of epoch {log.BURST - 1} of the query q were not")
    assert "more of these are only counted" in warnings[-1]
    assert count.startswith(f"{1000 - log.BURST} more of these were not logged; the last ")
    assert count.endswith("ledger show dead-letters --ledger /ledger")


def texts(caplog, name=""):
    """Return the lines that name a query. The session's other queries may end at the same time."""
    lines = (record.getMessage() for record in caplog.records if record.name == CONSOLE)
    return [line for line in lines if name in line]


cluster = scripted_cluster(1, flights=1)


@pytest.fixture
def options(cluster, tmp_path):
    ledger = Ledger(tmp_path / "ledger").path
    return {"nameServer": cluster.name_server, "topic": "flights", "ledger": ledger}


@pytest.mark.spark
@pytest.mark.parametrize(
    ("lane", "shown", "is_early"),
    [
        ("foreach", "foreach", False), ("foreach_batch", "foreachBatch", False),
        ("foreach_batch", "foreachBatch", True), ("source_stream", "datasource", False),
    ],
)  # fmt: skip
def test_a_query_says_its_start_its_losses_and_its_end(
    spark, options, tmp_path, caplog, lane, shown, is_early, monkeypatch
):
    """An early sink is older than its session."""
    caplog.set_level("INFO", CONSOLE)
    rows = stream_of(spark, tmp_path, '{"body": "one"}\n{"body": null}\n{"body": "two"}\n')
    ledger = options["ledger"]
    if lane == "source_stream":
        register(spark, ledger=ledger)
    with monkeypatch.context() as patch:
        if is_early:
            patch.setattr("rocket_sink.spark.listener.active_session", lambda: None)
        writer = stream_writer(lane, rows, options)
    if lane != "foreach":
        writer = writer.queryName("orders")
    query = run(writer, tmp_path / "checkpoint")
    name = query.id if lane == "foreach" else f"orders ({query.id[:8]})"
    wait_for(lambda: any(" ended: " in text for text in texts(caplog, name)))
    lines = texts(caplog, name)
    # Spark hides the sink of a foreachBatch query without epochs.
    if lane != "foreach_batch":
        caplog.clear()
        run(writer, tmp_path / "checkpoint")
        wait_for(lambda: len(texts(caplog, name)) > 1)
        assert texts(caplog, name)[1:] == [f"the query {name} ended: 0 rows in; ledger {ledger}"]
    start = f"the query {name} sends to the topic flights by {shown}, delivery at_least_once"
    assert lines.pop(0).startswith(start)
    assert lines[0].startswith(f"1 of 3 rows of epoch 0 of the query {name} were not delivered")
    assert "INVALID_BODY" in lines[0] or "body" in lines[0]
    assert lines[0].endswith(f"rocket-sink ledger show dead-letters --ledger {ledger}")
    end = f"the query {name} ended: 3 rows in, 2 acknowledged, 1 dead letter; ledger {ledger}"
    assert lines[1:] == [end]
