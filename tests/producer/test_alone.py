"""The producer's parts, each alone: with an engine, a driver and a clock of the test."""

import math
import threading
from concurrent.futures import wait
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rocket_sink import errors
from rocket_sink.errors import Outcome
from rocket_sink.message import Message, MessageQueue, SendResult
from rocket_sink.net.identity import new_message_ids
from rocket_sink.options import SinkOptions
from rocket_sink.producer import driver as producer_driver
from rocket_sink.producer import process_end, request_builder, tracing
from rocket_sink.producer.accumulator import results_of
from rocket_sink.producer.engine.attempt import (
    AttemptRecord,
    Completion,
    SendRequest,
    StoredFrames,
)  # fmt: skip
from rocket_sink.producer.engine.limits import Window
from rocket_sink.producer.engine_thread import EngineThread, State
from rocket_sink.producer.future import OpenFutures, SendFuture
from rocket_sink.producer.hooks import EndTransactionContext, Hooks, SendContext, SendHook
from rocket_sink.producer.process_end import Calls
from rocket_sink.producer.producer import Producer
from rocket_sink.producer.request_builder import RequestBuilder, with_trace_context
from rocket_sink.producer.request_queue import RequestQueue
from rocket_sink.producer.request_reply import RequestReply
from rocket_sink.producer.send_group import GROUP_LEAST, group_key, group_request
from rocket_sink.producer.tracing import RequestTraces, Tracer
from rocket_sink.producer.transactions import COMMIT, ROLLBACK, UNKNOWN, TransactionClient
from rocket_sink.producer.worker import Worker, seconds
from rocket_sink.wire.batch import encode_inner
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.ids import RecallHandle
from rocket_sink.wire.properties import properties_of
from rocket_sink.wire.responses import TransactionCheck
from rocket_sink.wire.stored import StoredMessage
from rocket_sink.wire.trace import EndTransactionTrace, MessageType, PubTrace
from tests.decoding import encode_recall_handle

NOW_S = 1000.0
QUEUE = MessageQueue("orders", "a", 1)
RESULT = SendResult(
    Outcome.ACKED, "SEND_OK", "ID", "M1", QUEUE, 7, "a:1", 2, 1.5, True, "T", "region", "R", True
)


def builder(limit=None, **options):
    ids = new_message_ids("10.0.0.1")
    return RequestBuilder(SinkOptions.parse(options), ids, lambda topic: limit)


# --- requests from messages --------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["", "ns"])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"tags": "tag"}, {"keys": ["k1"]}, {"keys": ["k1", "k2"]}, {"properties": {"p": "1"}},
        {"tags": "ü" * 3000, "keys": ["ü" * 6000]},
    ],
)  # fmt: skip
def test_the_bytes_of_a_message_in_a_batch_are_hardly_too_many(namespace, fields):
    made, message = builder(namespace=namespace), Message("orders", b"body", **fields)
    size = made.batch_bytes(message)
    extra = {"INSTANCE_ID": "ns"} if namespace else None
    real = len(encode_inner(b"body", properties_of(message, message_id="0" * 32, extra=extra), 0))
    assert real <= size <= real + 54
    if not namespace and "properties" not in fields and size < 1000:
        assert made.batch_bytes(replace(message, message_id="i" * 50)) == size + 50


@pytest.mark.parametrize(
    ("body", "fields", "timed", "version", "is_compressed"),
    [
        (b"x" * 99, {}, False, 0, False), (b"x" * 100, {}, False, 0, True),
        (b"x", {"delay_level": 1}, True, 0, False), (b"x", {"delay_ms": 1}, True, 407, False),
        (b"x", {"flag": 9}, False, 0, False),
    ],
)  # fmt: skip
def test_a_request_of_one_message(body, fields, timed, version, is_compressed):
    made = builder(compressMsgBodyOverHowmuch=100, maxMessageSize=1024, namespace="ns")
    request = made.single(Message("orders", body, message_id="ID", **fields), {"more": "1"})
    assert (request.topic, request.message_id, request.timed) == ("ns%orders", "ID", timed)
    assert bool(request.least_version) is bool(version) and not request.batch
    assert (len(request.body) < len(body), request.sys_flag != 0) == (is_compressed, is_compressed)
    assert request.flag == fields.get("flag", 0)
    assert {"INSTANCE_ID\x01ns", "more\x011", "UNIQ_KEY\x01ID"} <= set(
        request.properties.split("\x02")
    )
    assert made.queue(QUEUE) == MessageQueue("ns%orders", "a", 1)
    assert made.queue(made.queue(QUEUE)) == made.queue(QUEUE) and builder().queue(QUEUE) is QUEUE
    assert len(made.topic("t" * 124)) == 127
    with pytest.raises(errors.MessageError, match="128 characters; the limit is 127"):
        made.topic("t" * 125)
    assert made.single(Message("orders", bytes(1024))).message_count == 1
    large = Message("orders", bytes(1025), keys=["k"])
    for refuse in (made.single, made.batch_bytes, lambda one: list(made.batches([one]))):
        with pytest.raises(errors.MessageError, match="maxMessageSize is 1024") as caught:
            refuse(large)
        with pytest.raises(errors.MessageError, match="the limit is") as wide:
            refuse(Message("orders", b"x", keys=["ü" * 20_000]))
        assert wide.value.code == "PROPERTIES_TOO_LARGE"
        facts = {"topic": "orders", "keys": ("k",), "size": 1025, "limit": 1024}
        assert caught.value.code == "BODY_TOO_LARGE" and facts.items() <= caught.value.facts.items()


