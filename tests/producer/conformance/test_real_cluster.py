"""The producer on real brokers: every mode, a freeze, a kill; two clients read it all back."""

import shlex
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from string import Template

import pytest

from rocket_sink.cluster.local import admin
from rocket_sink.errors import ClusterError
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.producer import Producer
from rocket_sink.testing import FakeCluster
from rocket_sink.wire.codes import RequestCode
from tests.clusters import read_topic
from tests.docs.blocks import blocks_of

pytestmark = pytest.mark.cluster
PAGE = Path(__file__).parents[3] / "docs/guarantees/at-least-once.md"


def test_every_mode_arrives_once(real, topic):
    with Producer(nameServer=real.name_server) as producer:
        sent = [b"sync", b"async", b"oneway", b"b0", b"b1", b"z" * 10_000]
        ack = producer.send(Message(topic, b"sync", tags="t", keys=["k"], properties={"x": "1"}))
        producer.send_async(Message(topic, b"async")).result(10)
        producer.send_oneway(Message(topic, b"oneway"))
        producer.send_batch([Message(topic, b"b0"), Message(topic, b"b1")])
        producer.send(Message(topic, b"z" * 10_000))
    stored = list(read_topic(real.name_server, topic))
    assert Counter(m.body for m in stored) == Counter(sent)
    (one,) = [m for m in stored if m.body == b"sync"]
    assert (one.properties["TAGS"], one.properties["KEYS"], one.properties["x"]) == ("t", "k", "1")
    assert one.offset_message_id == ack.offset_message_id
    with Admin(nameServer=real.name_server) as admin:
        assert [m.body for m in admin.query_by_unique_key(topic, ack.message_id)] == [b"sync"]
        assert admin.count(topic) == 6
        assert admin.await_dispatched(topic)
    shown = real.admin("queryMsgByUniqueKey", "-t", topic, "-i", ack.message_id)
    assert "sync" in shown or ack.message_id in shown


def test_the_documented_commands_find_a_message_of_any_age(real, topic):
    """The month's start is the time in the id, as in the ids of Spark's lanes."""
    message = Message(topic, b"x", message_id="C0000202534C4701593400000000BEEF", keys="order-7")
    with Producer(nameServer=real.name_server) as producer:
        sent = producer.send(message)
    list(read_topic(real.name_server, topic))
    values = {
        "MESSAGE_ID": sent.message_id, "OFFSET_MESSAGE_ID": sent.offset_message_id,
        "BROKER_NAME": sent.queue.broker_name, "QUEUE_ID": sent.queue.queue_id,
        "QUEUE_OFFSET": sent.queue_offset,
    }  # fmt: skip
    (block,) = [block for block in blocks_of(PAGE) if "mqadmin" in block.text]
    with FakeCluster() as fake:
        fake.create_topic(topic, 1)
        text = Template(block.text.replace(" flights ", f" {topic} ")).substitute(values)
        for line in text.splitlines():
            command, _, versions = line.partition(" # ")
            _, name, _, _, *arguments = shlex.split(command)
            version = versions[:5]
            assert "order-7" in admin(real.name_server, name, *arguments, version=version), line
            if name == "queryMsgByUniqueKey":
                with suppress(ClusterError):  # The scripted cluster has no such message.
                    admin(fake.name_server, name, *arguments, version=version)
        asked = [frame.ext["beginTimestamp"] for frame in fake.requests(RequestCode.QUERY_MESSAGE)]
    assert asked and set(asked) == {"0"}


FAULT_S = 6.0
PER_S = 1000


def _flow(engine, topic, seconds, first):
    """Send at a rate: tens of thousands of messages would keep brokers and readers busy."""
    done, number, longest = [], first, 0.0
    started = last = engine.clock()
    while engine.clock() - started < seconds:
        due = first + int((engine.clock() - started) * PER_S) + 1
        while engine.pending < 60 and number < due:
            engine.submit(SendRequest(topic, b"%d" % number, token=number))
            number += 1
        fresh = engine.poll(0.005)
        if fresh:
            longest, last = max(longest, engine.clock() - last), engine.clock()
        done += fresh
    return done, number, max(longest, engine.clock() - last)


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_broker_fails_and_nothing_is_lost(real, topic, fault, capsys):
    # An attempt may take longer than the fault lasts: only suspicion keeps the traffic going.
    options = SinkOptions.parse(nameServer=real.name_server, sendMsgTimeout=60_000)
    engine = SendEngine(options, record_attempts=False)
    before, number, usual_s = _flow(engine, topic, 2.0, 0)
    broker = real.brokers[0]
    strike = threading.Timer(0.5, getattr(broker, fault))
    strike.start()
    try:
        during, number, pause_s = _flow(engine, topic, 0.5 + FAULT_S, number)
    finally:
        strike.join()
        if fault == "freeze":
            broker.thaw()
        else:
            broker.restart()
    done = before + during + engine.drain()
    engine.close()
    with capsys.disabled():
        doubled = sum(c.maybe_duplicate for c in done)
        print(f"\n{fault}: pause {pause_s:.2f} s (usual {usual_s:.2f}), {doubled} maybe doubled")
    assert len(done) == number
    assert all(c.outcome.delivered for c in done), Counter(c.outcome for c in done)
    # On a busy machine, whose answers come in bursts, suspicion takes 3 s (`_SUSPECT_MAX_S`).
    assert pause_s < FAULT_S - 1.5
    time.sleep(1)
    stored = Counter(int(m.body) for m in read_topic(real.name_server, topic))
    assert set(stored) == set(range(number))
    marked = {c.token for c in done if c.maybe_duplicate}
    assert {body for body, count in stored.items() if count > 1} <= marked
