"""One attempt of one request, while it lasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rocket_sink.errors import SendError
from rocket_sink.message import MessageQueue, SendResult
from rocket_sink.producer.values import Attempt, SendRequest
from rocket_sink.routing.retry import Ordering
from rocket_sink.wire.frame import Frame

if TYPE_CHECKING:
    from rocket_sink.net.link import Link
    from rocket_sink.producer.brokers import Broker
    from rocket_sink.producer.deal import Place
    from rocket_sink.producer.engine import SendEngine


class Story:
    """What the attempts of one request share; made when the first one fails."""

    __slots__ = ("attempts", "degraded", "earlier", "last_broker", "last_error", "unknown")

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.earlier: list[type[Exception]] = []
        self.last_broker: str | None = None
        self.last_error: SendError | None = None
        self.unknown: SendError | None = None
        """The first error that leaves open whether the message is stored."""
        self.degraded: SendResult | None = None
        """An earlier attempt stored it, less durably than asked for."""


class Flight:
    """Owner of one request frame. A retry is a new Flight: an owner is never in two frames."""

    __slots__ = (
        "attempt", "body", "body_bytes", "broker", "counted", "deadline_s", "done", "engine",
        "handed_s", "hooked", "lane", "link", "ordering", "pinned", "place", "ready_s", "request",
        "story", "wall_ms", "wire_bytes",
    )  # fmt: skip

    def __init__(
        self,
        engine: SendEngine,
        request: SendRequest,
        body: Sequence[Any],
        body_bytes: int,
        ordering: Ordering,
        now_s: float,
        deadline_s: float,
    ) -> None:
        self.engine = engine
        self.request = request
        self.body = body
        self.body_bytes = body_bytes
        self.ordering = ordering
        self.ready_s = now_s
        self.deadline_s = deadline_s
        self.attempt = 1
        self.counted = 1
        """As `attempt`, without those that do not use one up (GO_AWAY)."""
        self.pinned: MessageQueue | None = None
        """The queue of the attempt before, when it must be tried there again."""
        self.place: Place | None = None
        """Where it goes, once that is chosen."""
        self.broker: Broker | None = None
        """Set while it counts as in flight there."""
        self.link: Link | None = None
        self.hooked: Frame | None = None
        """The request as the RPC hooks left it, when there are any."""
        self.handed_s = 0.0
        self.wall_ms = 0
        self.wire_bytes = 0
        self.done = False
        self.lane: MessageQueue | None = None
        self.story: Story | None = None

    def successor(self, now_s: float, *, counts: bool) -> Flight:
        """The next attempt."""
        self.done = True
        later = Flight(
            self.engine, self.request, self.body, self.body_bytes, self.ordering, now_s,
            self.deadline_s,
        )  # fmt: skip
        later.attempt = self.attempt + 1
        later.counted = self.counted + (1 if counts else 0)
        later.story = self.story
        later.lane = self.lane
        return later

    @property
    def queue(self) -> MessageQueue | None:
        return None if self.place is None else self.place.queue

    @property
    def broker_name(self) -> str:
        """The queue's; of a static topic a logical one."""
        return "" if self.place is None else self.place.queue.broker_name

    @property
    def home(self) -> str:
        """The broker it goes to."""
        return "" if self.place is None else self.place.home

    @property
    def address(self) -> str:
        return "" if self.place is None else self.place.address

    def told(self) -> Story:
        """The story, begun if need be."""
        if self.story is None:
            self.story = Story()
        return self.story

    def on_answer(self, frame: Frame, sent_s: float | None, now_s: float) -> None:
        if not self.done:
            self.engine._answered(self, frame, sent_s, now_s)

    def on_failed(self, error: SendError, now_s: float) -> None:
        if not self.done:
            self.engine._failed(self, error, None, now_s)
