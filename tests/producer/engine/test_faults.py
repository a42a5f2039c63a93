"""Freezes, kills, cuts, windows, order: the engine's work while something is wrong."""

import time
from collections import Counter

import pytest

from rocket_sink.errors import NotSentError, Outcome, UnwrittenError
from rocket_sink.message import MessageQueue
from rocket_sink.net.client import Call
from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.testing import Delay, Drop, FaultProxy
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.requests import heartbeat
from tests.producer.conftest import drive_until, is_well, request, send, submit
from tests.producer.waiting import until


def _stream(engine, seconds, first, enough=float("inf"), pending=200):
    """Keep requests in flight until `enough` are complete; return them and the next number."""
    done, number = [], first
    started = engine.clock()
    while engine.clock() - started < seconds and len(done) < enough:
        while engine.pending < pending:
            engine.submit(request(number))
            number += 1
        done += engine.poll(0.05)
    return done, number


def test_a_frozen_broker_does_not_stop_unordered_traffic(cluster, make_engine):
    """Suspicion redirects the traffic long before an attempt is given up (after 20 s here)."""
    engine = make_engine(sendMsgTimeout=60_000)
    before, number = _stream(engine, 0.7, 0)
    cluster.brokers[0].freeze()
    during, number = _stream(engine, 15.0, number, enough=2000)
    cluster.brokers[0].thaw()
    done = before + during + engine.drain()
    assert len(done) == number
    assert all(c.outcome is Outcome.ACKED for c in done)
    assert len(during) >= 2000


def test_a_frozen_broker_cannot_collect_the_window_while_the_other_has_fits(cluster, make_engine):
    """A burst makes the living broker suspect, too; then it alone is the lesser evil."""
    engine = make_engine(sendMsgTimeout=600_000)
    frozen, well = cluster.brokers
    for number in range(40):
        send(engine, number)
    frozen.freeze()
    number = 100
    for _ in range(8):
        for delay in (Delay(300), Delay(450), Delay(600)):
            well.on_send(delay, times=8)
        done, number = _stream(engine, 30.0, number, enough=60, pending=40)
    stuck = engine.brokers.of(frozen.name).in_flight
    frozen.thaw()
    assert len(done) >= 60, "all places were taken by what the frozen broker holds"
    assert all(c.outcome is Outcome.ACKED for c in engine.drain())
    # The frozen broker gets another of 40 requests while it has at most FREE_IN_FLIGHT and 1.25
    # times as many as the other: 28 and 11 may become 29 and 11, but 29 and 10 may not grow.
    assert stuck <= 29


def test_a_frozen_broker_is_suspected_though_its_answers_took_long(cluster, make_engine):
    """The broker may hold a send for long, but not a request that asks for a sign of life."""
    engine = make_engine(sendMsgTimeout=600_000)
    frozen = cluster.brokers[0]
    queue = MessageQueue("orders", frozen.name, 0)
    engine.publish_info("orders")
    broker = engine.brokers.of(frozen.name)
    for _ in range(20):
        broker.measure(1e6)
        broker.measure(1e-6)
    frozen.freeze()
    engine.submit(request(1, queue=queue))
    began_s = engine.clock()
    drive_until(engine, lambda: not is_well(engine, frozen.name))
    took_s = engine.clock() - began_s
    frozen.thaw()
    engine.drain()
    assert took_s < broker.suspect_after_s(0.0)


def test_a_short_pause_doubles_nothing(cluster, engine):
    """A pause of 300 ms, like a garbage collection, raises suspicion but gives up no request."""
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


def test_suspicion_comes_and_goes(cluster, make_engine):
    engine = make_engine(suspectAfterMs=50, sendMsgTimeout=30_000)
    send(engine)
    cluster.brokers[0].freeze()
    name = cluster.brokers[0].name
    engine.submit(request(1, queue=MessageQueue("orders", name, 0)))
    drive_until(engine, lambda: not is_well(engine, name))
    sent = len(cluster.brokers[1].store.messages("orders"))
    submit(engine, 10)
    drive_until(engine, lambda: engine.pending == 1)
    assert len(cluster.brokers[1].store.messages("orders")) == sent + 10
    cluster.brokers[0].thaw()
    engine.drain()
    engine.poll(0.0)
    time.sleep(0.02)
    engine.poll(0.0)
    assert not engine.brokers.of(name).suspicion


