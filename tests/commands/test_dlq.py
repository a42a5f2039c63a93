"""`rocket-sink dlq` as users type it, on the scripted cluster; no Spark."""

import json
import re
from collections.abc import Callable

import pyarrow.parquet as pq
import pytest

from rocket_sink.ledger.schema import DEAD_LETTER
from rocket_sink.producer.admin.dlq import RESENDS
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import PermName, RequestCode
from tests.ledger.values import spool_rows
from tests.producer.admin.test_dlq import GROUP, TOPIC, give_up
from tests.run_command import run_command


@pytest.fixture
def cluster():
    with FakeCluster(brokers=2) as fake:
        fake.create_topic("orders", 4)
        fake.create_topic(TOPIC, 1)
        for number in range(3):
            give_up(fake, number, broker=number % 2)
        yield fake


Cli = Callable[..., tuple[str, str]]


@pytest.fixture
def run(cluster):
    """Return a function that runs `rocket-sink dlq` and returns what it prints."""

    def dlq(command, *arguments, code=0):
        done = run_command("dlq", command, "-n", cluster.name_server, *arguments)
        assert done.code == code, done.err
        return done.out, done.err

    return dlq


def test_groups_and_letters_are_listed(run):
    out, _ = run("list", "--json")
    assert [json.loads(line) for line in out.splitlines()] == [{"group": GROUP, "letters": 3}]
    out, _ = run("list", "-g", GROUP, "--json", "--key", "k1")
    (row,) = map(json.loads, out.splitlines())
    assert (row["topic"], row["message_id"], row["keys"]) == ("orders", "ID1", ["k1", "all"])
    assert (row["body"], row["reconsume_times"]) == ("body 1", 16)
    out, _ = run("list", "-g", GROUP)
    assert "body 0" in out
    heads = f"dead letters of {GROUP} given up topic keys times resends message id body "
    assert " ".join(out.split()).startswith(heads)
    assert "1970-01-01 00:00:01" in out


def test_nothing_selected_is_no_error(run, tmp_path):
    assert "no dead letter" in run("list", "-g", GROUP, "--key", "nosuch")[1]
    assert "0 dead letters" in run("resend", "-g", GROUP, "--key", "nosuch")[1]
    out = tmp_path / "none.parquet"
    assert "0 dead letters" in run("export", "-g", GROUP, "--key", "no", "--out", str(out))[1]
    assert pq.read_table(out).num_rows == 0


def test_a_group_without_dead_letters_is_an_error(run):
    assert "%DLQ%nosuch" in run("list", "-g", "nosuch", code=1)[1]


def test_export_to_files(run, tmp_path):
    run("export", "-g", GROUP, "--out", str(tmp_path / "x.parquet"))
    rows = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert sorted(row["body"] for row in rows) == [b"body 0", b"body 1", b"body 2"]
    assert dict(rows[0]["properties"]) == {"color": "red"}
    assert dict(rows[0]["system_properties"])["RETRY_TOPIC"] == "orders"
    run("export", "-g", GROUP, "--out", str(tmp_path / "x.json"))
    lines = (tmp_path / "x.json").read_text().splitlines()
    assert [json.loads(line)["message_id"] for line in lines] == ["ID0", "ID1", "ID2"]
    _, err = run("export", "-g", GROUP, "--out", str(tmp_path / "x.txt"), code=1)
    assert "is not known: name it" in err
    run("export", "-g", GROUP, code=2)


def test_export_to_a_ledger_gives_the_same_letters_each_time(run, tmp_path):
    """A broker that was made anew at its address has another letter at an old one's place."""
    with FakeCluster(brokers=1) as anew:
        anew.create_topic(TOPIC, 1)
        give_up(anew, 3)
        for server in ((), (), ("-n", anew.name_server)):
            run("export", "-g", GROUP, "--ledger", str(tmp_path / "ledger"), *server)
    rows = spool_rows(*(tmp_path / "ledger").rglob("*.arrow"))
    assert {row["kind"] for row in rows} == {DEAD_LETTER}
    assert len(rows) == 7
    assert len({row["letter_id"] for row in rows}) == 4
    first = next(row for row in rows if row["message_id"] == "ID0")
    assert (first["topic"], first["reason"], first["body"]) == ("orders", "consumer", b"body 0")
    assert (first["keys"], first["tags"], first["flag"]) == (["k0", "all"], "t", 7)
    assert dict(first["properties"]) == {"color": "red"}
    assert first["partition"] is None


def test_resend(run, cluster):
    assert json.loads(run("resend", "-g", GROUP, "--dry-run", "--json")[0]) == {
        "selected": 3, "by_topic": {"orders": 3},
    }  # fmt: skip
    assert cluster.messages("orders") == []
    assert json.loads(run("resend", "-g", GROUP, "--limit", "2", "--json")[0])["resent"] == 2
    done = json.loads(run("resend", "-g", GROUP, "--rate", "100", "--json")[0])
    assert (done["resent"], done["already"]) == (1, 2)
    assert sorted(m.body for m in cluster.messages("orders")) == [b"body 0", b"body 1", b"body 2"]
    assert "3 sent by an earlier resend" in run("resend", "-g", GROUP)[1]


