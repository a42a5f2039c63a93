"""The jar cache: filled whole or not at all, checked, usable offline."""

import hashlib
from pathlib import Path

import pytest

from rocket_sink.cluster import jars
from rocket_sink.cluster.jars import ROOTS, Artifact, load_lock, locked_module, parse_lock
from rocket_sink.errors import ClusterError
from rocket_sink.java import Java
from tools.rocketmq_lock import graph_module

JAVA = Java(Path("/nowhere"), 17, "test")
BODY = b"the jar"
ARTIFACTS = tuple(
    Artifact("g", name, "1", "", hashlib.sha256(BODY).hexdigest()) for name in ("a", "b", "c")
)


class FakeRegistry:
    """A stand-in for Ivy. `bodies` maps a jar's name to the contents of its next fetches."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.bodies: dict[str, list[bytes | None]] = {}
        self.rounds: list[list[str]] = []

    def fetch(self, java, work, artifacts, into, on_jar) -> None:
        assert into.parent.parent == self.cache, "a rename is atomic on one file system only"
        self.rounds.append([a.name for a in artifacts])
        for artifact in artifacts:
            bodies = self.bodies.get(artifact.name)
            if (body := bodies.pop(0) if bodies else BODY) is not None:
                (into / artifact.file_name).write_bytes(body)
                on_jar()


@pytest.fixture
def registry(tmp_path, monkeypatch):
    fake = FakeRegistry(tmp_path)
    monkeypatch.setattr(jars, "load_lock", lambda _version: ARTIFACTS)
    monkeypatch.setattr(jars, "fetch_parts", fake.fetch)
    return fake


def resolve(cache: Path, messages: list[str] | None = None) -> list[Path]:
    tell = None if messages is None else messages.append
    return jars.resolve_jars("9.9.9", cache=cache, java=JAVA, progress=tell)


def test_the_cache_is_filled_once(tmp_path, registry):
    messages: list[str] = []
    paths = resolve(tmp_path, messages)
    assert [jar.name for jar in paths] == ["a-1.jar", "b-1.jar", "c-1.jar"]
    assert messages[-1] == "fetching RocketMQ 9.9.9: 3 of 3 jars"
    assert resolve(tmp_path) == paths
    assert registry.rounds == [["a", "b", "c"]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rocketmq-9.9.9", "rocketmq-9.9.9.lock"]


def test_a_spoilt_jar_is_fetched_again(tmp_path, registry):
    registry.bodies.update(b=[b"spoilt"], c=[None])
    assert resolve(tmp_path)[1].read_bytes() == BODY
    assert registry.rounds == [["a", "b", "c"], ["b", "c"]]


def test_a_jar_that_stays_spoilt_leaves_nothing(tmp_path, registry):
    registry.bodies["b"] = [b"spoilt", b"spoilt"]
    with pytest.raises(ClusterError, match=r"digests of 1 jars .* b-1\.jar"):
        resolve(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["rocketmq-9.9.9.lock"]


def test_an_incomplete_cache_is_filled_again(tmp_path, registry):
    resolve(tmp_path)[0].unlink()
    assert all(jar.is_file() for jar in resolve(tmp_path))
    assert len(registry.rounds) == 2


def test_a_jar_that_was_changed_in_the_cache_is_fetched_again(tmp_path, registry):
    resolve(tmp_path)[1].write_bytes(b"another jar")
    assert [jar.read_bytes() for jar in resolve(tmp_path)] == [BODY] * 3


@pytest.mark.parametrize(("whole", "checksums"), [(True, "sha1"), (False, "")])
def test_what_no_lock_checks_the_registrys_checksums_do(tmp_path, monkeypatch, whole, checksums):
    settings = tmp_path / "settings"
    java = java_that(tmp_path, f'cp "$4" {settings}')
    monkeypatch.delenv(jars.SETTINGS_ENV, raising=False)
    if whole:
        module = graph_module(["org.x:thing:9.9.9"])
        jars.run_ivy(java, tmp_path / "work", module, tmp_path, lambda: None, poms=True)
    else:
        jars.fetch_parts(java, tmp_path / "work", ARTIFACTS[:1], tmp_path, lambda: None)
    assert f'name="ivy.checksums" value="{checksums}"' in settings.read_text()


def test_the_cache_folder_is_the_argument_then_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(jars.CACHE_ENV, str(tmp_path / "env"))
    assert jars.cache_folder(tmp_path / "arg") == tmp_path / "arg"
    assert jars.cache_folder() == tmp_path / "env"
    monkeypatch.delenv(jars.CACHE_ENV)
    assert jars.cache_folder().name == "rocket-sink"


def test_a_cache_that_cannot_be_written(tmp_path, registry):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ClusterError, match=f"set {jars.CACHE_ENV}"):
        resolve(tmp_path / "file")


def test_the_users_own_ivy_settings_must_exist(tmp_path, monkeypatch):
    monkeypatch.setenv(jars.SETTINGS_ENV, str(tmp_path / "none.xml"))
    with pytest.raises(ClusterError, match=jars.SETTINGS_ENV):
        jars.fetch_parts(JAVA, tmp_path / "work", ARTIFACTS, tmp_path, lambda: None)


def java_that(folder: Path, script: str) -> Java:
    """Return a Java whose launcher runs this shell script with the arguments of Ivy."""
    launcher = folder / "java" / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\n{script}\n")
    launcher.chmod(0o755)
    return Java(folder / "java", 17, "test")


def test_a_failure_of_ivy_has_its_last_lines(tmp_path):
    java = java_that(tmp_path, "echo 'unknown host'\nexit 3")
    with pytest.raises(ClusterError, match=r"(?s)exit code 3.*unknown host"):
        jars.fetch_parts(java, tmp_path / "work", ARTIFACTS, tmp_path, lambda: None)


@pytest.mark.parametrize("version", ["latest", "v5.5.0", "0.0.1", "5.5.0 ", "5.5.0/../x"])
def test_only_versions_with_a_lock_file_run(version, tmp_path):
    with pytest.raises(ClusterError, match=r"only 4\.9\.7, 5\.3\.3, 5\.5\.0"):
        jars.resolve_jars(version, cache=tmp_path / "cache", java=JAVA)
    assert not list(tmp_path.iterdir())


# Lock files: which lines are read, which are refused, and that our two are complete.


SHA = "0" * 63 + "a"
PLAIN = Artifact("org.x", "thing", "1.2-b", "", SHA)
NATIVE = Artifact("org.x", "thing", "1.2-b", "linux-x86_64", SHA)


def test_a_lock_is_read_line_by_line():
    text = f"# Apache RocketMQ 9.9\n\n{PLAIN.line}\n{NATIVE.line}\n"
    assert parse_lock(text, "x") == (PLAIN, NATIVE)


def test_file_names_are_those_of_a_maven_repository():
    assert PLAIN.file_name == "thing-1.2-b.jar"
    assert NATIVE.file_name == "thing-1.2-b-linux-x86_64.jar"


@pytest.mark.parametrize(
    "line", ["org.x:thing " + SHA, "org.x:thing:1 abc", f"a:b:c:d:e {SHA}", f"../x:b:/c {SHA}"]
)
def test_a_bad_line_is_named(line):
    with pytest.raises(ClusterError, match=r"some\.lock, line 2: expected"):
        parse_lock(f"# head\n{line}\n", "some.lock")


def test_the_same_jar_twice_is_refused():
    with pytest.raises(ClusterError, match=r"line 2: thing-1\.2-b\.jar is there twice"):
        parse_lock(f"{PLAIN.line}\n{PLAIN.line.replace('org.x', 'org.y')}\n", "some.lock")


@pytest.mark.parametrize(("version", "least"), [("5.5.0", 100), ("5.3.3", 130), ("4.9.7", 40)])
def test_the_locks_we_ship_hold_the_roots(version, least):
    lock = load_lock(version)
    assert len(lock) >= least
    names = {a.name for a in lock if a.group == "org.apache.rocketmq" and a.version == version}
    assert set(ROOTS) <= names


def test_digests_are_checked(tmp_path):
    file = tmp_path / "x.jar"
    file.write_bytes(b"jar")
    good = Artifact("g", "x", "1", "", hashlib.sha256(b"jar").hexdigest())
    assert good.matches(file)
    file.write_bytes(b"jaR")
    assert not good.matches(file)
    assert not good.matches(tmp_path / "absent.jar")


def test_ivy_is_asked_for_these_jars_and_nothing_more():
    text = locked_module([NATIVE, PLAIN, Artifact("org.y", "other", "2", "", SHA)])
    assert text.count("<dependency ") == 2
    assert text.count('transitive="false"') == 2
    assert text.count("<artifact ") == 3
    assert 'm:classifier="linux-x86_64"' in text


def test_without_a_lock_ivy_is_asked_for_dependencies_too():
    text = graph_module(["org.x:thing:1.2", "org.y:other:2"])
    assert 'name="thing" rev="1.2"' in text
    assert 'name="other" rev="2"' in text
    assert "transitive" not in text
