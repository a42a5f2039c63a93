"""Address and credentials of a ledger's object store, from Hadoop's properties.

Users set `spark.hadoop.fs.*` once, for Spark. The driver and the tasks also reach the store by
pyarrow, for the files beside the table, and the driver by delta-rs. So the driver reads the
properties of its session, and sends them to the tasks with the ledger's token (`ledger.token`).
pyarrow and delta-rs take missing properties from the environment, each by its own variables."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from rocket_sink.errors import LedgerError
from rocket_sink.option_spec import Secret

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs
    from pyspark.sql import DataFrame, SparkSession

Properties = dict[str, Secret]
"""{name in Hadoop: value}. The values are never printed."""

_S3A: Final = (
    "endpoint", "endpoint.region", "access.key", "secret.key", "session.token",
    "connection.ssl.enabled",
)  # fmt: skip
_DELTA_RS: Final = {
    "access_key": "AWS_ACCESS_KEY_ID", "secret_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN", "region": "AWS_REGION",
}  # fmt: skip
"""{argument of pyarrow: option of delta-rs}."""
_PATIENCE: Final = {"max_retries": "12", "backoff_config.init_backoff": "500ms"}
"""Retries for about half a minute, as in S3A. By default delta-rs gives up after some seconds."""
_ENDPOINT: Final = "AWS_ENDPOINT_URL"
_ENDPOINT_S3: Final = "AWS_ENDPOINT_URL_S3"
_OSS: Final = ("endpoint", "accessKeyId", "accessKeySecret", "securityToken")
_BUCKET: Final = "fs.s3a.bucket."
_AZURE_KEY: Final = "fs.azure.account.key."
_AZURE: Final = frozenset({"abfs", "abfss"})
_AZURE_ENDPOINT: Final = "AZURE_STORAGE_ENDPOINT"
"""The environment variable by which delta-rs reaches another Azure than Microsoft's public one."""
_S3: Final = frozenset({"s3", "s3a", "s3n"})
_REFUSING: Final = _AZURE | {"gs", "hdfs"}
"""Schemes of stores that always refuse to overwrite if the writer asks for it: Azure and Google by
a condition of the request, HDFS by a rename."""

_remembered: dict[str, Properties] = {}


def remember(properties: Properties, uri: str = "") -> None:
    """Remember the properties of the ledger at `uri`; without `uri`, of all other ledgers."""
    _remembered[uri] = properties


def properties_for(uri: str) -> Properties:
    """Return the properties of a ledger's store that the Spark session has; without a session, the
    remembered ones. The driver may remember those of an earlier session."""
    session = active_session()
    if is_classic(session):
        return _values(session.sparkContext._jsc.hadoopConfiguration(), _names(uri))
    return _remembered.get(uri, _remembered.get("", {}))


def active_session() -> Any:
    """Return the classic or Connect session of this process, or None; never start a session. A
    thread that has not used Spark yet has no session of its own, and gets the process's session.
    Workers, and processes without pyspark, get None."""
    if "pyspark.sql" not in sys.modules:
        return None
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except Exception:
        return None


def is_classic(spark: SparkSession | None) -> bool:
    """Return whether the session has a JVM. A Spark Connect session has none."""
    return getattr(spark, "_jsparkSession", None) is not None


def spark_frame(session: SparkSession, rows: pa.Table) -> DataFrame:
    """Return the rows as a frame of Spark. Spark 4.2 loses all rows that follow an empty record
    batch, so the frame gets none."""
    return session.createDataFrame(rows.combine_chunks())


def all_properties(session: SparkSession) -> Properties:
    """Return the properties of all stores, for use while the ledger's store is not known."""
    conf = session.sparkContext._jsc.hadoopConfiguration()
    names = [f"fs.s3a.{name}" for name in _S3A] + [f"fs.oss.{name}" for name in _OSS]
    buckets = dict(conf.getPropsWithPrefix(_BUCKET))
    names += [f"{_BUCKET}{name}" for name in buckets if name.partition(".")[2] in _S3A]
    names += [f"{_AZURE_KEY}{name}" for name in dict(conf.getPropsWithPrefix(_AZURE_KEY))]
    return _values(conf, names)


def is_s3(uri: str) -> bool:
    """Return whether the URI is on S3, by any of Hadoop's schemes."""
    return urlsplit(uri).scheme in _S3


