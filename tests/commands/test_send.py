"""`rocket-sink send` exits 0 only when every message was acknowledged."""

import os
import subprocess
import sys

import pytest

from rocket_sink.testing import Answer, FakeCluster
from tests.clusters import scripted_cluster
from tests.run_command import Done, run_command

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


def send(cluster: FakeCluster, *arguments: str, lines: str = "", code: int = 0) -> Done:
    """Send the arguments, or lines of JSON."""
    form = ("--json-lines",) if lines else ()
    done = run_command("send", "-n", cluster.name_server, *form, *arguments, stdin=lines)
    assert done.code == code, done.err
    return done


def bodies(cluster: FakeCluster, topic: str = "orders") -> list[bytes]:
    return [bytes(message.body) for message in cluster.messages(topic)]


def test_one_refused_message_among_others_exits_1(cluster):
    assert send(cluster, "-t", "orders", "a", "b", "c").err == "3 sent\n"
    cluster.brokers[0].on_send(Answer(13, "no"), times=1)
    done = send(cluster, "-t", "orders", "a", "b", "c", code=1)
    assert done.err.endswith("2 sent, 1 failed\n")
    assert len(bodies(cluster)) == 5


def test_a_topic_is_asked_for_before_any_body(cluster):
    assert "name a topic: -t TOPIC" in send(cluster, "a", code=2).err


def test_lines_of_json_may_name_their_topics(cluster):
    cluster.create_topic("two", queues=1)
    lines = '{"topic": "orders", "body": "a"}\n{"topic": "two", "body": "b"}\n'
    assert send(cluster, lines=lines).err == "2 sent\n"
    assert (bodies(cluster), bodies(cluster, "two")) == ([b"a"], [b"b"])


def test_a_delay_that_overflows_at_brokers_is_refused(cluster):
    most = str(2**63 - 1)
    as_option = send(cluster, "-t", "orders", "--delay-ms", most, "a", code=1)
    line = f'{{"body": "a", "delay_ms": {most}}}\n'
    as_field = send(cluster, "-t", "orders", lines=line, code=1)
    assert bodies(cluster) == []
    assert "INVALID_DELAY" in as_option.err and "INVALID_DELAY" in as_field.err


def test_lines_of_json_take_the_row_contracts_names(cluster):
    for name in ("delivery_timestamp", "delivery_timestamp_ms"):
        send(cluster, "-t", "orders", lines=f'{{"value": "a", "{name}": 4000000000000}}\n')
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
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        error_text = process.stderr.read()
    assert process.returncode == 1
    count = len(bodies(cluster))
    assert error_text == f"standard output is closed: {count:,} sent, what follows is not\n"
    assert count < 1000
