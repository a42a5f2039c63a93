"""The producer's modes on real brokers, read back here and by RocketMQ's admin tool."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink import errors
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.producer import Producer
from rocket_sink.producer.transactions import COMMIT, ROLLBACK
from rocket_sink.testing import Answer, CutAnswer, FaultProxies
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.requests import query_message
from rocket_sink.wire.trace import PubTrace
from tests.clusters import make_topic, read_topic
from tests.decoding import decode_trace
from tests.java_client import read_with_java
from tests.producer.conftest import stored
from tests.producer.waiting import until
from tests.python import run_python
from tests.task.one_task import CTX, run_task

pytestmark = pytest.mark.cluster

ENDING_SCRIPT = """
import multiprocessing, sys
from rocket_sink import Message, Producer

producer = Producer(nameServer=sys.argv[1], sendMsgTimeout=60_000)

def work(who):
    for number in range(2000):
        producer.send_async(Message(sys.argv[2], b"%s-%d" % (who, number)))

child = multiprocessing.get_context("fork").Process(target=work, args=(b"c",))
child.start()
child.join()
work(b"p")
"""


def bodies(real, topic):
    return Counter(message.body for message in stored(real, topic))


def test_gathered_batches_give_each_message_its_own_place(real, topic):
    with Producer(nameServer=real.name_server, autoBatch=True) as producer:
        futures = [producer.send_async(Message(topic, b"%d" % n)) for n in range(500)]
        results = [future.result(20) for future in futures]
    until(lambda: len(stored(real, topic)) >= 500)
    messages = {m.message_id: m for m in stored(real, topic)}
    assert len(messages) == 500
    for number, result in enumerate(results):
        message = messages[result.message_id]
        assert message.body == b"%d" % number
        assert message.offset_message_id == result.offset_message_id
        place = (result.queue.queue_id, result.queue_offset)
        assert (message.queue_id, message.queue_offset) == place


def test_a_script_without_close_loses_no_message(real, topic, tmp_path):
    """Java's consumer reads each message of a script that ends, and of its child."""
    script = tmp_path / "script.py"
    script.write_text(ENDING_SCRIPT)
    run_python(script, real.name_server, topic, timeout_s=120)
    bodies_read = {message.body for message in read_with_java(real, topic)}
    assert bodies_read == {b"%s-%d" % (who, n) for who in (b"p", b"c") for n in range(2000)}


def test_messages_without_keys_are_not_lost_in_a_compaction_topic(real, tmp_path):
    """Java's consumer sees all acknowledged messages and skips no offset."""
    topic = "wants-keys"
    make_topic(real, topic, attributes={"cleanup.policy": "COMPACTION"})
    keys = [f"row-{n}" if n % 2 else None for n in range(10)]
    columns = {"body": [b"row-%d" % n for n in range(10)], "keys": keys}
    options = SinkOptions.parse(nameServer=real.name_server, topic=topic, ledger=str(tmp_path))
    total = run_task(options, CTX, columns)
    assert (total.acked, total.dead) == (5, 5)
    assert "message key is missing" in total.first_error
    with Producer(nameServer=real.name_server) as producer:
        with pytest.raises(errors.MessageIllegalError, match="Required message key is missing"):
            producer.send_batch([Message(topic, b"x")] * 3)
        producer.send_batch([Message(topic, b"batch-%d" % n, keys=f"b{n}") for n in range(3)])
    wanted = {b"row-1", b"row-3", b"row-5", b"row-7", b"row-9", b"batch-0", b"batch-1", b"batch-2"}
    assert {message.body for message in read_with_java(real, topic)} == wanted


def test_c73_transactions_end_in_five_ways(real, topic):
    """The ways are commit, rollback, commit at the check, rollback at the check, and unknown at
    first and committed later. Another producer than the sender answers the checks."""
    checks, ways = Counter(), ["commit", "rollback", "late-commit", "late-rollback", "slow"]

    def listen(message):
        way = message.body.decode().partition(" ")[0]
        checks[message.body] += 1
        if way == "slow" and checks[message.body] == 1:
            return None
        return ROLLBACK if way == "late-rollback" else COMMIT

    states = {"commit": COMMIT, "rollback": ROLLBACK}
    options = {**real.client_options(), "producerGroup": "tx-group"}
    with Producer(**options) as sender, Producer(**options, transaction_listener=listen) as hears:
        hears.listen_for_checks(topic)
        results = {}
        for number in range(10):
            way = ways[number % 5]
            message = Message(topic, f"{way} {number}".encode(), keys=[f"k{number}"])
            results[number] = sender.send_in_transaction(
                message, lambda _, arg: states.get(arg), way
            )
        sender.close()  # From here on the listener's process is the only one of the group.
        kept = {n for n in results if "rollback" not in ways[n % 5]}
        until(lambda: len(stored(real, topic)) == len(kept), 60.0)
        until(lambda: all(checks[f"late-rollback {n}".encode()] for n in (3, 8)), 60.0)
    assert {int(m.body.split()[1]) for m in stored(real, topic)} == kept
    assert all(results[n].ended == (n % 5 < 2) for n in results)
    by_body = {m.body.decode().split()[0] for m in stored(real, topic)}
    assert by_body == {"commit", "late-commit", "slow"}
    assert not checks[b"commit 0"] and not checks[b"rollback 1"]
    shown = real.admin("queryMsgByUniqueKey", "-t", topic, "-i", results[0].transaction_id)
    assert results[0].transaction_id in shown
    with pytest.raises(errors.ClusterError):
        real.admin("queryMsgByUniqueKey", "-t", topic, "-i", results[1].transaction_id)


