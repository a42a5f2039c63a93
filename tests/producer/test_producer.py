"""The public producer: modes, threads, forks, limits, secrets."""

import gc
import multiprocessing
import threading
import time
from contextlib import suppress

import pytest

from rocket_sink import errors
from rocket_sink.errors import Outcome
from rocket_sink.message import Message, MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer import engine_thread
from rocket_sink.producer.producer import Producer
from rocket_sink.testing import Answer, Delay, Drop
from rocket_sink.wire.acl import Credentials
from rocket_sink.wire.codes import PermName, RequestCode
from tests.producer.waiting import in_threads, until


def test_send_writes_all_fields_of_the_message(cluster, make_producer):
    message = Message(
        "orders", b"body", tags="a", keys=["k1", "k2"], sharding_key="u1",
        properties={"x": "1"}, flag=7,
    )  # fmt: skip
    ack = make_producer().send(message)
    (stored,) = cluster.messages("orders")
    assert ack.outcome is Outcome.ACKED and ack.attempts == 1
    assert (stored.body, stored.flag) == (b"body", 7)
    wanted = {
        "TAGS": "a", "KEYS": "k1 k2", "__SHARDINGKEY": "u1", "x": "1", "WAIT": "true",
        "UNIQ_KEY": ack.message_id,
    }  # fmt: skip
    assert wanted.items() <= stored.properties.items()


def begun(before):
    """Return the names of the running threads that were not among those before."""
    return {thread.name for thread in set(threading.enumerate()) - before}


def test_callbacks_alone_need_a_second_thread(cluster, make_producer):
    before = set(threading.enumerate())
    producer = make_producer()
    assert not begun(before)
    producer.send(Message("orders", b"x"))
    producer.send_batch([Message("orders", b"x")] * 3)
    producer.send_oneway(Message("orders", b"x"))
    producer.send_async(Message("orders", b"x")).result(5)
    assert begun(before) == {"rocket-sink-producer"}
    producer.send_async(Message("orders", b"x"), lambda *end: None).result(5)
    until(lambda: begun(before) == {"rocket-sink-producer", "rocket-sink-callbacks"})
    producer.close()
    assert not begun(before)


def test_an_idle_producer_goes_on_with_its_heartbeats(cluster, make_producer):
    producer = make_producer(heartbeatBrokerInterval=100)
    producer.send(Message("orders", b"x"))
    until(lambda: len(cluster.requests(RequestCode.HEART_BEAT)) >= 3)
    assert producer.send(Message("orders", b"y")).message_id


@pytest.mark.parametrize("mode", ["send", "send_async"])
def test_an_idle_producer_greets_brokers_that_are_back(cluster, make_producer, mode):
    producer = make_producer(heartbeatBrokerInterval=100)
    getattr(producer, mode)(Message("orders", b"x"))
    until(lambda: len(cluster.requests(RequestCode.HEART_BEAT)) >= 2)
    cluster.kill()
    peek = producer._session.engine.client.peek
    until(lambda: not any(peek(broker.address) for broker in cluster.brokers))
    time.sleep(0.2)  # An interval passes.
    for broker in cluster.brokers:
        broker.requests.clear()
        broker.restart()
    until(lambda: len(cluster.requests(RequestCode.HEART_BEAT)) >= 2, 20.0)


def test_an_idle_producer_that_was_dropped_leaves_no_thread(cluster):
    before = set(threading.enumerate())
    producer = Producer(nameServer=cluster.name_server, heartbeatBrokerInterval=100)
    producer.send_oneway(Message("orders", b"x"))
    # The producer's thread has had a look, and sleeps again.
    until(lambda: len(cluster.requests(RequestCode.HEART_BEAT)) >= 2)
    del producer
    # The producer's thread may hold it for a moment, so the first collection may find it in use.
    until(lambda: gc.collect() >= 0 and not begun(before))


