"""Arrow batches inside foreach, which `RocketSink.stream` hands over."""

from typing import Any
from unittest.mock import MagicMock, Mock, call

import pyarrow as pa
import pytest
from pyspark.errors import PySparkImportError

from rocket_sink.spark import packs
from rocket_sink.spark.packs import pack
from rocket_sink.spark.sink import RocketSink
from tests.clusters import scripted_cluster
from tests.spark.streams import run

MIB = 1 << 20
cluster = scripted_cluster(1)


def opened(batches):
    columns = [row.column("arrow_batch") for row in batches]
    assert all(len(column) == 1 for column in columns)
    return [pa.ipc.open_stream(column[0].as_py()).read_next_batch() for column in columns]


@pytest.mark.parametrize(
    ("bodies_mib", "rows_of_packs"),
    [
        ([], []), ([1] * 4, [4]), ([5] * 7, [3, 2, 2]), ([20], [1]), ([1, 20, 1], [1, 1, 1]),
    ],
)  # fmt: skip
def test_a_pack_has_at_most_16_mib_or_one_row(bodies_mib, rows_of_packs):
    bodies = [bytes([number]) * (size * MIB) for number, size in enumerate(bodies_mib)]
    batch = pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary())})
    parts = opened(pack(iter([batch])))
    assert [part.num_rows for part in parts] == rows_of_packs
    assert [body for part in parts for body in part["body"].to_pylist()] == bodies


def test_nested_and_null_columns_keep_their_values():
    rows = {
        "body": ["订单", None, ""],
        "tags": pa.nulls(3, pa.string()),
        "properties": pa.array([[("a", "1")], None, []], pa.map_(pa.string(), pa.string())),
        "keys": [["k1", None], [], None],
    }
    batch = pa.RecordBatch.from_pydict(rows)
    empty = batch.slice(0, 0)
    assert opened(pack(iter([empty, batch.slice(1), empty]))) == [batch.slice(1)]


@pytest.mark.parametrize("handed", [None, Mock()])
def test_a_task_sends_the_rows_of_packs(monkeypatch, handed):
    run = MagicMock(handed="rows")
    begin = Mock(return_value=run)
    monkeypatch.setattr(packs, "foreach_run", begin)
    task = packs.PackTask("options", "plan", 1, 2, "token", handed)
    assert begin.mock_calls == [call("options", 1, 2, "token", hands_over=handed is not None)]
    batch = pa.RecordBatch.from_pydict({"body": ["x"]})
    [packed] = pack(iter([batch]))
    task.process(packed.to_pylist()[0].popitem()[1:])
    assert run.feed.mock_calls == [call(batch, "plan")]
    task.close(ValueError("upstream"))
    assert run.abort.called and not run.finish.called
    task.close(None)
    assert run.finish.called
    assert handed is None or handed.add.mock_calls == [call("rows")]


def test_only_without_pandas_are_rows_handed_over_alone(caplog):
    failures = [ImportError("no pandas"), ValueError("another error")]
    frame: Any = Mock(**{"mapInArrow.side_effect": failures})
    assert packs.packed(frame) is None
    assert caplog.messages == [
        "Spark hands over each row alone, which takes twice the CPU: no pandas"
    ]
    with pytest.raises(ValueError, match="another error"):
        packs.packed(frame)


@pytest.mark.spark
@pytest.mark.parametrize("has_pandas", [True, False])
def test_a_stream_hands_over_packs_or_says_why_it_cannot(
    spark, cluster, tmp_path, monkeypatch, caplog, has_pandas
):
    if not has_pandas:
        refuse = Mock(side_effect=PySparkImportError("pandas >= 2.2.0 must be installed"))
        functions = "pyspark.sql.pandas.functions"
        monkeypatch.setattr(f"{functions}.require_minimum_pandas_version", refuse)
    numbers = spark.range(2000).selectExpr("CAST(id AS STRING) AS body")
    numbers.write.parquet(str(tmp_path / "in"))
    rows = spark.readStream.schema("body STRING").parquet(str(tmp_path / "in"))
    sink = RocketSink(nameServer=cluster.name_server, topic="t")
    query = run(sink.stream(rows), tmp_path / "c")
    plan = query._jsq.explainInternal(False)
    assert sorted(int(message.body) for message in cluster.messages("t")) == [*range(2000)]
    assert ("MapInArrow" in plan) is has_pandas
    assert ("pandas >= 2.2.0 must be installed" in caplog.text) is not has_pandas
