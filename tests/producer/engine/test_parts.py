"""The engine's parts, each alone: a client whose calls a test answers, on a clock of the test."""

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from rocket_sink import errors
from rocket_sink.message import MessageQueue
from rocket_sink.net.channel import HEARD_RECENTLY_S
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import SendAttempt, SendRequest
from rocket_sink.producer.engine.brokers import Broker, SendTarget
from rocket_sink.producer.engine.heartbeat import Heartbeats
from rocket_sink.producer.engine.questions import Questions
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.producer.engine.stored_check import StoredChecks, look_up
from rocket_sink.routing.fault import FAILING, FaultTable
from rocket_sink.wire.codes import RequestCode, ResponseCode, mq_version
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.properties import UNIQ_KEY
from rocket_sink.wire.stored import StoredMessage, encode_stored

NOW_S = 100.0
LATE = errors.RequestTimeoutError("no answer")


class Asked(NamedTuple):
    address: str
    frame: Frame
    on_end: Any
    deadline_s: float

    def end(self, answer, now_s=NOW_S):
        """End the call with an answer, or an error."""
        self.on_end.on_end(answer, None, now_s)


class Client:
    """A client with open connections to `addresses`; `asked` are its calls."""

    def __init__(self, *addresses):
        self.asked = []
        self.links = {address: Link(address) for address in addresses}
        self.opened = len(addresses)
        self.now_s = NOW_S

    def clock(self):
        return self.now_s

    @property
    def channels(self):
        return self.links.values()

    def peek(self, address):
        return self.links.get(address)

    def channel(self, address, now_s):
        if address == "refuses:1":
            raise errors.ConnectError("refused")
        self.opened += 1
        return self.links.setdefault(address, Link(address))

    def call(self, address, frame, on_end, *, deadline_s, now_s):
        self.asked.append(Asked(address, frame, on_end, deadline_s))

    def call_on(self, channel, frame, on_end, *, deadline_s, now_s):
        self.call(channel.address, frame, on_end, deadline_s=deadline_s, now_s=now_s)

    def poll(self, timeout_s):
        self.now_s += timeout_s

    def take(self):
        asked, self.asked = self.asked, []
        return asked

    def addresses(self):
        """Return the addresses of the calls since the last look, in order."""
        return sorted(call.address for call in self.take())


@dataclass(eq=False)
class Link:
    """An open connection on which nothing is in flight."""

    address: str
    is_open = True
    heard_s = NOW_S
    peer_version = None
    silence_s = 0.0

    def __post_init__(self):
        self.connection = SimpleNamespace(oldest=None)

    def silent_s(self, now_s):
        return self.silence_s


# --- heartbeats and probes ---------------------------------------------------------------------


class World:
    """The heartbeats of an engine that knows the brokers a and b, each with the topic t."""

    def __init__(self, *connected, **options):
        self.client = Client(*connected)
        self.addresses = {"a": "a:1", "b": "b:1"}
        self.refreshed = []
        routes = SimpleNamespace(
            addresses=lambda: self.addresses, refresh_old=self.refreshed.append,
            topics_in_use=lambda now_s: {"a": "t", "b": "t", "gone": "t"},
        )  # fmt: skip
        self.faults = FaultTable(store=SharedBrokerState.in_process())
        identity = SimpleNamespace(client_id="me", group="g")
        parsed = SinkOptions.parse(nameServer="h:1", heartbeatBrokerInterval="30s", **options)
        self.beats = Heartbeats(parsed, self.client, routes, self.faults, identity)

    def run(self, now_s):
        self.beats.run(now_s)
        return self.client.addresses()


def test_a_connection_gets_a_heartbeat_when_it_is_new_and_then_once_per_interval():
    world = World("a:1")
    world.beats.run(NOW_S)
    [beat] = world.client.take()
    assert (beat.address, beat.frame.code) == ("a:1", RequestCode.HEART_BEAT)
    assert beat.deadline_s == NOW_S + 3.0 and not world.refreshed
    answer = Frame(0, version=mq_version(5, 1, 0))
    for end in (LATE, answer, LATE):
        beat.end(end)
    assert world.client.links["a:1"].peer_version == answer.version
    world.client.links.setdefault("b:1", Link("b:1"))
    assert world.run(NOW_S + 0.4) == [], "it has just looked"
    assert world.run(NOW_S + 0.5) == ["b:1"]
    world.client.links["a:1"] = Link("a:1")
    assert not world.beats.all_sent()
    world.client.opened += 1
    assert world.run(NOW_S + 0.6) == ["a:1"], "a new connection does not wait for the next look"
    assert world.beats.all_sent()
    assert world.run(NOW_S + 30.4) == []
    world.beats.look_now()
    assert world.run(NOW_S + 30.5) == ["b:1"]
    world.client.links["a:1"].is_open = False
    assert world.run(NOW_S + 31.1) == [], "it still connects"


