"""The jar cache: filled whole or not at all, checked, usable offline."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from unittest.mock import MagicMock

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

    def __init__(self, cache):
        self.cache = cache
        self.bodies: dict[str, list[bytes | None]] = {}
        self.rounds: list[list[str]] = []
        self.errors: list[ClusterError] = []

    def fetch(self, java, work, artifacts, into, on_jar):
        assert into.parent.parent == self.cache, "a rename is atomic on one file system only"
        assert java is JAVA and not work.exists()
        self.rounds.append([a.name for a in artifacts])
        if self.errors:
            raise self.errors.pop()
        for artifact in artifacts:
            assert not (into / artifact.file_name).exists()
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


def resolve(cache, messages=None):
    tell = None if messages is None else messages.append
    return jars.resolve_jars("9.9.9", cache=cache, java=JAVA, progress=tell)


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_the_cache_is_filled_once(is_waited_for, tmp_path, registry, monkeypatch):
    """All users may read the cache. A full cache needs no lock, because a read-only folder
    refuses locks."""
    cache, messages = tmp_path / "new", []
    registry.cache = cache
    lock = jars.only_one

    def waited(path, tell):
        monkeypatch.setattr(jars, "only_one", lock)
        resolve(cache)
        return lock(path, tell)

    if is_waited_for:
        monkeypatch.setattr(jars, "only_one", waited)
    umask = os.umask(0o077)
    try:
        paths = resolve(cache, messages)
    finally:
        os.umask(umask)
    assert [jar.name for jar in paths] == ["a-1.jar", "b-1.jar", "c-1.jar"]
    text = "fetching RocketMQ 9.9.9: "
    counts = ["3 jars, once", *(f"{number} of 3 jars" for number in (1, 2, 3))]
    assert messages == ([] if is_waited_for else [f"{text}{count}" for count in counts])
    assert paths[0].parent.stat().st_mode & 0o777 == 0o755
    monkeypatch.setattr(jars, "only_one", None)
    assert resolve(cache) == paths
    assert registry.rounds == [["a", "b", "c"]]
    assert sorted(p.name for p in cache.iterdir()) == ["rocketmq-9.9.9", "rocketmq-9.9.9.lock"]


def test_a_spoilt_jar_is_fetched_again(tmp_path, registry):
    registry.bodies.update(b=[b"spoilt"], c=[None])
    assert resolve(tmp_path)[1].read_bytes() == BODY
    assert registry.rounds == [["a", "b", "c"], ["b", "c"]]


@pytest.mark.parametrize("error", [None, ClusterError("no network")])
def test_a_jar_that_stays_spoilt_leaves_nothing(error, tmp_path, registry):
    registry.bodies["b"] = [b"spoilt", b"spoilt"]
    registry.errors = [error, error] if error else []
    with pytest.raises(ClusterError, match=str(error or r"digests of 1 jars .* b-1\.jar")):
        resolve(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["rocketmq-9.9.9.lock"]


@pytest.mark.parametrize("spoil", [Path.unlink, lambda jar: jar.write_bytes(b"another jar")])
def test_a_cache_that_is_incomplete_or_changed_is_filled_again(spoil, tmp_path, registry):
    spoil(resolve(tmp_path)[1])
    assert [jar.read_bytes() for jar in resolve(tmp_path)] == [BODY] * 3
    assert len(registry.rounds) == 2


@pytest.mark.parametrize(
    ("whole", "checksums", "own"), [(True, "sha1", ""), (False, "", ""), (False, "", "<own/>")]
)
def test_what_no_lock_checks_the_registrys_checksums_do(
    tmp_path, monkeypatch, whole, checksums, own
):
    """Unless the user has settings of their own. Ivy runs in a scratch folder."""
    settings, words, mine = (tmp_path / name for name in ("settings", "words", "own.xml"))
    java = java_that(tmp_path, f'cp "$4" {settings}; echo "$@" > {words}; echo "[SUCCESSFUL ] x"')
    mine.write_text(own)
    monkeypatch.setenv(jars.SETTINGS_ENV, str(mine) if own else "")
    work, jar = tmp_path / "work", MagicMock()
    if whole:
        module = graph_module(["org.x:thing:9.9.9"])
        jars.run_ivy(java, work, module, tmp_path, jar, poms=True)
    else:
        jars.fetch_parts(java, work, ARTIFACTS[:1], tmp_path, jar)
        work, module = work / "part-0", locked_module(ARTIFACTS[:1])
    text = settings.read_text()
    if own:
        assert text == own
    else:
        assert f'name="ivy.checksums" value="{checksums}"' in text
        assert f'usepoms="{str(whole).lower()}"' in text
    pattern = tmp_path if whole else tmp_path / jars.FLAT
    assert words.read_text().split() == [
        "-jar", str(jars.find_ivy()),
        "-settings", str(mine if own else work / "ivysettings.xml"), "-cache", str(work / "cache"),
        "-ivy", str(work / "ivy.xml"), "-types", "jar", "bundle", "-retrieve", str(pattern),
    ]  # fmt: skip
    assert (work / "ivy.xml").read_text() == module and jar.call_count == 1


def test_parts_are_fetched_side_by_side(tmp_path, monkeypatch):
    """Each part has artifacts, and each artifact is in one part."""
    artifacts = [replace(ARTIFACTS[0], name=f"n{number}") for number in range(8)]
    together, parts = Barrier(6, timeout=60), []

    def run_ivy(java, folder, module, *more, **options):
        parts.append(module)
        together.wait()

    monkeypatch.setattr(jars, "run_ivy", run_ivy)
    jars.fetch_parts(JAVA, tmp_path, artifacts, tmp_path, lambda: None)
    assert sorted(part.count("<artifact ") for part in parts) == [1] * 4 + [2] * 2
    assert all("".join(parts).count(f'artifact name="n{number}"') == 1 for number in range(8))


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None), SimpleNamespace(origin="/x")])
def test_a_pyspark_without_jars_is_explained(spec, monkeypatch):
    monkeypatch.setattr(jars, "find_spec", lambda name: spec)
    with pytest.raises(ClusterError, match="not a variant without jars"):
        jars.find_ivy()


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


def java_that(folder, script):
    """Return a Java whose launcher runs this shell script with the arguments of Ivy."""
    launcher = folder / "java" / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\n{script}\n")
    launcher.chmod(0o755)
    return Java(folder / "java", 17, "test")


@pytest.mark.parametrize(
    ("line", "hint"),
    [("unknown host", ""), ("x: not found", "try another"), ("PKIX", "trustStore")],
)
def test_a_failure_of_ivy_has_its_last_lines(line, hint, tmp_path):
    java = java_that(tmp_path, f"seq 100 130; printf '\\377 {line} ' >&2; cat; exit 3")
    with pytest.raises(ClusterError, match=r"(?s)fetch Apache RocketMQ \(exit code 3") as raised:
        jars.fetch_parts(java, tmp_path / "work", ARTIFACTS, tmp_path, lambda: None)
    text = str(raised.value)
    assert text.endswith(f"lines:\n{chr(10).join(map(str, range(107, 131)))}\n\ufffd {line}")
    assert [sign in text for sign in ("try another", "trustStore")] == [
        hint == "try another", hint == "trustStore"
    ]  # fmt: skip


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
    """File names are those of a Maven repository."""
    text = f"# Apache RocketMQ 9.9\n\n{PLAIN.line}\n{NATIVE.line}\n"
    assert parse_lock(text, "x") == (PLAIN, NATIVE)
    assert PLAIN.file_name == "thing-1.2-b.jar"
    assert NATIVE.file_name == "thing-1.2-b-linux-x86_64.jar"


@pytest.mark.parametrize(
    "line",
    ["org.x:thing " + SHA, "org.x:thing:1 abc", f"a:b:c:d:e {SHA}", f"../x:b:/c {SHA}", "x" * 900],
)
def test_a_bad_line_is_named(line):
    with pytest.raises(ClusterError, match=r"some\.lock, line 2: expected") as raised:
        parse_lock(f"# head\n{line}\n", "some.lock")
    assert repr(line[:120]) in str(raised.value)


def test_the_same_jar_twice_is_refused():
    with pytest.raises(ClusterError, match=r"line 2: thing-1\.2-b\.jar is there twice"):
        parse_lock(f"{PLAIN.line}\n{PLAIN.line.replace('org.x', 'org.y')}\n", "some.lock")


@pytest.mark.parametrize(("version", "least"), [("5.5.0", 100), ("5.3.3", 130), ("4.9.7", 40)])
def test_the_locks_we_ship_hold_the_roots(version, least):
    lock = load_lock(version)
    assert len(lock) >= least
    names = {a.name for a in lock if a.group == "org.apache.rocketmq" and a.version == version}
    assert set(ROOTS) <= names


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
