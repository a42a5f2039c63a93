"""The public producer: modes, threads, forks, limits, secrets."""

import multiprocessing
import threading
import time

import pytest

from rocket_sink import errors
from rocket_sink.errors import Outcome
from rocket_sink.message import Message, MessageQueue
from rocket_sink.producer.transactions import COMMIT
from rocket_sink.testing import Answer, Drop
from rocket_sink.wire.acl import Credentials
from rocket_sink.wire.codes import PermName, RequestCode
from tests.producer.waiting import until


def test_the_look_up_for_a_selector_is_of_the_sends_time(producer, monkeypatch):
    driver, looked = producer._session.driver, []
    info = driver.publish_info("orders")
    monkeypatch.setattr(driver.engine.routes, "peek", lambda topic: None)

    def publish_info(topic, *, timeout_s):
        looked.append((driver.engine.clock(), timeout_s))
        return info

    monkeypatch.setattr(driver, "publish_info", publish_info)
    message = Message("orders", b"x")
    request = producer._request(message, None, lambda queues, *_: queues[0], None, 200)
    [(began_s, timeout_s)] = looked
    assert 0 < request.since_s <= began_s and timeout_s == request.timeout_s == 0.2


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
    producer.send_in_transaction(Message("orders", b"x"), lambda message, arg: COMMIT)
    assert begun(before) == {"rocket-sink-producer"}
    producer.send_async(Message("orders", b"x"), lambda *end: None).result(5)
    until(lambda: begun(before) == {"rocket-sink-producer", "rocket-sink-callbacks"})
    producer.close()
    assert not begun(before)


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


def test_a_keys_later_message_waits_for_one_that_goes_again(cluster, make_producer):
    producer = make_producer(ordering="strict")
    cluster.on_send(Answer(2, "busy"), times=1)
    bodies = [b"%d" % number for number in range(3)]
    futures = [producer.send_async(Message("orders", b, sharding_key="k")) for b in bodies]
    assert all(future.result(10) for future in futures)
    assert [message.body for message in cluster.messages("orders")] == bodies


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
    for call in (lambda: producer.fetch_publish_message_queues("orders"), producer.flush):
        with pytest.raises(errors.ProducerClosedError):
            call()


def test_close_has_a_deadline_and_leaves_no_future_open(cluster, make_producer):
    producer = make_producer(sendMsgTimeout=30_000)
    producer.send(Message("orders", b"warm"))
    cluster.on_send(Drop(), times=None)
    futures = [producer.send_async(Message("orders", b"x")) for _ in range(10)]
    producer.close(0.3)
    assert all(f.done() and f.exception().outcome is Outcome.UNKNOWN for f in futures)


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


def test_health_and_isolations_are_values(cluster, make_producer):
    producer = make_producer(retryTimesWhenSendFailed=0)
    bad, good = (broker.name for broker in cluster.brokers)
    producer.send(Message("orders", b"x"), queue=MessageQueue("orders", good, 0))
    cluster.broker(bad).on_send(Answer(14, "disk full"))
    with pytest.raises(errors.SendError):
        producer.send(Message("orders", b"x"), queue=MessageQueue("orders", bad, 0))
    isolated, well = producer.broker_health()
    assert (isolated.broker_name, isolated.available, isolated.reachable) == (bad, False, True)
    assert 0 < isolated.available_in_ms <= 10_000 and isolated.in_flight == 0
    assert (well.broker_name, well.available, well.available_in_ms) == (good, True, 0)
    assert well.latency_ms > 0
    (event,) = producer.isolations()
    assert (event.broker_name, event.cause) == (bad, "SERVICE_NOT_AVAILABLE")
    assert producer.isolations() == []


@pytest.mark.parametrize("ordering", ["strict", "best_effort"])
def test_ordered_sends_feed_the_table(cluster, make_producer, ordering):
    """In Java neither sends to a queue nor those by a selector do so (DefaultMQProducerImpl)."""
    producer = make_producer(ordering=ordering)
    home = producer.send(Message("orders", b"x", sharding_key="k")).queue.broker_name
    cluster.broker(home).on_send(Answer(14, "shutting down"))
    again = producer.send(Message("orders", b"x", sharding_key="k"))
    assert again.outcome is Outcome.ACKED
    assert [event.broker_name for event in producer.isolations()] == [home]
