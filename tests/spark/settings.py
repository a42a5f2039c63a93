"""A setting of the shared session, for the length of a test."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def setting(spark: Any, name: str, value: str) -> Iterator[Any]:
    """Change a SQL setting of the session; set the old value again at the end."""
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield spark
    finally:
        spark.conf.set(name, before)