def always_refuses(uri: str) -> bool:
    """Return whether every store of this scheme can refuse to overwrite an object. A store with
    S3's API may ignore the condition."""
    return urlsplit(uri).scheme in _REFUSING


def has_delta_rs(uri: str) -> bool:
    """Return whether delta-rs has a client for the store, and commits transactions to it."""
    return urlsplit(uri).scheme in _S3 | _REFUSING and keeps_transactions()


def open_store(uri: str, properties: Mapping[str, Secret]) -> tuple[fs.FileSystem, str] | None:
    """Return pyarrow's file system and the path in it; None if `properties` lack those of the
    store. Raise OSError or ValueError if pyarrow refuses the values."""
    parts, arguments = urlsplit(uri), dict[str, Any]()
    before, _, after = parts.netloc.rpartition("@")
    if is_s3(uri):
        arguments = _s3_arguments(parts.netloc, properties)
    elif parts.scheme == "oss":
        arguments = _oss_arguments(properties)
    elif parts.scheme in _AZURE:
        key = properties.get(f"{_AZURE_KEY}{after}")
        if before and key is not None:
            from pyarrow import fs

            account = after.partition(".")[0]
            arguments = {"account_key": key.reveal(), **_azure_endpoint()}
            return fs.AzureFileSystem(account, **arguments), f"{before}{parts.path}"
    return (_s3_files(arguments), f"{after}{parts.path}") if arguments else None


def delta_rs_address(uri: str, properties: Mapping[str, Secret]) -> tuple[str, dict[str, str]]:
    """Return delta-rs's URI of a table on a store, and its `storage_options`. Raise LedgerError if
    the keys of S3 are from Spark's settings, but the environment has a session token."""
    parts = urlsplit(uri)
    if is_s3(uri):
        return f"s3:{uri.partition(':')[2]}", {**_s3_options(uri, properties), **_PATIENCE}
    options = dict(_PATIENCE)
    host = parts.netloc.rpartition("@")[2]
    key = properties.get(f"{_AZURE_KEY}{host}")
    if key is not None:
        options |= {"AZURE_STORAGE_ACCOUNT_KEY": key.reveal()}
    if parts.scheme in _AZURE and os.environ.get(_AZURE_ENDPOINT, "").startswith("http://"):
        options |= {"AZURE_ALLOW_HTTP": "true"}
    return uri, options


def _azure_endpoint() -> dict[str, str]:
    """Return pyarrow's arguments for the endpoint in the environment, which delta-rs reads."""
    scheme, _, address = os.environ.get(_AZURE_ENDPOINT, "").partition("://")
    if not address:
        return {}
    host = address.partition("/")[0]
    return {
        "blob_storage_authority": host, "blob_storage_scheme": scheme,
        "dfs_storage_authority": host, "dfs_storage_scheme": scheme,
    }  # fmt: skip


def _s3_options(uri: str, properties: Mapping[str, Secret]) -> dict[str, str]:
    arguments = _s3_arguments(urlsplit(uri).netloc, properties)
    options = {
        name: arguments[argument] for argument, name in _DELTA_RS.items() if argument in arguments
    }
    token = _DELTA_RS["session_token"]
    if "access_key" in arguments and token not in options and os.environ.get(token):
        raise LedgerError(
            f"the keys of {uri} are in Spark's settings, and {token} in the environment belongs to "
            "others; unset it, or set fs.s3a.session.token",
            path=uri,
        )
    if endpoint := _s3_endpoint(arguments):
        # Set both variables: delta-rs prefers the one for S3, and the environment may have it.
        options |= {_ENDPOINT: endpoint, _ENDPOINT_S3: endpoint}
        options["AWS_ALLOW_HTTP"] = str(endpoint.startswith("http://")).lower()
    return {**options, "AWS_CONDITIONAL_PUT": "etag"}


def host_of(uri: str, properties: Mapping[str, Secret]) -> str:
    """Return host and port of a store with S3's API; empty for Amazon's own S3, and for a store of
    another scheme, whose URI names the host or an account."""
    endpoint = _s3_endpoint(_s3_arguments(urlsplit(uri).netloc, properties)) if is_s3(uri) else ""
    return endpoint.rpartition("://")[2].rstrip("/").lower()