def test_many_threads_share_it(cluster, make_producer, monkeypatch):
    # A thread that is not woken sleeps for ever.
    monkeypatch.setattr(engine_thread, "_IDLE_S", 1000.0)
    producer, ids = make_producer(), []

    def work(worker):
        for number in range(40):
            ids.append(producer.send(Message("orders", b"%d-%d" % (worker, number))).message_id)

    in_threads(6, work)
    assert len(ids) == len(set(ids)) == 240
    bodies = {b"%d-%d" % (worker, number) for worker in range(6) for number in range(40)}
    assert {message.body for message in cluster.messages("orders")} == bodies


def test_threads_do_not_wait_for_one_slow_answer(cluster, producer):
    """The leader's own answer is slow; the other threads get theirs meanwhile."""
    producer.send(Message("orders", b"warm"))
    slow, quick = (MessageQueue("orders", b.name, 0) for b in cluster.brokers)
    cluster.brokers[0].on_send(Delay(700), times=1)
    leader = threading.Thread(
        target=lambda: producer.send(Message("orders", b"slow"), queue=slow), daemon=True
    )
    leader.start()
    for number in range(20):
        producer.send(Message("orders", b"%d" % number), queue=quick)
    assert leader.is_alive()
    leader.join(5)


@pytest.mark.parametrize("how", ["plain", "selector", "strict"])
def test_async_failures_of_a_look_up_reach_the_future_too(cluster, make_producer, how):
    for broker in cluster.brokers:
        broker.is_master = False
    producer, ends = make_producer(sendMsgTimeout=100, ordering="strict"), []
    message = Message("orders", b"x", sharding_key="k" if how == "strict" else None)
    selector = (lambda queues, message, arg: queues[0]) if how == "selector" else None
    future = producer.send_async(message, lambda *end: ends.append(end), selector=selector)
    assert isinstance(future.exception(10), errors.NoRouteError)
    until(lambda: ends)
    assert ends == [(None, future.exception())]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_the_look_up_for_a_selector_is_of_the_sends_time(cluster, make_producer, how):
    for broker in cluster.brokers:
        broker.is_master = False
        broker.on_send(Drop(), times=None)
    timer = threading.Timer(2.5, lambda: [setattr(b, "is_master", True) for b in cluster.brokers])
    timer.start()
    producer, began_s = make_producer(sendMsgTimeout=4000), time.monotonic()
    send = producer.send if how == "sync" else producer.send_async
    with pytest.raises(errors.RequestTimeoutError):
        future = send(Message("orders", b"x"), selector=lambda queues, message, arg: queues[0])
        future.result(10)
    took_s = time.monotonic() - began_s
    assert 3.9 < took_s < 6.4, "with a time of its own the look-up makes it 6.5 s"
    timer.join()


def test_oneway_over_a_dead_connection_is_an_error(cluster, make_producer):
    producer = make_producer(sendMsgTimeout=500)
    producer.send_oneway(Message("orders", b"one"))
    cluster.kill()
    # The kernel may take a frame for the dead connection, or refuse it; it does neither twice.
    with pytest.raises(errors.ConnectError):
        for _ in range(4):
            with suppress(errors.UnwrittenError):
                producer.send_oneway(Message("orders", b"two"))


def test_illegal_batches(cluster, producer):
    for batch in (
        [],
        [Message("orders", b"1"), Message("other", b"2")],
        [Message("orders", b"1", delay_level=3)],
        [Message("orders", b"1"), Message("orders", b"1", wait_store=False)],
    ):
        with pytest.raises(errors.MessageError):
            producer.send_batch(batch)
    assert cluster.messages("orders") == []


def test_selector_and_queue(cluster, producer):
    queues = producer.fetch_publish_message_queues("orders")
    assert len(queues) == 8
    ack = producer.send(Message("orders", b"x"), queue=queues[5])
    assert ack.queue == queues[5]
    ack = producer.send(Message("orders", b"x"), selector=lambda qs, m, arg: qs[arg], arg=3)
    assert ack.queue == queues[3]


