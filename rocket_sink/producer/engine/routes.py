"""Topic routes: cached, and fetched again every 30 s or when a failure shows that they are stale.

An unknown topic gets the route of the template topic (TBW102), and a warning names the nearest
existing topic, because the name may be mistyped. Only the first worker of an executor warns. A
known route is dropped only after two answers "does not exist" (Java keeps it for ever,
apache/rocketmq#8025), and only if a name server knows some of its brokers: a restarted name server
knows no topic until brokers register, which may take 30 s. A proxy does not say which brokers it
knows, so its answers must repeat for `PROXY_MISSING_S`. While all name servers are down, known
routes stay in use. A new topic then takes the route that another worker has cached, even an old
one. A route without a master, or an answer of a name server that knows no broker, is no result. The
client then asks again each second while messages are sent to the topic.

The client asks one name server after another, first the one that answered last, for at most `TRY_S`
each, until one knows the topic. "Does not exist" counts only after all servers were asked, because
a server may have restarted, or belong to another cluster. (Java 5.x asks a single server per
look-up.) The template route is used only if all servers that answer name a common broker for it. No
call blocks: callbacks get the answers while the client is driven."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

from rocket_sink.errors import (
    NameServerUnavailableError,
    NoRouteError,
    RemoteProtocolError,
    SendError,
    TlsRefusedError,
)
from rocket_sink.message_rules import is_loopback, is_system_topic, without_namespace
from rocket_sink.net import log
from rocket_sink.net.channel import HEARD_RECENTLY_S
from rocket_sink.net.client import Call, NetworkClient
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.routing.address_map import mapped_addresses, mapped_route
from rocket_sink.routing.topic_publish_info import TOPICS_MAX, TopicPublishInfo
from rocket_sink.text import clean, nearest
from rocket_sink.wire import requests
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.responses import decode_cluster_info, decode_topics
from rocket_sink.wire.route import TopicRoute, broker_addresses, decode_route

_LOG: Final = log.logger(__name__)
_ALL_TOPICS: Final = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
TRY_S: Final = 1.0
"""Longest wait for one name server."""
PROXY_HINT: Final = " (RocketMQ proxies support few requests: docs/deploy/proxy.md)"
ANSWERS: Final = frozenset((ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST))
"""Codes that answer a question. After any other code the client asks the next server."""

Unavailable = NameServerUnavailableError | TlsRefusedError
Answers = dict[str, Frame]
"""{name server's address: its answer}, without answers whose code is not in `ANSWERS`."""
Done = Callable[[Answers, Unavailable | None, float], None]
LookUp = Generator[tuple[Frame, bool], Any, None]
"""Yields (request, whether all name servers get it); is sent the answers and their time."""


class NameServers:
    """The name servers in random order; the last server that answered moves to the front. All
    brokers' addresses in their answers pass `route` or `reached`, which apply `addressMap`."""

    def __init__(
        self, options: SinkOptions, client: NetworkClient, rng: Random, timeout_s: float
    ) -> None:
        self._addresses = list(options.name_servers)
        self._address_map = options.address_map
        rng.shuffle(self._addresses)
        self._client = client
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<NameServers {';'.join(self._addresses)}>"

    def ask(
        self,
        frame: Frame,
        done: Done,
        now_s: float,
        *,
        of_all: bool = False,
        codes: Collection[int] = ANSWERS,
    ) -> None:
        """Ask the servers, and call `done(answers, error, now)` once:

        - By default ask one after the other. If a server knows the topic, ask no further server,
          and pass its answer only.
        - If no server knows the topic, pass all answers.
        - With `of_all`, ask every server, and pass all answers.
        - If no server answered, pass the error. It is a TlsRefusedError if each server refused TLS,
          because further look-ups are useless then.

        `codes` are the codes that count as an answer."""
        addresses = sorted(self._addresses, key=lambda address: self._is_silent(address, now_s))
        deadline_s = now_s + self._timeout_s
        _Question(self, self._client, addresses, frame, done, deadline_s, of_all, codes).next(now_s)

    def _is_silent(self, address: str, now_s: float) -> bool:
        """Return whether an answer is due (at a proxy: also to a send) and the server is silent."""
        channel = self._client.peek(address)
        return channel is not None and channel.silent_s(now_s) > HEARD_RECENTLY_S

    def route(self, body: bytes) -> TopicRoute:
        """Return the route in an answer's body, with addresses as this client reaches them."""
        return mapped_route(self._address_map, decode_route(body))

    def reached(self, brokers: Mapping[str, Mapping[int, str]]) -> dict[str, dict[int, str]]:
        """Return {broker name: {broker id: address}} as this client reaches the brokers."""
        entries = self._address_map
        return {name: mapped_addresses(entries, name, ids) for name, ids in brokers.items()}

    def prefer(self, address: str) -> None:
        """Ask this server first from now on."""
        self._addresses.sort(key=lambda known: known != address)


@dataclass
class _Question:
    servers: NameServers
    client: NetworkClient
    unasked: list[str]
    frame: Frame
    done: Done
    deadline_s: float
    of_all: bool
    codes: Collection[int]
    in_flight: int = 0
    is_done: bool = False
    answers: Answers = field(default_factory=dict)
    failures: dict[str, object] = field(default_factory=dict)
    """{address: the error or the text that says why the server has not answered}"""

    def next(self, now_s: float) -> None:
        """Ask the next server. Ask all remaining servers at once with `of_all`, or if an answer was
        that the server does not know the topic."""
        if not self.unasked or now_s >= self.deadline_s:
            for address in self.unasked:
                self.failures[address] = "not asked: no time was left"
            self._end(now_s)
            return
        count = len(self.unasked) if self.of_all or self.answers else 1
        share_s = (self.deadline_s - now_s) / (len(self.unasked) - count + 1)
        batch, self.unasked = self.unasked[:count], self.unasked[count:]
        self.in_flight = count
        for address in batch:
            on_end = Call(partial(self._take_answer, address))
            deadline_s = now_s + min(TRY_S, max(share_s, 0.1))
            self.client.call(address, self.frame, on_end, deadline_s=deadline_s, now_s=now_s)

    def _take_answer(
        self, address: str, answer: Frame | None, error: SendError | None, now_s: float
    ) -> None:
        if self.is_done:
            return
        self.in_flight -= 1
        if answer is not None and answer.code == ResponseCode.SUCCESS and not self.of_all:
            self.answers = {address: answer}
            self._end(now_s)
            return
        if answer is not None and answer.code in self.codes:
            self.answers[address] = answer
        elif answer is not None:
            hint = PROXY_HINT if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED else ""
            remark = clean(answer.remark or "", 200).strip()
            self.failures[address] = f"answered {answer.code}: {remark}{hint}"
        else:
            self.failures[address] = error
        if not self.in_flight:
            self.next(now_s)

    def _end(self, now_s: float) -> None:
        self.is_done = True
        if self.answers and not self.of_all:
            self.servers.prefer(next(iter(self.answers)))
        self.done(self.answers, None if self.answers else self._unavailable(), now_s)

    def _unavailable(self) -> Unavailable:
        failures = self.failures
        errors = [error for error in failures.values() if isinstance(error, TlsRefusedError)]
        if errors and len(errors) == len(failures):
            return TlsRefusedError("; ".join(error.text for error in errors), **errors[-1].facts)
        reasons = {address: str(failure) for address, failure in failures.items()}
        lines = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
        local = all(map(is_loopback, reasons))
        advice = "; look for your local cluster by `rocket-sink cluster status`, and start it by "
        advice = f"{advice}`rocket-sink cluster up`" if local else ""
        return NameServerUnavailableError(
            f"no name server answered ({lines}); check the option nameServer{advice}",
            reasons=reasons,
        )


REFRESH_S: Final = 1.0
"""Shortest time between two look-ups of a topic."""
MISSES_MAX: Final = 2
IN_USE_S: Final = 60.0
"""Shortest time without a look-up after which nobody sends to a topic."""
PROXY_MISSING_S: Final = 60.0
"""Time for which a proxy must answer "does not exist" until a known route is dropped. The proxy's
name server may have restarted: brokers register within 30 s, and the proxy asks it each 20 s."""


@dataclass(slots=True)
class _Topic:
    name: str
    info: TopicPublishInfo | None = None
    fetched_s: float = float("-inf")
    asked_s: float = float("-inf")
    fetching: bool = False
    misses: int = 0
    missing_since_s: float = 0.0
    """The time of the first of the `misses`."""
    error: SendError | None = None
    final: bool = False

    def drop(self) -> None:
        """Forget the route and its age, so the next look-up is due at once."""
        self.info = None
        self.fetched_s = float("-inf")

    def fail(self, text: str, *, is_final: bool = False) -> None:
        """Note why there is no route. The next look-ups are useless if this is final."""
        self.error = NoRouteError(f"topic {self.name!r} {text}", topic=self.name)
        self.final = is_final


_UNKNOWN: Final = _Topic("")
"""The state of each topic that nobody has asked for."""


class Routes:
    """The routes of one engine. `look_ups` counts look-ups that ended, with or without a route;
    `events` gets the topic of each."""

    def __init__(
        self,
        options: SinkOptions,
        name_servers: NameServers,
        shared: SharedBrokerState,
        events: set[Hashable],
    ) -> None:
        self._name_servers = name_servers
        self._shared = shared
        self._events = events
        self._planned: dict[str, float] = {}
        """{topic: time of its next look-up, when `REFRESH_S` has passed since the last one}"""
        self.look_ups = 0
        self._interval_s = options.poll_name_server_interval_ms / 1000
        self._template = options.template_topic
        self._namespace = options.namespace
        self._queue_nums = options.default_topic_queue_nums
        self._topics: dict[str, _Topic] = {}
        self._addresses: tuple[tuple[int, int], dict[str, str]] = (0, 0), {}

    def get(self, topic: str, now_s: float) -> TopicPublishInfo | None:
        """Return the known route. Start a look-up if there is no route, or an old one."""
        state = self._topics.get(topic)
        if state is None:
            if len(self._topics) >= TOPICS_MAX:
                self._forget()
            state = _Topic(topic)
            self._from_shared(state, now_s)
            self._topics[topic] = state
        if now_s - state.fetched_s >= self._interval_s:
            self.refresh(topic, now_s)
        return state.info

    def peek(self, topic: str) -> TopicPublishInfo | None:
        """Return the known route of any age, if there is one; any thread may call this."""
        return self._topics.get(topic, _UNKNOWN).info

    def _forget(self) -> None:
        """Forget the topics with the oldest routes, half of the limit. Topics in use have newer
        routes, because sends refresh them. A send to a forgotten topic waits for a look-up."""
        idle = [state for state in list(self._topics.values()) if not self.fetching(state.name)]
        idle.sort(key=lambda state: state.fetched_s)
        for state in idle[: TOPICS_MAX // 2]:
            self._topics.pop(state.name, None)

    def refresh(self, topic: str, now_s: float) -> None:
        """Start a look-up now, or as soon as `REFRESH_S` has passed since the last one."""
        state = self._topics.setdefault(topic, _Topic(topic))
        if state.fetching:
            return
        if now_s - state.asked_s < REFRESH_S:
            if not state.final:
                self._planned[topic] = state.asked_s + REFRESH_S
            return
        self._planned.pop(topic, None)
        state.asked_s = now_s
        self._go_on(state, self._look_up(state), None, None, now_s)

    def start_planned(self, now_s: float) -> None:
        """Start the planned look-ups that are due."""
        for topic in [topic for topic, at_s in self._planned.items() if now_s >= at_s]:
            self.refresh(topic, now_s)

    def wait_s(self, longest_s: float, now_s: float) -> float:
        """Return the time until the next planned look-up, at most `longest_s`."""
        due_s = min(self._planned.values(), default=float("inf"))
        return min(longest_s, max(0.0, due_s - now_s))

    def refresh_old(self, now_s: float) -> None:
        """Start a look-up of each topic that had none within `pollNameServerInterval`."""
        for topic, state in list(self._topics.items()):
            if now_s - state.asked_s >= self._interval_s:
                self.refresh(topic, now_s)

    def error(self, topic: str) -> SendError | None:
        """Return the error that says why there is no route."""
        return self._topics.get(topic, _UNKNOWN).error

    def fetching(self, topic: str) -> bool:
        """Return whether a look-up of the topic is under way or planned."""
        return self._topics.get(topic, _UNKNOWN).fetching or topic in self._planned

    def is_unresolvable(self, topic: str) -> bool:
        """Return whether waiting for a route is useless: the topic and its template do not exist,
        or name servers and client refuse each other's certificates."""
        state = self._topics.get(topic, _UNKNOWN)
        return state.info is None and state.final and not state.fetching

    def check_resolvable(self, topic: str) -> None:
        """Raise the topic's error if it is unresolvable: NoRouteError or TlsRefusedError."""
        error = self.error(topic)
        if error is not None and self.is_unresolvable(topic):
            raise error.copy()

    def addresses(self) -> dict[str, str]:
        """Return {broker name: master's address} of all known routes. If two routes disagree, the
        newer one counts. The dictionary is cached, because every tick of the engine needs it."""
        # Routes change when a look-up ends, and when a new topic takes another worker's route.
        as_of = self.look_ups, len(self._topics)
        if as_of != self._addresses[0]:
            addresses: dict[str, str] = {}
            # Copy the values, because other threads add topics.
            for state in sorted(self._topics.values(), key=lambda entry: entry.fetched_s):
                if state.info is not None:
                    addresses.update(state.info.masters)
            self._addresses = as_of, addresses
        return self._addresses[1]

    def topics_in_use(self, now_s: float) -> dict[str, str]:
        """Return {broker: a topic on it} for probes, of the topics that somebody sends to. A send
        looks an old route up again, so a topic without a look-up for a while is not in use. Java
        looks up the route of each topic it ever sent to, and probes the brokers in these routes."""
        oldest_s = now_s - max(IN_USE_S, 2 * self._interval_s)
        return {
            name: topic
            for topic, state in list(self._topics.items())
            if state.info is not None and max(state.asked_s, state.fetched_s) >= oldest_s
            for name in state.info.queues_by_broker
        }

    def _from_shared(self, state: _Topic, now_s: float, *, of_any_age: bool = False) -> None:
        """Take the route from the shared cache if another worker has put a recent one there."""
        shared_route = self._shared.route(state.name)
        oldest_s = float("inf") if of_any_age else self._interval_s
        if shared_route is None or not 0 <= now_s - shared_route[1] < oldest_s:
            return
        try:
            info = TopicPublishInfo.of(state.name, self._name_servers.route(shared_route[0]))
        except RemoteProtocolError:
            return
        if info.ok:
            state.info, state.fetched_s, state.error = info, shared_route[1], None

    def _keep(self, state: _Topic, now_s: float) -> None:
        """Keep the old route, or take another worker's, after a look-up without a result."""
        if state.info is None:
            self._from_shared(state, now_s, of_any_age=True)
        if state.info is not None:
            # Make the next look-up due in a second, however old the route is.
            state.fetched_s = now_s - self._interval_s + REFRESH_S

    def _look_up(self, state: _Topic) -> LookUp:
        """Look the topic up. If the name servers do not know it, it keeps its known route until
        `MISSES_MAX` such answers. Without a known route it gets the route of the template topic."""
        answers, now_s = yield requests.get_route(state.name), False
        frame = next(iter(answers.values()))
        if frame.code != ResponseCode.TOPIC_NOT_EXIST:
            self._take_body(state, bytes(frame.body or b""), now_s)
            return
        if not state.misses:
            state.missing_since_s = now_s
        state.misses += 1
        registered: list[Collection[str]] | None = None
        if state.info is not None and state.misses >= MISSES_MAX:
            answers, now_s = yield Frame(RequestCode.GET_BROKER_CLUSTER_INFO), True
            holders, registered = state.info.queues_by_broker.keys(), _registered_names(answers)
            is_long = now_s - state.missing_since_s >= PROXY_MISSING_S
            if any(holders & names for names in registered) or (not registered and is_long):
                state.drop()
        if state.info is not None:
            self._keep(state, now_s)
            return
        if self._template not in ("", state.name):
            answers, now_s = yield requests.get_route(self._template), True
            if self._take_template(state, answers, now_s):
                is_new = state.misses == 1 and not is_system_topic(state.name)
                if is_new and self._shared.note_new_topic(state.name, now_s, self._interval_s):
                    # The look-up does not wait for this answer, because sends wait for the look-up.
                    warn = partial(self._warn_of_new, state.name)
                    self._name_servers.ask(Frame(_ALL_TOPICS), warn, now_s, of_all=True)
                return
            registered = None
        if registered is None:
            answers, now_s = yield Frame(RequestCode.GET_BROKER_CLUSTER_INFO), True
            registered = _registered_names(answers)
        if all(registered):  # A name server without brokers knows no topic yet.
            template = self._template or "none"
            state.fail(
                f"does not exist and is not made on the fly (template topic {template}): create "
                "it, or check its name and the option namespace",
                is_final=True,
            )
        else:
            state.fail("has no route: no broker has registered at one of the name servers yet")
            self._keep(state, now_s)

    def _go_on(
        self,
        state: _Topic,
        look_up: LookUp,
        answers: Answers | None,
        error: Unavailable | None,
        now_s: float,
    ) -> None:
        """Pass the answers (None at the start) to a look-up, and ask its next question."""
        state.fetching, question = False, None
        if error is None:
            with contextlib.suppress(StopIteration):
                question = look_up.send(None if answers is None else (answers, now_s))
        else:
            state.error, state.final = error, isinstance(error, TlsRefusedError)
            if state.info is not None or not state.final:
                self._keep(state, now_s)
        if question is None:
            self.look_ups += 1
            self._events.add(state.name)
            return
        state.fetching, (frame, of_all) = True, question
        on_end = partial(self._go_on, state, look_up)
        codes = ANSWERS
        if frame.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            codes |= {ResponseCode.REQUEST_CODE_NOT_SUPPORTED}  # the answer of a proxy
        self._name_servers.ask(frame, on_end, now_s, of_all=of_all, codes=codes)

    def _warn_of_new(
        self, topic: str, answers: Answers, error: Unavailable | None, now_s: float
    ) -> None:
        """Warn of a topic that the first send creates; without an answer, name no nearest topic."""
        topics = (name for frame in answers.values() for name in _topics_in(frame))
        _LOG.warning("%s%s", will_be_created(topic), name_hint(topic, topics, self._namespace))

    def _take_body(self, state: _Topic, body: bytes, now_s: float) -> None:
        try:
            info = TopicPublishInfo.of(state.name, self._name_servers.route(body))
        except RemoteProtocolError as error:
            state.error = NoRouteError(f"the route of topic {state.name!r} is unreadable: {error}")
            return
        state.misses = 0
        self._take(state, info, now_s)
        if info.ok:
            self._shared.put_route(state.name, body, now_s)

    def _take(self, state: _Topic, info: TopicPublishInfo, now_s: float) -> None:
        if info.ok:
            state.info, state.fetched_s, state.error, state.final = info, now_s, None, False
        else:
            state.drop()
            state.fail("has no writable queue on a broker with a master")

    def _take_template(self, state: _Topic, answers: Answers, now_s: float) -> bool:
        """Take the template's route if all name servers that answered name a common broker. Return
        False if no server has the template."""
        templates: dict[str, TopicRoute] = dict.fromkeys(answers, TopicRoute())
        for server, frame in answers.items():
            if frame.code == ResponseCode.SUCCESS:
                with contextlib.suppress(RemoteProtocolError):
                    templates[server] = self._name_servers.route(bytes(frame.body or b""))
        largest = max(templates.values(), key=lambda route: len(route.queues))
        if not largest.queues:
            return False
        brokers = {
            server: broker_addresses({broker.name: broker.addresses for broker in route.brokers})
            for server, route in templates.items()
        }
        if set.intersection(*brokers.values()):
            info = TopicPublishInfo.default(state.name, largest, self._queue_nums)
            self._take(state, info, now_s)
            return True
        names = "; ".join(
            f"{server} names {', '.join(sorted(f'{n} ({a})' for n, a in pairs)) or 'none'}"
            for server, pairs in brokers.items()
        )
        state.fail(
            "does not exist, and the name servers disagree about the brokers that make topics "
            f"on the fly ({names}): take the wrong one out of the option nameServer, or create "
            "the topic"
        )
        self._keep(state, now_s)
        return True


def will_be_created(topic: str) -> str:
    return (
        f"no name server knows the topic {topic} yet: the first send creates it where brokers "
        "allow that (autoCreateTopicEnable), unless the option createTopic is empty"
    )


def name_hint(topic: str, names: Iterable[str], namespace: str | None) -> str:
    """Return the advice to check a missing topic's name, with the nearest of the names."""
    topics = (without_namespace(namespace, name) for name in names if not is_system_topic(name))
    near = nearest(without_namespace(namespace, topic), topics)
    return "; check its name" + (f", the nearest existing topic is {near}" if near else "")


def _topics_in(frame: Frame) -> tuple[str, ...]:
    """Return the names of an answer's topics; a proxy gives none."""
    with contextlib.suppress(RemoteProtocolError):
        return decode_topics(frame)
    return ()


def _registered_names(answers: Answers) -> list[Collection[str]]:
    """Return the names of the registered brokers, for each server with a readable answer. A proxy
    gives none."""
    names: list[Collection[str]] = []
    for frame in answers.values():
        with contextlib.suppress(RemoteProtocolError):
            names.append(decode_cluster_info(frame).keys())
    return names