@pytest.mark.parametrize(
    ("keys", "lacks"),
    [(("a", "b"), False), (("a", None), True), (("a", "\t"), True)],
)
@pytest.mark.parametrize("wait", [True, False])
def test_a_request_of_a_batch(keys, lacks, wait):
    messages = [Message("orders", b"x", keys=k or (), wait_store=wait, message_id=f"I{n}")
                for n, k in enumerate(keys)]  # fmt: skip
    (part,) = builder().batches(messages)
    request = part.request
    assert (request.message_count, request.batch, request.lacks_keys) == (2, True, lacks)
    assert request.properties == f"WAIT\x01{str(wait).lower()}\x02"
    assert (request.message_id, part.ids, part.messages) == ("I0,I1", ("I0", "I1"), tuple(messages))


def test_batches_end_at_the_limits(monkeypatch):
    messages = [Message("orders", b"x" * 100, message_id=f"I{n}") for n in range(5)]
    size = len(encode_inner(b"x" * 100, properties_of(messages[0], message_id="I0"), 0))

    def counts(limit, of_broker=None):
        parts = [*builder(of_broker).batches(messages, limit)]
        assert [m for part in parts for m in part.messages] == messages
        return [len(part.messages) for part in parts]

    assert counts(2 * size) == counts(9999, 2 * size) == [2, 2, 1]
    assert counts(2 * size - 1) == counts(2 * size - 1, 9999) == [1] * 5
    monkeypatch.setattr(request_builder, "BATCH_MAX_MESSAGES", 3)
    assert counts(None) == [3, 2]
    whole = builder()
    with pytest.raises(errors.MessageError, match="batch"):
        list(whole.batches([]))
    are_batches = [part.request.batch for part in whole.batches(messages[:3], 2 * size)]
    assert are_batches == [True, False], "one message is no batch"
    (part,) = whole.batches(messages[:2])
    part.request.queue, part.request.timeout_s = QUEUE, 7.0
    halves = whole.split(part)
    assert [half.ids for half in halves] == [("I0",), ("I1",)]
    assert {(half.request.queue, half.request.timeout_s) for half in halves} == {(QUEUE, 7.0)}


@pytest.mark.parametrize(
    ("own", "now"),
    [({}, {"traceparent": "span"}), ({"traceparent": "own"}, {"traceparent": "own"}),
     ({"a": "1", "baggage": "own"}, {"traceparent": "span", "a": "1", "baggage": "own"})],
)  # fmt: skip
def test_a_context_is_added_to_the_properties(monkeypatch, own, now):
    context = {"traceparent": "span"} | ({"baggage": "span"} if len(own) == 2 else {})
    monkeypatch.setattr(request_builder, "trace_context", lambda: context)
    assert with_trace_context(Message("orders", b"x", properties=own)).properties == now
    monkeypatch.setattr(request_builder, "trace_context", dict)
    assert with_trace_context(Message("orders", b"x", properties=own)).properties == own


@pytest.mark.parametrize(
    ("offset_ids", "own"), [("M1,M2,M3", ["M1", "M2", "M3"]), ("M1", ["M1"] * 3)]
)
def test_the_results_of_a_batch(offset_ids, own):
    result = RESULT._replace(offset_message_id=offset_ids)
    assert results_of(result, ["A", "B", "C"]) == [
        result._replace(message_id=message_id, offset_message_id=offset_id, queue_offset=7 + n)
        for n, (message_id, offset_id) in enumerate(zip("ABC", own, strict=True))
    ]


# --- groups and the queue ----------------------------------------------------------------------


def asynchronous(number, body=b"body", **more):
    future = SendFuture(None, None, None, None)
    fields = {"since_s": NOW_S, "message_id": f"I{number}", "token": future, **more}
    return SendRequest("orders", body, **fields)


@pytest.mark.parametrize(
    ("change", "is_alone", "is_other"),
    [
        ({}, False, False), ({"ordered": True}, True, None), ({"choose": len}, True, None),
        ({"timeout_s": 1.0}, True, None), ({"token": None}, True, None),
        ({"queue": QUEUE}, False, True), ({"timed": True}, False, True),
        ({"least_version": 1}, False, True), ({"since_s": NOW_S + 0.1}, False, True),
        ({"since_s": NOW_S + 0.09}, False, False),
    ],
)  # fmt: skip
def test_who_may_share_a_group(change, is_alone, is_other):
    key = group_key(asynchronous(1, **change))
    assert (key is None) is is_alone
    assert is_alone or (key != group_key(asynchronous(0))) is is_other


def test_a_group_has_the_fields_of_its_first_and_ends_each_future():
    shared = {"queue": QUEUE, "timed": True, "least_version": 3}
    requests = [asynchronous(n, b"x" * n, **shared) for n in range(4)]
    requests[1].since_s += 0.01
    request = group_request(requests)
    group = request.group
    assert (request.message_count, request.message_id, request.since_s) == (4, "I0", NOW_S)
    assert {name: getattr(request, name) for name in shared} == shared and request.token is group
    assert (len(group), group.body_bytes, group.bytes_of(np.array([1, 3]))) == (4, 6, 4)
    assert group.leave(1, 2) is requests[1] and group.leave(1, 3).message_count == 2
    columns = np.array([2, 0]), np.array([8, 9]), np.array([b"M8", b"M9"])
    for texts, values in ((None, (None, None)), (np.array([b"t", b"u"]), ("t", "u"))):
        stored = StoredFrames(*columns, texts, texts, np.array([3.0, 4.0]))
        ends = [*group._stored_results(RESULT, stored)]
        assert [end[0] for end in ends] == [requests[2].token, requests[0].token]
        assert ends[0][1] == RESULT._replace(
            message_id="I2", offset_message_id="M8", queue_offset=8, latency_ms=3.0,
            transaction_id=values[0], recall_handle=values[0],
        )  # fmt: skip
        assert ends[1][1].recall_handle == values[1]
    error = errors.ConnectError("refused")
    group.on_done(Completion(group, Outcome.NOT_SENT, None, error))
    failures = [future.exception(0) for future in group.tokens]
    assert len({id(error), *map(id, failures)}) == 5


