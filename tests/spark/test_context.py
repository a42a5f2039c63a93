"""The task context, from what Spark gives its workers."""

from pathlib import Path
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
def test_the_run_is_told_from_the_query(properties: dict[str, str], run: str) -> None:
    assert streaming_run(properties.get) == run


def test_each_sink_of_a_query_has_a_record_of_its_own(tmp_path: Path) -> None:
    settings = MagicMock()
    for ledger, pending in (("old", ""), ("new", "5"), ("old", "5")):
        settings.get.return_value = pending
        tell_unrecorded(SinkOptions.parse(ledger=str(tmp_path / ledger)), "q", settings)
    assert settings.set.mock_calls == [call(UNRECORDED, epoch) for epoch in ("", "5", "")]
