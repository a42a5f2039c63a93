"""Freezes, kills, cuts, windows, order: the engine's work while something is wrong."""

import time
from collections import Counter

import pytest

from rocket_sink.errors import NotSentError, Outcome, UnwrittenError
from rocket_sink.message import MessageQueue
from rocket_sink.net.client import Call
from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.testing import Delay, FaultProxy
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.requests import heartbeat
from tests.producer.conftest import drive_until, request, send, submit


def test_a_short_pause_doubles_nothing(cluster, make_engine):
    """A pause of 300 ms, like a garbage collection, raises suspicion but gives up no request."""
    engine = make_engine(sendMsgTimeout=60_000)
    assert not send(engine).maybe_duplicate, "the machine was too slow before the pause"
    submit(engine, 20)
    cluster.brokers[0].freeze()
    submit(engine, 20, first=20)
    time.sleep(0.3)
    cluster.brokers[0].thaw()
    done = engine.drain()
    assert len(done) == 40
    assert all(c.outcome is Outcome.ACKED and not c.maybe_duplicate for c in done)
    bodies = Counter(message.body for message in cluster.messages("orders"))
    assert bodies.total() == len(bodies) == 41, bodies


@pytest.mark.parametrize(
    ("direction", "at_byte", "size", "outcome", "stored"),
    [
        # The frame is larger than all buffers on the way, and is cut in the middle.
        ("request", 100_000, 15_000_000, Outcome.NOT_SENT, 0),
        ("answer", 10, 1, Outcome.UNKNOWN, 1),
    ],
)
def test_a_cut_before_the_last_byte_of_a_frame_is_not_sent_and_a_later_one_unknown(
    cluster, make_engine, closing, direction, at_byte, size, outcome, stored
):
    engine = make_engine(retryTimesWhenSendFailed=0, sendMsgTimeout=5000)
    engine.publish_info("orders")
    proxies = {b.address: closing(FaultProxy(b.address)) for b in cluster.brokers}
    real = engine.client.channel
    engine.client.channel = lambda address, now: real(
        proxies[address].address if address in proxies else address, now
    )
    for proxy in proxies.values():
        proxy.cut_after(at_byte, direction)
    engine.submit(SendRequest("orders", bytes(size), token=1))
    (completion,) = engine.drain()
    assert completion.outcome is outcome, completion
    assert isinstance(completion.error, UnwrittenError) == (outcome is Outcome.NOT_SENT)
    assert completion.maybe_duplicate == (outcome is Outcome.UNKNOWN)
    assert len(cluster.messages("orders")) == stored


def test_unsent_requests_leave_a_suspect_connection(cluster, make_engine):
    """Bytes that the kernel has not taken yet go to another broker; nothing is sent twice."""
    engine = make_engine(suspectAfterMs=1500, sendMsgTimeout=200_000)
    engine.publish_info("orders")
    cluster.brokers[0].freeze()
    for number in range(4):
        engine.submit(request(number, queue=MessageQueue("orders", "broker-a", number)))
    engine.poll(0.05)
    stuck = engine.client.peek(cluster.brokers[0].address)
    assert stuck.is_open and stuck.connection.in_flight >= 4
    stuck.transport.write = lambda buffers: 0  # The kernel's buffer seems full.
    submit(engine, 8, first=4)
    assert stuck.write_queue._entries
    drive_until(engine, lambda: engine.pending == 4)
    done = engine.take()
    assert sorted(c.token for c in done) == list(range(4, 12))
    assert len(cluster.brokers[1].store.messages("orders")) == 8
    del stuck.transport.write
    cluster.brokers[0].thaw()
    done += engine.drain()
    assert len(done) == 12 and all(c.outcome is Outcome.ACKED for c in done)
    assert not any(c.maybe_duplicate for c in done)
    assert len(cluster.messages("orders")) == 12


def test_strict_order_has_one_request_in_flight_per_queue(cluster, engine):
    cluster.on_send(Delay(5), times=None)
    engine.publish_info("orders")
    queues = [MessageQueue("orders", b.name, q) for b in cluster.brokers for q in range(2)]
    most = 0
    for number in range(80):
        engine.submit(request(number, queue=queues[number % 4], ordered=True))
        engine.poll(0)
        most = max(most, sum(k.connection.in_flight for k in engine.client.channels))
    assert len(engine.drain()) <= 80
    assert 2 <= most <= 4 + 2  # The most in flight is one request per queue, and heartbeats.
    for queue in queues:
        stored = [
            int(m.body.split(b"-")[1])
            for m in cluster.broker(queue.broker_name).store.messages("orders")
            if m.queue_id == queue.queue_id
        ]
        assert stored == sorted(stored) and len(stored) == 20


def test_strict_order_survives_a_restart_in_order(cluster, make_engine):
    engine = make_engine(orderWaitMs=20_000)
    queue = MessageQueue("orders", "broker-a", 0)
    send(engine, "first", queue=queue, ordered=True)
    cluster.brokers[0].kill()
    for number in range(5):
        engine.submit(request(f"x-{number}", queue=queue, ordered=True))
    engine.poll(0.3)
    assert engine.pending == 5
    cluster.brokers[0].restart()
    done = engine.drain()
    assert [c.outcome for c in done] == [Outcome.ACKED] * 5
    bodies = [m.body for m in cluster.brokers[0].store.messages("orders")]
    assert bodies == [b"body-first", *(f"body-x-{n}".encode() for n in range(5))]


def test_peers_requests_are_answered_with_code_3(cluster, engine):
    send(engine)
    for broker in cluster.brokers:
        broker.send_request(Frame(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, {"topic": "t"}))
    drive_until(engine, lambda: any(f.is_response for f in cluster.requests()))
    assert {f.code for f in cluster.requests() if f.is_response} == {3}


def test_what_is_moved_off_a_suspect_connection_may_be_no_send(cluster, engine):
    """The call fails and can be repeated; no thread waits without limit."""
    broker = cluster.brokers[0]
    send(engine, "warm", queue=MessageQueue("orders", broker.name, 0))
    errors = []
    call = Call(lambda answer, error, now_s: errors.append(error))
    frame = heartbeat(client_id="c", producer_groups=["g"])
    now_s = engine.clock()
    engine.client.call(broker.address, frame, call, deadline_s=now_s + 20.0, now_s=now_s)
    engine.flow.move_unsent(broker.name, now_s)
    assert isinstance(errors[0], NotSentError)
    assert send(engine, "after").outcome is Outcome.ACKED and len(errors) == 1
