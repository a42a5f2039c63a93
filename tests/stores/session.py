"""A Spark session with S3A, whose settings are all that says where the store is.

hadoop-aws names one jar with every service of Amazon's (`bundle`). S3A takes these modules of the
same SDK instead, some megabytes together; Spark has the Netty that they ask for.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

import pyspark

from rocket_sink.spark.session import build_session
from tests.jvms import SMALL_PLANS
from tests.stores.server import KEY, REGION, SECRET

_SDK: Final = {"3.4.1": "2.24.6", "3.4.2": "2.29.52", "3.5.0": "2.35.4"}
"""Of each hadoop-aws: the version of Amazon's SDK that it was built with."""
_MODULES: Final = ("s3", "s3-transfer-manager", "sts", "netty-nio-client")
_EXCLUDED: Final = ("software.amazon.awssdk:bundle", "io.netty:*", "org.slf4j:*")
_CREDENTIALS: Final = "AWS_"


def hadoop_version() -> str:
    """Of the Hadoop in this Spark: hadoop-aws must be the same."""
    jars = Path(pyspark.__file__).parent / "jars"
    [name] = [jar.name for jar in jars.glob("hadoop-client-api-*.jar")]
    found = re.fullmatch(r"hadoop-client-api-(.*)\.jar", name)
    assert found
    return found[1]


def packages() -> tuple[str, ...]:
    """For `spark.jars.packages`."""
    hadoop = hadoop_version()
    sdk = [f"software.amazon.awssdk:{name}:{_SDK[hadoop]}" for name in _MODULES]
    return (f"org.apache.hadoop:hadoop-aws:{hadoop}", *sdk)


def settings(endpoint: str) -> dict[str, str]:
    """Spark's, for S3A."""
    given = {
        "endpoint": endpoint, "endpoint.region": REGION, "path.style.access": "true",
        "access.key": KEY, "secret.key": SECRET, "connection.ssl.enabled": "false",
        # moto gives no version ids in a bucket without versions, and others' etags for copies.
        "change.detection.mode": "none",
    }  # fmt: skip
    found = {f"spark.hadoop.fs.s3a.{name}": value for name, value in given.items()}
    found["spark.jars.excludes"] = ",".join(_EXCLUDED)
    return found


def s3_session(endpoint: str, **more: str) -> Any:
    """The one session of this process; nothing in the environment tells of the store."""
    for name in [name for name in os.environ if name.startswith(_CREDENTIALS)]:
        del os.environ[name]
    conf = {**SMALL_PLANS, **settings(endpoint), **more}
    return build_session("rocket-sink-stores", master="local[2,2]", conf=conf, packages=packages())


def sdk_version() -> str:
    return _SDK[hadoop_version()]