class Engine:
    """An engine that takes requests until its window is full."""

    def __init__(self, **options):
        self.options = SinkOptions.parse(options)
        self.taken = []
        self.failures = []
        self.window = Window(self.options)
        self.flow = SimpleNamespace(
            window=self.window, measure_failure=lambda *args: self.failures.append(args)
        )
        self.client = SimpleNamespace(rpc_hooks=[])
        self.refuses = None

    def clock(self):
        return NOW_S

    def try_submit(self, request):
        if self.refuses is not None:
            raise self.refuses
        if not self.window.take(len(request.body), request.message_count):
            return False
        self.taken.append(request)
        return True

    def sizes(self):
        """Return the numbers of messages of the requests that were taken."""
        return [request.message_count for request in self.taken]


@pytest.mark.parametrize(
    ("count", "options", "hooks", "sizes", "remaining"),
    [
        (7, {}, (), [1] * 7, 0), (8, {}, (), [8], 0), (8, {}, ("hook",), [1] * 8, 0),
        (300, {}, (), [256, 44], 0), (260, {}, (), [256, 1, 1, 1, 1], 0),
        (12, {"maxInFlight": 9}, (), [9], 3), (5, {"maxInFlight": 3}, (), [1, 1, 1], 2),
        (600, {"backPressureForAsyncSendSize": 1024}, (), [256], 344),
    ],
)  # fmt: skip
def test_requests_are_taken_in_groups_while_there_is_room(count, options, hooks, sizes, remaining):
    engine = Engine(**options)
    engine.client.rpc_hooks = hooks
    queue = RequestQueue(engine)
    requests = [asynchronous(n) for n in range(count)]
    for request in requests:
        queue.put(request)
    queue.drain()
    assert (engine.sizes(), list(queue.requests)) == (sizes, requests[count - remaining :])
    assert queue.has_room() is not bool(remaining)
    engine.window.requests = engine.window.bytes = 0
    queue.drain()
    assert not queue.requests or len(queue.requests) < remaining
    assert not queue._bytes or queue.requests


def test_a_sender_waits_until_its_request_is_taken():
    engine = Engine(maxInFlight=4)
    queue = RequestQueue(engine)
    requests = [asynchronous(n, since_s=0.0) for n in range(5)]
    waiters = [queue.put_if_room(request) for request in requests]
    assert [waiter is None for waiter in waiters] == [True] * 4 + [False]
    assert [request.since_s for request in requests] == [NOW_S] * 4 + [0.0]
    queue.drain()
    assert engine.sizes() == [1] * 4 and not queue.has_room() and waiters[4].value is None
    engine.window.give_back(0, 0)
    queue.drain()
    assert len(queue.requests) == 1, "the window is not roomy"
    engine.window.give_back(4, 1)
    queue.drain()
    assert waiters[4].value is True and not queue.requests
    again = queue.put_if_room(requests[0])
    assert again is not None and queue.withdraw(requests[0]) and not queue.withdraw(requests[0])
    assert not queue._blocked and RequestQueue(Engine(maxMessagesPerSecond=1)).put_if_room(
        requests[0]
    )


@pytest.mark.parametrize(
    ("due_s", "is_called", "has_completions", "waits"),
    [
        (math.inf, False, False, [1.0, 1.0]), (NOW_S + 0.4, False, False, [0.4, 0.4]),
        (NOW_S - 1.0, False, False, [0.0, 0.0]), (math.inf, True, False, [0.01, 0.01]),
        (math.inf, False, True, [1.0, 0.0]),
    ],
)  # fmt: skip
def test_a_step_waits_until_something_is_due(due_s, is_called, has_completions, waits):
    engine, limits = Engine(), []
    engine.heartbeats, engine.has_completions = SimpleNamespace(), has_completions
    engine.prepare = lambda longest_s: limits.append(longest_s) or longest_s
    engine.client.wait = lambda longest_s: limits.append(longest_s) or []
    engine.process = engine.take = lambda *ready: []
    thread = EngineThread(engine)
    thread.tasks.append(SimpleNamespace(run=lambda now_s: due_s))
    thread._calls.extend([SimpleNamespace(step=lambda: None)] * is_called)
    thread._step(1.0)
    assert limits == pytest.approx(waits)


def test_an_error_of_a_step_does_not_end_the_producers_thread(monkeypatch):
    engine, steps = Engine(), []
    engine.heartbeats = SimpleNamespace()
    thread = EngineThread(engine)

    def step(longest_s):
        steps.append(longest_s)
        if len(steps) == 1:
            raise TypeError("a hook's value")
        thread.state = State.CLOSED

    monkeypatch.setattr(thread, "_step", step)
    driving = threading.Thread(target=thread._run)
    driving.start()
    driving.join(60)
    assert steps == [1.0, 1.0]


