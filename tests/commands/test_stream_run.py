"""`rocket-sink stream --batch` partitions rows like a stream, before it sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from rocket_sink import RocketSink
from rocket_sink.commands.common.stream_run import run_batch
from rocket_sink.errors import ConfigurationError

TYPES = {"queue_id": IntegerType()}


class Frame:
    """The parts of a DataFrame that the driver looks at, without a JVM."""

    def __init__(self, *columns: str) -> None:
        fields = [StructField(name, TYPES.get(name, StringType())) for name in columns]
        self.schema = StructType(fields)
        self.sparkSession = SimpleNamespace()
        self.parted_by: tuple[Any, ...] = ()

    def __getitem__(self, name: str) -> str:
        return name

    def repartition(self, *by: Any) -> Frame:
        self.parted_by = by
        return self


@pytest.mark.parametrize(
    ("ordering", "columns", "parted_by"),
    [
        ("strict", ("body", "sharding_key"), ("`sharding_key`",)),
        ("best_effort", ("body", "sharding_key"), ("`sharding_key`",)),
        ("strict", ("body", "queue_id", "broker_name"), ()),
        ("none", ("body", "sharding_key"), ()),
        ("none", ("body",), ()),
    ],
)
def test_a_batch_in_order_has_a_keys_rows_in_one_partition(
    ordering: str, columns: tuple[str, ...], parted_by: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    written: list[Any] = []

    def write(sink: RocketSink, frame: Any) -> Any:
        written.append(frame)
        return SimpleNamespace(query_id="q", rows_in=3)

    monkeypatch.setattr(RocketSink, "write", write)
    source: Any = SimpleNamespace(read=lambda spark, streaming: Frame(*columns))
    options = {"nameServer": "n:1", "topic": "t", "ordering": ordering}
    report = run_batch(None, source, options, "foreach")  # type: ignore[arg-type]
    assert [frame.parted_by for frame in written] == [parted_by]
    assert (report.query_id, report.rows_read) == ("q", 3)


def test_a_batch_in_order_without_a_key_is_refused() -> None:
    source: Any = SimpleNamespace(read=lambda spark, streaming: Frame("body"))
    options = {"nameServer": "n:1", "topic": "t", "ordering": "best_effort"}
    with pytest.raises(ConfigurationError, match="sharding_key"):
        run_batch(None, source, options, "foreach")  # type: ignore[arg-type]
