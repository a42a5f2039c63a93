"""The task context, from what Spark gives its workers."""

from unittest.mock import MagicMock, call

import pytest

from rocket_sink.options import SinkOptions
from rocket_sink.spark.context import JOB_GROUP, QUERY_ID, RUN_ID, UNRECORDED, streaming_run
from rocket_sink.spark.session_checks import tell_unrecorded


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
def test_each_way_to_leave_records_begins_anew(tmp_path, options, lane):
    # Another ledger leaves no note in this one.
    settings, last = MagicMock(), "" if "ledger" in options else "0"
    starts = (({}, "", ""), (options, lane, "0"), ({}, "", "0"))
    for run, (more, by, settings.get.return_value) in enumerate(starts):
        ledger = tmp_path / more.get("ledger", "old")
        sink = SinkOptions.parse(**{**more, "ledger": str(ledger)})
        tell_unrecorded(sink, None, "q", str(run), settings, by)
    assert settings.set.mock_calls == [call(UNRECORDED, epoch) for epoch in ("", "0", last)]
