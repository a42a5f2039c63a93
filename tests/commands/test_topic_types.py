"""`rocket-sink check` and a topic's message.type, and how real brokers treat it."""

import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from rocket_sink.commands.check import _type
from rocket_sink.errors import BrokerError
from rocket_sink.ledger.records import in_order, send_rows
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.producer import Producer
from rocket_sink.testing import FakeCluster
from tests.clusters import make_topic
from tests.ledger.night import store
from tests.ledger.values import accounts, attempt, context
from tests.run_command import run_command

OPTIONS = {"nameServer": "127.0.0.1:9876", "topic": "t"}
FITS = [
    ("FIFO", {}, False), ("FIFO", {"ordering": "strict"}, True),
    ("FIFO", {"ordering": "best_effort"}, True), ("FIFO", {"columns": "delay_ms=wait"}, False),
    ("DELAY", {"columns": "delay_ms=wait"}, True),
    ("DELAY", {"columns": "delivery_timestamp=due", "ordering": "strict"}, True),
    ("DELAY", {"ordering": "strict"}, False), ("TRANSACTION", {}, False),
    ("TRANSACTION", {"delivery": "transactional", "ledger": "/tmp/l"}, True),
    ("NORMAL", {"delivery": "transactional", "ledger": "/tmp/l"}, False), ("NORMAL", {}, True),
    ("NORMAL", {"ordering": "strict"}, False), ("MIXED", {"ordering": "strict"}, True),
    ("PRIORITY", {"columns": "priority=urgency"}, True),
    ("LITE", {"columns": "lite_topic=session"}, True),
    ("LITE", {"columns": "priority=urgency"}, False),
]  # fmt: skip


def findings(attributes, **options):
    admin = SimpleNamespace(topic_attributes=lambda topic: {"broker-a": attributes})
    type_findings = list(_type(admin, SinkOptions.parse({**OPTIONS, **options})))
    types = [finding.text for finding in type_findings if finding.state == "ok"]
    assert types == [f"{name} is {value}" for name, value in attributes.items()]
    return [finding.text for finding in type_findings if finding.state == "note"]


@pytest.mark.parametrize(("kind", "options", "fits"), FITS)
def test_a_type_that_does_not_fit_is_noted(kind, options, fits):
    notes = findings({"message.type": kind}, **options)
    assert len(notes) == (0 if fits else 1)
    assert fits or f"message.type is {kind}" in notes[0]


def test_a_broker_that_left_the_route_is_named(tmp_path):
    """Warn of a query that sends now: its sends are in the file of a task that still runs.

    A query of last week is no reason for a warning.
    """
    now_ms = int(time.time() * 1000)
    ledger = store(tmp_path, in_order([accounts(context())], 1 << 32))
    writer = SpoolWriter(ledger, context(epoch=1))
    times = {"broker-a": 0, "broker-b": 60_000, "broker-c": 7 * 86_400_000}
    sent = [
        attempt(broker_name=name, topic="t", started_ms=now_ms - ago_ms)
        for name, ago_ms in times.items()
    ]
    sent.append(attempt(broker_name="broker-d", topic="other", started_ms=now_ms))
    writer.append(send_rows(sent, context(), requests=[1, 2, 3, 4]))
    with FakeCluster(brokers=2) as cluster:
        cluster.create_topic("t", queues=2)
        cluster.broker("broker-b").kill()
        cluster.forget_brokers()
        cluster.register("broker-a")
        done = run_command("check", "-n", cluster.name_server, "-t", "t", "--ledger", ledger)
    lines = [line.split(maxsplit=1) for line in done.out.splitlines()]
    failed = [line[1].partition("  ")[0] for line in lines if line[:1] == ["fail"]]
    assert done.code == 1 and failed == ["broker broker-b"]
    assert "2 writable queues on 1 of 1 registered broker" in done.out
    assert "1 of 7 failed" in done.out
    writer.abort()


def test_a_topic_that_wants_keys_is_noted():
    [found] = findings({"message.type": "NORMAL", "cleanup.policy": "COMPACTION"})
    assert "wants keys in each row" in found
    assert findings({"cleanup.policy": "DELETE"}) == findings({}, ordering="strict") == []


@pytest.mark.parametrize("below", ["", "deeper/ledger"])
def test_a_ledger_that_cannot_be_made_is_told(below, tmp_path):
    (tmp_path / "file").write_text("")
    with FakeCluster(brokers=1) as cluster:
        names = ("check", "-n", cluster.name_server, "--json", "--ledger")
        finding = run_command(*names, str(tmp_path / "file" / below)).json()["findings"][-1]
        assert finding["state"] == "fail" and "file is no folder that may be" in finding["text"]
        done = run_command(*names, str(tmp_path / "new" / "deeper"))
        assert done.code == 0 and "none yet, it will be made" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_broker_without_topic_types_is_noted():
    admin = Mock(**{"topic_attributes.side_effect": BrokerError("no")})
    [found] = _type(admin, SinkOptions.parse(OPTIONS))
    assert found.state == "note" and "not known" in found.text


@pytest.mark.cluster
def test_on_a_real_broker(local_cluster):
    def notes(topic, *more):
        done = run_command("check", "-n", local_cluster.name_server, "-t", topic, "--json", *more)
        assert done.code == 0, done.err
        texts = [each["text"] for each in done.json()["findings"] if each["state"] == "note"]
        return [text for text in texts if "message.type" in text]

    with Producer(nameServer=local_cluster.name_server) as producer:
        for kind in ("FIFO", "DELAY", "TRANSACTION", "NORMAL"):
            topic = f"of-{kind}"
            make_topic(local_cluster, topic, attributes={"message.type": kind})
            assert [kind in text for text in notes(topic)] == [True] * (kind != "NORMAL")
            # Brokers do not enforce the type. If they begin to, the text of the finding is wrong.
            producer.send(Message(topic, b"plain"))
            producer.send(Message(topic, b"ordered", sharding_key="k"))
            producer.send(Message(topic, b"later", delay_ms=600_000))
    assert notes("of-FIFO", "-O", "ordering=strict") == []
    assert len(notes("of-NORMAL", "-O", "ordering=strict")) == 1