def _s3_endpoint(arguments: Mapping[str, Any]) -> str:
    """Return the URL of the store, from pyarrow's arguments or from the environment."""
    if "endpoint_override" in arguments:
        return f"{arguments['scheme']}://{arguments['endpoint_override']}"
    return os.environ.get(_ENDPOINT_S3) or os.environ.get(_ENDPOINT, "")


@functools.lru_cache(maxsize=1)
def keeps_transactions() -> bool:
    """Return whether this delta-rs commits transactions; before 1.6 it commits files without them.
    An older version may be installed because another package needs it."""
    log_level = os.environ.get("RUST_LOG")
    # delta-rs reads RUST_LOG at its import. By default it warns if another commit came first.
    os.environ["RUST_LOG"] = log_level or "error"
    try:
        from deltalake import __version__
    finally:
        if log_level is None:
            del os.environ["RUST_LOG"]
    return tuple(map(int, __version__.split(".")[:2])) >= (1, 6)


def _s3_files(arguments: Mapping[str, Any]) -> fs.FileSystem:
    """Open S3. If Arrow has the option, one request writes a small file."""
    from pyarrow import fs

    try:
        return fs.S3FileSystem(allow_delayed_open=True, **arguments)
    except TypeError:
        # An older Arrow lacks the option, and needs three requests.
        return fs.S3FileSystem(**arguments)


def _values(conf: Any, names: Iterable[str]) -> Properties:
    """Return Hadoop's properties, including those in credential providers."""
    properties = {}
    for name in names:
        value = conf.getPassword(name)
        if value is not None and (text := "".join(value).strip()):
            properties[name] = Secret(text)
    return properties


def _names(uri: str) -> Iterator[str]:
    parts = urlsplit(uri)
    if is_s3(uri):
        for name in _S3A:
            yield f"fs.s3a.{name}"
            yield f"{_BUCKET}{parts.netloc}.{name}"
    elif parts.scheme == "oss":
        yield from (f"fs.oss.{name}" for name in _OSS)
    elif parts.scheme in _AZURE:
        yield f"{_AZURE_KEY}{parts.netloc.rpartition('@')[2]}"


def _s3_arguments(bucket: str, properties: Mapping[str, Secret]) -> dict[str, Any]:
    """Return pyarrow's arguments for a bucket. The bucket's own properties win, as in Hadoop."""
    settings = {}
    for name in _S3A:
        value = properties.get(f"{_BUCKET}{bucket}.{name}", properties.get(f"fs.s3a.{name}"))
        settings[name] = value.reveal() if value is not None else ""
    arguments: dict[str, Any] = {}
    if settings["access.key"] and settings["secret.key"]:
        arguments |= {"access_key": settings["access.key"], "secret_key": settings["secret.key"]}
        if settings["session.token"]:
            arguments["session_token"] = settings["session.token"]
    if settings["endpoint.region"]:
        arguments["region"] = settings["endpoint.region"]
    if settings["endpoint"]:
        is_plain = settings["connection.ssl.enabled"].lower() == "false"
        arguments |= _endpoint(settings["endpoint"], "http" if is_plain else "https")
    return arguments


def _oss_arguments(properties: Mapping[str, Secret]) -> dict[str, Any]:
    """Return pyarrow's arguments for OSS: S3's API, with the bucket in the host name."""
    settings = {name: properties.get(f"fs.oss.{name}", Secret("")).reveal() for name in _OSS}
    if not (settings["endpoint"] and settings["accessKeyId"] and settings["accessKeySecret"]):
        return {}
    arguments: dict[str, Any] = {
        "access_key": settings["accessKeyId"], "secret_key": settings["accessKeySecret"],
        "force_virtual_addressing": True, **_endpoint(settings["endpoint"], "https"),
    }  # fmt: skip
    if settings["securityToken"]:
        arguments["session_token"] = settings["securityToken"]
    # oss-cn-hangzhou.aliyuncs.com and oss-cn-hangzhou-internal.aliyuncs.com are in cn-hangzhou.
    host = arguments["endpoint_override"].partition(".")[0]
    if host.startswith("oss-"):
        arguments["region"] = host.removeprefix("oss-").removesuffix("-internal")
    return arguments


def _endpoint(address: str, scheme: str) -> dict[str, str]:
    """Return pyarrow's arguments for an address: `host`, `host:port` or a URL."""
    address_scheme, _, host = address.rpartition("://")
    return {"endpoint_override": host.rstrip("/"), "scheme": address_scheme or scheme}
