"""After an attempt without a known outcome: the broker is asked before anything is sent again.

Only for requests that bring a `proof`, the ids of their first and last message. Their answer is
waited for as long as the connection lives (up to `storedCheckTimeout`): a broker answers all that
it has read, and a slow or frozen one says later what became of it. When the connection is gone, or
the time is over, the broker is asked for the ids.

A batch is appended to the log as one (CommitLog.asyncPutMessages), so both are there or neither,
unless a broker was killed in the middle (seen): the error's fact `partly_stored` then names it. So
too when one of them is there without all of its properties (`StoredMessage.torn`).
"There" is believed at once; "not there" only when the broker has answered so for
`storedCheckDelay`, because the request may still wait in the broker's send queue (200 ms,
BrokerFastFailure) or its index entry be on its way (some milliseconds; more on a machine without a
free processor). No word within `storedCheckTimeout`: the outcome stays unknown.

Not excluded: a request that the network or a starved broker holds back for longer than that; a
master that changed and lost the message; an index that is switched off (`messageIndexEnable`); a
first message of which a killed broker kept the body and not the id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rocket_sink.errors import SendError
from rocket_sink.producer.flight import Flight
from rocket_sink.producer.look_up import LOOK_UP_S, look_up, topics_of
from rocket_sink.wire.stored import StoredMessage

if TYPE_CHECKING:
    from rocket_sink.producer.engine import SendEngine

_FIRST_WAIT_S: Final = 0.005
"""An index entry is there some 2 ms after the answer would have been."""
_GROWTH: Final = 4.0
_LONGEST_WAIT_S: Final = 0.5


class Inquiry:
    """The question whether one flight's request is stored."""

    def __init__(
        self, inquiries: Inquiries, flight: Flight, error: SendError, now_s: float
    ) -> None:
        self._inquiries = inquiries
        self.flight = flight
        self.error = error
        self.opened_s = now_s
        self._next_s = now_s
        self._wait_s = _FIRST_WAIT_S
        self._since_s: float | None = None
        self._missing = 0
        """Of the proof, in all answers since `_since_s`."""
        self._outstanding = 0
        self._failed = False
        self._found: dict[str, StoredMessage] = {}

    def step(self, now_s: float) -> None:
        """Ask (again) when it is time, and give up when it is over."""
        if now_s >= self.opened_s + self._inquiries.timeout_s:
            self._inquiries.close(self, now_s)
            self._inquiries.engine._undecided(self.flight, self.error, now_s)
        elif not self._outstanding and now_s >= self._next_s:
            self._ask(now_s)

    def _ask(self, now_s: float) -> None:
        request, engine = self.flight.request, self._inquiries.engine
        address = engine.routes.addresses().get(self.flight.home, self.flight.address)
        questions = [
            (topic, message_id)
            for topic in topics_of(request.topic, timed=request.timed)
            for message_id in request.proof
        ]
        self._outstanding, self._failed = len(questions), False
        self._found.clear()
        for topic, message_id in questions:
            look_up(
                engine.pump, address, topic, message_id, self._answered,
                since_ms=self.flight.wall_ms, deadline_s=now_s + LOOK_UP_S, now_s=now_s,
            )  # fmt: skip

    def _answered(
        self, message: StoredMessage | None, error: SendError | None, now_s: float
    ) -> None:
        self._outstanding -= 1
        if error is not None:
            # The broker may be back at another address.
            self._failed = True
            self._inquiries.engine.routes.refresh(self.flight.request.topic, now_s)
        if message is not None and message.message_id is not None:
            self._found[message.message_id] = message
        if not self._outstanding and self in self._inquiries.open:
            self._judge(now_s)

    def _judge(self, now_s: float) -> None:
        engine, proof = self._inquiries.engine, self.flight.request.proof
        if all(one in self._found and not self._found[one].torn for one in proof):
            self._inquiries.close(self, now_s)
            engine._proved_stored(self.flight, self._found[proof[0]], now_s)
            return
        missing = len(proof) - len(self._found)
        if self._failed:
            self._since_s = None
        elif self._since_s is None or missing != self._missing:
            self._since_s, self._missing = now_s, missing
        since_s = self._since_s
        if since_s is not None and now_s >= since_s + self._inquiries.delay_s:
            self._inquiries.close(self, now_s)
            if self._found:
                self.error.facts["partly_stored"] = self.flight.home
                engine._undecided(self.flight, self.error, now_s)
            else:
                engine._proved_absent(self.flight, self.error, now_s)
            return
        self._next_s = now_s + self._wait_s
        self._wait_s = min(self._wait_s * _GROWTH, _LONGEST_WAIT_S)
        if since_s is not None:
            self._next_s = min(self._next_s, since_s + self._inquiries.delay_s)


class Inquiries:
    """The open questions of an engine, stepped by its tick."""

    def __init__(self, engine: SendEngine) -> None:
        self.engine = engine
        self.timeout_s = engine.options.stored_check_timeout_ms / 1000
        self.delay_s = engine.options.stored_check_delay_ms / 1000
        self.open: dict[Inquiry, None] = {}

    def begin(self, flight: Flight, error: SendError, now_s: float) -> None:
        """Find out; the engine hears of the end by one of three methods."""
        inquiry = Inquiry(self, flight, error, now_s)
        self.open[inquiry] = None
        inquiry.step(now_s)

    def step(self, now_s: float) -> None:
        for inquiry in list(self.open):
            inquiry.step(now_s)

    def close(self, inquiry: Inquiry, now_s: float) -> None:
        """The time of the question is not the request's."""
        del self.open[inquiry]
        inquiry.flight.deadline_s += now_s - inquiry.opened_s

    def abandon(self, now_s: float) -> None:
        """The engine stops: what is not known now stays unknown."""
        for inquiry in list(self.open):
            self.close(inquiry, now_s)
            self.engine._undecided(inquiry.flight, inquiry.error, now_s)
