"""`rocket-sink send` exits 0 only when every message was acknowledged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rocket_sink.cli import main
from rocket_sink.testing import Answer, FakeCluster


def test_one_refused_message_among_others_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("orders", queues=1)
        command = ["send", "-n", cluster.name_server, "-t", "orders", "a", "b", "c"]
        assert main(command) == 0
        assert capsys.readouterr().err == "3 sent\n"
        cluster.brokers[0].on_send(Answer(13, "no"), times=1)
        assert main(command) == 1
        assert capsys.readouterr().err.endswith("2 sent, 1 failed\n")
        assert len(cluster.messages("orders")) == 5


@pytest.mark.parametrize(
    ("arguments", "properties"),
    [
        (["--property", "a=b=c", "--property", "d= e"], {"a": "b=c", "d": " e"}),
        (["--keys", "k1 k2", "--tags", "x=y"], {"KEYS": "k1 k2", "TAGS": "x=y"}),
        (["--sharding-key", "s=1", "--delay-level", "3"], {"__SHARDINGKEY": "s=1", "DELAY": "3"}),
        (["--delay-ms", "5000"], {"TIMER_DELAY_MS": "5000"}),
    ],
)
def test_options_are_fields_of_each_message(
    arguments: list[str], properties: dict[str, str]
) -> None:
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("orders", queues=1)
        assert main(["send", "-n", cluster.name_server, "-t", "orders", *arguments, "a", "b"]) == 0
        for message in cluster.messages("orders"):
            assert {name: message.properties.get(name) for name in properties} == properties


def test_a_topic_is_asked_for_before_any_body(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["send", "-n", "127.0.0.1:1", "a"]) == 2
    assert "name a topic: -t TOPIC" in capsys.readouterr().err


def send_lines(cluster: FakeCluster, path: Path, text: str, *more: str) -> int:
    path.write_text(text)
    return main(["send", "-n", cluster.name_server, *more, "--json-lines", "--file", str(path)])


def test_lines_of_json_may_name_their_topics(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = '{"topic": "one", "body": "a"}\n{"topic": "two", "body": "b"}\n'
    with FakeCluster(brokers=1) as cluster:
        for topic in ("one", "two"):
            cluster.create_topic(topic, queues=1)
        assert send_lines(cluster, tmp_path / "lines", lines) == 0
        assert [len(cluster.messages(topic)) for topic in ("one", "two")] == [1, 1]
    assert capsys.readouterr().err == "2 sent\n"


def test_a_delay_that_overflows_at_brokers_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    most = str(2**63 - 1)
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("later", queues=1)
        command = ["send", "-n", cluster.name_server, "-t", "later"]
        assert main([*command, "--delay-ms", most, "a"]) == 1
        line = f'{{"body": "a", "delay_ms": {most}}}\n'
        assert send_lines(cluster, tmp_path / "lines", line, "-t", "later") == 1
        assert cluster.messages("later") == []
    assert capsys.readouterr().err.count("INVALID_DELAY") == 2


def test_lines_of_json_take_the_row_contracts_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("later", queues=1)
        for name in ("delivery_timestamp", "delivery_timestamp_ms"):
            line = f'{{"value": "a", "{name}": 4000000000000}}\n'
            assert send_lines(cluster, lines, line, "-t", "later") == 0
        stored = cluster.messages("later")
        assert [m.properties["TIMER_DELIVER_MS"] for m in stored] == ["4000000000000"] * 2
        line = '{"body": "a", "delivery_timestamp": 1, "delivery_timestamp_ms": 2}\n'
        assert send_lines(cluster, lines, line, "-t", "later") == 1
        assert "unknown fields delivery_timestamp;" in capsys.readouterr().err


def test_null_is_as_if_it_were_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("one", queues=1)
        line = '{"body": "a", "keys": null, "wait_store": null, "flag": null}\n'
        assert send_lines(cluster, lines, line, "-t", "one") == 0
        assert [message.body for message in cluster.messages("one")] == [b"a"]
        line = '{"body": "a", "wait_store": "no"}\n'
        assert send_lines(cluster, lines, line, "-t", "one") == 1
        assert "neither true nor false" in capsys.readouterr().err


def test_a_body_that_is_no_utf_8_is_sent_as_the_shell_gave_it() -> None:
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("one", queues=1)
        body = os.fsdecode(b"\xff\x00a")
        assert main(["send", "-n", cluster.name_server, "-t", "one", body]) == 0
        assert [message.body for message in cluster.messages("one")] == [b"\xff\x00a"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"body": "b"', "is not JSON"),
        ("[1]", "not a JSON object"),
        ('{"body": "\\ud800"}', "utf-8"),
    ],
)
def test_the_line_that_ends_it_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, why: str
) -> None:
    lines = f'{{"body": "a"}}\n{line}\n{{"body": "c"}}\n'
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("one", queues=1)
        assert send_lines(cluster, tmp_path / "lines", lines, "-t", "one") == 1
        assert [message.body for message in cluster.messages("one")] == [b"a"]
    error_text = capsys.readouterr().err
    assert error_text.startswith("rocket-sink: message 1: ") and error_text.count("\n") == 1, (
        error_text
    )
    assert why in error_text and "not sent, nor what follows it" in error_text


def test_a_closed_output_ends_it_with_a_word(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("a\n" * 1000)
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("one", queues=1)
        command = [sys.executable, "-m", "rocket_sink.cli", "send", "-n", cluster.name_server]
        with subprocess.Popen(
            [*command, "-t", "one", "--file", str(lines)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None and process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            error_text = process.stderr.read()
        assert process.returncode == 1
        count = len(cluster.messages("one"))
    assert error_text == f"standard output is closed: {count:,} sent, what follows is not\n"
    assert count < 1000
