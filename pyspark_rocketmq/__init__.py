"""Where Spark finds the sink by itself: `format("rocketmq")` without `rocket_sink.register`.

Spark imports every top-level package named `pyspark_*` when it looks a format up, and registers its
`DefaultSource` (Spark: `pyspark/sql/worker/lookup_data_sources.py`). It walks the folders of the
path (`pkgutil.iter_modules`): a wheel, an archive and PYTHONPATH are found, an editable install
is not.

What only the session knows stays with `register`: the refusal of `spark.speculation`, the share of
a rate limit per task, folding the ledger while queries run.
"""

from rocket_sink.spark.datasource import RocketMQDataSource as DefaultSource

__all__ = ["DefaultSource"]
