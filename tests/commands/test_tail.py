"""`rocket-sink tail` as users type it, on the scripted cluster."""

import io
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink import Message, Producer
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.stored import StoredMessage
from tests.clusters import scripted_cluster
from tests.producer.waiting import until
from tests.run_command import run_command

cluster = scripted_cluster(1, t=1)


def tail(cluster, *arguments, code=0):
    done = run_command("tail", "-n", cluster.name_server, "-t", "t", *arguments)
    assert done.code == code, done.err
    return done


def bodies(cluster, *arguments):
    """Return the bodies that `tail --json` prints of the messages that are stored."""
    return [row["body"] for row in tail(cluster, "--no-follow", "--json", *arguments).lines()]


def test_without_follow_it_shows_what_was_acknowledged_a_moment_ago(cluster, monkeypatch):
    """Wait until messages can be read: a broker acknowledges a message before readers see it."""
    answers = [7, 7, 0]

    def runtime_info(_, name, address):
        behind = answers.pop(0)
        if not behind:
            with Producer(nameServer=cluster.name_server) as producer:
                producer.send(Message("t", b"late"))
        return {"dispatchBehindBytes": str(behind)}

    monkeypatch.setattr(Admin, "runtime_info", runtime_info)
    assert bodies(cluster, "--from-start") == ["late"] and not answers


def test_nothing_from_before_the_time(cluster):
    """Brokers before 5.2 answer a time after the newest message with that message's offset."""
    now_ms = time.time_ns() // 1_000_000
    for age_ms in (7_200_000, 3_600_000):
        message = StoredMessage("t", b"old", store_ms=now_ms - age_ms)
        cluster.brokers[0].store.append(message)
    last = Answer(0, ext=(("offset", "1"),))
    cluster.brokers[0].on(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, last, times=None)
    assert bodies(cluster, "--since", "10m") == []
    assert bodies(cluster, "--since", "90m") == ["old"]


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ("--last 3", range(9, 12)), ("--last 99", range(12)), ("--last 0", ()), ("", ()),
        ("--from-start", range(12)), ("--from-start --limit 2", range(2)),
        ("--from-start --key k3", [3]), ("--from-start --tag odd", range(1, 12, 2)),
        ("--since 1970-01-01T00:00:10", (10, 11)), ("--since 1970-01-01T08:00:10+08:00", (10, 11)),
    ],
)  # fmt: skip
def test_what_is_stored_is_in_the_order_of_time(more, shown):
    """The last are the newest of all queues. Times without a zone are UTC."""
    with FakeCluster(brokers=2) as cluster:
        cluster.create_topic("t", 2)
        for second in range(12):
            properties = {"KEYS": f"k{second} all", "TAGS": ("even", "odd")[second % 2],
                          "UNIQ_KEY": f"ID{second}", "color": "red"}  # fmt: skip
            cluster.brokers[second % 2].store.append(StoredMessage(
                "t", str(second).encode(), queue_id=second % 4 // 2, store_ms=1000 * second,
                born_ms=second, properties=properties,
            ))  # fmt: skip
        rows = tail(cluster, "--no-follow", "--json", *more.split()).lines()
        lines = tail(cluster, "--no-follow", *more.split()).out.splitlines()
    assert [row["body"] for row in rows] == [str(second) for second in shown]
    for row, line, second in zip(rows, lines, shown, strict=True):
        queue, offset = second % 4 // 2, second // 4
        broker = f"broker-{'ab'[second % 2]}"
        tag = ("even", "odd")[second % 2]
        assert row == {
            "topic": "t", "broker": broker, "queueId": queue, "queueOffset": offset,
            "storedMs": 1000 * second, "bornMs": second, "messageId": f"ID{second}", "tags": tag,
            "keys": f"k{second} all", "shardingKey": None, "body": str(second),
            "properties": {"color": "red"},
        }  # fmt: skip
        assert line == (
            f"00:00:{second:02d}.000  {broker}:{queue} @{offset}  tags={tag}  keys=k{second} all  "
            f"{second}"
        )


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "koi8-r"])
def test_characters_that_the_output_lacks_are_escaped(encoding, cluster):
    body = "żółw, é, мир, 猫, 😀"
    printed = {}
    cluster.brokers[0].store.append(StoredMessage("t", body.encode()))
    for form in ([], ["--json"]):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        arguments = ["-n", cluster.name_server, "-t", "t", "--from-start", "--no-follow", *form]
        assert run_command("tail", *arguments, out=out).code == 0
        out.flush()
        printed["--json" in form] = out.buffer.getvalue().decode(encoding)
    assert json.loads(printed[True])["body"] == body
    assert body.encode(encoding, "backslashreplace").decode(encoding) in printed[False]


@pytest.mark.parametrize("since", ["99999999999d", "²d", "-1d", "d", "1w", ""])
def test_a_time_that_is_none_is_a_wrong_option(since, cluster):
    assert "neither a time as" in tail(cluster, "--since", since, code=2).err


def test_a_queue_that_comes_later_is_followed_too(cluster):
    """A topic that is made on the fly appears on one broker after the other."""
    broker = cluster.brokers[0]

    def wait_for_pull(queue_id):
        pull = (RequestCode.PULL_MESSAGE, queue_id)
        until(lambda: any((r.code, (r.ext or {}).get("queueId")) == pull for r in broker.requests))

    def grow():
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
        options = ("-O", "pollNameServerInterval=10", "--limit", "1", "--json")
        assert tail(cluster, *options).json()["body"] == "late"
        grown.result()


@pytest.mark.parametrize("command", [["tail", "--from-start", "--no-follow"], ["check"]])
def test_queues_that_nobody_may_read_are_named(command, cluster):
    cluster.create_topic("t", 8, read_queues=4)
    for queue_id in range(8):
        cluster.brokers[0].store.append(StoredMessage("t", b"x", queue_id=queue_id))
    done = run_command(*command, "-n", cluster.name_server, "-t", "t")
    assert done.code == 1
    text = " ".join((done.out + done.err).split())
    assert "8 write queues and 4 read queues" in text and "topic create t --queues 8" in text
