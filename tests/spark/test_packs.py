"""Arrow batches inside foreach, which `RocketSink.stream` hands over."""

from typing import Any
from unittest.mock import MagicMock, Mock, call

import pyarrow as pa
import pytest
from pyspark.errors import PySparkImportError

from rocket_sink.spark import packs
from rocket_sink.spark.packs import pack

MIB = 1 << 20


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
    failures = [PySparkImportError("no pandas"), "packs", ValueError("another error")]
    frame: Any = Mock(**{"mapInArrow.side_effect": failures})
    assert packs.packed(frame) is None
    assert caplog.messages == [
        "Spark hands over each row alone, which takes twice the CPU: no pandas"
    ]
    assert packs.packed(frame) == "packs"
    assert frame.mapInArrow.call_args == call(pack, "arrow_batch binary")
    with pytest.raises(ValueError, match="another error"):
        packs.packed(frame)
