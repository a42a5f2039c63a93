"""`rocket-sink tail` as users type it, on the scripted cluster."""

from __future__ import annotations

import io
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink import Message, Producer, cli
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.stored import StoredMessage


def test_without_follow_it_shows_what_was_acknowledged_a_moment_ago(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wait until messages can be read: a broker acknowledges a message before readers see it."""
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", 1)
        answers = [7, 7, 0]

        def runtime_info(_: Admin, name: str, address: str) -> dict[str, str]:
            behind = answers.pop(0)
            if not behind:
                with Producer(nameServer=cluster.name_server) as producer:
                    producer.send(Message("t", b"late"))
            return {"dispatchBehindBytes": str(behind)}

        monkeypatch.setattr(Admin, "runtime_info", runtime_info)
        arguments = ["-n", cluster.name_server, "-t", "t", "--from-start", "--no-follow", "--json"]
        assert cli.main(["tail", *arguments]) == 0
    shown = [json.loads(line)["body"] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["late"] and not answers


def test_nothing_from_before_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Brokers before 5.2 answer a time after the newest message with that message's offset."""
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", 1)
        now_ms = time.time_ns() // 1_000_000
        for age_ms in (7_200_000, 3_600_000):
            message = StoredMessage("t", b"old", store_ms=now_ms - age_ms)
            cluster.brokers[0].store.append(message)
        last = Answer(0, ext=(("offset", "1"),))
        cluster.brokers[0].on(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, last, times=None)
        arguments = ["-n", cluster.name_server, "-t", "t", "--no-follow", "--json", "--since"]
        for since in ("10m", "90m"):
            assert cli.main(["tail", *arguments, since]) == 0
    assert capsys.readouterr().out.count("old") == 1


@pytest.mark.parametrize(
    ("begin", "count"), [(["--last", "3"], 3), (["--last", "0"], 0), (["--from-start"], 12)]
)
def test_what_is_stored_is_in_the_order_of_time(
    begin: list[str], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last are the newest of all queues."""
    with FakeCluster(brokers=2) as cluster:
        cluster.create_topic("t", 2)
        for second in range(12):
            broker = cluster.brokers[second % 2]
            message = StoredMessage(
                "t", str(second).encode(), queue_id=second % 4 // 2, store_ms=1000 * second
            )
            broker.store.append(message)
        assert (
            cli.main(
                ["tail", "-n", cluster.name_server, "-t", "t", "--no-follow", "--json", *begin]
            )
            == 0
        )
    shown = [json.loads(line)["body"] for line in capsys.readouterr().out.splitlines()]
    assert shown == [str(second) for second in range(12 - count, 12)]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "koi8-r"])
def test_characters_that_the_output_lacks_are_escaped(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "żółw, é, мир, 猫, 😀"
    printed = {}
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", 1)
        cluster.brokers[0].store.append(StoredMessage("t", body.encode()))
        for form in ([], ["--json"]):
            out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
            monkeypatch.setattr("sys.stdout", out)
            options = ["-n", cluster.name_server, "-t", "t", "--from-start", "--no-follow"]
            assert cli.main(["tail", *options, *form]) == 0
            out.flush()
            printed["--json" in form] = out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert json.loads(printed[True])["body"] == body
    assert body.encode(encoding, "backslashreplace").decode(encoding) in printed[False]


@pytest.mark.parametrize("since", ["99999999999d", "²d", "-1d", "d", "1w", ""])
def test_a_time_that_is_none_is_a_wrong_option(
    since: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tail", "-n", "127.0.0.1:1", "-t", "t", "--since", since]) == 2
    assert "neither a time as" in capsys.readouterr().err


def test_a_queue_that_comes_later_is_followed_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A topic that is made on the fly appears on one broker after the other."""
    with FakeCluster(brokers=["broker-a"]) as cluster:
        cluster.create_topic("t", 1)
        broker = cluster.brokers[0]
        options = ["-n", cluster.name_server, "-t", "t", "-O", "pollNameServerInterval=10"]

        def wait_for_pull(queue_id: str) -> None:
            deadline_s = time.monotonic() + 30
            pulls = (RequestCode.PULL_MESSAGE, queue_id)
            while time.monotonic() < deadline_s and not any(
                (request.code, (request.ext or {}).get("queueId")) == pulls
                for request in broker.requests
            ):
                time.sleep(0.01)

        def grow() -> None:
            wait_for_pull("0")
            cluster.stop_name_server()
            time.sleep(0.1)
            cluster.start_name_server()
            cluster.create_topic("t", 2)
            broker.store.append(StoredMessage("t", b"late", queue_id=1))
            wait_for_pull("1")
            broker.store.append(StoredMessage("t", b"end"))

        with ThreadPoolExecutor(1) as pool:
            grown = pool.submit(grow)
            assert cli.main(["tail", *options, "--limit", "1", "--json"]) == 0
            grown.result()
    assert json.loads(capsys.readouterr().out)["body"] == "late"


@pytest.mark.parametrize("command", [["tail", "--from-start", "--no-follow"], ["check"]])
def test_queues_that_nobody_may_read_are_named(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", 8, read_queues=4)
        for queue_id in range(8):
            cluster.brokers[0].store.append(StoredMessage("t", b"x", queue_id=queue_id))
        assert cli.main([*command, "-n", cluster.name_server, "-t", "t"]) == 1
    output = capsys.readouterr()
    text = " ".join((output.out + output.err).split())
    assert "8 write queues and 4 read queues" in text and "-r 8 -w 8" in text
