"""The spool and the locks on an S3 API; boto3 lists the store for the judge."""

import contextlib
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from pyarrow import fs

from rocket_sink.ledger import lock as lease_module
from rocket_sink.ledger import storage as storage_module
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


class Hadoop(dict):
    """The stand-in of Spark's Hadoop configuration, whose passwords are arrays of characters."""

    getPassword = dict.get

    def getPropsWithPrefix(self, start):
        return {name.removeprefix(start): value for name, value in self.items() if start in name}


OSS = {"fs.oss.endpoint": "oss-cn-hangzhou-internal.aliyuncs.com", "fs.oss.accessKeyId": "a",
       "fs.oss.accessKeySecret": "s"}  # fmt: skip
OTHERS = {"fs.s3a.bucket.other.access.key": "o", "fs.azure.account.key.other": "o"}


@pytest.mark.parametrize(
    ("uri", "properties", "wanted"),
    [
        ("s3a://b/l", {"fs.s3a.endpoint": "minio:9000", "fs.s3a.connection.ssl.enabled": "false"},
         {"endpoint_override": "minio:9000", "scheme": "http"}),
        ("s3n://b/l", {"fs.s3a.access.key": "a", "fs.s3a.secret.key": " s\n",
                       "fs.s3a.session.token": "t", "fs.s3a.endpoint.region": "eu-central-1"},
         {"access_key": "a", "secret_key": "s", "session_token": "t", "region": "eu-central-1"}),
        ("s3://b/l", {"fs.s3a.bucket.b.endpoint": "http://minio/", "fs.s3a.endpoint": "elsewhere",
                      "fs.s3a.secret.key": "without the other key", "fs.s3a.endpoint.region": " "},
         {"endpoint_override": "minio", "scheme": "http"}),
        ("s3a://b/l", {"fs.s3a.access.key": "without the other key"}, None),
        ("oss://b/l", OSS | {"fs.oss.securityToken": "t"},
         {"endpoint_override": OSS["fs.oss.endpoint"], "scheme": "https", "region": "cn-hangzhou",
          "access_key": "a", "secret_key": "s", "force_virtual_addressing": True,
          "session_token": "t"}),
        *(("oss://b/l", {name: OSS[name] for name in OSS if name != out}, None) for out in OSS),
        ("s3a://b/l", {}, None),
        ("hdfs://name:9000/l", {}, None),
    ],
)  # fmt: skip
def test_hadoops_names_are_pyarrows_arguments(uri, properties, wanted, monkeypatch):
    monkeypatch.setattr(fs, "S3FileSystem", lambda allow_delayed_open, **arguments: arguments)
    conf = Hadoop(properties | OTHERS | {"fs.s3a.bucket.b.impl": "no property of ours"})
    session = SimpleNamespace(_jsparkSession=1, sparkContext=MagicMock())
    session.sparkContext._jsc.hadoopConfiguration.return_value = conf
    monkeypatch.setattr(storage_module, "active_session", lambda: session)
    secrets = storage_module.properties_for(uri)
    texts = {name: value.strip() for name, value in properties.items()}
    assert secrets == {name: Secret(text) for name, text in texts.items() if text}
    assert all_properties(session) == secrets | {name: Secret("o") for name in OTHERS}
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
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "")
    assert open_store(AZURE, AZURE_KEY) == (("me", {"account_key": "a2V5"}), "box/l")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1/me/")
    ends = {f"{kind}_storage_authority": "127.0.0.1:1" for kind in ("blob", "dfs")}
    ends |= {f"{kind}_storage_scheme": "http" for kind in ("blob", "dfs")}
    assert open_store(AZURE, AZURE_KEY) == (("me", {"account_key": "a2V5", **ends}), "box/l")
    for uri, keys in ((AZURE, {}), (AZURE.replace("box@", ""), AZURE_KEY)):
        assert open_store(uri, keys) is None


@pytest.mark.parametrize(
    ("uri", "endpoint", "wanted"),
    [
        (AZURE, "", {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}),
        (AZURE, "http://127.0.0.1:1/me",
         {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5", "AZURE_ALLOW_HTTP": "true"}),
        ("gs://box/l", "http://127.0.0.1:1/me", {}),
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
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    for name, url in (("", "http://other"), ("_S3", "https://elsewhere")):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL{name}", url)
        _, options = delta_rs_address("s3://b/l", {})
        assert options["AWS_ENDPOINT_URL"] == options["AWS_ENDPOINT_URL_S3"] == url
        assert options["AWS_ALLOW_HTTP"] == ("false" if name else "true")
    names = {"endpoint": "minio:9000", "connection.ssl.enabled": "false", "access.key": "a",
             "secret.key": "s", "endpoint.region": "r"}  # fmt: skip
    settings = {f"fs.s3a.{name}": Secret(value) for name, value in names.items()}
    with refusal("s3a://b/l", "belongs to others; unset it, or set fs.s3a.session.token"):
        delta_rs_address("s3a://b/l", settings)
    settings["fs.s3a.session.token"] = Secret("t")
    assert delta_rs_address("s3a://b/l:1", settings) == ("s3://b/l:1", {
        "AWS_ENDPOINT_URL": "http://minio:9000", "AWS_ENDPOINT_URL_S3": "http://minio:9000",
        "AWS_ALLOW_HTTP": "true", "AWS_CONDITIONAL_PUT": "etag", "AWS_REGION": "r",
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t",
        "max_retries": "12", "backoff_config.init_backoff": "500ms"})  # fmt: skip
