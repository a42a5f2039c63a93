"""`rocket-sink check` with a broker that is away or full, wrong credentials, or behind a proxy."""

import datetime as dt
import errno
import os
import platform

import pyarrow as pa
import pytest

from rocket_sink import TableProducer
from rocket_sink.commands.check import _compared
from rocket_sink.ledger.records import in_order, send_rows
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import PermName, RequestCode, ResponseCode
from tests.clusters import scripted_cluster
from tests.ledger.night import at, store
from tests.ledger.values import attempt, context
from tests.run_command import run_command

UNKNOWN = Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "request type 106 not supported")


cluster = scripted_cluster(1, t=8)


def check(cluster, *more, topic="t", code=0):
    """Return {what was checked: (state, text)}."""
    done = run_command("check", "-n", cluster.name_server, "-t", topic, *more, "--json")
    assert done.code == code, done.err
    assert done.json()["ok"] is not bool(code)
    return {each["what"]: (each["state"], each["text"]) for each in done.json()["findings"]}


@pytest.mark.parametrize(("hours", "code"), [(1, 1), (25, 0)])
def test_a_broker_that_the_ledger_knows_is_missed(cluster, tmp_path, hours, code):
    now = dt.datetime.now(dt.timezone.utc)
    both = [attempt(broker_name=name) for name in ("broker-a", "broker-b")]
    rows = at(send_rows(both, context()), now - dt.timedelta(hours=hours))
    ledger = store(tmp_path / "ledger", in_order([rows], 1 << 32))
    findings = check(cluster, "-l", ledger, code=code)
    assert findings.get("broker broker-b", ("",))[0] == ("fail" if code else "")


def test_a_ledger_without_a_table_knows_a_broker_too(tmp_path):
    """The first fold makes the table; a `TableProducer` folds nothing."""
    ledger = str(tmp_path / "ledger")
    with FakeCluster(brokers=2) as cluster:
        cluster.create_topic("t", 1)
        rows = {"body": ["a", "b"], "queue_id": [0, 0], "broker_name": ["broker-a", "broker-b"]}
        with TableProducer(nameServer=cluster.name_server, topic="t", ledger=ledger) as producer:
            producer.send(pa.table(rows))
        cluster.forget_brokers()
        cluster.register("broker-a")
        findings = check(cluster, "-l", ledger, code=1)
    assert findings["broker broker-b"][0] == "fail"
    assert findings["ledger"][1].endswith(": there")


@pytest.mark.parametrize("topic", ["t", "not-there-yet"])
def test_a_wrong_password_is_told_also_without_the_topic(cluster, topic):
    refusal = Answer(16, "check signature failed, user=me")
    cluster.brokers[0].on(RequestCode.GET_MAX_OFFSET, refusal, times=None)
    _, text = check(cluster, topic=topic, code=1)["broker broker-a"]
    assert "check signature failed" in text and "accessKey and secretKey" in text


@pytest.mark.parametrize(("used", "code"), [("0.87", 0), ("0.91", 1), (None, 0)])
def test_a_full_disk_is_in_the_way(cluster, used, code, monkeypatch):
    """Report a disk above 0.90: brokers refuse to write with any setting (5.3.3)."""
    figures = {"commitLogDiskRatio": used} if used else {}
    monkeypatch.setattr(Admin, "runtime_info", lambda *_: figures)
    findings = check(cluster, code=code)
    assert ("91% full" in findings["broker broker-a"][1]) == bool(code)


@pytest.mark.parametrize(
    ("delivery", "state"), [("at_least_once", "note"), ("effectively_once", "fail")]
)
def test_the_first_line_says_that_there_is_a_proxy(cluster, delivery, state):
    cluster.on_name_server(RequestCode.GET_BROKER_CLUSTER_INFO, UNKNOWN, times=None)
    findings = check(cluster, "-O", f"delivery={delivery}", code=int(state == "fail"))
    first, (proxy_state, text) = next(iter(findings.items()))
    assert (first, proxy_state) == (f"proxy {cluster.name_server}", state)
    assert "RocketMQ proxy" in text
    assert findings["topic t"] == ("ok", "8 writable queues on 1 of 1 registered broker")


def test_other_commands_name_the_page_about_proxies(cluster):
    cluster.on_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, UNKNOWN, times=None)
    done = run_command("dlq", "list", "-n", cluster.name_server)
    text = " ".join(done.err.split())
    assert done.code == 1
    assert "request type 106 not supported" in text and "docs/deploy/proxy.md" in text


NS = {"one:1": {("a", "1"), ("b", "2")}, "two:1": {("a", "1")}, "other:1": {("a", "9")}}


@pytest.mark.parametrize(
    ("server", "others", "state", "part"),
    [
        ("one:1", (), "ok", "answers, knows 2 brokers"),
        ("one:1", ("two:1",), "ok", "answers, knows 2 brokers"),
        ("two:1", ("one:1",), "note", "answers, knows 1 broker, not b, which others know"),
        ("two:1", ("other:1",), "fail", "knows 1 broker (a), none that other:1 knows: one of"),
        ("one:1", ("two:1", "other:1"), "ok", "answers, knows 2 brokers"),
        ("other:1", ("one:1", "two:1"), "fail", "(a), none that one:1, two:1 knows"),
        ("none:1", ("one:1",), "fail", "answers, but knows no broker"),
    ],
)
def test_name_servers_are_compared(server, others, state, part):
    """A server that knows nobody is no stranger to others."""
    known = {**NS, "none:1": set[tuple[str, str]]()}
    own = {name: known[name] for name in (server, *others, "none:1")}
    found_state, text = _compared(server, own)
    assert (found_state, part in text) == (state, True), text


