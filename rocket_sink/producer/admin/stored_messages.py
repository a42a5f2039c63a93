"""Look-ups of stored messages by id at all brokers of a topic, many in flight: for epochs that may
have been sent before (`delivery=effectively_once`), and dead letters with an unknown outcome. The
caller's thread drives the engine. Completions of sends stay in the engine until its `poll`."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rocket_sink.errors import AuthenticationError, DeliveryError, PermissionDeniedError, SendError
from rocket_sink.message import MessageQueue
from rocket_sink.net.client import Call
from rocket_sink.producer.engine.stored_check import LACKS_SUB, LOOK_UP_S, look_up, topics_of
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.headers import INT64_MAX, Frame
from rocket_sink.wire.requests import query_max_offset
from rocket_sink.wire.responses import long_field
from rocket_sink.wire.stored import IsCopy, StoredMessage

if TYPE_CHECKING:
    from rocket_sink.producer.engine.engine import SendEngine

_WINDOW: Final = 256
"""Limit of look-ups in flight, because a broker reads its log for each look-up."""
_ADVICE: Final = "Start the brokers that the messages were sent to."
_NO_ID: Final = "-"
"""An id that no message has."""

Brokers = Mapping[str, Iterable[str]]
Query = tuple[str, str, str]
"""(broker name, topic, message id)."""


@dataclass(eq=False)
class StoredMessages:
    """Asks brokers which messages they have stored.

    Args:
        since_ms: a lower bound of the messages' store times (ms since 1970).
        brokers: {topic: further brokers that must answer}, read at each call. A message may be on a
            broker that is not in the route now.
        advice: what the user can do if a broker does not answer; part of the error text.
        by_route: query the brokers of the topic's route.

    Attributes:
        torn: {id: message} of the last `find`, if all copies are torn (`StoredMessage.torn`).

    Raises from all methods:
        DeliveryError: a broker did not answer within `storedCheckTimeout`.
        SendError: a fatal error (credentials).
    """

    engine: SendEngine
    since_ms: int
    brokers: Brokers = field(default_factory=dict)
    advice: str = _ADVICE
    by_route: bool = True
    torn: dict[str, StoredMessage] = field(default_factory=dict)
    _settled: set[str] = field(default_factory=set)
    _tests: Mapping[str, IsCopy] = field(default_factory=dict)
    _ends: dict[MessageQueue, int] = field(default_factory=dict)
    """The ends of queues, as of the last look."""
    _found: set[str] = field(default_factory=set)
    _again: deque[Query] = field(default_factory=deque)
    _in_flight: set[Query] = field(default_factory=set)
    _heard_s: float = field(init=False)
    _last_error: SendError | None = None

    def settle(self, topic: str) -> None:
        """Wait until every broker answers, and then for `storedCheckDelay`; once for each broker.
        After this each request of an earlier attempt is stored and indexed, or never will be."""
        new = [name for name in self._names(topic) if name not in self._settled]
        if not new:
            return
        self._ask([(name, topic, _NO_ID) for name in new], topic)
        self._settled.update(new)
        self.engine.drive_for(self.engine.options.stored_check_delay_ms / 1000)

    def find(self, topic: str, ids: Collection[str], *, timed: bool) -> set[str]:
        """Return the ids for which a broker has a whole message, not only a torn copy. With {id:
        function} only a message for which the function is true counts: without
        `delivery=effectively_once` several messages may have one id."""
        names = self._names(topic)
        self._found, self.torn = set(), {}
        self._tests = ids if isinstance(ids, Mapping) else {}
        queries = [
            (name, at, wanted_id)
            for wanted_id in ids
            for at in topics_of(topic, timed=timed)
            for name in names
        ]
        self._ask(queries, topic)
        for message_id in self._found:
            self.torn.pop(message_id, None)
        return self._found

    def _names(self, topic: str) -> list[str]:
        masters = set(self.engine.publish_info(topic).masters) if self.by_route else set[str]()
        return sorted(masters.union(self.brokers.get(topic, ())))

    def _ask(self, queries: Iterable[Query], topic: str) -> None:
        engine = self.engine
        waiting = deque(queries)
        self._heard_s, self._last_error = engine.clock(), None
        while waiting or self._again or self._in_flight:
            while waiting and len(self._in_flight) < _WINDOW:
                self._look_up(waiting.popleft())
            # Get the route again, because a missing broker may be back in it.
            engine.routes.get(topic, engine.clock())
            engine.drive()
            if not self._in_flight and not waiting:
                waiting, self._again = self._again, waiting
                if waiting:
                    engine.routes.refresh(topic, engine.clock())
            self._check(waiting, topic)

    def _look_up(self, query: Query) -> None:
        name, topic, message_id = query
        engine = self.engine
        now_s = engine.clock()
        address = engine.routes.addresses().get(name)
        if address is None:
            # Get the template topic's route for a broker that has not created the topic yet.
            engine.routes.get(engine.options.template_topic, now_s)
            self._again.append(query)
            return

        def done(message: StoredMessage | None, error: SendError | None, at_s: float) -> None:
            self._in_flight.discard(query)
            if error is not None:
                is_old = isinstance(error, AuthenticationError)
                if not (is_old and engine.reread_credentials(now_s)):
                    self._last_error = error
                self._again.append(query)
                return
            self._heard_s = at_s
            if message is not None and message.torn:
                self.torn[message_id] = message
            elif message is not None:
                self._take(query, address, message)

        self._in_flight.add(query)
        look_up(
            engine.client, address, topic, message_id, done,
            since_ms=self.since_ms, deadline_s=now_s + LOOK_UP_S, now_s=now_s,
            is_copy=self._tests.get(message_id),
        )  # fmt: skip

    def _take(self, query: Query, address: str, message: StoredMessage) -> None:
        """Count the message, unless its queue ends before it: brokers find a message by its id as
        long as their log has it, even if its topic was deleted and made anew since."""
        name, topic, message_id = query
        queue, engine = MessageQueue(topic, name, message.queue_id), self.engine
        if message.topic != topic or message.queue_offset < self._ends.get(queue, 0):
            self._found.add(message_id)
            return

        def done(answer: Frame | None, error: SendError | None, at_s: float) -> None:
            self._in_flight.discard(query)
            if answer is None:
                self._last_error = error
                self._again.append(query)
                return
            # A broker that refuses to tell the end of a queue may have the message.
            is_told = answer.code == ResponseCode.SUCCESS
            self._ends[queue] = long_field(answer, "offset") if is_told else INT64_MAX
            if message.queue_offset < self._ends[queue]:
                self._found.add(message_id)

        self._in_flight.add(query)
        now_s = engine.clock()
        engine.client.call(
            address, query_max_offset(queue), Call(done), deadline_s=now_s + LOOK_UP_S, now_s=now_s
        )

    def _check(self, waiting: deque[Query], topic: str) -> None:
        error, engine = self._last_error, self.engine
        if error is not None and error.fatal:
            raise error
        if isinstance(error, PermissionDeniedError):
            raise DeliveryError(
                f"this user may not look up which messages of the topic {topic!r} are stored "
                f"already ({error}), so none of them is sent. {LACKS_SUB}",
                first_error=str(error),
            )
        unanswered = (*waiting, *self._again, *self._in_flight)
        until_s = self._heard_s + engine.options.stored_check_timeout_ms / 1000
        if not unanswered or engine.clock() < until_s:
            return
        silent = sorted({name for name, *_ in unanswered})
        raise DeliveryError(
            f"{', '.join(silent)} does not say which messages of the topic {topic!r} are stored "
            f"already ({error or 'no answer, or not in the route'}), so none of them is sent. "
            f"{self.advice}",
            first_error=str(error or ""),
        )
