"""The task context, from what Spark gives its workers."""

import pytest

from rocket_sink.options import SinkOptions
from rocket_sink.spark.context import JOB_GROUP, QUERY_ID, RUN_ID, streaming_run
from rocket_sink.spark.session_checks import unrecorded_by


@pytest.mark.parametrize(
    ("properties", "run"),
    [
        ({QUERY_ID: "q", JOB_GROUP: "r"}, "r"),
        ({QUERY_ID: "q", RUN_ID: "r", JOB_GROUP: "user's"}, "r"),
        ({QUERY_ID: "q"}, ""),
        ({JOB_GROUP: "a batch's, named by its user"}, ""),
    ],
)
def test_the_run_is_told_from_the_query(properties, run):
    assert streaming_run(properties.get) == run


@pytest.mark.parametrize(
    ("options", "lane"),
    [({"ledger": "new"}, ""), ({"appId": "a"}, ""), ({"ledgerVia": "spark"}, ""), ({}, "batches")],
)
def test_each_way_to_leave_records_begins_anew(tmp_path, caplog, options, lane):
    # A run with another ledger writes its note there, so this ledger has no note of the run.
    epochs, last = [], "" if "ledger" in options else "0"
    starts = (({}, "", ""), (options, lane, "0"), ({}, "", "0"))
    for run, (more, by, pending) in enumerate(starts):
        ledger = tmp_path / more.get("ledger", "old")
        sink = SinkOptions.parse(**{**more, "ledger": str(ledger)})
        epochs.append(unrecorded_by(sink, None, "q", str(run), pending, by))
    assert epochs == ["", "0", last]
    assert caplog.text.count("epoch 0 was begun before") == len("".join(epochs))
