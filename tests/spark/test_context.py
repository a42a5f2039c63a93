"""The task context, from what Spark gives its workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocket_sink.options import SinkOptions
from rocket_sink.spark.context import JOB_GROUP, QUERY_ID, RUN_ID, streaming_run
from rocket_sink.spark.datasource import _begin_write


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


def test_each_batch_write_of_an_app_id_is_a_query_of_its_own(tmp_path: Path) -> None:
    """With a common id, a later write's accounts would replace the earlier ones and letters."""
    for delivery in ("at_least_once", "effectively_once"):
        options = SinkOptions.parse(
            nameServer="n:1", topic="t", ledger=str(tmp_path), delivery=delivery, appId="nightly"
        )
        writes = [_begin_write(options, run) for run in ("one", "two")]
        again = delivery == "effectively_once"  # The first write has not ended.
        assert writes == ["nightly/one", "nightly/one" if again else "nightly/two"]
    assert _begin_write(options.with_(appId=""), "one") == "one"
