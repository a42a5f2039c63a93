"""`rocket-sink check` with a broker that is away or full, wrong credentials, or behind a proxy."""

import datetime as dt
import json
import shlex
from pathlib import Path

import pyarrow as pa
import pytest

from rocket_sink import TableProducer
from rocket_sink.ledger.records import in_order, send_rows
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import PermName, RequestCode, ResponseCode
from rocket_sink.wire.headers import Frame, response_to
from tests.clusters import scripted_cluster
from tests.ledger.night import at, store
from tests.ledger.values import attempt, context
from tests.run_command import run_command

Findings = dict[str, tuple[str, str]]
UNKNOWN = Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "request type 106 not supported")


cluster = scripted_cluster(1, t=8)


def check(cluster: FakeCluster, *more: str, topic: str = "t", code: int = 0) -> Findings:
    """Return {what was checked: (state, text)}."""
    done = run_command("check", "-n", cluster.name_server, "-t", topic, *more, "--json")
    assert done.code == code, done.err
    assert done.json()["ok"] is not bool(code)
    return {each["what"]: (each["state"], each["text"]) for each in done.json()["findings"]}


@pytest.mark.parametrize(("hours", "code"), [(1, 1), (25, 0)])
def test_a_broker_that_the_ledger_knows_is_missed(
    cluster: FakeCluster, tmp_path: Path, hours: int, code: int
) -> None:
    now = dt.datetime.now(dt.timezone.utc)
    both = [attempt(broker_name=name) for name in ("broker-a", "broker-b")]
    rows = at(send_rows(both, context()), now - dt.timedelta(hours=hours))
    ledger = store(tmp_path / "ledger", in_order([rows], 1 << 32))
    findings = check(cluster, "-l", ledger, code=code)
    assert findings.get("broker broker-b", ("",))[0] == ("fail" if code else "")


def test_a_ledger_without_a_table_knows_a_broker_too(tmp_path: Path) -> None:
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


def test_a_closed_topic_is_opened_by_the_command(cluster: FakeCluster) -> None:
    cluster.create_topic("t", 8, perm=PermName.READ)
    _, text = check(cluster, code=1)["topic t"]
    assert "it is closed" in text
    assert run_command(*shlex.split(text.partition("rocket-sink ")[2])).code == 0
    assert check(cluster)["topic t"][0] == "ok"


@pytest.mark.parametrize("topic", ["t", "not-there-yet"])
def test_a_wrong_password_is_told_also_without_the_topic(cluster: FakeCluster, topic: str) -> None:
    refusal = Answer(16, "check signature failed, user=me")
    cluster.brokers[0].on(RequestCode.GET_MAX_OFFSET, refusal, times=None)
    _, text = check(cluster, topic=topic, code=1)["broker broker-a"]
    assert "check signature failed" in text and "accessKey and secretKey" in text


@pytest.mark.parametrize(("used", "code"), [("0.87", 0), ("0.91", 1), ("nothing", 0)])
def test_a_full_disk_is_in_the_way(cluster: FakeCluster, used: str, code: int) -> None:
    """Report a disk above 0.90: brokers refuse to write with any setting (5.3.3)."""

    def figures(request: Frame) -> Frame:
        # AdminBrokerProcessor.getBrokerRuntimeInfo answers with a KVTable.
        answer = response_to(request, ResponseCode.SUCCESS)
        answer.body = json.dumps({"table": {"commitLogDiskRatio": used}}).encode()
        return answer

    if used != "nothing":
        cluster.brokers[0]._handlers[RequestCode.GET_BROKER_RUNTIME_INFO] = figures
    findings = check(cluster, code=code)
    assert ("91% full" in findings["broker broker-a"][1]) == bool(code)


@pytest.mark.parametrize(
    ("delivery", "state"), [("at_least_once", "note"), ("effectively_once", "fail")]
)
def test_the_first_line_says_that_there_is_a_proxy(
    cluster: FakeCluster, delivery: str, state: str
) -> None:
    cluster.on_name_server(RequestCode.GET_BROKER_CLUSTER_INFO, UNKNOWN, times=None)
    findings = check(cluster, "-O", f"delivery={delivery}", code=int(state == "fail"))
    first, (proxy_state, text) = next(iter(findings.items()))
    assert (first, proxy_state) == (f"proxy {cluster.name_server}", state)
    assert "RocketMQ proxy" in text
    assert findings["topic t"] == ("ok", "8 writable queues on 1 of 1 registered broker")


def test_other_commands_name_the_page_about_proxies(cluster: FakeCluster) -> None:
    cluster.on_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, UNKNOWN, times=None)
    done = run_command("dlq", "list", "-n", cluster.name_server)
    text = " ".join(done.err.split())
    assert done.code == 1
    assert "request type 106 not supported" in text and "docs/deploy/proxy.md" in text
