"""Paths of ledgers: each names one folder, even after repeated resolving."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rocket_sink.errors import ConfigurationError, LedgerError
from rocket_sink.ledger.path import check_encoding, path_part, resolve_path

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
        (" ", "empty"), ("/a/b /", "white space"), ("file:///ledger#1", "no part of the path"),
        ("file:///ledger?1", "no part of the path"), ("c.s.t", "is the name of a table"),
        ("file://data/ledger", "a host before the path, is no part"),
    ],
)  # fmt: skip
def test_a_path_that_others_read_differently_is_refused(path, why):
    with pytest.raises(LedgerError, match=why):
        resolve_path(path)


def test_a_store_that_pyarrow_does_not_know_has_a_spool_on_the_driver():
    place = resolve_path("weird+scheme://x/y")
    assert (place.uri, place.root, place.is_local) == ("weird+scheme://x/y", "x/y", False)
    assert place.spools == (place.driver_folder,) and "pyarrow" in place.problem
    with pytest.raises(
        LedgerError, match=r"no file system for weird\+scheme: .* All lanes can use this ledger"
    ):
        place.filesystem()


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
    for path in ("", "/data/orders", "s3://bucket/\u8ba2\u5355"):
        check_encoding(spark, path)
    (tmp_path / "\u8ba2\u5355").mkdir()
    monkeypatch.chdir(tmp_path / "\u8ba2\u5355")
    with pytest.raises(ConfigurationError, match="\u8ba2\u5355/ledger"):
        check_encoding(spark, "ledger")
    check_encoding(_session("UTF-8"), "ledger")


def test_long_ids_that_differ_at_their_end_have_files_of_their_own():
    """A batch write's id joins its appId and the write's own id."""
    app_id = "warehouse/" + 80 * "a"
    parts = {path_part(f"{app_id}/{write}") for write in ("1", "2")}
    assert len(parts) == 2 and all(len(part) == 80 and "_" not in part for part in parts)
    assert path_part("a_b/" + "c" * 70) == "a=5Fb=2F" + "c" * 70