@pytest.mark.parametrize("error", [errors.ConnectError("no"), ValueError("defect")])
@pytest.mark.parametrize("count", [1, GROUP_LEAST])
def test_what_the_engine_refuses_ends_each_of_its_messages(error, count):
    engine = Engine()
    engine.refuses = error
    queue = RequestQueue(engine)
    requests = [asynchronous(n) for n in range(count)]
    for request in requests:
        queue.put(request)
    queue.drain()
    queue.put(asynchronous(9))
    queue.close()
    *own, closed = queue.refused
    assert [end.token for end in own] == [request.token for request in requests]
    assert {end.outcome for end in own} == {Outcome.NOT_SENT} and len(engine.failures) == 2
    kind = errors.ConnectError if isinstance(error, errors.SendError) else errors.UnwrittenError
    assert {type(end.error) for end in own} == {kind}
    assert isinstance(closed.error, errors.ProducerClosedError)


# --- transactions, requests and replies --------------------------------------------------------


class Driver:
    """A driver that answers each call of a broker by `answer`."""

    closing = False

    def __init__(self, answer=None, half=None):
        self.answer, self.half = answer or Frame(0), half or RESULT
        self.sent = []
        self.calls = []
        self.stays = []
        self.now_s = NOW_S
        self.info = SimpleNamespace(masters={"a": "a:1"})
        self.engine = SimpleNamespace(
            clock=lambda: self.now_s, identity=SimpleNamespace(client_id="me", group="g"),
            routes=SimpleNamespace(addresses=lambda: {"a": "moved:1"}),
            client=SimpleNamespace(respond=lambda *args: self.calls.append(args)),
        )  # fmt: skip
        self.thread = SimpleNamespace(wake=lambda: self.calls.append("wake"))

    def send(self, request, messages, mode):
        self.sent.append((request, messages, mode))
        if isinstance(self.half, Exception):
            raise self.half
        return self.half

    def submit_again(self, request, token):
        self.sent.append((request, token))

    def invoke(self, address, frame):
        self.calls.append((address, frame, "two-way"))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def oneway(self, address, frame):
        self.calls.append((address, frame, "oneway"))

    def publish_info(self, topic, **more):
        self.calls.append((topic, more))
        return self.info

    def stay_connected(self, until_s=0.0):
        self.stays.append(until_s)


class Ends(SendHook):
    def __init__(self):
        self.contexts = []

    def end_transaction(self, context):
        self.contexts.append(context)


HALF = RESULT._replace(offset_message_id="7F00000100002A9F00000000000003E8", queue_offset=5)
"""The result of a half message at the commit-log offset 1000."""


class Unspeakable(Exception):
    def __repr__(self):
        raise AttributeError("missing")


