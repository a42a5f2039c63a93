"""From a request to a frame on a connection: route, queue, lane, head; or a place to wait."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Final

from rocket_sink.errors import (
    ConnectError,
    InvalidQueueError,
    NoRouteError,
    NotSentError,
    SendError,
    UnwrittenError,
)
from rocket_sink.message import MessageQueue
from rocket_sink.producer.brokers import Broker
from rocket_sink.producer.core import STEP_S, EngineCore
from rocket_sink.producer.deal import Deal, Place, place_of
from rocket_sink.producer.flight import Flight
from rocket_sink.producer.outcomes import too_old
from rocket_sink.routing.publish import PublishInfo
from rocket_sink.routing.retry import attempt_deadline

_JOINED_BYTES: Final = 2048
"""Below this copying a body costs less than one more buffer in the gathered write."""


class Placing(EngineCore):
    """The half of the engine before the wire."""

    def _move_unsent(self, broker_name: str, now_s: float) -> None:
        """Requests that no byte has been sent of go elsewhere, or queue again where they must."""
        address = self.routes.addresses().get(broker_name)
        link = self.pump.peek(address) if address else None
        for owner in link.withdraw() if link is not None else ():
            if isinstance(owner, Flight):
                self._landed(owner)
                self._dispatch(self._again(owner, owner.ready_s, counts=False), now_s)
            else:
                owner.on_failed(UnwrittenError(f"{address} takes no more bytes"), now_s)
        held = self.brokers.of(broker_name).held
        for _ in range(len(held)):
            self._dispatch(held.popleft(), now_s)

    # --- one attempt, until it is on its connection ------------------------------------------

    def _dispatch(self, flight: Flight, now_s: float) -> None:
        request = flight.request
        if now_s >= flight.deadline_s:
            error = flight.story.last_error if flight.story is not None else None
            error = error or self.routes.error(request.topic)
            self._failed(flight, error or UnwrittenError("no time was left"), None, now_s)
            return
        info = self.routes.get(request.topic, now_s)
        if info is None:
            self._park(flight, now_s)
            return
        try:
            place = self._choose(flight, info, now_s)
        except SendError as error:
            self._failed(flight, error, None, now_s)
            return
        if place is None:
            self._later(flight, now_s + STEP_S)
            return
        if request.ordered and not self._lanes.enter(flight, place.queue):
            return
        self._transmit(flight, place, now_s)

    def select(self, info: PublishInfo, now_s: float) -> MessageQueue | None:
        """A queue by the engine's own selector."""
        self.brokers.view(now_s)
        place = self._spread(info, None)
        return None if place is None else place.queue

    def available(self, broker_name: str) -> bool:
        """False while the broker is isolated or under suspicion."""
        self.brokers.view(self.clock())
        return self.brokers.available(broker_name) and not self.brokers.of(broker_name).suspect

    def _choose(self, flight: Flight, info: PublishInfo, now_s: float) -> Place | None:
        request, brokers = flight.request, self.brokers
        queue = request.queue
        if queue is not None:
            if info.index_of(queue) is None:
                raise InvalidQueueError(
                    f"{queue} is not in the route of the topic any more", topic=request.topic
                )
            return place_of(info, queue, brokers)
        if flight.pinned is not None and info.index_of(flight.pinned) is not None:
            return place_of(info, flight.pinned, brokers)
        brokers.view(now_s)
        if request.choose is None:
            last = flight.story.last_broker if flight.story is not None else None
            return self._spread(info, last)
        well = brokers.available_for(request.topic)
        queue = request.choose(info, lambda name: well(name) and not brokers.of(name).suspect)
        return None if queue is None else place_of(info, queue, brokers)

    def _spread(self, info: PublishInfo, last: str | None) -> Place | None:
        brokers = self.brokers
        if self._deals is not None and last is None and brokers.all_well:
            deal = self._deals.get(info.topic)
            if deal is None or deal.info is not info:
                deal = self._deals[info.topic] = Deal(info, brokers, self._rng)
            place = deal.take(brokers)
            if place is not None:
                return place
        queue = self._chooser.select(
            info,
            available=brokers.available_for(info.topic),
            reachable=brokers.reachable_in(info, last),
            suspicion=brokers.suspicion,
            last_broker=last,
            load=brokers,
        )
        return None if queue is None else place_of(info, queue, brokers)

    def _transmit(self, flight: Flight, place: Place, now_s: float) -> None:
        request, brokers = flight.request, self.brokers
        flight.place = place
        queue, _, address, broker = place
        flight.wall_ms = int((now_s + self._wall_offset_s) * 1000)
        if not address:
            error = NoRouteError(f"broker {place.home} has no master now", topic=request.topic)
            self._failed(flight, error, None, now_s)
            return
        if broker.window is not None and not broker.has_room:
            broker.held.append(flight)
            return
        broker.in_flight += 1
        brokers.total_in_flight += 1
        flight.broker, flight.handed_s = broker, now_s
        if request.least_version and not self._is_new_enough(flight, now_s):
            return
        try:
            link = self.pump.link(address, now_s)
        except ConnectError as refused:
            self._failed(flight, refused, None, now_s)
            return
        until_s = self._attempt_deadline(flight, now_s)
        opaque = link.connection.open_request(
            deadline_s=until_s,
            token=flight,
            # Given up while the broker holds it, it is stored there and sent to another one, too.
            latest_s=flight.deadline_s if self._bounds.attempt_cap_s is None else until_s,
        )
        head = self._head(flight, queue, opaque)
        flight.link = link
        size = flight.wire_bytes = len(head) + flight.body_bytes
        body = flight.body
        if size < _JOINED_BYTES and len(body) == 1 and type(body[0]) is bytes:
            self.pump.send(link, flight, (head + body[0],), size, now_s)
        else:
            self.pump.send(link, flight, [head, *body], size, now_s)

    def _attempt_deadline(self, flight: Flight, now_s: float) -> float:
        bounds = self._bounds
        if flight.request.proof:
            # A broker answers all that it has read, however late, and no other word is as sure.
            return now_s + bounds.stored_check_s
        left = (flight.request.attempts or bounds.max_attempts) - flight.counted + 1
        return attempt_deadline(
            now_s, flight.deadline_s, left, bounds.attempt_cap_s, ordering=flight.ordering
        )

    def _head(self, flight: Flight, queue: MessageQueue, opaque: int) -> bytes:
        request = flight.request
        template = self._heads.template(request.topic, batch=request.batch, reply=request.reply)
        born_ms = request.born_ms or flight.wall_ms
        if not self.pump.rpc_hooks.hooks:
            return template.head(
                opaque, queue.queue_id, born_ms, request.properties, flight.body_bytes,
                queue.broker_name, request.sys_flag, request.flag, flight.body,
            )  # fmt: skip
        frame = template.frame(
            queue.queue_id, born_ms, request.properties, queue.broker_name, request.sys_flag,
            request.flag,
        )  # fmt: skip
        frame.body = b"".join(flight.body)
        flight.hooked = self.pump.rpc_hooks.before(flight.address, frame)
        return template.head_of(flight.hooked, opaque, flight.body_bytes, flight.body)

    # --- brokers that would ignore what a message asks for -----------------------------------

    def _is_new_enough(self, flight: Flight, now_s: float) -> bool:
        """True: go on. Else the attempt has ended, or goes on when the broker told its version."""
        version = self.brokers.versions.get(flight.address)
        if version is None:
            self._ask_version(flight, now_s)
            return False
        if version < flight.request.least_version:
            topic, name = flight.request.topic, flight.home
            self._failed(flight, too_old(topic, name, flight.address, version), None, now_s)
            return False
        return True

    def _ask_version(self, flight: Flight, now_s: float) -> None:
        def introduced(error: SendError | None, at_s: float) -> None:
            if flight.done:
                return
            if error is None:
                self._landed(flight)
                self._dispatch(flight, at_s)
                return
            if not isinstance(error, NotSentError):  # only the heartbeat's outcome is unknown
                error = UnwrittenError(f"{flight.address} did not tell its version: {error.text}")
            self._failed(flight, error, None, at_s)

        until_s = self._attempt_deadline(flight, now_s)
        self.errands.introduce(flight.address, introduced, until_s, now_s)

    # --- waiting for a busy broker, for a route, or for a time ----------------------------------

    def _let_go(self, broker: Broker, now_s: float) -> None:
        """What waits for a place at a busy broker goes on, as far as there are places now."""
        room = broker.room
        for _ in range(len(broker.held)):
            flight = broker.held.popleft()
            if now_s >= flight.deadline_s:
                text = f"broker {broker.name} is busy: no place came free there in time"
                self._failed(flight, UnwrittenError(text), None, now_s)
            elif room > 0:
                room -= 1
                self._later(flight, now_s)
            else:
                broker.held.append(flight)

    def _park(self, flight: Flight, now_s: float) -> None:
        topic = flight.request.topic
        if self.routes.hopeless(topic):
            error = self.routes.error(topic)
            assert error is not None
            self._failed(flight, type(error)(error.text, **error.facts), None, now_s)
            return
        self._parked.setdefault(topic, deque()).append(flight)

    def _after_look_up(self, flight: Flight, now_s: float) -> None:
        """Dispatch it by a route that is newer than its failure."""
        self._parked.setdefault(flight.request.topic, deque()).append(flight)
        self._unpark(flight.request.topic, now_s)

    def _unpark(self, topic: str, now_s: float) -> None:
        known = self.routes.get(topic, now_s) is not None and not self.routes.fetching(topic)
        known = known or self.routes.hopeless(topic)
        parked = self._parked.pop(topic, deque())
        for flight in parked:
            if known or now_s >= flight.deadline_s:
                self._dispatch(flight, now_s)
            else:
                self._parked.setdefault(topic, deque()).append(flight)

    def _route_changed(self, topic: str, now_s: float) -> None:
        if topic in self._parked:
            self._unpark(topic, now_s)

    def _later(self, flight: Flight, due_s: float) -> None:
        heapq.heappush(self._delayed, (min(due_s, flight.deadline_s), next(self._sequence), flight))
