"""The commands with a real cluster, Spark and ledger; most run in the test's own process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.run_command import run_command

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(1800)]

PATIENT = ("-O", "sendMsgTimeout=60s", "-O", "connectTimeoutMs=20s")
"""Options by which a busy machine does not make a healthy broker look slow."""

ONE_QUEUE = (
    "-O", "ordering=strict", "-O", "createTopic=TBW102", "-O", "pollNameServerInterval=10min",
)  # fmt: skip
"""Options that keep all messages in one queue.

A slow first message isolates its broker, and best effort would avoid it. The route of a topic that
is made on the fly changes once its broker has registered it."""


def rocket_sink(*arguments, code=0, spark=None, stdin=""):
    done = run_command(*arguments, spark=spark, stdin=stdin)
    assert done.code == code, f"{arguments}\n{done.out}\n{done.err}"
    return done


def as_json(*arguments, code=0, spark=None):
    return rocket_sink(*arguments, "--json", code=code, spark=spark).json()


def json_lines(*arguments):
    return rocket_sink(*arguments, "--json").lines()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    rocket_sink("cluster", "up", "--home", str(folder))
    yield folder
    rocket_sink("cluster", "down", "--home", str(folder))
    assert as_json("cluster", "status", "--home", str(folder), code=1)["running"] is False


@pytest.fixture(scope="module")
def name_server(home):
    state = as_json("cluster", "status", "--home", str(home))
    assert state["running"]
    return str(state["name_server"])


def tail(name_server, topic):
    return json_lines("tail", "-n", name_server, "-t", topic, "--from-start", "--no-follow")


def test_send_routes_tail_check(name_server):
    sent = json_lines(
        "send", "-n", name_server, "-t", "shell", "--tags", "T", "--sharding-key", "k",
        *PATIENT, *ONE_QUEUE, "one", "two", "three",
    )  # fmt: skip
    assert [row["outcome"] for row in sent] == ["acked"] * 3
    (queue,) = {(row["broker"], row["queueId"]) for row in sent}
    rows = tail(name_server, "shell")
    assert [row["body"] for row in rows] == ["one", "two", "three"]
    assert {(row["broker"], row["queueId"]) for row in rows} == {queue}
    assert [row["messageId"] for row in rows] == [row["messageId"] for row in sent]
    route = as_json("topic", "show", "-n", name_server, "shell")
    assert queue[0] in {row["broker"] for row in route}
    assert as_json("check", "-n", name_server, "-t", "shell", *PATIENT)["ok"]


def test_check_fails_when_a_name_server_is_away(name_server):
    checked = as_json("check", "-n", f"{name_server};127.0.0.1:1", *PATIENT, code=1)
    states = {finding["what"]: finding["state"] for finding in checked["findings"]}
    assert states["name server 127.0.0.1:1"] == "fail"
    assert states[f"name server {name_server}"] == "ok"


def test_sigterm_ends_a_stream_in_good_order(tmp_path, name_server):
    ledger = str(tmp_path / "ledger")
    command = [
        sys.executable, "-m", "rocket_sink.cli", "stream", "--format", "rate",
        "--source-option", "rowsPerSecond=50", "--select", "cast(value AS string) AS body",
        "--checkpoint", str(tmp_path / "ck"), "-n", name_server, "-t", "ticks", "-l", ledger,
        "--trigger", "1 second", *PATIENT, "--json",
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        for line in process.stderr:
            if line.startswith("epoch 1"):
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["error"] is None
    counts = report["counts"]
    # On a busy machine the next micro-batch begins at once: it counts some rows, and repeats.
    assert counts["rows_in"] == counts["acked"] >= report["rows_read"] > 0
