"""The state that the data source and its tasks leave in PySpark's worker processes."""

import gc
import sys

import pyarrow as pa
import pytest

from rocket_sink.task import worker_heap
from tests.python import run_python


@pytest.fixture
def in_worker(monkeypatch):
    monkeypatch.setattr(worker_heap, "_is_worker", lambda: True)
    worker_heap.freeze_once.cache_clear()
    yield
    worker_heap.freeze_once.cache_clear()
    gc.unfreeze()


def test_a_workers_heap_is_frozen_once(in_worker):
    before = gc.get_freeze_count()
    worker_heap.freeze_once()
    frozen = gc.get_freeze_count()
    assert frozen > before
    later = [[number] for number in range(1000)]
    worker_heap.freeze_once()
    assert gc.get_freeze_count() <= frozen, len(later)


def test_nobody_elses_heap_is_frozen():
    worker_heap.freeze_once.cache_clear()
    before = gc.get_freeze_count()
    worker_heap.freeze_once()
    assert gc.get_freeze_count() == before


@pytest.mark.spark
def test_workers_are_known_by_their_main_module(spark):
    """A task that has sent has also frozen the objects of its worker."""

    def main_module(batches):
        from rocket_sink.task.worker_heap import freeze_once

        list(batches)
        freeze_once()
        name = sys.modules["__main__"].__spec__.name
        yield pa.RecordBatch.from_pydict({"name": [name], "frozen": [gc.get_freeze_count()]})

    frame = spark.range(1).coalesce(1).mapInArrow(main_module, "name string, frozen long")
    (row,) = frame.collect()
    assert row.name == "pyspark.daemon" and row.frozen > 10_000


def test_planning_and_committing_import_little():
    """Spark plans and commits a stream's data source in processes that do nothing else."""
    heavy = [
        "numpy", "pyarrow.compute", "pyarrow.fs", "rocket_sink.producer.engine.engine", "tenacity",
    ]  # fmt: skip
    code = f"""
import sys
import pyarrow
before = set(sys.modules)
import rocket_sink.spark.datasource
print([name for name in {heavy} if name in set(sys.modules) - before])
"""
    ran = run_python("-c", code)
    assert ran.stdout.strip() == "[]"
