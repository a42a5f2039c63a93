"""The state of a send engine, and what its two halves ask of each other.

`Placing` brings a request to a connection, `AttemptEnds` deals with what comes of it; `SendEngine`
is both, driven by its caller.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from rocket_sink.errors import SendError
from rocket_sink.net.link import Link
from rocket_sink.net.pump import Pump
from rocket_sink.options import SinkOptions
from rocket_sink.producer.brokers import Brokers
from rocket_sink.producer.credentials import CredentialsProvider
from rocket_sink.producer.deal import Deal
from rocket_sink.producer.errand import Errands
from rocket_sink.producer.flight import Flight
from rocket_sink.producer.heads import Heads
from rocket_sink.producer.identity import Identity
from rocket_sink.producer.lanes import Lanes
from rocket_sink.producer.name_servers import NameServers
from rocket_sink.producer.pace import Pace
from rocket_sink.producer.routes import Routes
from rocket_sink.producer.shared import SharedHealth
from rocket_sink.producer.values import Attempt, Completion, SendRequest
from rocket_sink.producer.window import Window
from rocket_sink.routing.choice import MachineRoom, QueueChooser
from rocket_sink.routing.retry import Ordering, RetryPolicies
from rocket_sink.routing.selectors import selector_named
from rocket_sink.wire.frame import Frame

STEP_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long and how often a request is tried, by the options; durations in seconds."""

    timeout_s: float
    order_wait_s: float
    attempt_cap_s: float | None
    max_attempts: int
    stored_check_s: float

    @classmethod
    def of(cls, options: SinkOptions) -> Bounds:
        cap_ms = options.attempt_timeout_ms
        return cls(
            options.send_msg_timeout_ms / 1000,
            options.order_wait_ms / 1000,
            cap_ms / 1000 if cap_ms > 0 else None,
            1 + options.retry_times,
            options.stored_check_timeout_ms / 1000,
        )

    def of_request(self, request: SendRequest) -> tuple[Ordering, float]:
        """How strictly its queue binds it, and its time in all."""
        if not request.ordered and request.timeout_s is None:
            return Ordering.NONE, self.timeout_s
        ordering, timeout_s = Ordering.NONE, self.timeout_s
        if request.ordered:
            ordering = Ordering.STRICT if request.choose is None else Ordering.BEST_EFFORT
            timeout_s = self.order_wait_s
        return ordering, timeout_s if request.timeout_s is None else request.timeout_s


class EngineCore:
    """See the module; `SendEngine` tells the arguments."""

    errands: Errands
    stays_connected = False
    """Connect to every broker of the known routes and stay so: they want to ask us things."""
    _closing = False
    _stopping = False
    _fatal = False

    def __init__(
        self,
        options: SinkOptions,
        *,
        shared: SharedHealth | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_attempt: Callable[[Attempt], None] | None = None,
        record_attempts: bool = True,
        rng: Random | None = None,
        credentials: CredentialsProvider | None = None,
    ) -> None:
        """Raises OptionError; connects to nobody yet."""
        self.options = options
        self.clock = clock
        self.identity = Identity(options)
        self._bounds = Bounds.of(options)
        self._rng = rng or Random()
        self._shared = shared or SharedHealth.in_process()
        self._heads = Heads(options, self.identity.group, credentials)
        self._on_attempt = on_attempt
        self._record = record_attempts or on_attempt is not None
        self._connect()
        self._hold()

    def reread_credentials(self, signed_s: float) -> bool:
        """True when there are others than those of that time."""
        return self._heads.reread(signed_s, self.clock())

    def _connect(self) -> None:
        """Make what talks to the peers and what knows of them."""
        options = self.options
        self.on_request: Callable[[Link, Frame], bool] = lambda link, frame: False
        self.pump = Pump(options, clock=self.clock)
        self.pump.sign = self._heads.sign if self._heads.signer else None
        self.pump.on_request = lambda link, frame: self.on_request(link, frame)
        self.brokers = Brokers(options, self._shared)
        self.name_servers = NameServers(
            options.name_servers, self.pump, self._rng, options.mq_client_api_timeout_ms / 1000
        )
        self.routes = Routes(options, self.name_servers, self._shared, self._route_changed)

    def _hold(self) -> None:
        """Make what requests are chosen a place by, and where they wait."""
        options = self.options
        weights, room = dict(options.broker_weights) or None, options.machine_room
        self._chooser = QueueChooser(
            selector_named(options.queue_selector, weights),
            self._rng,
            near=MachineRoom(room) if room else None,
        )
        # The fast path knows how to deal in turn over all queues only.
        in_turn = options.queue_selector == "round_robin" and not room
        self._deals: dict[str, Deal] | None = {} if in_turn else None
        self._wall_offset_s = time.time() - self.clock()
        self._policies = RetryPolicies.of(options)
        self.window = Window(options)
        self._pace = Pace.of(options, self.clock())
        self._lanes = Lanes()
        self._parked: dict[str, deque[Flight]] = {}
        self._delayed: list[tuple[float, int, Flight]] = []
        self._sequence = itertools.count()
        self._done: list[Completion] = []

    def _dispatch(self, flight: Flight, now_s: float) -> None:
        """Bring it on its way: to a connection, or to where it waits."""
        raise NotImplementedError

    def _later(self, flight: Flight, due_s: float) -> None:
        """Dispatch it at that time."""
        raise NotImplementedError

    def _after_look_up(self, flight: Flight, now_s: float) -> None:
        """Dispatch it by a route that is newer than its failure."""
        raise NotImplementedError

    def _route_changed(self, topic: str, now_s: float) -> None:
        """A look-up of the topic's route has ended."""
        raise NotImplementedError

    def _again(self, flight: Flight, now_s: float, *, counts: bool) -> Flight:
        """The request's next attempt."""
        raise NotImplementedError

    def _answered(self, flight: Flight, frame: Frame, sent_s: float | None, now_s: float) -> None:
        """The broker answered."""
        raise NotImplementedError

    def _failed(self, flight: Flight, error: SendError, sent_s: float | None, now_s: float) -> None:
        """The attempt ended without being stored, or nobody knows."""
        raise NotImplementedError

    def _inquire(self, flight: Flight, error: SendError, now_s: float) -> None:
        """Find out whether an attempt of unknown outcome stored it."""
        raise NotImplementedError

    def _landed(self, flight: Flight) -> None:
        """It is not in flight at its broker any more."""
        raise NotImplementedError

    def _recorded(
        self, flight: Flight, now_s: float, sent_s: float | None, outcome: Any, **ending: Any
    ) -> list[Attempt]:
        """Keep and tell the attempt's record."""
        raise NotImplementedError