@pytest.mark.parametrize(
    ("attributes", "late"),
    [((), []), (("reconnects",), ["a:1"]), (("stays_connected",), ["a:1", "b:1"])],
)
def test_brokers_without_a_connection(attributes, late):
    world = World("a:1")
    assert world.run(NOW_S) == ["a:1"]
    del world.client.links["a:1"]
    for name in attributes:
        setattr(world.beats, name, True)
    world.addresses["refuses"] = "refuses:1"
    first = world.run(NOW_S + 1.0)
    assert first == (late if "stays_connected" in attributes else [])
    assert world.refreshed == ([NOW_S + 1.0] if "stays_connected" in attributes else [])
    assert world.run(NOW_S + 29.0) == []
    assert world.run(NOW_S + 31.0) == late


def test_a_silent_connection_is_asked_once_while_an_answer_is_due():
    world = World("a:1", "b:1")
    world.run(NOW_S)
    a, b = world.client.links.values()
    a.connection.oldest = b.connection.oldest = SimpleNamespace(sent_s=NOW_S - 1, deadline_s=109.0)
    a.silence_s, b.silence_s = HEARD_RECENTLY_S / 2 + 0.01, HEARD_RECENTLY_S / 2
    world.beats.run(NOW_S + 0.1)
    [asked] = world.client.take()
    assert (asked.address, asked.deadline_s) == ("a:1", 109.0)
    assert world.run(NOW_S + 0.2) == []
    asked.end(LATE)
    assert world.run(NOW_S + 0.3) == ["a:1"]
    a.connection.oldest = None
    assert sorted(world.beats.connections()) == [("a", None, NOW_S), ("b", NOW_S - 1, NOW_S)]
    world.addresses["c"] = "b:1"
    assert [name for name, *_ in world.beats.connections()] == ["a", "b", "c"], "of a proxy"


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_the_end_waits_for_the_answers_of_connected_brokers(answers):
    world = World("a:1", "b:1", "c:1", "closed:1")
    world.addresses = {name: f"{name}:1" for name in ("a", "b", "d", "closed")}
    client, call, calls = world.client, world.client.call, []
    client.links["closed:1"].is_open = False

    def answered(address, frame, on_end, **times):
        call(address, frame, on_end, **times)
        calls.append(times["deadline_s"])
        if len(calls) <= answers:
            client.take()[0].end(Frame(0))

    client.call = answered
    world.beats.unregister(0.98)
    assert calls == [NOW_S + 0.98] * 2
    assert client.now_s == pytest.approx(NOW_S if answers == 2 else NOW_S + 1.0, abs=0.01)


@pytest.mark.parametrize(
    ("end", "after_s", "verdicts"),
    [
        (None, 0.0, [False]), (Frame(0), 0.1, [True]), (LATE, 4.1, [False]), (LATE, 4.2, []),
        (Frame(0), 4.2, [True]),
    ],
)  # fmt: skip
def test_an_unreachable_broker_is_probed(end, after_s, verdicts):
    world = World()
    for name in ("a", "gone"):
        world.faults.update(name, 1.0, NOW_S, rank=FAILING, reachable=False, cause="CONNECT")
    notes = []
    world.faults.note_probe = lambda *probe, alive: notes.append((*probe, alive))
    assert world.run(NOW_S) == [], "its first probe is due later"
    world.faults.enabled = False
    assert world.run(NOW_S + 9.0) == [], "nothing is probed without a fault table"
    world.faults.enabled = True
    now_s = NOW_S + 10.0
    world.beats.run(now_s)
    [probe] = world.client.take()
    assert (probe.address, probe.frame.code) == ("a:1", RequestCode.GET_MAX_OFFSET)
    assert probe.frame.ext["topic"] == "t" and probe.frame.ext["queueId"] == "0"
    assert probe.deadline_s == pytest.approx(now_s + 4.2)
    world.beats.look_now()
    assert world.run(now_s) == [], "one probe at a time"
    if end is not None:
        probe.end(end, now_s + after_s if after_s < 4.2 else probe.deadline_s)
    else:
        # Ticks that are far apart count as 50 ms each, because nobody reads answers between them.
        for number in range(1, 6):
            assert not notes or number == 5
            world.beats.run(now_s + 2.0 * number)
    assert [alive for *_, alive in notes] == verdicts
    if end is None:
        probe.end(Frame(0), now_s + 20.0)
        assert notes[-1] == ("a", now_s + 20.0, True), "it lives, although the answer came late"
        probe.end(LATE, now_s + 20.0)
        [again] = world.client.take()
        again.end(LATE, now_s + 12.0)
        assert [alive for *_, alive in notes] == [False, True, False]