def test_recall_takes_a_message_back_and_leaves_the_other(real, topic):
    with Producer(nameServer=real.name_server) as producer:
        recalled = producer.send(Message(topic, b"taken", delay_ms=4000))
        kept = producer.send(Message(topic, b"left", delay_s=4))
        assert recalled.recall_handle and kept.recall_handle
        assert producer.recall(topic, recalled.recall_handle) == recalled.message_id
        assert bodies(real, topic) == {}
        until(lambda: bodies(real, topic)[b"left"], 30.0)
        time.sleep(1.5)  # The other message's time has passed as well.
        assert bodies(real, topic) == {b"left": 1}
        with pytest.raises(errors.SendError):
            producer.recall(topic, kept.recall_handle)


def test_c73_delay_levels(real, topic):
    timed = real.version.startswith("5.")
    with Producer(**real.client_options()) as producer:
        began = time.time()
        for level in (1, 2):
            producer.send(Message(topic, b"%d" % level, delay_level=level))
        if timed:
            at_ms = int(began * 1000) + 2000
            producer.send(Message(topic, b"time", delivery_timestamp_ms=at_ms))
        assert bodies(real, topic) == {}
    until(lambda: len(stored(real, topic)) == 2 + timed, 30.0)
    waits = {m.body: m.store_ms / 1000 - began for m in stored(real, topic)}
    assert waits[b"1"] >= 0.9 and waits[b"2"] >= 4.5
    assert waits[b"1"] < waits[b"2"]
    assert not timed or waits[b"time"] >= 1.5


def test_a_request_gets_its_reply_through_another_broker(real, topic):
    options = {"nameServer": real.name_server}
    with (
        Producer(**options, producerGroup="asks") as asker,
        Producer(**options) as replier,
        ThreadPoolExecutor(1) as threads,
    ):
        queue = asker.fetch_publish_message_queues(topic)[0]
        asking = threads.submit(asker.request, Message(topic, b"ping"), 30, queue=queue)
        until(lambda: stored(real, topic), 30.0)
        (asked,) = stored(real, topic)
        for text in (b"pong", b"too late"):  # The second reply finds no request that waits.
            replier.reply(asked, text, properties={"x": "1"})
        reply = asking.result(30)
        until(lambda: asker.late_replies == 1)
        asker.close()
        with pytest.raises(errors.RequesterGoneError):
            replier.reply(asked, b"nobody asks any more")
        assert not replier.isolations()
    assert (reply.body, reply.properties["x"]) == (b"pong", "1")
    assert reply.topic == "DefaultCluster_REPLY_TOPIC"


def test_traces_are_what_the_admin_tool_reads(real, topic):
    with Producer(nameServer=real.name_server, producerGroup="traced", enableTrace=True) as one:
        sent = one.send(Message(topic, b"abc", tags="t", keys=["k1"]))
    traces = {}

    def is_traced():
        for message in read_topic(real.name_server, "RMQ_SYS_TRACE_TOPIC"):
            of_message = decode_trace(message.body.decode())
            traces.update((t.message_id, t) for t in of_message if isinstance(t, PubTrace))
        return sent.message_id in traces

    until(is_traced, 20.0)
    trace = traces[sent.message_id]
    assert (trace.producer_group, trace.success) == ("traced", True)
    until(lambda: _indexed(real, "RMQ_SYS_TRACE_TOPIC", sent.message_id), 20.0)
    shown = real.admin("QueryMsgTraceById", "-i", sent.message_id)
    assert "traced" in shown and "Pub" in shown and "success" in shown


def _indexed(real, topic, key):
    """Return the brokers that have a message with this key in their index."""
    frame = query_message(topic=topic, key=key, max_num=1, unique_key=False)
    missing = {ResponseCode.QUERY_NOT_FOUND}
    with Admin(nameServer=real.name_server) as admin:
        return [
            broker.name
            for broker in real.brokers
            if admin._call(broker.name, broker.address, frame, missing).code not in missing
        ]


def test_faults_before_real_brokers(real, topic):
    with (
        FaultProxies(real.name_server) as proxies,
        Producer(nameServer=proxies.name_server, retryTimesWhenSendFailed=0) as producer,
    ):
        queue = producer.fetch_publish_message_queues(topic)[0]
        proxy = proxies.of(next(b.address for b in real.brokers if b.name == queue.broker_name))
        producer.send(Message(topic, b"good"), queue=queue)
        proxy.on_send(Answer(2, "busy"))
        with pytest.raises(errors.BrokerBusyError):
            producer.send(Message(topic, b"refused by the proxy"), queue=queue)
        proxy.on_send(CutAnswer(20))
        with pytest.raises(errors.UnknownOutcomeError):
            producer.send(Message(topic, b"stored all the same"), queue=queue)
    assert bodies(real, topic) == {b"good": 1, b"stored all the same": 1}
