"""The options of the tests' JVMs, and their archives; no JVM is started."""

import os
from pathlib import Path
from typing import Any

import pytest

from rocket_sink.cluster import conf
from tests import jvms


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(jvms, "user_cache_path", lambda name: tmp_path)
    return tmp_path


def test_an_archive_that_is_not_there_is_not_named(cache):
    assert not any("SharedArchiveFile" in option for option in jvms.java_options(jvms.SPARK))
    path = jvms.archive(jvms.SPARK)
    path.parent.mkdir()
    path.touch()
    assert f"-XX:SharedArchiveFile={path}" in jvms.java_options(jvms.SPARK)
    assert str(path) in jvms.submit_args() and str(path) not in jvms.java_options(jvms.BROKER)


def test_what_is_there_is_not_made_again_and_old_ones_go(cache, monkeypatch):
    paths: list[Path] = []
    monkeypatch.setattr(jvms, "_make_of_broker", lambda path: paths.append(path))
    monkeypatch.setattr(jvms, "_make_of_spark", lambda path: path.write_bytes(b"classes"))
    folder = jvms.archive(jvms.SPARK).parent
    folder.mkdir()
    old = [folder / f"{kind}-{n}.jsa" for kind in ("spark", "broker") for n in range(6)]
    for number, path in enumerate(old):
        path.touch()
        os.utime(path, (number, number))
    jvms.main()
    assert jvms.archive(jvms.SPARK).read_bytes() == b"classes"
    assert (
        len(list(folder.glob("spark-*.jsa"))) == 4 and len(list(folder.glob("broker-*.jsa"))) == 6
    )
    assert len(paths) == 1, "a Java without jcmd makes none, and that is no error"
    monkeypatch.setattr(jvms, "_make_of_spark", lambda path: pytest.fail("it is there"))
    jvms.main()


def test_brokers_are_quick_as_long_as_it_is_said(tmp_path):
    given: dict[str, Any] = {
        "java": Path("java"), "folder": tmp_path, "version": "5.3.3", "memory": (), "extra": (),
    }  # fmt: skip
    with jvms.quick_brokers("-XX:Other"):
        quick = conf.jvm_command("broker", **given)
    usual = conf.jvm_command("broker", **given)
    assert quick[-1] == usual[-1] == "org.apache.rocketmq.broker.BrokerStartup"
    assert "-XX:Other" in quick[:-1] and "-XX:Other" not in usual