# --- questions ---------------------------------------------------------------------------------

TARGET = SendTarget(MessageQueue("t", "a", 0), "a", "a:1", Broker("a"))
AGE_S = 30.0
KEYED = b'{"attributes":{"cleanup.policy":"COMPACTION"}}'


def asking():
    """Return a client, its events, and a function that asks about the topic t at a time."""
    client, events = Client("a:1"), set()
    questions = Questions(client, events)

    def wants_keys(since_s, now_s, topic="t"):
        return questions.wants_keys(topic, TARGET, since_s, now_s)

    return client, events, wants_keys


@pytest.mark.parametrize(
    ("end", "wants", "advice", "warnings"),
    [
        (Frame(0, body=KEYED), True, "", 0), (Frame(0, body=b"{}"), False, "", 0),
        (Frame(0, body=b"["), False, "a does not tell the cleanup.policy of topic t (", 2),
        (Frame(17), False, "", 0), (Frame(1), False, "right Get", 2),
        (Frame(3, version=mq_version(4, 9, 7)), False, "", 0),
        (Frame(3, version=mq_version(5, 0, 0)), False, "docs/deploy/proxy.md", 1),
    ],
)  # fmt: skip
def test_an_answer_holds_for_a_while(end, wants, advice, warnings, caplog):
    client, events, wants_keys = asking()
    assert wants_keys(NOW_S, NOW_S) is None and wants_keys(NOW_S, NOW_S + 1.0) is None
    [asked] = client.take()
    assert asked.frame.code == RequestCode.GET_TOPIC_CONFIG and asked.frame.ext["topic"] == "t"
    assert asked.deadline_s == NOW_S + 3.0 and not events
    asked.end(end)
    assert events == {("t", "a")} and advice in caplog.text
    assert wants_keys(NOW_S, NOW_S + AGE_S - 0.1) is wants and not client.asked
    assert wants_keys(NOW_S, NOW_S + AGE_S) is wants, "the old answer holds meanwhile"
    [again] = client.take()
    again.end(errors.ConnectError("refused"), NOW_S + AGE_S)
    assert wants_keys(NOW_S + AGE_S, NOW_S + AGE_S + 1.0) is wants, "an error ends no old answer"
    assert wants_keys(NOW_S + AGE_S + 1.0, NOW_S + AGE_S + 2.0) is wants
    client.take()[0].end(Frame(0, body=b"{}"), NOW_S + AGE_S + 2.0)
    assert wants_keys(NOW_S, NOW_S + AGE_S + 3.0) is False
    assert wants_keys(NOW_S, NOW_S, "another") is None
    client.take()[0].end(end)
    assert caplog.text.count("cleanup.policy of") == warnings, "a proxy gets one for all topics"


@pytest.mark.parametrize(
    ("end", "error"),
    [(errors.ConnectError("refused"), errors.NotSentError),
     (Frame(2, remark="busy"), errors.BrokerBusyError), (LATE, None)],
)  # fmt: skip
def test_a_question_that_failed_is_asked_again_by_later_requests(end, error):
    client, events, wants_keys = asking()
    assert wants_keys(NOW_S, NOW_S) is None
    client.take()[0].end(end, NOW_S + 1.0)
    assert events == {("t", "a")}
    if error is not None:
        for since_s in (NOW_S, NOW_S + 1.0):
            with pytest.raises(error) as caught:
                wants_keys(since_s, NOW_S + 1.5)
        assert caught.value is not end and not client.asked
    assert wants_keys(NOW_S + 1.1, NOW_S + 1.5) is None
    assert client.addresses() == ["a:1"]


# --- checks whether an attempt was stored ------------------------------------------------------


GBK = "订单".encode("gbk").decode("utf-8", "surrogateescape")


