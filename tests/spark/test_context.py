"""The task context, from what Spark gives its workers."""

from __future__ import annotations

import pytest

from rocket_sink.spark.context import JOB_GROUP, QUERY_ID, RUN_ID, streaming_run


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
