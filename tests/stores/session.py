"""A Spark session with S3A; only its settings say where the store is.

hadoop-aws names one jar with all services of Amazon (`bundle`). Instead, S3A takes these modules
of the same SDK, some megabytes together; Spark has the Netty that they need.
"""

import os
import re
from pathlib import Path

import pyspark

from rocket_sink.spark.session import build_session
from tests.jvms import SMALL_PLANS
from tests.stores.server import KEY, REGION, SECRET

_SDK = {"3.4.1": "2.24.6", "3.4.2": "2.29.52", "3.5.0": "2.35.4"}
"""The version of Amazon's SDK with which each hadoop-aws was built."""
_MODULES = ("s3", "s3-transfer-manager", "sts", "netty-nio-client")
_EXCLUDED = ("software.amazon.awssdk:bundle", "io.netty:*", "org.slf4j:*")


def hadoop_version():
    """Return the version of the Hadoop in this Spark: hadoop-aws must have the same."""
    jars = Path(pyspark.__file__).parent / "jars"
    [name] = [jar.name for jar in jars.glob("hadoop-client-api-*.jar")]
    return re.fullmatch(r"hadoop-client-api-(.*)\.jar", name)[1]


def packages():
    """Return the packages for `spark.jars.packages`."""
    hadoop = hadoop_version()
    sdk = [f"software.amazon.awssdk:{name}:{_SDK[hadoop]}" for name in _MODULES]
    return (f"org.apache.hadoop:hadoop-aws:{hadoop}", *sdk)


def settings(endpoint):
    """Return Spark's settings for S3A."""
    s3a = {
        "endpoint": endpoint, "endpoint.region": REGION, "path.style.access": "true",
        "access.key": KEY, "secret.key": SECRET, "connection.ssl.enabled": "false",
        # moto gives no version ids in a bucket without versions, and copies get other etags.
        "change.detection.mode": "none",
    }  # fmt: skip
    conf = {f"spark.hadoop.fs.s3a.{name}": value for name, value in s3a.items()}
    conf["spark.jars.excludes"] = ",".join(_EXCLUDED)
    return conf


def s3_session(endpoint, **more):
    """Return the only session of this process; nothing in the environment tells of the store."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    conf = {**SMALL_PLANS, **settings(endpoint), **more}
    return build_session("rocket-sink-stores", master="local[2,2]", conf=conf, packages=packages())


def sdk_version():
    return _SDK[hadoop_version()]