@pytest.mark.parametrize(
    ("decision", "state", "flag", "error"),
    [
        (COMMIT, COMMIT, "8", None), (ROLLBACK, ROLLBACK, "12", None), (None, UNKNOWN, "0", None),
        ("yes", UNKNOWN, "0", "TypeError(\"a TransactionState is wanted, not 'yes'\")"),
        (ValueError("no"), UNKNOWN, "0", "ValueError('no')"),
        (ValueError("x" * 5000), UNKNOWN, "0", f"ValueError('{'x' * 1009}..."),
        (Unspeakable(), UNKNOWN, "0", "Unspeakable"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("listener", [None, lambda message: COMMIT])
def test_the_end_of_a_transaction(decision, state, flag, error, listener):
    driver, hooks, ends = Driver(half=HALF), Hooks("g"), Ends()
    hooks.add(ends)
    client = TransactionClient("g", driver, builder(namespace="ns"), hooks, lambda: listener)
    calls = []

    def execute(message, arg):
        calls.append((message.message_id, arg))
        if isinstance(decision, Exception):
            raise decision
        return decision

    result = client.send(Message("orders", b"x", message_id="ID"), execute, "arg")
    [(request, _, mode)] = driver.sent
    facts = mode, request.timed, request.sys_flag & 12, calls
    assert facts == ("transaction", True, 4, [("ID", "arg")])
    assert {"TRAN_MSG\x01true", "PGROUP\x01g"} <= set(request.properties.split("\x02"))
    assert driver.stays == ([] if listener is None else [0.0])
    [(address, frame, way)] = driver.calls
    assert (address, way) == ("moved:1", "oneway" if state is UNKNOWN else "two-way")
    assert frame.ext == {
        "topic": "ns%orders", "producerGroup": "g", "tranStateTableOffset": "5",
        "commitLogOffset": "1000", "commitOrRollback": flag, "fromTransactionCheck": "false",
        "msgId": "ID", "transactionId": "T", "bname": "a",
    }  # fmt: skip
    assert frame.remark == (error and f"executing the local transaction raised {error}")
    assert (result.state, result.end_error, result.send_result) == (state, None, HALF)
    assert result.ended is (state is not UNKNOWN) and result.transaction_id == "ID"
    assert type(result.local_error).__name__ == (error or "NoneType").partition("(")[0]
    [context] = ends.contexts
    assert replace(context, message=None) == EndTransactionContext(
        "g", "ns%orders", None, "ID", "T", "moved:1", state.value, False, None
    )


@pytest.mark.parametrize(
    ("answer", "half", "error"),
    [
        (Frame(1, remark="no"), HALF, errors.BrokerError),
        (Frame(10, remark="late"), HALF, errors.NotStoredError),
        (errors.ConnectError("no"), HALF, errors.ConnectError),
        (Frame(0), HALF._replace(offset_message_id="?"), errors.InvalidAnswerError),
    ],
)
def test_an_end_that_failed(answer, half, error, caplog):
    driver = Driver(answer, half)
    client = TransactionClient("g", driver, builder(), Hooks("g"), lambda: None)
    result = client.send(Message("orders", b"x"), lambda *_: COMMIT)
    assert type(result.end_error) is error and not result.ended
    if type(answer) is Frame and answer.code:
        facts = {"response_code": answer.code, "remark": answer.remark}
        assert facts.items() <= result.end_error.facts.items()
    assert ("failed: " in caplog.text) is bool(driver.calls)


def test_a_degraded_half_message_is_rolled_back_although_its_send_fails():
    degraded = HALF._replace(outcome=Outcome.ACKED_DEGRADED)
    for half in (degraded, errors.DegradedError("degraded", result=degraded)):
        driver = Driver(half=half)
        client = TransactionClient("g", driver, builder(), Hooks("g"), lambda: None)
        try:
            assert client.send(Message("orders", b"x"), lambda *_: 1 / 0).state is ROLLBACK
        except errors.DegradedError:
            assert half is not degraded
        [(_, frame, _)] = driver.calls
        assert (frame.ext["commitOrRollback"], frame.remark) == ("12", None)


@pytest.mark.parametrize(
    ("group", "listener", "flag"),
    [("g", lambda m: COMMIT, "8"), ("g", lambda m: 1 / 0, "0"), ("other", lambda m: COMMIT, ""),
     ("g", None, "")],
)  # fmt: skip
def test_a_check_is_answered_with_its_own_fields(monkeypatch, caplog, group, listener, flag):
    message = StoredMessage("orders", b"x", properties={"UNIQ_KEY": "ID"})
    check = TransactionCheck(
        producer_group=group, topic="orders", tran_state_table_offset=5, commit_log_offset=1000,
        transaction_id="T", broker_name="a", message=message,
    )  # fmt: skip
    driver = Driver()
    hooks, ends = Hooks("g"), Ends()
    hooks.add(ends)
    client = TransactionClient("g", driver, builder(), hooks, lambda: listener)
    monkeypatch.setattr(
        "rocket_sink.producer.transactions.decode_transaction_check", lambda f: check
    )
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr("rocket_sink.producer.transactions._HELD_CHECKS", 1)
    for _ in range(2):
        client.take_check(SimpleNamespace(address="a:1"), Frame(39))
    assert ("1 transaction checks wait; one more is dropped" in caplog.text) is bool(flag)
    assert (client._checks is not None) is bool(flag)
    if flag:
        client._answer_check(*client._checks.get_nowait())
        [(address, frame, _)] = driver.calls
        assert address == "a:1" and frame.ext == {
            "topic": "orders", "producerGroup": "g", "tranStateTableOffset": "5",
            "commitLogOffset": "1000", "commitOrRollback": flag, "fromTransactionCheck": "true",
            "msgId": "T", "transactionId": "T", "bname": "a",
        }  # fmt: skip
        text = "the transaction listener raised ZeroDivisionError('division by zero')"
        assert frame.remark == (None if flag == "8" else text)
        [end] = ends.contexts
        assert end.from_transaction_check and end.message is message


@pytest.mark.parametrize(
    ("error", "text"),
    [(errors.ConnectError("no way"), "at a:1 was not answered: no way"),
     (ValueError("defect"), "defect")],
)  # fmt: skip
def test_a_check_that_is_not_answered_is_logged(caplog, error, text):
    checks = SimpleNamespace(get=lambda timeout: ("a:1", "check"))
    driver = Driver()
    client = TransactionClient("g", driver, builder(), Hooks("g"), lambda: None)

    def fail(address, check):
        driver.closing = True
        raise error

    client._answer_check = fail
    client._answer_checks(checks)
    # PySpark's logger gives the handler of tests another form, so look at the record itself.
    (record,) = caplog.records
    assert text in f"{record.getMessage()} {record.exc_info}" and record.peer == "a:1"


def waiting_driver(*, is_taken):
    """Return a driver whose waits end without a value; its queue has the request, or not."""
    made = object.__new__(producer_driver.Driver)
    waits = []
    made.engine, made._timeout_s, made._hooks = Engine(), 3.0, Hooks("g")
    made.engine.pending = 5
    made.engine.longest_s = 20.0

    def wait(waiter, timeout_s):
        waits.append(timeout_s)
        return False

    made.thread = SimpleNamespace(wait=wait, wake=list, state=State.OPEN)
    made._queue = SimpleNamespace(
        requests=[], put_if_room=lambda request: "waiter", withdraw=lambda request: not is_taken
    )
    made.waits = waits
    return made


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.parametrize(("own_s", "since_s", "wait_s"), [(None, 0.0, 3.0), (7.0, NOW_S - 2, 5.0)])
def test_a_request_that_was_taken_after_all_is_awaited(is_taken, own_s, since_s, wait_s):
    driver = waiting_driver(is_taken=is_taken)
    request = SendRequest(
        "orders", b"x", timeout_s=own_s, since_s=since_s, properties="KEYS\x01k\x02"
    )
    if is_taken:
        driver.submit(request, None)
    else:
        words = r"1 bytes to 'orders' keys k: 5 requests.*backPressure"
        with pytest.raises(errors.WindowFullError, match=words) as caught:
            driver.submit(request, None)
        assert (caught.value.keys, caught.value.size) == (("k",), 1)
        assert request.since_s == (since_s or NOW_S) and len(driver.engine.failures) == 1
    assert driver.waits == [wait_s]
    sync = SendRequest("orders", b"x", timeout_s=own_s)
    if is_taken:
        with pytest.raises(errors.RequestTimeoutError, match="long past"):
            driver.send(sync, (), "sync")
    else:
        with pytest.raises(errors.WindowFullError):
            driver.send(sync, (), "sync")
    assert driver.waits[1:] == [own_s or 3.0] + [26.0] * is_taken


def test_a_request_has_the_rest_of_its_time():
    driver = Driver()
    asks = RequestReply(driver, builder(namespace="ns"))

    def publish(topic, *, timeout_s):
        assert (topic, timeout_s) == ("ns%orders", 2.0)
        driver.now_s += 0.25

    driver.publish_info = publish

    def send(request, messages, mode):
        properties = dict(p.split("\x01") for p in request.properties.rstrip("\x02").split("\x02"))
        assert (request.timeout_s, mode, request.queue.topic) == (1.75, "request", "ns%orders")
        assert (properties["REPLY_TO_CLIENT"], properties["TTL"]) == ("me", "2000")
        [(correlation_id, waiter)] = asks._waiting.items()
        assert correlation_id == properties["CORRELATION_ID"]
        if driver.half is not RESULT:
            waiter.finish("reply")
        else:
            driver.now_s += 9.0
        return RESULT

    driver.send = send
    with pytest.raises(errors.ReplyTimeoutError, match=r"within 2.0 s .*ID") as late:
        asks.request(Message("orders", b"x"), 2.0, QUEUE)
    assert late.value.message_id == "ID" and late.value.correlation_id and not asks._waiting
    assert driver.stays == [NOW_S + 0.75], "it waits half a second for connections"
    driver.now_s, driver.half = NOW_S, None
    assert asks.request(Message("orders", b"x"), 2.0, QUEUE) == "reply"
    assert len(driver.stays) == 1, "the topic's brokers are connected"


@pytest.mark.parametrize(
    ("masters", "address"), [({"a": "a:1"}, "a:1"), ({}, "moved:1"), (None, None)]
)
def test_a_recall_goes_to_the_broker_of_its_handle(masters, address):
    driver = Driver(Frame(0, {"msgId": "ID"}))
    driver.info.masters = masters or {}
    name = "z" if masters is None else "a"
    asks = RequestReply(driver, builder(namespace="ns"))
    text = encode_recall_handle(RecallHandle("ns%orders", name, "1", "ID"))
    if address is None:
        with pytest.raises(errors.NoRouteError, match="broker z of the recall handle") as caught:
            asks.recall("orders", text)
        assert caught.value.topic == "ns%orders"
        return
    assert asks.recall("orders", text) == "ID"
    used, frame, _ = driver.calls[-1]
    assert used == address and frame.ext == {
        "producerGroup": "g", "topic": "ns%orders", "recallHandle": text, "bname": "a",
    }  # fmt: skip
    facts = {"topic": "ns%orders", "broker_name": "a", "broker_address": address}
    for code, remark, is_forbidden in (
        (17, "gone", False), (16, "operation is forbidden", True), (16, "no right", False),
        (1, "operation is forbidden", False),
    ):  # fmt: skip
        driver.answer = Frame(code, remark=remark)
        with pytest.raises(errors.SendError, match=remark) as refused:
            asks.recall("orders", text)
        assert facts.items() <= refused.value.facts.items()
        assert ("recallMessageEnable=true" in str(refused.value)) is is_forbidden


# --- traces ------------------------------------------------------------------------------------


def context(mode="sync", message=None, **result):
    made = SendContext(mode, "ns%g", "ns%orders", [message or MESSAGE], ("ID",), 5)
    made.result, made.cost_ms = RESULT._replace(**result), 12.7
    return made


MESSAGE = Message("orders", b"body", tags="tag", keys=["k1", "k2"])


def tracer(**options):
    driver = Driver()
    parsed = SinkOptions.parse(traceSample=1, namespace="ns", producerGroup="g", **options)
    return Tracer(parsed, builder(), driver), driver


@pytest.mark.parametrize(
    ("mode", "fields", "kind"),
    [
        ("sync", {}, MessageType.NORMAL), ("sync", {"delay_level": 1}, MessageType.DELAY),
        ("sync", {"priority": 1}, MessageType.NORMAL),
        ("sync", {"lite_topic": "l"}, MessageType.NORMAL),
        ("transaction", {}, MessageType.TRANSACTION_HALF),
    ],
)  # fmt: skip
def test_the_line_of_a_message(mode, fields, kind):
    traces, _ = tracer()
    traces.after_send(context(mode, replace(MESSAGE, **fields), region_id=None))
    assert traces._lines.pop() == PubTrace(
        5, "DefaultRegion", "g", "orders", "ID", "tag", "k1 k2", "a:1", 4, 12, kind, "M1", True
    )
    traces.after_send(context(outcome=Outcome.ACKED_DEGRADED))
    last = traces._lines.pop()
    assert (last.success, last.region_id) == (False, "region")
    for untraced in ({"trace_on": False}, None):
        made = context(**untraced or {})
        made.topic = made.topic if untraced else "RMQ_SYS_TRACE_TOPIC"
        traces.after_send(made)
    assert not traces._lines
    batch = context(offset_message_id="M1,M2")
    batch.messages, batch.message_ids = [MESSAGE] * 2, ("I1", "I2")
    traces.after_send(batch)
    assert [(line.message_id, line.offset_message_id) for line in traces._lines] == [
        ("I1", "M1"), ("I2", "M2")
    ]  # fmt: skip


@pytest.mark.parametrize("is_check", [True, False])
def test_the_line_of_the_end_of_a_transaction(is_check):
    traces, _ = tracer()
    message = MESSAGE if not is_check else StoredMessage("t", b"", properties={"TAGS": "tag"})
    traces.end_transaction(EndTransactionContext(
        "ns%g", "ns%orders", message, "ID", None, "a:1", "COMMIT_MESSAGE", is_check, None
    ))  # fmt: skip
    line = traces._lines.pop()
    assert line.time_ms > 1_700_000_000_000
    assert replace(line, time_ms=0) == EndTransactionTrace(
        0, "DefaultRegion", "g", "orders", "ID", "tag", "" if is_check else "k1 k2", "a:1",
        MessageType.TRANSACTION_COMMIT, "", "COMMIT_MESSAGE", is_check,
    )  # fmt: skip


def test_lines_are_sent_when_they_are_due_or_many(monkeypatch):
    traces, driver = tracer(traceTopic="traces")
    assert traces.run(NOW_S) == math.inf and not driver.sent
    traces.after_send(context())
    assert driver.calls == ["wake"] and traces.run(NOW_S + 0.4) == NOW_S + 0.5
    driver.now_s += 0.3
    traces.after_send(context())
    assert traces.run(NOW_S + 0.49) == NOW_S + 0.5 and not driver.sent, "the first line counts"
    assert traces.run(NOW_S + 0.5) == math.inf
    [(request, token)] = driver.sent
    assert request.topic == "traces" and token is traces and b"ID" in request.body
    assert "KEYS\x01ID k1 k2\x02" in request.properties
    for number in range(100):
        assert number == 0 or traces.run(driver.now_s) > driver.now_s
        traces.after_send(context())
    assert traces.run(driver.now_s) == math.inf and len(driver.sent) == 2
    monkeypatch.setattr(tracing, "_HELD", 2)
    for _ in range(5):
        traces.after_send(context())
    assert traces.dropped == 3
    for error, dropped in ((None, 3), (errors.ConnectError("no"), 4)):
        traces.on_done(Completion(None, Outcome.ACKED, None, error))
        assert traces.dropped == dropped
    driver.submit_again = lambda *_: (_ for _ in ()).throw(errors.ConnectError("no"))
    assert traces.run(math.inf) == math.inf and traces.dropped == 6


RECORD = AttemptRecord(
    1, "orders", "a", "a:1", 1, 7, 100, 0.0, 0.0, 20.5, 2, 8, 90, Outcome.ACKED
)  # fmt: skip


@pytest.mark.parametrize(
    ("properties", "half", "kind"),
    [("", False, MessageType.NORMAL), ("", True, MessageType.TRANSACTION_HALF),
     ("TIMER_DELAY_MS\x015\x02", False, MessageType.DELAY),
     ("DELAY\x015\x02", False, MessageType.DELAY),
     ("TIMER_DELIVER_MS\x015\x02", False, MessageType.DELAY)],
)  # fmt: skip
def test_the_lines_of_a_tasks_request(properties, half, kind):
    options = SinkOptions.parse(traceSample=1, namespace="ns", producerGroup="ns%g")
    traces = RequestTraces(options, Engine())
    lines = []
    traces._send = lines.extend
    texts = [f"UNIQ_KEY\x01I{n}\x02KEYS\x01k\x02{properties}" for n in range(3)]
    own = [SimpleNamespace(body=b"body", properties=text) for text in texts]
    later = replace(RECORD, attempt=2, started_ms=150)
    result = RESULT._replace(queue=MessageQueue("ns%orders", "a", 1), region_id=None)
    end = Completion(None, Outcome.ACKED, result, None, [RECORD, later])
    traces.note(
        end, lambda indices: own if indices is None else [own[i] for i in indices], half=half
    )
    expected = PubTrace(
        100, "DefaultRegion", "g", "orders", "I0", "", "k", "a:1", 4, 70, kind, "M1", True
    )
    assert lines == [replace(expected, message_id=f"I{n}") for n in range(3)]
    lines.clear()
    end.stored = StoredFrames(
        np.array([2]), np.array([9]), np.array([b"M9"]), None, None, np.zeros(1)
    )
    end.outcome = Outcome.ACKED_DEGRADED
    traces.note(end, lambda indices: [own[i] for i in indices or ()], half=half)
    assert lines == [replace(expected, message_id="I2", offset_message_id="M9", success=False)]
    lines.clear()
    for change in ({"trace_on": False}, {"queue": MessageQueue("RMQ_SYS_TRACE_TOPIC", "a", 0)}):
        end.result = result._replace(**change)
        traces.note(end, lambda indices: own, half=half)
    assert not lines


def test_a_task_sends_few_traces_at_once():
    engine = Engine()
    traces = RequestTraces(SinkOptions.parse(traceSample=1, compressLevel=0), engine)
    line = PubTrace(1, "r", "g", "t", "ID", "", "", "a:1", 1, 1, MessageType.NORMAL, "M", True)
    for _ in range(66):
        traces._send([line])
    assert (traces.in_flight, len(engine.taken), traces.dropped) == (64, 64, 2)
    request = engine.taken[0]
    assert (request.oneway, request.attempts, request.timeout_s) == (True, 1, 1.0)
    assert request.token is traces and request.topic == "RMQ_SYS_TRACE_TOPIC"
    engine.drain = lambda deadline_s: [Completion(traces, Outcome.UNKNOWN, None, None)] * 64
    traces.close()
    assert traces.in_flight == 0
    traces._send([replace(line, message_id="i" * 40_000)])
    engine.refuses = errors.ConnectError("no")
    traces._send([line])
    assert traces.dropped >= 3


# --- threads and the process's end -------------------------------------------------------------


def test_open_futures_are_pruned_and_unseen_failures_are_kept(monkeypatch):
    monkeypatch.setattr("rocket_sink.producer.future._PRUNE_AT", 3)
    futures = OpenFutures()
    own = [SendFuture(None, None, None, None) for _ in range(6)]
    for future in own[:5]:
        futures.append(future)
    own[0].resolve(RESULT, None)
    for future in own[1:5]:
        future.resolve(None, errors.ConnectError("no"))
    assert own[1].exception(0) is not None, "somebody has asked"
    assert wait(own[2:4], 0).done == {*own[2:4]}, "a wait asks for no error"
    futures.prune()
    assert futures.unseen == own[2:5] and futures.undone() == []
    futures.append(own[5])
    futures.prune()
    assert len(futures._new) == 1, "few futures are left for later"
    assert futures.undone() == [own[5]] == futures.undone()


def test_a_failure_is_seen_by_a_callback():
    workers, ends = SimpleNamespace(callbacks=SimpleNamespace(put=lambda job: job())), []
    future = SendFuture(workers, Hooks("g"), None, lambda *end: ends.append(end))
    future.resolve(None, errors.ConnectError("no"))
    assert len(ends) == 1 and not future.is_unseen_failure


@pytest.mark.parametrize(
    ("state", "is_abandoned", "is_running", "joins", "is_counted"),
    [
        (State.OPEN, False, True, [], True), (State.OPEN, False, False, [], False),
        (State.REFUSING, False, True, [21.0], False), (State.OPEN, True, True, [21.0], False),
    ],
)  # fmt: skip
def test_the_end_counts_what_was_not_delivered(
    state, is_abandoned, is_running, joins, is_counted, caplog
):
    own = [SendFuture(None, None, None, None) for _ in range(4)]
    own[0].resolve(RESULT, None)
    for future in own[1:3]:
        future.resolve(None, errors.ConnectError("no"))
    assert own[1].exception(0), "somebody knows it"
    driver, called = object.__new__(producer_driver.Driver), []
    driver.engine = SimpleNamespace(clock=lambda: NOW_S, longest_s=20.0)
    driver.futures = SimpleNamespace(unseen=own[2:3], undone=lambda: own)
    driver.flush = driver._has_ended = bool
    driver.thread = SimpleNamespace(
        state=state, is_abandoned=is_abandoned, is_running=is_running, tasks=[],
        join=called.append, call=lambda step: step(),
    )  # fmt: skip
    driver.finish()
    assert called == joins
    assert ("at least 2 messages" in caplog.text) is is_counted


def test_a_worker_runs_its_jobs_in_order_and_ends():
    worker, jobs = Worker("test-worker"), []
    assert worker.flush(0) and worker.is_idle
    for number in range(3):
        worker.put(lambda number=number: jobs.append((number, worker.is_caller, worker.flush(0))))
    assert worker.flush(60) and jobs == [(n, True, True) for n in range(3)]
    thread = worker._threads["runs"]
    gate = threading.Event()
    worker.put(lambda: gate.wait(60))
    assert not worker.flush(0.01) and not worker.is_caller
    gate.set()
    worker.put(lambda: 1 / 0)
    worker.stop()
    thread.join(60)
    assert not thread.is_alive() and not worker._threads
    worker.put(lambda: jobs.append("again"))
    assert worker.flush(60) and jobs[-1] == "again"
    assert [seconds(s) for s in (None, -2.0, 1.5, 1e99)] == [-1, 0.0, 1.5, threading.TIMEOUT_MAX]


def test_the_end_waits_for_calls_of_daemon_threads_and_lets_no_other_begin(monkeypatch, caplog):
    monkeypatch.setattr(process_end, "_SILENT_S", 0.0)
    monkeypatch.setattr(process_end, "_CALLS_S", 0.05)
    calls, began, gate, done = Calls("a test"), threading.Event(), threading.Event(), []

    def work(number):
        with calls.uninterrupted(), calls.uninterrupted():
            began.set()
            assert gate.wait(60)
            done.append(number)

    threading.Thread(target=work, args=(1,), daemon=True).start()
    assert began.wait(60)
    calls.finish()
    assert calls._threads and "it waits for a test, at most 0 s" in caplog.text
    assert caplog.text.count("it waits for") == 1
    threading.Thread(target=work, args=(2,), daemon=True).start()
    gate.set()
    calls.finish()
    assert done == [1] and not calls._threads
    with calls.uninterrupted():
        done.append(3)


def test_a_hooks_context_has_the_cost_and_replaced_hooks_are_gone():
    hooks, first, second = Hooks("g"), Ends(), Ends()
    hooks.add(first)
    hooks.add(second, instead_of=first)
    assert hooks.hooks == (second,)
    made = hooks.before("sync", "t", [MESSAGE], ("ID",))
    assert (made.mode, made.producer_group, made.topic) == ("sync", "g", "t")
    assert made.started_ms > 1_700_000_000_000
    made._started_s -= 2.0
    hooks.after(made, RESULT, None)
    assert 2000 <= made.cost_ms < 62_000 and (made.result, made.error) == (RESULT, None)
    hooks.after(None, RESULT, None)


@pytest.mark.parametrize("options", [{}, {"autoBatch": True}, {"traceSample": 1}])
def test_a_session_has_the_parts_of_its_options(closing, options):
    name = f"of-{len(options)}-{next(iter(options), '')}"
    producer = closing(Producer(nameServer="127.0.0.1:1", instanceName=name, **options))
    session = producer._session
    parts = {"autoBatch": session.accumulator, "traceSample": session.tracer}
    assert {key for key, part in parts.items() if part is not None} == options.keys()
    assert session.driver.thread.tasks == [part for part in parts.values() if part is not None]
    assert producer._hooks.hooks == (() if session.tracer is None else (session.tracer,))
    with pytest.raises(errors.ConfigurationError, match=name):
        Producer(nameServer="127.0.0.1:1", instanceName=name)