def found(*ids, torn=False, offsets=(0, 1, 2)):
    """Return a broker's answer that has messages with these ids, and a key in another encoding."""
    own = [{UNIQ_KEY: each, "KEYS": GBK} for each in ids]
    stored = [
        StoredMessage("t", b"x", properties=properties, torn=torn, commit_log_offset=offset)
        for properties, offset in zip(own, offsets, strict=False)
    ]
    return Frame(ResponseCode.SUCCESS, body=b"".join(map(encode_stored, stored)))


NOTHING = Frame(ResponseCode.QUERY_NOT_FOUND)


class Check:
    """A check of the ids i and j whose attempt ended at NOW_S, with a delay of 1 s, at most 60."""

    def __init__(self, *, timed=False):
        self.client, self.refreshed = Client(), []
        self.reread = []
        routes = SimpleNamespace(
            addresses=lambda: {"a": "moved:1"},
            refresh=lambda topic, now_s: self.refreshed.append((topic, now_s)),
        )
        self.checks = StoredChecks(1.0, 60.0, self.client, routes, self.reread.append)
        request = SendRequest("t", b"x", verify_ids=("i", "j"), timed=timed)
        self.ends = deque()
        self.attempt = SendAttempt(self.ends, request, (), 0, False, NOW_S, NOW_S + 5.0)
        self.attempt.target, self.attempt.ended_s, self.attempt.wall_ms = TARGET, NOW_S, 90_000_000
        self.error = self.attempt.ensure_history().last_error = errors.RequestTimeoutError("late")
        self.checks.begin(self.attempt)

    def answer(self, now_s, *answers):
        asked = self.client.take()
        for call, answer in zip(asked, answers, strict=True):
            call.end(answer, now_s)
        return asked

    def times(self, until_s, *answers):
        """Return the times of the questions until then, after the start; all get the answers."""
        times, now_s = [], NOW_S
        while now_s < until_s and self.client.asked:
            times.append(round(now_s - NOW_S, 3))
            self.answer(now_s, *answers)
            for check in self.checks.open:
                now_s = min(check.next_s, NOW_S + 60.0)
                self.checks.step(now_s - 0.001)
                assert not self.client.asked
            self.checks.step(now_s)
        return times


