"""The commands as users run them: own processes, a real cluster, a real Spark, a real ledger."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(1800)]

PATIENT = ("-O", "sendMsgTimeout=60s", "-O", "connectTimeoutMs=20s", "-O", "mqClientApiTimeout=20s")
"""A busy machine must not make a healthy broker look slow."""


def rocket_sink(
    *arguments: str, code: int | None = 0, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "rocket_sink.cli", *arguments],
        input=stdin, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert code is None or done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done


def as_json(*arguments: str, code: int | None = 0) -> Any:
    return json.loads(rocket_sink(*arguments, "--json", code=code).stdout)


def json_lines(*arguments: str) -> list[Any]:
    done = rocket_sink(*arguments, "--json")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cluster")
    rocket_sink("cluster", "up", "--home", str(folder))
    yield folder
    rocket_sink("cluster", "down", "--home", str(folder))
    assert as_json("cluster", "status", "--home", str(folder), code=1)["running"] is False


@pytest.fixture(scope="module")
def name_server(home: Path) -> str:
    state = as_json("cluster", "status", "--home", str(home))
    assert state["running"]
    return str(state["name_server"])


def bodies(name_server: str, topic: str) -> list[str]:
    rows = json_lines("tail", "-n", name_server, "-t", topic, "--from-start", "--no-follow")
    return [row["body"] for row in rows]


def test_up_twice_is_the_same_cluster(home: Path, name_server: str) -> None:
    assert as_json("cluster", "up", "--home", str(home))["name_server"] == name_server


def test_send_routes_tail_check(name_server: str) -> None:
    sent = json_lines(
        "send", "-n", name_server, "-t", "shell", "--tags", "T", "--sharding-key", "k",
        *PATIENT, "one", "two", "three",
    )  # fmt: skip
    assert [row["outcome"] for row in sent] == ["acked"] * 3
    (queue,) = {(row["broker"], row["queueId"]) for row in sent}
    rows = json_lines("tail", "-n", name_server, "-t", "shell", "--from-start", "--no-follow")
    assert [row["body"] for row in rows] == ["one", "two", "three"]
    assert {(row["broker"], row["queueId"]) for row in rows} == {queue}
    assert [row["messageId"] for row in rows] == [row["messageId"] for row in sent]
    route = as_json("routes", "-n", name_server, "-t", "shell")
    assert queue[0] in {row["broker"] for row in route["brokers"]}
    assert as_json("check", "-n", name_server, "-t", "shell", *PATIENT)["ok"]


def test_lines_of_standard_input_are_messages(name_server: str) -> None:
    lines = '{"body": {"a": 1}, "keys": ["x"]}\n{"value": "plain"}\n'
    rocket_sink("send", "-n", name_server, "-t", "lines", "--json-lines", *PATIENT, stdin=lines)
    assert sorted(bodies(name_server, "lines")) == ["plain", '{"a": 1}']


def test_a_message_that_cannot_be_sent_is_exit_code_1(name_server: str) -> None:
    done = rocket_sink("send", "-n", name_server, "-t", "TBW102 x", "body", code=1)
    assert "INVALID_TOPIC" in done.stderr


def test_check_fails_when_a_name_server_is_away(name_server: str) -> None:
    found = as_json("check", "-n", f"{name_server};127.0.0.1:1", code=1)
    states = {finding["what"]: finding["state"] for finding in found["findings"]}
    assert states["name server 127.0.0.1:1"] == "fail"
    assert states[f"name server {name_server}"] == "ok"


ROWS = 200
EMPTY = 3


@pytest.fixture(scope="class")
def world(tmp_path_factory: pytest.TempPathFactory, name_server: str) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("stream")
    (folder / "in").mkdir()
    rows = [
        {"id": n, "key": f"k{n % 7}", "text": "" if n < EMPTY else f"text {n}"} for n in range(ROWS)
    ]
    text = "\n".join(map(json.dumps, rows))
    (folder / "in" / "rows.json").write_text(text)
    return {"folder": str(folder), "ledger": str(folder / "ledger"), "ns": name_server}


class TestStreamAndBackfill:
    """One story: rows stream in, some cannot be sent, they are mended and sent again."""

    def stream(self, world: dict[str, str]) -> Any:
        return as_json(
            "stream", "--format", "json", "--path", f"{world['folder']}/in",
            "--checkpoint", f"{world['folder']}/checkpoint", "--trigger", "available-now",
            "-n", world["ns"], "-t", "story", "-l", world["ledger"], "--ordering", "strict",
            "--select", "text AS body", "--select", "key AS sharding_key",
            "--select", "cast(id AS string) AS keys", *PATIENT,
        )  # fmt: skip

    def test_1_rows_are_sent_and_accounted_for(self, world: dict[str, str]) -> None:
        done = self.stream(world)
        assert done["error"] is None
        counts = done["counts"]
        assert counts["rows_in"] == ROWS
        assert (counts["acked"], counts["dead"]) == (ROWS - EMPTY, EMPTY)
        assert len(bodies(world["ns"], "story")) == ROWS - EMPTY

    def test_2_a_second_run_sends_nothing(self, world: dict[str, str]) -> None:
        assert self.stream(world)["rows_read"] == 0
        assert len(bodies(world["ns"], "story")) == ROWS - EMPTY

    def test_3_a_dry_run_counts_and_sends_nothing(self, world: dict[str, str]) -> None:
        plan = as_json("backfill", "-l", world["ledger"], "--dry-run", "--reason", "data")
        assert (plan["pending"], plan["selected"]) == (EMPTY, EMPTY)
        assert {row["last_error_code"] for row in plan["sample"]} == {"EMPTY_BODY"}

    def test_4_what_no_broker_takes_stays_pending(self, world: dict[str, str]) -> None:
        done = as_json(
            "backfill", "-l", world["ledger"], "-n", world["ns"], "--reason", "data", *PATIENT,
            code=1,
        )  # fmt: skip
        assert (done["resent"], done["failed"], done["pending"]) == (0, EMPTY, EMPTY)

    def test_5_the_report_tells_the_same(self, world: dict[str, str]) -> None:
        found = as_json("report", "-l", world["ledger"])
        assert found["totals"]["rows_in"] == ROWS
        assert found["totals"]["dead"] == EMPTY
        assert found["dead_letters"][0]["pending"] == EMPTY


def test_letters_of_a_closed_topic_are_sent_when_it_opens(
    tmp_path: Path, home: Path, name_server: str
) -> None:
    """The way of most dead letters: a broker refuses for a while, a backfill sends them later."""
    from rocket_sink.cluster import admin

    def permit(permission: int) -> None:
        admin(name_server, "updateTopic", "-c", "DefaultCluster", "-t", "door",
              "-r", "2", "-w", "2", "-p", str(permission))  # fmt: skip

    rows = [{"n": n, "k": f"k{n % 3}"} for n in range(60)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    ledger = str(tmp_path / "ledger")
    permit(4)
    rocket_sink(
        "stream", "--format", "json", "--path", f"{tmp_path}/in", "--checkpoint",
        f"{tmp_path}/ck", "--trigger", "available-now", "-n", name_server,
        "--select", "cast(n AS string) AS body", "--select", "k AS sharding_key",
        "--select", "'door' AS topic", "-l", ledger, "--ordering", "strict", "-O", "orderWaitMs=5s",
    )  # fmt: skip
    permit(6)
    done = as_json("backfill", "-l", ledger, "-n", name_server, *PATIENT)
    assert (done["pending_before"], done["resent"], done["pending"]) == (60, 60, 0)
    stored: dict[str, list[int]] = {}
    for row in json_lines("tail", "-n", name_server, "-t", "door", "--from-start", "--no-follow"):
        stored.setdefault(row["shardingKey"], []).append(int(row["body"]))
    assert sorted(n for numbers in stored.values() for n in numbers) == list(range(60))
    assert all(numbers == sorted(numbers) for numbers in stored.values())
    again = as_json("backfill", "-l", ledger, "-n", name_server, *PATIENT)
    assert (again["selected"], again["resent"]) == (0, 0)
    assert len(bodies(name_server, "door")) == 60


def test_sigterm_ends_a_stream_in_good_order(tmp_path: Path, name_server: str) -> None:
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
        assert process.stderr is not None
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
    assert counts["rows_in"] == counts["acked"] == report["rows_read"] > 0
