"""The commands with a real cluster, Spark and ledger; most run in the test's own process."""

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


def answered(*arguments, code=0):
    """Run a command with `--json`, and return its end."""
    done = run_command(*arguments, "--json")
    assert done.code == code, f"{arguments}\n{done.out}\n{done.err}"
    return done


@pytest.fixture(scope="module")
def name_server(tmp_path_factory):
    home = ("--home", str(tmp_path_factory.mktemp("cluster")))
    answered("cluster", "up", *home)
    state = answered("cluster", "status", *home).json()
    assert state["running"]
    yield state["name_server"]
    answered("cluster", "down", *home)
    assert answered("cluster", "status", *home, code=1).json()["running"] is False


def test_send_routes_tail_check(name_server):
    sent = answered(
        "send", "-n", name_server, "-t", "shell", "--tags", "T", "--sharding-key", "k",
        *PATIENT, *ONE_QUEUE, "one", "two", "three",
    ).lines()  # fmt: skip
    assert [row["outcome"] for row in sent] == ["acked"] * 3
    (queue,) = {(row["broker"], row["queueId"]) for row in sent}
    rows = answered("tail", "-n", name_server, "-t", "shell", "--from-start", "--no-follow").lines()
    assert [row["body"] for row in rows] == ["one", "two", "three"]
    assert {(row["broker"], row["queueId"]) for row in rows} == {queue}
    assert [row["messageId"] for row in rows] == [row["messageId"] for row in sent]
    route = answered("topic", "show", "-n", name_server, "shell").json()
    assert queue[0] in {row["broker"] for row in route}
    assert answered("check", "-n", name_server, "-t", "shell", *PATIENT).json()["ok"]
