"""The modules that need Spark: sinks, data source, listener, sessions, backfill. The import raises
a MissingPackageError if pyspark is not installed."""

from importlib.util import find_spec

from rocket_sink.errors import MissingPackageError

if find_spec("pyspark") is None:
    raise MissingPackageError(
        "this needs Spark, and the package pyspark is not installed: pip install "
        "'rocket-sink[spark]', or install rocket-sink where your Spark is",
        package="pyspark",
    )
