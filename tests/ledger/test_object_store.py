"""The spool and the locks on an S3 API; boto3 lists the store for the judge."""

import contextlib
import os
import pickle

import pytest
from pyarrow import fs

from rocket_sink.ledger import lock as lease_module
from rocket_sink.ledger import storage as storage_module
from rocket_sink.ledger.append.table import ledger_token
from rocket_sink.ledger.lock import LedgerLock
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.storage import (
    all_properties,
    always_refuses,
    delta_rs_address,
    has_delta_rs,
    open_store,
)
from rocket_sink.ledger.transport import files as spool_files
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.option_spec import Secret
from tests.stores.server import S3Server

from .values import context, refusal, sends, write_spool


@pytest.fixture(scope="module")
def store():
    """Yield a client of an S3 server on loopback; pyarrow finds the server by the environment."""
    with contextlib.closing(S3Server()) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.storage_options.items():
            patch.setenv(name, value)
        server.make_bucket("bucket")
        yield server.client()


@pytest.fixture
def place(store, request, monkeypatch):
    monkeypatch.setattr(lease_module, "_SETTLE_S", 0.3)
    monkeypatch.setattr(lease_module, "_POLL_S", 0.1)
    return resolve_path(f"s3://bucket/{request.node.name}")


def test_a_damaged_object_is_put_aside(store, place):
    sealed = write_spool(place, context(), sends(context(), 2))
    moved = spool_files.put_aside(place, place.filesystem(), sealed)
    assert spool_files.quarantined(place) == [moved]
    assert spool_files.sealed_files(place, place.filesystem()) == []


def test_a_lock_has_one_holder_and_goes(store, place):
    first, second = LedgerLock(place), LedgerLock(place)
    assert first.acquire(0) and not second.acquire(0)
    first.check()
    first.release()
    objects = store.list_objects_v2(Bucket="bucket")["Contents"]
    assert not [item["Key"] for item in objects if item["Key"].endswith("/lock")]


@pytest.fixture
def s3a(store, spark, monkeypatch):
    """Yield a ledger whose store is named by Spark's configuration only."""
    # Writers that other tests made in this process have left their session's properties. Spark
    # makes writers in processes of their own.
    monkeypatch.setattr(storage_module, "_remembered", {})
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    settings = {
        "fs.s3a.endpoint": endpoint, "fs.s3a.access.key": "elsewhere", "fs.s3a.secret.key": "s",
        "fs.s3a.bucket.bucket.access.key": "test", "fs.s3a.endpoint.region": "us-east-1",
    }  # fmt: skip
    for name, value in settings.items():
        conf.set(name, value)
    yield "s3a://bucket/told-by-spark"
    for name in settings:
        conf.unset(name)


@pytest.mark.spark
def test_driver_and_tasks_reach_the_store_by_sparks_settings(spark, store, s3a):
    place = resolve_path(s3a)
    assert place.root == "bucket/told-by-spark"
    properties = {name: value.reveal() for name, value in all_properties(spark).items()}
    assert properties.pop("fs.s3a.endpoint").startswith("http://127.0.0.1:")
    assert properties == {
        "fs.s3a.access.key": "elsewhere", "fs.s3a.secret.key": "s",
        "fs.s3a.bucket.bucket.access.key": "test", "fs.s3a.endpoint.region": "us-east-1",
        "fs.s3a.connection.ssl.enabled": "true",
    }  # fmt: skip
    assert place.storage["fs.s3a.bucket.bucket.access.key"].reveal() == "test"
    assert "test" not in repr(place)
    token = ledger_token(place, spools=True)
    assert pickle.loads(pickle.dumps(token)) == token

    ctx, rows = context(), sends(context(), 2)

    def write(_):
        token.check()
        writer = SpoolWriter(resolve_path(s3a), ctx)  # Workers lack the tests' modules.
        writer.append(rows)
        yield writer.seal()

    paths = spark.sparkContext.parallelize(range(2), 2).mapPartitions(write).collect()
    assert {info.path for info in spool_files.sealed_files(place, place.filesystem())} == set(paths)