@pytest.mark.parametrize("ordering", ["none", "best_effort", "strict"])
def test_oneway_goes_where_send_goes(cluster, make_producer, ordering):
    producer = make_producer(ordering=ordering)
    home = producer.send(Message("orders", b"x", sharding_key="user-1")).queue
    for _ in range(4):
        producer.send_oneway(Message("orders", b"x", sharding_key="user-1"))
    queues = producer.fetch_publish_message_queues("orders")
    chosen = next(queue for queue in queues if queue != home)
    producer.send_oneway(Message("orders", b"y"), selector=lambda qs, m, arg: arg, arg=chosen)
    until(lambda: len(cluster.messages("orders")) == 6)
    assert sum(f.is_oneway for f in cluster.requests(RequestCode.SEND_MESSAGE_V2)) == 5
    for queue, count in ((home, 5), (chosen, 1)):
        stored = cluster.broker(queue.broker_name).store.messages("orders")
        assert sum(m.queue_id == queue.queue_id for m in stored) == count


def test_best_effort_moves_and_strict_stays(cluster, make_producer):
    producer = make_producer(ordering="best_effort")
    home = producer.send(Message("orders", b"x", sharding_key="k")).queue
    cluster.broker(home.broker_name).kill()
    moved = {producer.send(Message("orders", b"x", sharding_key="k")).queue for _ in range(4)}
    assert len(moved) == 1 and next(iter(moved)).broker_name != home.broker_name
    strict = make_producer(ordering="strict", orderWaitMs=300)
    with pytest.raises(errors.NotSentError):
        strict.send(Message("orders", b"x", sharding_key="k"))


def look_up(producer, topic):
    """Look the topic's route up anew, and wait for the answer."""
    driver, engine = producer._session.driver, producer._session.engine
    driver.call(lambda: engine.routes.refresh(topic, engine.clock()) or True)

    driver.read(lambda: [engine.routes.get(topic, engine.clock())])
    until(lambda: driver.read(lambda: [not engine.routes.fetching(topic)])[0])


@pytest.mark.parametrize(
    ("has_master", "error", "text"),
    [
        # Nothing tells whether the broker is down or lacks the topic.
        (False, errors.NotSentError, "start it, or if it runs, create the topic"),
        # It stays in the route, but its queues leave it (`mqadmin wipeWritePerm`).
        (True, errors.InvalidQueueError, "takes no writes now"),
    ],
)
def test_with_strict_order_no_key_moves_while_a_broker_takes_no_writes(
    cluster, make_producer, has_master, error, text
):
    """Over the other brokers' queues, the hash would give another queue."""
    producer = make_producer(ordering="strict", orderWaitMs=300)
    keys = [f"key {number}" for number in range(12)]
    homes = {key: producer.send(Message("orders", b"x", sharding_key=key)).queue for key in keys}
    away = cluster.brokers[0]
    if has_master:
        cluster.create_topic("orders", 4, perm=PermName.READ, brokers=[away.name])
    else:
        away.is_master = False
        away.kill()
    look_up(producer, "orders")
    for key, home in homes.items():
        message = Message("orders", b"x", sharding_key=key)
        if home.broker_name == away.name:
            with pytest.raises(error, match=text):
                producer.send(message)
        else:
            assert producer.send(message).queue == home
    if has_master:
        cluster.create_topic("orders", 4, brokers=[away.name])
        look_up(producer, "orders")
        for key, home in homes.items():
            assert producer.send(Message("orders", b"x", sharding_key=key)).queue == home


def _send_in_child(producer, pipe):
    results = [producer.send(Message("orders", b"child")) for _ in range(5)]
    pipe.send([r.message_id for r in results])
    producer.close()


def test_a_forked_child_has_its_own_connections_and_ids(cluster, make_producer):
    producer = make_producer(sendMsgTimeout=60_000)
    own = [producer.send(Message("orders", b"parent")).message_id]
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    children = [fork.Process(target=_send_in_child, args=(producer, there)) for _ in range(2)]
    for child in children:
        child.start()
    own += [producer.send(Message("orders", b"parent")).message_id for _ in range(5)]
    assert here.poll(60)
    theirs = here.recv() + here.recv()
    for child in children:
        child.join(10)
        assert child.exitcode == 0
    assert len(set(own + theirs)) == 16
    assert producer.send(Message("orders", b"parent")).outcome is Outcome.ACKED
    assert len(cluster.messages("orders")) == 17