@pytest.mark.parametrize("timed", [True, False])
def test_a_broker_is_asked_for_both_ids_where_it_is_now(timed):
    check = Check(timed=timed)
    asked = check.answer(NOW_S + 2.0, found("i"), *[NOTHING] * (5 if timed else 1))
    topics = ["t", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"] if timed else ["t"]
    assert [(call.frame.ext["topic"], call.frame.ext["key"]) for call in asked] == [
        (topic, key) for topic in topics for key in "ij"
    ]
    assert {call.address for call in asked} == {"moved:1"}
    assert {call.deadline_s for call in asked} == {NOW_S + 3.0}
    assert {call.frame.ext["beginTimestamp"] for call in asked} == {str(90_000_000 - 86_400_000)}
    assert not check.ends and not check.refreshed


def test_both_ids_prove_that_it_was_stored_and_the_time_of_the_check_does_not_count(caplog):
    check = Check()
    check.answer(NOW_S + 2.0, found("i"), found("j"))
    [(attempt, result, _, ended_s)] = check.ends
    assert (attempt, ended_s, attempt.deadline_s) == (check.attempt, NOW_S + 2.0, NOW_S + 7.0)
    assert result.message.message_id == "i" and result.decided and not check.checks.open
    assert "offset 0 of queue 0 of topic t on moved:1 has properties" in caplog.text


@pytest.mark.parametrize(
    ("answers", "decided", "partly"),
    [
        ((NOTHING, NOTHING), True, False), ((found("i"), NOTHING), False, True),
        ((found("i"), found("j", torn=True)), False, True),
    ],
)  # fmt: skip
def test_a_missing_id_counts_after_the_delay(answers, decided, partly):
    check = Check()
    times = check.times(NOW_S + 10.0, *answers)
    assert times == [0.0, 0.005, 0.025, 0.105, 0.425, 0.925, 1.0]
    [(_, result, *_)] = check.ends
    assert (result.message, result.decided) == (None, decided)
    assert check.error.facts.get("partly_stored") == ("a" if partly else None)


@pytest.mark.parametrize(("answer", "next_s"), [(found("i"), 1.99), (Frame(1), 2.1)])
def test_ids_that_appear_one_by_one_and_failures_begin_the_delay_anew(answer, next_s):
    check = Check()
    check.times(NOW_S + 0.9, NOTHING, NOTHING)
    for after_s in (0.99, 1.6):
        check.checks.step(NOW_S + after_s)
        check.answer(NOW_S + after_s, answer, NOTHING)
    check.checks.step(NOW_S + next_s - 0.01)
    assert not check.client.asked and not check.ends
    check.checks.step(NOW_S + next_s)
    check.answer(NOW_S + next_s, found("i"), found("j"))
    assert check.ends[0][1].message is not None


def test_failed_questions_decide_nothing_until_the_time_is_over():
    check = Check()
    times = check.times(NOW_S + 200.0, NOTHING, Frame(1, remark="broken"))
    assert times[:7] == [0.0, 0.005, 0.025, 0.105, 0.425, 0.925, 1.425] and times[-1] > 59.0
    [(_, result, _, ended_s)] = check.ends
    assert (result.decided, ended_s) == (False, NOW_S + 60.0)
    assert check.refreshed[0] == ("t", NOW_S) and not check.reread


@pytest.mark.parametrize(
    ("remark", "reread", "is_over"),
    [
        ("User:w has no permission to access Topic:t", 0, True),
        ("check signature failed.", 1, False),
    ],
)
def test_a_refused_question(remark, reread, is_over):
    check = Check()
    check.answer(NOW_S + 1.0, Frame(16, remark=remark), NOTHING)
    assert len(check.reread) == reread and bool(check.ends) is is_over
    assert check.reread in ([], [NOW_S])
    if is_over:
        [(_, result, *_)] = check.ends
        assert type(result.error) is errors.RequestTimeoutError and not result.decided
        assert "rights Sub and Get" in str(result.error) and remark in str(result.error)


COPIES = found("i", "i", "i", offsets=(5, 7, 6))


@pytest.mark.parametrize(
    ("answer", "is_copy", "offset", "error"),
    [
        (COPIES, None, 7, None), (COPIES, lambda copy: copy.commit_log_offset < 7, 6, None),
        (COPIES, lambda copy: copy.body == b"x", 7, None), (found("j"), None, None, None),
        (NOTHING, None, None, None), (LATE, None, None, errors.RequestTimeoutError),
        (Frame(0, body=b"broken"), None, None, errors.InvalidAnswerError),
        (Frame(10), None, None, errors.InvalidAnswerError),
        (Frame(1), None, None, errors.BrokerError),
    ],
)  # fmt: skip
def test_a_look_up_ends_with_the_newest_copy_or_an_error(answer, is_copy, offset, error):
    client, ends = Client(), []
    look_up(
        client, "a:1", "t", "i", lambda *end: ends.append(end), since_ms=0, deadline_s=1.0,
        now_s=NOW_S, is_copy=is_copy,
    )  # fmt: skip
    [asked] = client.take()
    names = ("maxNum", "beginTimestamp", "_UNIQUE_KEY_QUERY")
    assert [asked.frame.ext[name] for name in names] == ["32", "0", "true"]
    asked.end(answer)
    [(message, failed, at_s)] = ends
    assert (message and message.commit_log_offset, at_s) == (offset, NOW_S)
    assert type(failed) is (error or type(None))


@pytest.mark.parametrize(
    ("changes", "is_lost"),
    [
        ({}, True), ({"now_s": NOW_S + 14.9}, False), ({"stored_s": 99.9}, False),
        ({"verify_ids": ()}, False), ({"sent_s": None}, False), ({"token": "no send"}, False),
        ({"broker": None}, False),
    ],
)  # fmt: skip
def test_an_answer_is_lost_if_a_later_request_was_stored(changes, is_lost):
    check, hastened = Check(), []
    check.attempt.request.verify_ids = changes.get("verify_ids", ("i",))
    check.attempt.broker = changes.get(
        "broker", Broker("a", stored_sent_s=changes.get("stored_s", NOW_S))
    )
    token, sent_s = changes.get("token", check.attempt), changes.get("sent_s", NOW_S)
    for link in (check.client.channel("b:1", NOW_S), check.client.channel("a:1", NOW_S)):
        link.connection.hasten = hastened.append
    link.connection.oldest = SimpleNamespace(token=token, sent_s=sent_s)
    check.checks.step(changes.get("now_s", NOW_S + 15.0))
    assert hastened == [check.attempt] * is_lost


def test_all_checks_end_with_the_engine():
    check = Check()
    check.checks.abandon(NOW_S + 1.0)
    [(_, result, _, ended_s)] = check.ends
    assert (result.error, result.decided, ended_s) == (check.error, False, NOW_S + 1.0)
    check.answer(NOW_S + 2.0, found("i"), found("j"))
    assert len(check.ends) == 1
