"""The sources of a command's sink options, and which source wins."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import click
import pytest

from rocket_sink.commands.common import sink_input
from rocket_sink.commands.common.base import Command
from rocket_sink.commands.common.sink_input import given_options, sink_options
from rocket_sink.errors import ClusterError
from tests.run_command import run_command


@pytest.fixture(autouse=True)
def no_local_cluster(monkeypatch):
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    monkeypatch.setattr(sink_input, "_local_name_server", lambda: None)


def options_of(*arguments):
    options = {}

    @click.command(cls=Command)
    @sink_options("nameServer", "topic", "ledger")
    def command():
        options.update(given_options())

    command.main(list(arguments), standalone_mode=False)
    return options


def test_a_flag_wins_over_a_pair_and_a_pair_over_the_file(tmp_path):
    conf = tmp_path / "x.conf"
    conf.write_text("topic = file\nledger = file\nnameServer = file:1\n")
    pairs = ("-O", "topic=pair", "-O", "ledger=pair", "-O", "columns=body=b")
    options = options_of("--conf", str(conf), *pairs, "-t", "flag")
    ledger = str(Path("pair").absolute())
    assert options == {"nameServer": "file:1", "ledger": ledger, "topic": "flag",
                       "columns": "body=b"}  # fmt: skip


def test_a_pair_with_blanks_names_the_same_ledger():
    assert options_of("-O", "ledger = /data/l")["ledger"] == "/data/l"
    assert options_of("-O", "ledger =  ").get("ledger", "").strip() == ""


def test_a_pair_given_twice_in_two_spellings_is_refused():
    with pytest.raises(click.BadParameter, match="twice"):
        options_of("-O", "sendMsgTimeout=1s", "-O", "send_msg_timeout=2s")


def test_a_secret_that_everybody_sees_in_ps_is_warned_of(capsys):
    options_of("-O", "secretKey=hunter2", "-O", "accessKey=env:KEY", "-O", "topic=t")
    note = capsys.readouterr().err
    assert "secretKey" in note and "env:NAME" in note
    assert "accessKey" not in note and "hunter2" not in note


def test_a_name_server_is_given_or_of_the_environment_or_of_the_local_cluster(monkeypatch):
    monkeypatch.setattr(sink_input, "_local_name_server", lambda: "local:1")
    assert options_of() == {"nameServer": "local:1"}
    monkeypatch.setenv("NAMESRV_ADDR", "env:1")
    assert options_of() == {"nameServer": "env:1"}
    assert options_of("-n", "mine:1") == {"nameServer": "mine:1"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "nameServer is missing: give --name-server HOST:PORT, or start a local cluster"),
        (("-n", "a:1", "-O", "sendMsgTimeout=fast"), "sendMsgTimeout: 'fast' is not a duration"),
    ],
)
def test_a_stream_is_refused_before_spark_starts(more, words, tmp_path):
    checkpoint = str(tmp_path / "checkpoint")
    done = run_command("stream", "--format", "rate", "--checkpoint", checkpoint, *more)
    assert done.code == 2
    assert words in done.err


@pytest.mark.parametrize(
    ("state", "address"),
    [(None, None), (ClusterError("damaged"), None), (OSError(13, "no"), None),
     (SimpleNamespace(running=False, name_server="local:1"), None),
     (SimpleNamespace(running=True, name_server="local:1"), "local:1")],
)  # fmt: skip
def test_the_local_cluster_is_used_if_it_runs(state, address, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    monkeypatch.setattr(sink_input, "status", MagicMock(side_effect=[state]))
    assert options_of().get("nameServer") == address
    noted = "name server: local:1 (the local cluster)\n" if address else ""
    assert capsys.readouterr().err == noted


def test_paths_become_absolute_and_uris_stay():
    assert sink_input.absolute("ledger") == str(Path("ledger").absolute())
    assert sink_input.absolute("~/ledger") == str(Path.home() / "ledger")
    for uri in ("s3a://bucket/ledger", "hdfs://n/ledger", "file:/ledger"):
        assert sink_input.absolute(uri) == uri