def test_a_killed_broker_fails_nothing(cluster, make_engine):
    engine = make_engine(sendMsgTimeout=60_000)
    send(engine)
    submit(engine, 50)
    cluster.brokers[0].kill()
    longest = 0.0
    done = []
    for number in range(50, 150):
        started = engine.clock()
        engine.submit(request(number))
        done += engine.poll(0.5)
        longest = max(longest, engine.clock() - started)
    done += engine.drain()
    assert len(done) == 150
    assert all(c.outcome is Outcome.ACKED for c in done)
    assert longest < 10, "waited for an attempt's deadline"
    bodies = {m.body for m in cluster.messages("orders")}
    assert {f"body-{n}".encode() for n in range(150)} <= bodies


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


def test_every_place_in_the_window_is_given_back(cluster, make_engine):
    cluster.on_send(Drop(), times=5)
    engine = make_engine(sendMsgTimeout=900)
    submit(engine, 60)
    assert len(engine.drain()) == 60
    assert (engine.pending, engine.flow.window.bytes) == (0, 0)
    assert all(engine.brokers.of(b.name).in_flight == 0 for b in cluster.brokers)


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


def test_strict_order_waits_for_its_queue_and_others_flow(cluster, make_engine):
    engine = make_engine(orderWaitMs=20_000)
    send(engine)
    frozen, well = (MessageQueue("orders", b.name, 0) for b in cluster.brokers)
    cluster.brokers[0].freeze()
    for number in range(10):
        engine.submit(request(f"f-{number}", queue=frozen, ordered=True))
        engine.submit(request(f"w-{number}", queue=well, ordered=True))
    engine.drive_for(1.2)
    assert sorted(c.token for c in engine.take()) == [f"w-{n}" for n in range(10)]
    cluster.brokers[0].thaw()
    done = engine.drain()
    assert [c.token for c in done] == [f"f-{n}" for n in range(10)]
    assert all(c.outcome is Outcome.ACKED and not c.maybe_duplicate for c in done)


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


def test_ordered_requests_time_out_behind_a_stuck_one(cluster, make_engine, monkeypatch):
    engine = make_engine(orderWaitMs=400)
    queue = MessageQueue("orders", "broker-a", 0)
    engine.publish_info("orders")
    cluster.brokers[0].freeze()
    with monkeypatch.context() as patch:
        # The clock stands still, or a later request would have time left when the stuck one has
        # ended.
        now_s = engine.clock()
        patch.setattr(engine, "clock", lambda: now_s)
        for number in range(3):
            engine.submit(request(number, queue=queue, ordered=True))
    done = engine.drain(engine.clock() + 3)
    outcomes = {c.token: c.outcome for c in done}
    assert outcomes == {0: Outcome.UNKNOWN, 1: Outcome.NOT_SENT, 2: Outcome.NOT_SENT}


def test_peers_requests_are_answered_with_code_3(cluster, engine):
    send(engine)
    for broker in cluster.brokers:
        broker.send_request(Frame(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, {"topic": "t"}))
    drive_until(engine, lambda: any(f.is_response for f in cluster.requests()))
    assert {f.code for f in cluster.requests() if f.is_response} == {3}


def test_heartbeats_and_unregister_have_the_group(cluster, make_engine):
    engine = make_engine(producerGroup="mine")
    for _ in range(4):
        send(engine)
    time.sleep(0.02)
    engine.process(())
    engine.client.poll(0.05)
    engine.close()

    until(lambda: cluster.requests(RequestCode.UNREGISTER_CLIENT))
    beats = cluster.requests(RequestCode.HEART_BEAT)
    assert beats and b'"mine"' in bytes(beats[0].body)
    assert cluster.requests(RequestCode.UNREGISTER_CLIENT)[0].ext["producerGroup"] == "mine"


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
