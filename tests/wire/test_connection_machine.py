"""Random users and peers of a connection, compared with a model of a list and a counter."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.connection import Answered, Connection, UnexpectedAnswer, Violation
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.connection = Connection()
        self.now_s = 0.0
        self.opened: list[tuple[int, int]] = []
        self.unwritten: list[int] = []
        self.written: set[int] = set()
        self.left: Counter[object] = Counter()

    @property
    def usable(self):
        return self.connection.error is None

    @precondition(lambda self: self.usable)
    @rule(wait_s=st.integers(1, 5))
    def open(self, wait_s):
        token = len(self.opened)
        opaque = self.connection.open_request(deadline_s=self.now_s + wait_s, token=token)
        self.opened.append((opaque, token))
        self.unwritten.append(token)

    @precondition(lambda self: self.usable and self.unwritten)
    @rule(count=st.integers(1, 3))
    def write(self, count):
        done, self.unwritten = self.unwritten[:count], self.unwritten[count:]
        self.written.update(done)
        self.connection.mark_written(done[-1], self.now_s)

    @precondition(lambda self: self.usable and self.opened)
    @rule(which=st.integers(0, 50), cut=st.booleans())
    def answer(self, which, cut):
        opaque, token = self.opened[which % len(self.opened)]
        data = encode_frame(Frame(0, {"k": "v"}, opaque=opaque, flag=1))
        half = len(data) // 2 if cut else 0
        events = self.connection.receive_data(data[:half], self.now_s)
        events += self.connection.receive_data(data[half:], self.now_s)
        (event,) = events
        if isinstance(event, Answered):
            assert event.token == token
            assert (event.sent_s is not None) == (token in self.written)
            self.left[token] += 1
        else:
            assert isinstance(event, UnexpectedAnswer)
            assert self.left[token] == 1

    @precondition(lambda self: self.usable)
    @rule(opaque=st.integers(-5, -1) | st.integers(10_000, 10_005))
    def foreign(self, opaque):
        data = encode_frame(Frame(0, opaque=opaque, flag=1))
        (event,) = self.connection.receive_data(data, self.now_s)
        assert isinstance(event, UnexpectedAnswer)

    @rule(step_s=st.integers(0, 3))
    def tick(self, step_s):
        self.now_s += step_s
        for expired in self.connection.expire(self.now_s):
            assert expired.written == (expired.token in self.written)
            self.left[expired.token] += 1
            if not expired.written:
                self.unwritten.remove(expired.token)
        next_s = self.connection.next_deadline_s
        assert (next_s is not None) == (self.connection.in_flight > 0)
        assert next_s is None or next_s > self.now_s

    @precondition(lambda self: self.usable)
    @rule(keep=st.booleans())
    def withdraw(self, keep):
        kept = self.unwritten[0] if keep and self.unwritten else None
        for token in self.connection.withdraw_unwritten(keep=kept):
            self.left[token] += 1
        self.unwritten = [] if kept is None else [kept]

    # A connection ends late in a run, so that most runs do something before.
    @precondition(lambda self: self.usable and len(self.opened) > 5)
    @rule()
    def garbage(self):
        (event,) = self.connection.receive_data(b"\xff" * 9, self.now_s)
        assert isinstance(event, Violation)
        assert isinstance(self.connection.error, RemoteProtocolError)

    @precondition(lambda self: len(self.opened) > 5)
    @rule()
    def close(self):
        for lost in self.connection.close():
            assert lost.written == (lost.token in self.written)
            self.left[lost.token] += 1
        assert sum(self.left.values()) == len(self.opened)

    @invariant()
    def each_request_is_in_the_table_or_has_left_once(self):
        assert all(count == 1 for count in self.left.values())
        assert self.connection.in_flight == len(self.opened) - len(self.left)


Machine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestMachine = Machine.TestCase
