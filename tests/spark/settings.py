"""A setting of the shared session, for the length of a test."""

import contextlib


@contextlib.contextmanager
def setting(spark, name, value):
    """Change a SQL setting of the session; set the old value again at the end."""
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield spark
    finally:
        spark.conf.set(name, before)
