"""Lock files: which lines are read, which are refused, and that our two are complete."""

import hashlib
from pathlib import Path

import pytest

from rocket_sink.cluster.jars import ROOTS, Artifact, load_lock, locked_module, parse_lock
from rocket_sink.errors import ClusterError
from tools.rocketmq_lock import graph_module

SHA = "0" * 63 + "a"
PLAIN = Artifact("org.x", "thing", "1.2-b", "", SHA)
NATIVE = Artifact("org.x", "thing", "1.2-b", "linux-x86_64", SHA)


def test_a_lock_is_read_line_by_line() -> None:
    text = f"# Apache RocketMQ 9.9\n\n{PLAIN.line}\n{NATIVE.line}\n"
    assert parse_lock(text, "x") == (PLAIN, NATIVE)


def test_file_names_are_those_of_a_maven_repository() -> None:
    assert PLAIN.file_name == "thing-1.2-b.jar"
    assert NATIVE.file_name == "thing-1.2-b-linux-x86_64.jar"


@pytest.mark.parametrize(
    "line", ["org.x:thing " + SHA, "org.x:thing:1 abc", f"a:b:c:d:e {SHA}", f"../x:b:/c {SHA}"]
)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(ClusterError, match=r"some\.lock, line 2: expected"):
        parse_lock(f"# head\n{line}\n", "some.lock")


def test_the_same_jar_twice_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"line 2: thing-1\.2-b\.jar is there twice"):
        parse_lock(f"{PLAIN.line}\n{PLAIN.line.replace('org.x', 'org.y')}\n", "some.lock")


@pytest.mark.parametrize(("version", "least"), [("5.5.0", 100), ("5.3.3", 130), ("4.9.7", 40)])
def test_the_locks_we_ship_hold_the_roots(version: str, least: int) -> None:
    lock = load_lock(version)
    assert len(lock) >= least
    names = {a.name for a in lock if a.group == "org.apache.rocketmq" and a.version == version}
    assert set(ROOTS) <= names


def test_digests_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "x.jar"
    file.write_bytes(b"jar")
    good = Artifact("g", "x", "1", "", hashlib.sha256(b"jar").hexdigest())
    assert good.matches(file)
    file.write_bytes(b"jaR")
    assert not good.matches(file)
    assert not good.matches(tmp_path / "absent.jar")


def test_ivy_is_asked_for_these_jars_and_nothing_more() -> None:
    text = locked_module([NATIVE, PLAIN, Artifact("org.y", "other", "2", "", SHA)])
    assert text.count("<dependency ") == 2
    assert text.count('transitive="false"') == 2
    assert text.count("<artifact ") == 3
    assert 'm:classifier="linux-x86_64"' in text


def test_without_a_lock_ivy_is_asked_for_dependencies_too() -> None:
    text = graph_module(["org.x:thing:1.2", "org.y:other:2"])
    assert 'name="thing" rev="1.2"' in text
    assert 'name="other" rev="2"' in text
    assert "transitive" not in text
