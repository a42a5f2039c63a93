"""Paths of ledgers: each names one folder, even after repeated resolving."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
from pyarrow import fs

from rocket_sink.errors import ConfigurationError, LedgerError
from rocket_sink.ledger import storage
from rocket_sink.ledger.path import check_encoding, path_part, resolve_path

from .values import refusal

NAMES = [
    "a b", "a#b", "a#c", "a?b", "50%", "hour=12%3A00", "%41", "A", "line\nbreak", "tab\tbed", "ü",
    "a:b", "a;b", "[a]*{b,c}", "`", "..a", "file:a",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_local_path_that_is_resolved_again_names_the_same_folder(tmp_path, name):
    place = resolve_path(f"{tmp_path}/{name}/ledger")
    assert Path(place.root) == tmp_path / name / "ledger"
    assert resolve_path(place.uri) == place
    assert str(place) == place.root and str(resolve_path(str(place))) == place.root


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("x/y", "{cwd}/x/y"), ("/a/b/", "/a/b"), ("file:/a/b", "/a/b"), ("file:///a/b", "/a/b"),
        (" /a/b \n", "/a/b"), ("//host/ledger", "/host/ledger"),
        ("file:///a%20b%23", "/a b#"), ("file://localhost/a%20b", "/a b"), ("/a/../b/", "/b"),
        # Spark names paths in Hadoop's form, which escapes nothing.
        ("file:/a%20b", "/a%20b"),
    ],
)  # fmt: skip
def test_a_local_path_names_one_folder(path, root):
    place = resolve_path(path)
    assert place.root == root.format(cwd=Path.cwd())
    assert (place.uri, place.spools, place.problem) == (f"file:{place.root}", (place,), "")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/a/b /", "white space"), ("file:///ledger#1", "no part of the path"),
        ("file:///ledger?1", "no part of the path"), ("c.s.t/", "is the name of a table"),
        ("file://data/ledger", "a host before the path, is no part"),
    ],
)  # fmt: skip
def test_a_path_that_others_read_differently_is_refused(path, why):
    with refusal(path.rstrip("/"), why):
        resolve_path(path)
    with pytest.raises(LedgerError, match="empty"):
        resolve_path(" ")


def test_a_store_that_pyarrow_does_not_know_has_a_spool_on_the_driver():
    uri = "weird+scheme://x:1/y"
    place = resolve_path(f" {uri}/ ")
    assert repr(place) == f"LedgerPath(uri='{uri}', root='x:1/y', is_local=False)"
    assert place.spools == (place.driver_folder,) and "pyarrow" in place.problem
    with refusal(uri, r"no file system for weird\+scheme: .* All lanes can use this ledger"):
        place.filesystem()


@pytest.mark.parametrize(
    ("uri", "scheme", "root", "setting"),
    [
        ("s3n://b/l", "s3", "b/l", "AWS_"), ("gs://b/l", "gs", "b/l", "GOOGLE_"),
        ("gcs://b/l", "gcs", "b/l", "GOOGLE_"), ("wasbs://b@me/l", "abfs", "b/l", "AZURE_CLIENT_"),
        ("hdfs://n:9000/l", "hdfs", "/l", "HADOOP_"), ("viewfs://c/l", "viewfs", "/l", "HADOOP_"),
    ],
)  # fmt: skip
def test_a_store_is_opened_by_pyarrow_or_says_what_it_needs(
    uri, scheme, root, setting, monkeypatch
):
    """Tasks must find the folder by the guess if they reach a store that the driver does not."""
    opening = MagicMock(side_effect=[OSError, ValueError, NotImplementedError, ("", f"{root}/")])
    monkeypatch.setattr(storage, "active_session", lambda: None)
    monkeypatch.setattr(fs, "FileSystem", SimpleNamespace(from_uri=opening))
    for _ in range(2):
        place = resolve_path(uri)
        assert (place.root, place.spools) == (root, (place.driver_folder,))
        assert f"cannot reach it: ; {place.remedy}" in place.problem and setting in place.remedy
    with refusal(uri, setting):
        place.filesystem()
    assert resolve_path(uri).root == root
    assert opening.call_args_list == [call(f"{scheme}:{uri.partition(':')[2]}")] * 4


def _session(encoding):
    system = SimpleNamespace(getProperty={"sun.jnu.encoding": encoding}.get)
    lang = SimpleNamespace(System=system)
    jvm = SimpleNamespace(java=SimpleNamespace(lang=lang))
    return SimpleNamespace(_jsparkSession=object(), _jvm=jvm)


@pytest.mark.parametrize("encoding", ["ANSI_X3.4-1968", "ISO-8859-1", "GBK", "x-of-java-only"])
def test_a_path_that_java_would_take_for_another_one_is_refused(encoding, tmp_path, monkeypatch):
    spark = _session(encoding)
    with pytest.raises(ConfigurationError, match=f"is {encoding}.*LC_ALL=C.UTF-8"):
        check_encoding(spark, "/data/\u8ba2\u5355")
    check_encoding(SimpleNamespace(), "/data/\u8ba2\u5355")
    (tmp_path / "\u8ba2\u5355").mkdir()
    monkeypatch.chdir(tmp_path / "\u8ba2\u5355")
    with pytest.raises(ConfigurationError, match="\u8ba2\u5355/ledger"):
        check_encoding(spark, "ledger")
    for path in ("", "/data/orders", "s3://bucket/\u8ba2\u5355"):
        check_encoding(spark, path)
    check_encoding(_session("UTF-8"), "ledger")


def test_long_ids_that_differ_at_their_end_have_files_of_their_own():
    """A batch write's id joins its appId and the write's own id."""
    app_id = "warehouse/" + 80 * "a"
    parts = {path_part(f"{app_id}/{write}") for write in ("1", "2")}
    assert len(parts) == 2 and all(len(part) == 80 and "_" not in part for part in parts)
    assert path_part("a_b/" + "c" * 72) == "a=5Fb=2F" + "c" * 72