def test_what_a_resend_advises_works(run, cluster):
    """Paste the option of each line that has one: all letters are sent."""
    give_up(cluster, 3, RETRY_TOPIC="")
    give_up(cluster, 4, **{RESENDS: "3"})
    _, err = run("resend", "-g", GROUP, code=1)
    assert "3 dead letters sent again" in err
    assert err.count("(--") == 2, err
    (to_topic,) = re.findall(r"\((--\S+) gives one\)", err)
    (again,) = re.findall(r"\((--\S+) sends them\)", err)
    done = run("resend", "-g", GROUP, "--message-id", "ID3", to_topic, "orders", "--json")
    assert json.loads(done[0])["resent"] == 1
    done = run("resend", "-g", GROUP, "--message-id", "ID4", again, "--json")
    assert json.loads(done[0])["resent"] == 1
    assert sorted(m.body for m in cluster.messages("orders")) == [
        f"body {number}".encode() for number in range(5)
    ]


def test_what_chooses_among_messages_wants_a_group(run):
    run("list")
    for arguments in (("--topic", "orders"), ("--since", "1d"), ("--limit", "3"), ("--key", "k")):
        run("list", *arguments, code=2)


def test_a_resend_names_what_failed_and_tells_degraded_from_stored(run, cluster):
    """Brokers store the first of three letters, do not flush the second, and refuse the third."""
    cluster.delete_topic("orders")
    cluster.create_topic("orders", 4, brokers=["broker-a"])
    letters = [json.loads(line) for line in run("list", "-g", GROUP, "--json")[0].splitlines()]
    assert json.loads(run("resend", "-g", GROUP, "--limit", "1", "--json")[0])["resent"] == 1
    for answer in (Answer(10), Answer(13, "no such message")):
        cluster.broker("broker-a").on_send(answer)
    done = json.loads(run("resend", "-g", GROUP, "--json", code=1)[0])
    assert (done["already"], done["resent"], done["degraded"], done["failed"]) == (1, 1, 1, 1)
    (failure,) = done["failures"]
    assert failure["message_id"] == letters[2]["message_id"] and failure["topic"] == "orders"
    assert failure["code"] == "MESSAGE_ILLEGAL" and "no such message" in failure["error"]


def test_a_resend_names_what_failed_and_is_degraded_as_text(run, cluster):
    """The user may not look up, and so learns the right that is missing."""
    cluster.delete_topic("orders")
    cluster.create_topic("orders", 4, brokers=["broker-a"])
    broker = cluster.broker("broker-a")
    broker.on_send(Answer(10))
    out, err = run("resend", "-g", GROUP, "--limit", "1")
    assert "1 of these stored, but not flushed or replicated in time" in err and not out
    broker.on(RequestCode.QUERY_MESSAGE, Answer(16, "w has no permission to access Topic:orders"))
    out, err = run("resend", "-g", GROUP, "--message-id", "ID1", code=1)
    row = " ".join(out.split())
    assert "ID1" in row and "orders" in row and "NO_PERMISSION" in row and "Sub and Get" in row
    assert "1 failed" in err


@pytest.mark.parametrize("closed", [["broker-a"], ["broker-a", "broker-b"]])
@pytest.mark.parametrize(
    "command",
    [["list", "--group", GROUP], ["export", "--group", GROUP], ["resend", "--group", GROUP]],
    ids=lambda command: command[0],
)
def test_letters_that_may_not_be_read_are_not_none(cluster, run, command, closed, tmp_path):
    """Raise an error, as Java's client does: brokers up to 4.9 make such topics write-only."""
    cluster.create_topic(TOPIC, 1, perm=PermName.WRITE, brokers=closed)
    if command[0] == "export":
        command = [*command, "--out", str(tmp_path / "letters")]
    out, err = run(*command, code=1)
    assert "rocket-sink topic create" in err and all(name in err for name in closed)
    assert "0 dead letters" not in out
    out, _ = run("list")
    assert "3" in out  # `list` counts messages even if they may not be read.


def test_check_and_tail_of_a_topic_that_may_not_be_read(cluster):
    cluster.create_topic("orders", 4, perm=PermName.WRITE)
    names = ("-n", cluster.name_server, "-t", "orders")
    checked = run_command("check", *names)
    assert checked.code == 0 and "offset 0" in checked.out
    for form in ([], ["--json"]):
        done = run_command("tail", "--last", "3", *form, *names)
        assert done.code == 1 and "rocket-sink topic create" in done.err
