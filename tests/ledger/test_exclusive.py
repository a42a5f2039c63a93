"""Who may commit to a ledger on a store: what its answers to a second write of an object prove."""

from types import SimpleNamespace

import pytest
from py4j import java_gateway
from py4j.protocol import Py4JJavaError

from rocket_sink.ledger.append import exclusive
from rocket_sink.ledger.path import resolve_path

from .values import refusal

PLACE = resolve_path("s3a://bucket/ledger")
LOG_STORE = "spark.delta.logStore."


class JavaError(Py4JJavaError):
    """An error of the session's file system; `is_io`: it is one of I/O."""

    def __init__(self, text, *, is_io=True):
        Exception.__init__(self, text)
        self.java_exception = SimpleNamespace(toString=lambda: text, is_io=is_io)


AWAY = JavaError("java.nio.file.AccessDeniedException: 403")
EXISTS = [
    JavaError(f"org.apache.hadoop.fs.s3a.{text}")
    for text in ("AWSBadRequestException: Status Code: 412", "RemoteFileChangedException: changed",
                 "FileAlreadyExistsException: there")
]  # fmt: skip


class Store:
    """The stand-in of a session with Java: its file system gives these answers to writes, `None` if
    it makes the object. The attributes record what it was asked for."""

    def __init__(self, *answers, **settings):
        self.answers, self.options, self.made, self.deleted = [*answers], set(), [], []
        hadoop = SimpleNamespace(get=settings.get)
        state = SimpleNamespace(newHadoopConf=lambda: hadoop)
        self._jsparkSession = SimpleNamespace(sessionState=lambda: state)
        files = SimpleNamespace(Path=lambda uri: SimpleNamespace(
            uri=uri, getFileSystem=lambda conf: self if conf is hadoop else None))  # fmt: skip
        packages = SimpleNamespace(apache=SimpleNamespace(hadoop=SimpleNamespace(fs=files)))
        self._jvm = SimpleNamespace(org=packages)
        self.conf = SimpleNamespace(get=settings.get)
        self.sparkContext = SimpleNamespace(_gateway=self, applicationId=str(id(self)))

    def createFile(self, path):
        self.made.append(path.uri)
        return self

    def overwrite(self, *value):
        self.options.add(value)
        return self

    must = overwrite

    def build(self):
        return self

    def close(self):
        if answer := self.answers.pop(0):
            raise answer

    def delete(self, path, recursive):
        assert not recursive
        self.deleted.append(path.uri)
        raise OSError("the rights to delete are missing")


@pytest.fixture(autouse=True)
def pauses_s(monkeypatch):
    """Let no test wait; return the pauses."""
    pauses = []
    # Threads of other tests may sleep, so replace `time` in this module only.
    monkeypatch.setattr(exclusive, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(java_gateway, "is_instance_of", lambda gateway, error, name: error.is_io)
    return pauses


@pytest.mark.parametrize(
    ("answers", "refuses", "pauses"),
    [
        *(((None, error), True, 0) for error in EXISTS),
        ((None, None), False, 0),  # The store ignores the condition.
        ((AWAY, None, AWAY, None, EXISTS[0]), True, 2),
        ((JavaError("an option", is_io=False), None, EXISTS[0]), False, 0),
        ((TypeError("no such option"), None, EXISTS[0]), False, 0),
    ],
)
def test_a_store_is_exclusive_if_it_refuses_a_second_write(answers, refuses, pauses, pauses_s):
    """Ask again after I/O errors, which say nothing about conditions."""
    store = Store(*answers)
    assert exclusive.store_refuses(store, PLACE) == refuses
    assert pauses_s == [1.0, 2.0][:pauses]
    assert store.options == {(True,), ("fs.option.create.conditional.overwrite", True)}
    assert set(store.deleted) == set(store.made) and len(store.deleted) == 1 + pauses
    assert all(uri.startswith(f"{PLACE.uri}/_tries/") for uri in store.made)


def test_a_store_that_goes_on_denying_ends_the_write(pauses_s):
    store = Store(*[AWAY] * 4)
    with refusal(PLACE.uri, r"403\. Nothing was sent; try again"):
        exclusive.store_refuses(store, PLACE)
    assert pauses_s == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("uri", "settings", "refuses", "warns"),
    [
        ("abfss://box@me.dfs.core.windows.net/l", {}, True, False),
        ("obs://bucket/ledger", {}, False, False), ("/data/ledger", {}, False, True),
        (PLACE.uri, {"fs.s3a.encryption.algorithm": "SSE-C"}, False, True),
        (PLACE.uri, {"fs.s3a.bucket.bucket.server-side-encryption-algorithm": "C"}, False, True),
        (PLACE.uri, {"fs.s3a.bucket.other.encryption.algorithm": "SSE-C"}, True, True),
        (PLACE.uri, {f"{LOG_STORE}s3a.impl": "their.Store"}, False, False),
        (PLACE.uri, {f"{LOG_STORE}s3a.impl": exclusive._OWN_STORE}, True, True),
        (PLACE.uri, {f"{LOG_STORE}s3.impl": "their.Store"}, True, True),
        (PLACE.uri, {f"{LOG_STORE}class": "their.Store"}, False, False),
    ],
)  # fmt: skip
def test_settings_decide_before_the_store_is_asked(uri, settings, refuses, warns, caplog):
    """Warn once of a second driver where it could overwrite commits of Spark's Delta."""
    store = Store(None, EXISTS[0], **settings)
    place = resolve_path(uri)
    assert exclusive.store_refuses(store, place) == refuses
    assert bool(store.made) == (refuses and place == PLACE)
    for _ in range(2):
        exclusive.warn_if_shared(store, place)
    assert len(caplog.messages) == warns
    reason = "somebody has altered the table" if place.is_local else "is for one driver"
    assert all(reason in text and str(place) in text for text in caplog.messages)