def test_a_forked_child_lets_go_of_the_parents_connections(cluster, producer):
    """Otherwise a broker would not see that the parent has gone while the child lives."""
    queues = producer.fetch_publish_message_queues("orders")
    producer.send(Message("orders", b"parent"), queue=queues[0])
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    child = fork.Process(target=_sockets_in_child, args=(producer, queues[0], there))
    child.start()
    # The connections are those to the name server and to the broker.
    assert here.poll(20) and here.recv() == [True, True]
    child.join(10)


def _sockets_in_child(producer, queue, pipe):
    before = [channel.transport for channel in producer._session.engine.client.channels]
    producer.send(Message("orders", b"child"), queue=queue)
    pipe.send([transport.fileno() == -1 for transport in before])
    producer.close()


def test_closed_is_closed(cluster, producer):
    producer.send(Message("orders", b"x"))
    producer.close()
    producer.close()
    for call in (producer.send, producer.send_async, producer.send_oneway):
        with pytest.raises(errors.ProducerClosedError):
            call(Message("orders", b"x"))
    with pytest.raises(errors.ProducerClosedError):
        producer.fetch_publish_message_queues("orders")


def test_close_waits_for_what_is_in_flight(cluster, producer):
    producer.send(Message("orders", b"warm"))
    cluster.on_send(Delay(200), times=None)
    futures = [producer.send_async(Message("orders", b"x")) for _ in range(10)]
    producer.close(5)
    assert all(f.done() and f.result().outcome is Outcome.ACKED for f in futures)


def test_close_has_a_deadline_and_leaves_no_future_open(cluster, make_producer):
    producer = make_producer(sendMsgTimeout=30_000)
    producer.send(Message("orders", b"warm"))
    cluster.on_send(Drop(), times=None)
    futures = [producer.send_async(Message("orders", b"x")) for _ in range(10)]
    producer.close(0.3)
    assert all(f.done() and f.exception().outcome is Outcome.UNKNOWN for f in futures)


def test_requests_are_signed_with_references_resolved_late(
    cluster, make_producer, monkeypatch, tmp_path
):
    monkeypatch.setenv("RMQ_USER", "alice")
    (tmp_path / "secret").write_text("hunter2-canary\n")
    producer = make_producer(accessKey="env:RMQ_USER", secretKey=f"file:{tmp_path}/secret")
    producer.send(Message("orders", b"x"))
    producer.send_batch([Message("orders", b"y")])
    for frame in cluster.requests():
        assert frame.ext["AccessKey"] == "alice" and frame.ext["Signature"]
    assert "canary" not in repr(producer) + repr(producer.options) + repr(producer._session.engine)


@pytest.mark.parametrize("mode", ["sync", "async", "rotated"])
def test_remarks_are_shown_without_credentials(cluster, make_producer, mode):
    """The remarks are in the form of 5.5.0 and of 4.9.7."""
    values = ("canary-user", "canary-secret", "canary-token")
    remark = "User:{0} is not found, {1}, {2}, signature of accessKey {0}".format(*values)
    cluster.on_send(Answer(16, remark), times=None)
    keys = dict(zip(("accessKey", "secretKey", "securityToken"), values, strict=True))
    if mode == "rotated":
        keys = {"credentials": lambda: Credentials(*values)}
    producer = make_producer(**keys)
    with pytest.raises(errors.AuthenticationError) as caught:
        if mode == "async":
            producer.send_async(Message("orders", b"x")).result(20)
        producer.send(Message("orders", b"x"))
    assert "User:*** is not found, ***, ***, signature of accessKey ***" in str(caught.value)
    assert "canary" not in repr(caught.value) + repr(vars(caught.value))


def test_missing_secret_file_is_an_option_error(cluster):
    with pytest.raises(errors.OptionError, match="secretKey"):
        Producer(nameServer="h:1", accessKey="a", secretKey="file:/nowhere/x")


def test_options_and_more(cluster):
    options = SinkOptions.parse(nameServer=cluster.name_server)
    with Producer(options, producerGroup="g") as producer:
        assert producer.options.producer_group == "g"
        assert "producer" in repr(producer).lower()
