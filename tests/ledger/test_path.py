"""Paths of ledgers: each names one folder, even after repeated resolving."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocket_sink.errors import ConfigurationError, LedgerError
from rocket_sink.ledger.path import check_encoding, path_part, resolve_path
from rocket_sink.ledger.query.duckdb_reader import open_quick

from .night import store
from .values import accounts, context

NAMES = [
    "a b", "a#b", "a#c", "a?b", "50%", "hour=12%3A00", "%41", "A", "line\nbreak", "tab\tbed", "ü",
    "a:b", "a;b", "[a]*{b,c}", "`", "..a", "file:a",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_local_path_that_is_resolved_again_names_the_same_folder(
    tmp_path: Path, name: str
) -> None:
    place = resolve_path(f"{tmp_path}/{name}/ledger")
    assert Path(place.root) == tmp_path / name / "ledger"
    assert resolve_path(place.uri) == place
    assert str(place) == place.root and str(resolve_path(str(place))) == place.root


def test_two_slashes_at_the_start_are_one() -> None:
    place = resolve_path("//host/ledger")
    assert (place.uri, place.root) == ("file:/host/ledger", "/host/ledger")


def test_white_space_around_a_path_is_no_part_of_it() -> None:
    assert resolve_path(" /a/b \n") == resolve_path("/a/b")
    with pytest.raises(LedgerError, match="white space"):
        resolve_path("/a/b /")


def test_uris_of_others_are_unescaped() -> None:
    assert resolve_path("file:///a%20b%23").root == "/a b#"
    assert resolve_path("file://localhost/a%20b").root == "/a b"
    # Spark names paths in Hadoop's form, which escapes nothing.
    assert resolve_path("file:/a%20b").root == "/a%20b"
    for mark in "#?":
        with pytest.raises(LedgerError, match="no part of the path"):
            resolve_path(f"file:///ledger{mark}1")


def test_a_folder_that_delta_rs_may_read_as_another_is_left_to_spark(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    store(folder, [accounts(context(), acked=1)])
    assert open_quick(folder) is not None
    for name in ("a#b", "a?b", "a%20b"):
        folder = folder.rename(tmp_path / name)
        assert open_quick(folder) is None


def _session(encoding: str) -> Any:
    system = SimpleNamespace(getProperty={"sun.jnu.encoding": encoding}.get)
    lang = SimpleNamespace(System=system)
    jvm = SimpleNamespace(java=SimpleNamespace(lang=lang))
    return SimpleNamespace(_jsparkSession=object(), _jvm=jvm)


@pytest.mark.parametrize("encoding", ["ANSI_X3.4-1968", "ISO-8859-1", "GBK", "x-of-java-only"])
def test_a_path_that_java_would_take_for_another_one_is_refused(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_long_ids_that_differ_at_their_end_have_files_of_their_own() -> None:
    """A batch write's id joins its appId and the write's own id."""
    app_id = "warehouse/" + 80 * "a"
    parts = {path_part(f"{app_id}/{write}") for write in ("1", "2")}
    assert len(parts) == 2 and all(len(part) == 80 and "_" not in part for part in parts)
    assert path_part("a_b/" + "c" * 70) == "a=5Fb=2F" + "c" * 70