def test_each_name_server_is_asked(cluster):
    with FakeCluster(brokers=["broker-z"]) as other:
        servers = f"{cluster.name_server};127.0.0.1:1;{other.name_server}"
        done = run_command("check", "-n", servers, "-O", "connectTimeoutMs=500", "--json")
    states = {each["what"]: each["state"] for each in done.json()["findings"]}
    names = (cluster.name_server, "127.0.0.1:1", other.name_server)
    assert [states[f"name server {name}"] for name in names] == ["fail"] * 3
    silent = run_command("check", "-n", "127.0.0.1:1", "-t", "t", "--json").json()["findings"]
    assert [each["what"] for each in silent] == ["python", "java", "name server 127.0.0.1:1"]


NO_READ = Answer(16, "the broker's permission is denied")
EXACT = ("-O", "delivery=effectively_once")


def refuse(code):
    return lambda cluster: cluster.brokers[0].on(code, NO_READ, times=None)


@pytest.mark.parametrize(
    ("prepare", "more", "state", "part"),
    [
        (lambda _: None, (), "ok", "answers (queue 0 is at offset 0)"),
        (lambda _: None, EXACT, "ok", "answers (queue 0 is at offset 0)"),
        (lambda cluster: cluster.create_topic("ns%t"), ("-O", "namespace=ns"), "ok", "answers (q"),
        (lambda cluster: None, ("-O", "namespace=ns"), "ok", "answers (queue 0 is at offset 0)"),
        (refuse(RequestCode.GET_MAX_OFFSET), (), "ok", "this user may send at most, not read"),
        (refuse(RequestCode.GET_MAX_OFFSET), EXACT, "fail", "permission is denied"),
        (refuse(RequestCode.QUERY_MESSAGE), EXACT, "fail", "permission is denied"),
        (refuse(RequestCode.QUERY_MESSAGE), (), "ok", "answers (queue 0"),
        (lambda cluster: cluster.create_topic("t", read_queues=0), (), "ok",
         ", not asked: no readable queue"),
        (lambda cluster: setattr(cluster.brokers[0], "is_master", False), (), "fail",
         "has no master now"),
    ],
)  # fmt: skip
def test_a_broker_is_asked_as_a_query_will_ask(cluster, prepare, more, state, part):
    prepare(cluster)
    done = run_command("check", "-n", cluster.name_server, "-t", "t", *more, "--json")
    findings = {each["what"]: (each["state"], each["text"]) for each in done.json()["findings"]}
    assert (findings["broker broker-a"][0], part in findings["broker broker-a"][1]) == (state, True)
    states = {found for found, _ in findings.values()}
    assert done.code == ("fail" in states) and findings["java"][0] == "ok"
    packages = [text.split()[0] for text in findings["python"][1].split(", ")]
    assert packages == [platform.python_version(), "pyspark", "delta-spark", "pyarrow"]
    if part == "has no master now":
        assert findings["topic t"][1] == "has no queue to write to: no broker has a master"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([{"queues": 3}], "6 writable queues on 2 of 2 registered brokers"),
        ([{"queues": 1, "brokers": ["broker-b"]}],
         "1 writable queue on 1 of 2 registered brokers; put it on all brokers with rocket-sink"),
        ([{"queues": 2}, {"queues": 2, "brokers": ["broker-a"], "perm": PermName.READ}],
         "2 writable queues on 1 of 2 registered brokers; 1 without master or write permission"),
    ],
)  # fmt: skip
def test_the_last_line_counts_the_findings(settings, text):
    with FakeCluster(brokers=2) as cluster:
        for each in settings:
            cluster.create_topic("t", **each)
        done = run_command("check", "-n", cluster.name_server, "-t", "t")
        assert text in " ".join(done.out.split()) and done.code == 0
        last = done.out.splitlines()[-1]
        assert last == ("ready" if text.endswith("brokers") else "ready, with 1 note")
        assert ("note" in done.out.replace(last, "")) is ("note" in last)
        done = run_command("check", "-n", cluster.name_server)
        assert "none given (--topic): brokers are not looked at" in " ".join(done.out.split())
        cluster.broker("broker-b").kill()
        done = run_command("check", "-n", cluster.name_server, "-t", "t")
        assert done.code == 1 and done.out.splitlines()[-1].startswith("1 of ")


def test_a_group_is_compared_with_a_ledger(cluster, tmp_path, monkeypatch):
    asked = run_command("check", "-n", cluster.name_server, "-g", "billing")
    assert asked.code == 2 and "give --ledger PATH" in asked.err
    ledger = store(tmp_path / "ledger", in_order([send_rows([attempt()], context())], 1))
    group = ("-l", ledger, "-g", "billing")
    assert "request type 14 not" in check(cluster, *group, code=1)["group billing"][1]
    monkeypatch.setattr("rocket_sink.ledger.query.duckdb_reader.find_spec", lambda name: None)
    state, text = check(cluster, *group, code=1)["group billing"]
    assert state == "fail" and "rocket-sink report --group" in text


def test_a_ledger_without_hard_links_is_refused(cluster, tmp_path, monkeypatch):
    def refuse_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse_links)
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda path, mode: mode == os.F_OK)
        refused = check(cluster, "-l", str(tmp_path / "new"), code=1)["ledger"]
    assert "is no folder that may be written to" in refused[1]
    findings = check(cluster, "-l", str(tmp_path / "new"), code=1)
    assert "no hard links" in findings["ledger"][1] and not list(tmp_path.iterdir())