@pytest.mark.parametrize(
    ("uri", "properties", "wanted"),
    [
        ("s3a://b/l", {"fs.s3a.endpoint": "minio:9000", "fs.s3a.connection.ssl.enabled": "false"},
         {"endpoint_override": "minio:9000", "scheme": "http"}),
        ("s3a://b/l", {"fs.s3a.access.key": "a", "fs.s3a.secret.key": "s",
                       "fs.s3a.session.token": "t", "fs.s3a.endpoint.region": "eu-central-1"},
         {"access_key": "a", "secret_key": "s", "session_token": "t", "region": "eu-central-1"}),
        ("oss://b/l", {"fs.oss.endpoint": "oss-cn-hangzhou-internal.aliyuncs.com",
                       "fs.oss.accessKeyId": "a", "fs.oss.accessKeySecret": "s"},
         {"endpoint_override": "oss-cn-hangzhou-internal.aliyuncs.com", "scheme": "https",
          "region": "cn-hangzhou", "access_key": "a", "secret_key": "s",
          "force_virtual_addressing": True}),
        ("oss://b/l", {"fs.oss.endpoint": "oss-cn-hangzhou.aliyuncs.com"}, None),
        ("s3a://b/l", {}, None),
        ("hdfs://name:9000/l", {}, None),
    ],
)  # fmt: skip
def test_hadoops_names_are_pyarrows_arguments(uri, properties, wanted, monkeypatch):
    monkeypatch.setattr(fs, "S3FileSystem", lambda allow_delayed_open, **arguments: arguments)
    secrets = {name: Secret(value) for name, value in properties.items()}
    assert open_store(uri, secrets) == (None if wanted is None else (wanted, "b/l"))

    def older(**given):
        if "allow_delayed_open" in given:
            raise TypeError("unexpected keyword argument")
        return given

    monkeypatch.setattr(fs, "S3FileSystem", older)
    assert open_store(uri, secrets) == (None if wanted is None else (wanted, "b/l"))


AZURE = "abfss://box@me.dfs.core.windows.net/l"
AZURE_KEY = {"fs.azure.account.key.me.dfs.core.windows.net": Secret("a2V5")}


def test_azures_account_key_is_taken(monkeypatch):
    opened, root = open_store(AZURE, AZURE_KEY)
    assert (opened.type_name, root) == ("abfs", "box/l")
    monkeypatch.setattr(fs, "AzureFileSystem", lambda account, **arguments: (account, arguments))
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1/me")
    ends = {f"{kind}_storage_authority": "127.0.0.1:1" for kind in ("blob", "dfs")}
    ends |= {f"{kind}_storage_scheme": "http" for kind in ("blob", "dfs")}
    assert open_store(AZURE, AZURE_KEY) == (("me", {"account_key": "a2V5", **ends}), "box/l")


@pytest.mark.parametrize(
    ("uri", "endpoint", "wanted"),
    [
        (AZURE, "", {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}),
        (AZURE, "http://127.0.0.1:1/me",
         {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5", "AZURE_ALLOW_HTTP": "true"}),
        ("gs://box/l", "", {}),
        ("hdfs://name-node:8020/l", "", {}),
    ],
)  # fmt: skip
def test_delta_rs_gets_the_account_key(monkeypatch, uri, endpoint, wanted):
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    address, options = delta_rs_address(uri, AZURE_KEY)
    assert (address, {**options, **wanted}) == (uri, options)
    assert set(options) - set(wanted) == {"max_retries", "backoff_config.init_backoff"}
    assert always_refuses(uri) and has_delta_rs(uri)


def test_delta_rs_gets_the_settings_of_s3(monkeypatch):
    """The address of the settings wins; a session token in the environment is of other keys."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "https://elsewhere")
    names = {"endpoint": "minio:9000", "connection.ssl.enabled": "false", "access.key": "a",
             "secret.key": "s", "endpoint.region": "r"}  # fmt: skip
    settings = {f"fs.s3a.{name}": Secret(value) for name, value in names.items()}
    address, options = delta_rs_address("s3a://b/l", settings)
    by_name = {"AWS_ENDPOINT_URL": "http://minio:9000", "AWS_ENDPOINT_URL_S3": "http://minio:9000",
               "AWS_ALLOW_HTTP": "true", "AWS_CONDITIONAL_PUT": "etag", "AWS_REGION": "r",
               "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}  # fmt: skip
    assert (address, {**options, **by_name}) == ("s3://b/l", options)
    assert delta_rs_address("s3://b/l", {})[1]["AWS_ALLOW_HTTP"] == "false"
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    with refusal("s3a://b/l", "belongs to others; unset it, or set fs.s3a.session.token"):
        delta_rs_address("s3a://b/l", settings)
    settings["fs.s3a.session.token"] = Secret("t")
    assert delta_rs_address("s3a://b/l", settings)[1]["AWS_SESSION_TOKEN"] == "t"
