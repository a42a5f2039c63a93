"""`rocket-sink dlq` as users type it, on the scripted cluster; no Spark."""

import json
import re

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


@pytest.fixture
def run(cluster):
    """Return a function that runs `rocket-sink dlq`, by default for one group."""

    def dlq(command, *arguments, code=0, group=GROUP):
        names = ("-n", cluster.name_server, *(("-g", group) if group else ()))
        done = run_command("dlq", command, *names, *arguments)
        assert done.code == code, done.err
        return done

    return dlq


def test_groups_and_letters_are_listed(run):
    assert run("list", "--json", group="").lines() == [{"group": GROUP, "letters": 3}]
    (row,) = run("list", "--json", "--key", "k1").lines()
    assert (row["topic"], row["message_id"], row["keys"]) == ("orders", "ID1", ["k1", "all"])
    assert (row["body"], row["reconsume_times"]) == ("body 1", 16)
    shown = " ".join(run("list").out.split())
    heads = f"dead letters of {GROUP} given up topic keys times resends message id body "
    assert shown.startswith(heads) and "body 0" in shown and "1970-01-01 00:00:01" in shown
    assert "%DLQ%nosuch" in run("list", group="nosuch", code=1).err


def test_nothing_selected_is_no_error(run, tmp_path, cluster):
    assert "no dead letter" in run("list", "--key", "nosuch").err
    assert "0 dead letters" in run("resend", "--key", "nosuch").err
    out = tmp_path / "none.parquet"
    assert "0 dead letters" in run("export", "--key", "no", "--out", str(out)).err
    assert pq.read_table(out).num_rows == 0
    cluster.delete_topic(TOPIC)
    assert run("list", group="").err == "no consumer group has a dead-letter topic\n"


def test_export_to_files(run, tmp_path):
    run("export", "--out", str(tmp_path / "x.parquet"))
    rows = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert sorted(row["body"] for row in rows) == [b"body 0", b"body 1", b"body 2"]
    assert dict(rows[0]["properties"]) == {"color": "red"}
    assert dict(rows[0]["system_properties"])["RETRY_TOPIC"] == "orders"
    run("export", "--out", str(tmp_path / "x.json"))
    lines = (tmp_path / "x.json").read_text().splitlines()
    assert [json.loads(line)["message_id"] for line in lines] == ["ID0", "ID1", "ID2"]
    refused = run("export", "--out", str(tmp_path / "x.txt"), code=1)
    assert "is not known: name it" in refused.err
    run("export", code=2)


def test_export_to_a_ledger_gives_the_same_letters_each_time(run, tmp_path):
    """A broker that was made anew at its address has another letter at an old one's place."""
    with FakeCluster(brokers=1) as anew:
        anew.create_topic(TOPIC, 1)
        give_up(anew, 3)
        for server in ((), (), ("-n", anew.name_server)):
            run("export", "--ledger", str(tmp_path / "ledger"), *server)
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
    plan = run("resend", "--dry-run", "--json").json()
    assert plan == {"selected": 3, "by_topic": {"orders": 3}} and not cluster.messages("orders")
    shown = run("resend", "--dry-run")
    assert shown.err == "3 dead letters are selected; nothing sent\n" and "orders" in shown.out
    assert run("resend", "--limit", "2", "--json").json()["resent"] == 2
    done = run("resend", "--rate", "100", "--json").json()
    assert (done["resent"], done["already"]) == (1, 2)
    assert sorted(m.body for m in cluster.messages("orders")) == [b"body 0", b"body 1", b"body 2"]
    assert "3 sent by an earlier resend" in run("resend").err


def test_what_a_resend_advises_works(run, cluster):
    """Paste the option of each line that has one: all letters are sent."""
    give_up(cluster, 3, RETRY_TOPIC="")
    give_up(cluster, 4, **{RESENDS: "3"})
    error_text = run("resend", code=1).err
    assert "3 dead letters sent again" in error_text and error_text.count("(--") == 2, error_text
    (to_topic,) = re.findall(r"\((--\S+) gives one\)", error_text)
    (again,) = re.findall(r"\((--\S+) sends them\)", error_text)
    for number, advice in ((3, [to_topic, "orders"]), (4, [again])):
        done = run("resend", "--message-id", f"ID{number}", *advice, "--json")
        assert done.json()["resent"] == 1
    bodies = sorted(message.body for message in cluster.messages("orders"))
    assert bodies == [b"body %d" % number for number in range(5)]


def test_what_chooses_among_messages_wants_a_group(run):
    for arguments in (("--topic", "orders"), ("--since", "1d"), ("--limit", "3"), ("--key", "k")):
        run("list", *arguments, code=2, group="")


def test_a_resend_names_what_failed_and_tells_degraded_from_stored(run, cluster):
    """Brokers store the first of three letters, do not flush the second, and refuse the third."""
    cluster.delete_topic("orders")
    cluster.create_topic("orders", 4, brokers=["broker-a"])
    broker = cluster.broker("broker-a")
    letters = run("list", "--json").lines()
    assert run("resend", "--limit", "1", "--json").json()["resent"] == 1
    for answer in (Answer(10), Answer(13, "no such message")):
        broker.on_send(answer)
    done = run("resend", "--json", code=1).json()
    assert (done["already"], done["resent"], done["degraded"], done["failed"]) == (1, 1, 1, 1)
    (failure,) = done["failures"]
    assert failure["message_id"] == letters[2]["message_id"] and failure["topic"] == "orders"
    assert failure["code"] == "MESSAGE_ILLEGAL" and "no such message" in failure["error"]
    broker.on_send(Answer(10))
    shown = run("resend", "--message-id", "ID2")
    assert "1 of these stored, but not flushed or replicated in time" in shown.err and not shown.out


def test_a_user_who_may_not_look_up_learns_the_right_that_is_missing(run, cluster):
    cluster.delete_topic("orders")
    cluster.create_topic("orders", 4, brokers=["broker-a"])
    refusal = Answer(16, "w has no permission to access Topic:orders")
    cluster.broker("broker-a").on(RequestCode.QUERY_MESSAGE, refusal)
    done = run("resend", "--message-id", "ID1", code=1)
    row = " ".join(done.out.split())
    assert "ID1" in row and "orders" in row and "NO_PERMISSION" in row and "Sub and Get" in row
    assert done.err.splitlines()[-2:] == ["  1 failed", "  NO_PERMISSION: 1"]


@pytest.mark.parametrize("closed", [["broker-a"], ["broker-a", "broker-b"]])
@pytest.mark.parametrize("command", ["list", "export", "resend"])
def test_letters_that_may_not_be_read_are_not_none(cluster, run, command, closed, tmp_path):
    """Raise an error, as Java's client does: brokers up to 4.9 make such topics write-only."""
    cluster.create_topic(TOPIC, 1, perm=PermName.WRITE, brokers=closed)
    out = ("--out", str(tmp_path / "letters")) if command == "export" else ()
    done = run(command, *out, code=1)
    assert "rocket-sink topic create" in done.err and all(name in done.err for name in closed)
    assert "0 dead letters" not in done.out
    assert "3" in run("list", group="").out  # `list` counts messages even if they may not be read.


def test_check_and_tail_of_a_topic_that_may_not_be_read(cluster):
    cluster.create_topic("orders", 4, perm=PermName.WRITE)
    names = ("-n", cluster.name_server, "-t", "orders")
    checked = run_command("check", *names)
    assert checked.code == 0 and "offset 0" in checked.out
    for form in ([], ["--json"]):
        done = run_command("tail", "--last", "3", *form, *names)
        assert done.code == 1 and "rocket-sink topic create" in done.err
