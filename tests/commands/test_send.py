"""`rocket-sink send` exits 0 only when every message was acknowledged."""

import json
import os
import re
import subprocess
import sys

import pytest

from rocket_sink.testing import Answer
from tests.clusters import scripted_cluster
from tests.run_command import run_command

cluster = scripted_cluster(1, orders=1)


@pytest.mark.parametrize(
    ("arguments", "properties"),
    [
        (["--property", "a=b=c", "--property", "d= e"], {"a": "b=c", "d": " e"}),
        (["--keys", "k1 k2", "--tags", "x=y"], {"KEYS": "k1 k2", "TAGS": "x=y"}),
        (["--sharding-key", "s=1", "--delay-level", "3"], {"__SHARDINGKEY": "s=1", "DELAY": "3"}),
        (["--delay-ms", "5000"], {"TIMER_DELAY_MS": "5000"}),
    ],
)
def test_options_are_fields_of_each_message(cluster, arguments, properties):
    send(cluster, "-t", "orders", *arguments, "a", "b")
    for message in cluster.messages("orders"):
        assert {name: message.properties.get(name) for name in properties} == properties


def send(cluster, *arguments, lines="", code=0):
    """Send the arguments, or lines of JSON."""
    form = ("--json-lines",) if lines else ()
    done = run_command("send", "-n", cluster.name_server, *form, *arguments, stdin=lines)
    assert done.code == code, done.err
    return done


def bodies(cluster, topic="orders"):
    return [bytes(message.body) for message in cluster.messages(topic)]


@pytest.mark.parametrize(
    ("answer", "times", "first", "last"),
    [
        (Answer(13, "no"), 1, "message ", "2 sent, 1 failed\n"),
        # All messages would meet this refusal, so it ends the command.
        (Answer(1, "check signature failed"), None, "message 0: AUTH_FAILED", "0 sent, 1 failed\n"),
    ],
)
def test_one_refused_message_among_others_exits_1(cluster, answer, times, first, last):
    assert send(cluster, "-t", "orders", "a", "b", "c").err == "3 sent\n"
    cluster.on_send(answer, times=times)
    done = send(cluster, "-t", "orders", "a", "b", "c", code=1)
    assert first in done.err and done.err.endswith(last)
    assert len(bodies(cluster)) == 3 + int(last[0])


def test_a_topic_is_asked_for_before_any_body(cluster, tmp_path):
    assert "name a topic: -t TOPIC" in send(cluster, "a", code=2).err
    file = tmp_path / "bodies"
    file.write_bytes(b"a\r\nb\n")
    both = send(cluster, "-t", "orders", "--file", str(file), "c", code=2).err
    assert "give bodies or --file, not both" in both
    assert send(cluster, "-t", "orders", "--file", str(file)).err == "2 sent\n"
    assert bodies(cluster) == [b"a", b"b"]


def test_each_result_is_a_line(cluster):
    cluster.on_send(Answer(2, "busy"), times=1)
    shown = send(cluster, "-t", "orders", "a").out
    assert re.fullmatch(
        r"acked  broker-a queue 0 offset 0  \d+\.\d ms  \w{32}  2 attempts\n", shown
    )
    cluster.on_send(Answer(13, "no"), times=1)
    done = send(cluster, "-t", "orders", "--json", "a", "b", code=1)
    failed, sent = map(json.loads, done.out.splitlines())
    assert failed.keys() == {"number", "outcome", "code", "error"} and done.err == ""
    facts = (sent["number"], sent["queueOffset"], sent["broker"], sent["topic"], sent["attempts"])
    assert facts == (1, 1, "broker-a", "orders", 1) and 0 < sent["latencyMs"] < 600_000


@pytest.mark.parametrize(
    ("value", "body"),
    [('{"a": "ż"}', '{"a": "ż"}'.encode()), ("[1]", b"[1]"), ('"b"', b"b"), ("5", b"")],
)
def test_the_body_of_a_line_may_be_json(cluster, value, body):
    done = send(cluster, "-t", "orders", lines=f'{{"body": {value}}}\n', code=not body)
    assert bodies(cluster) == [body] * (not done.code)
    assert done.code == 0 or ("message 0: " in done.err and "INVALID" in done.err)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_without_a_name_server_each_message_would_wait(more):
    words = ("send", "-n", "127.0.0.1:1", "-t", "orders", *more, "a", "b")
    done = run_command(*words)
    assert done.code == 1 and len(done.out.splitlines()) == len(more)
    assert len(done.err.splitlines()) == 1 - len(more)


def test_lines_of_json_take_the_row_contracts_names(cluster):
    for name in ("delivery_timestamp", "delivery_timestamp_ms"):
        line = {"topic": "orders", "value": "a", name: 4_000_000_000_000}
        assert send(cluster, lines=json.dumps(line)).err == "1 sent\n"
    stored = cluster.messages("orders")
    assert [m.properties["TIMER_DELIVER_MS"] for m in stored] == ["4000000000000"] * 2
    line = '{"body": "a", "delivery_timestamp": 1, "delivery_timestamp_ms": 2}\n'
    done = send(cluster, "-t", "orders", lines=line, code=1)
    assert "unknown fields delivery_timestamp;" in done.err


def test_null_is_as_if_it_were_not_there(cluster):
    line = '{"body": "a", "keys": null, "wait_store": null, "flag": null}\n'
    send(cluster, "-t", "orders", lines=line)
    assert bodies(cluster) == [b"a"]
    done = send(cluster, "-t", "orders", lines='{"body": "a", "wait_store": "no"}\n', code=1)
    assert "neither true nor false" in done.err


def test_a_body_that_is_no_utf_8_is_sent_as_the_shell_gave_it(cluster):
    send(cluster, "-t", "orders", os.fsdecode(b"\xff\x00a"))
    assert bodies(cluster) == [b"\xff\x00a"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"body": "b"', "is not JSON"),
        ("[1]", "not a JSON object"),
        ('{"body": "\\ud800"}', "utf-8"),
    ],
)
def test_the_line_that_ends_it_is_named(cluster, line, why):
    lines = f'{{"body": "a"}}\n{line}\n{{"body": "c"}}\n'
    err = send(cluster, "-t", "orders", lines=lines, code=1).err
    assert bodies(cluster) == [b"a"]
    assert err.startswith("rocket-sink: message 1: ") and err.count("\n") == 1, err
    assert why in err and "not sent, nor what follows it" in err


def test_a_closed_output_ends_it_with_a_word(cluster, tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("a\n" * 1000)
    command = [sys.executable, "-m", "rocket_sink.cli", "send", "-n", cluster.name_server]
    with subprocess.Popen(
        [*command, "-t", "orders", "--file", str(lines)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.readline()
        process.stdout.close()
        error_text = process.stderr.read()
    assert process.returncode == 1
    count = len(bodies(cluster))
    assert error_text == f"standard output is closed: {count:,} sent, what follows is not\n"
    assert count < 1000
