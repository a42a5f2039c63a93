"""Administrative requests: routes, offsets, pulls, queries by id, topics. Only `create_topic`
changes a broker. Requests that change a broker's configuration are left out (CVE-2023-33246)."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

from rocket_sink.errors import (
    BrokerError,
    ConfigurationError,
    ConnectError,
    GoAwayError,
    Isolate,
    NoRouteError,
    NotSentError,
    PermissionDeniedError,
    RejectedError,
    RocketSinkError,
    SendError,
)
from rocket_sink.message import MessageQueue
from rocket_sink.message_rules import DLQ_PREFIX, with_namespace, without_namespace
from rocket_sink.net.client import NetworkClient, invoke
from rocket_sink.options import NO_TEMPLATE, SinkOptions, constructor_options
from rocket_sink.producer.engine.headers import HeaderTemplates
from rocket_sink.producer.engine.routes import Answers, NameServers, name_hint, will_be_created
from rocket_sink.producer.engine.stored_check import HIDDEN_TOPICS, LACKS_SUB, warn_of_replaced
from rocket_sink.routing.address_map import with_origin
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.wire import requests, responses
from rocket_sink.wire.codes import PermName, RequestCode, ResponseCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.ids import address_in_id, decode_offset_message_id
from rocket_sink.wire.properties import UNIQ_KEY, split_keys
from rocket_sink.wire.route import QueueData, TopicRoute, broker_addresses
from rocket_sink.wire.stored import Allowance, StoredMessage, decode_stored, first_offset

_GROUP: Final = "TOOLS_CONSUMER"
"""A consumer group that every broker creates for tools (SubscriptionGroupManager.init)."""
_MASTER: Final = 0
_EMPTY_PULLS: Final = 3
_PAUSE_S: Final = 0.5
_LATE_MS: Final = 60_000
PULL_BYTES: Final = 1 << 20


class Admin:
    """Synchronous calls to name servers and brokers; a context manager; not thread-safe. A call may
    raise NotSentError, RejectedError or UnknownOutcomeError, within `timeout_s` per request. While
    a queue's broker or the name servers are away, a request to it is repeated for `patience_s`."""

    def __init__(
        self, options: SinkOptions | None = None, *, timeout_s: float = 5.0,
        patience_s: float = 0.0, **more: Any,
    ) -> None:  # fmt: skip
        self.options = constructor_options(options, more)
        self._timeout_s, self._patience_s = timeout_s, patience_s
        headers = HeaderTemplates(self.options)
        self._client = NetworkClient(self.options, sign=headers.adder, hide=headers.hide)
        self._name_servers = NameServers(self.options, self._client, Random(), timeout_s)
        self._routes: dict[str, TopicRoute] = {}

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    # --- routes ------------------------------------------------------------------------------

    def check_name_servers(self) -> str:
        """Check that a name server (or a proxy) answers a route request. Return a warning if the
        options' topic is missing, else an empty text: the first send may create a missing topic, so
        it is no error. Raise NameServerUnavailableError or TlsRefusedError if no server answers."""
        topic = self.options.topic
        try:
            self.topic_route(topic or requests.AUTO_CREATE_TOPIC)
        except NoRouteError:
            text = will_be_created(topic)
            if not self.options.template_topic:
                text = f"no name server knows the topic {topic}: no send creates it, because "
                text += NO_TEMPLATE
            return text + self.name_hint(topic) if topic else ""
        return ""

    def name_hint(self, topic: str) -> str:
        """Return the advice to check a missing topic's name, with the nearest existing name."""
        names: tuple[str, ...] = ()
        with contextlib.suppress(RocketSinkError):  # A hint is not worth an error.
            names = self.topics()
        return name_hint(topic, names, self.options.namespace)

    def topic_route(self, topic: str) -> TopicRoute:
        """Return the current route; raises NoRouteError if the topic does not exist."""
        topic = with_namespace(self.options.namespace, topic)
        frame = next(iter(self._ask(requests.get_route(topic), of_all=False).values()))
        if frame.code == ResponseCode.TOPIC_NOT_EXIST:
            raise NoRouteError(
                f"the name servers do not know topic {topic!r}: {self._remedy(topic)}", topic=topic
            )
        self._routes[topic] = route = self._name_servers.route(bytes(frame.body or b""))
        return route

    def cluster(self, name: str | None = None) -> dict[str, dict[int, str]]:
        """Return the addresses of all brokers, by name and broker id; with `name`, of that cluster
        only. Raises NoRouteError if two name servers know different clusters (no broker in common).
        """
        answers = self._ask(Frame(RequestCode.GET_BROKER_CLUSTER_INFO))
        merged: dict[str, dict[int, str]] = {}
        merged_addresses: set[tuple[str, str]] = set()
        for server, frame in answers.items():
            brokers = responses.decode_cluster_info(frame, name)
            addresses = broker_addresses(brokers)
            if merged_addresses and addresses and not merged_addresses & addresses:
                raise NoRouteError(
                    f"the name servers {', '.join(answers)} know different clusters, {server} that "
                    f"of {', '.join(brokers)}: take the wrong one out of the option nameServer"
                )
            merged_addresses |= addresses
            merged |= brokers
        return self._name_servers.reached(merged)

    def proxy(self) -> str | None:
        """Return the address of a RocketMQ proxy among the name servers; None if there is none.
        Proxies, unlike name servers of all versions, do not support GET_BROKER_CLUSTER_INFO."""
        for address in self.options.name_servers:
            with contextlib.suppress(SendError):
                frame = Frame(RequestCode.GET_BROKER_CLUSTER_INFO)
                answer = invoke(self._client, address, frame, self._timeout_s)
                if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                    return address
        return None

    def topics(self) -> tuple[str, ...]:
        """Return the names of the topics that any name server knows."""
        answers = self._ask(Frame(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)).values()
        return tuple(sorted({name for frame in answers for name in responses.decode_topics(frame)}))

    def queues(self, topic: str, *, to_read: bool = True) -> list[MessageQueue]:
        """Return the topic's queues on all brokers with a master, sorted. With `to_read`, raises
        PermissionDeniedError if a broker does not let anybody read the topic, or not each queue
        with messages: brokers refuse to read queues from readQueueNums on, for consumers, too."""
        topic = with_namespace(self.options.namespace, topic)
        route = self.topic_route(topic)
        masters = _masters(route)
        closed = [
            data for data in route.queues if data.read and not data.perm & PermName.READ and to_read
        ]
        if closed:
            names = ", ".join(data.broker_name for data in closed)
            permission = "read and write" if closed[0].writable else "read"
            raise PermissionDeniedError(
                f"topic {topic!r} may not be read on {names}: its messages there would be missing. "
                "Open it with " + create_command(self.options, topic, "--permission", permission),
                topic=topic, broker_name=closed[0].broker_name,
            )  # fmt: skip
        settings = [data for data in route.queues if data.broker_name in masters]
        if to_read:
            for data in settings:
                self._check_readable(topic, data)
        return sorted(
            MessageQueue(topic, data.broker_name, queue_id)
            for data in settings
            for queue_id in range(data.read if to_read else max(data.read, data.write))
        )

    def _check_readable(self, topic: str, data: QueueData) -> None:
        for queue_id in range(data.read, data.write):
            queue = MessageQueue(topic, data.broker_name, queue_id)
            if self.max_offset(queue) > self.min_offset(queue):
                closed = closed_queues(self.options, topic, data)
                text = f"queue {queue_id} has messages: {closed}"
                raise PermissionDeniedError(text, topic=topic, broker_name=data.broker_name)

    # --- offsets and messages ----------------------------------------------------------------

    def max_offset(self, queue: MessageQueue) -> int:
        """Return the offset that the queue's next message will get."""
        return self._offset(queue, requests.query_max_offset(queue))

    def min_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the queue's oldest message."""
        return self._offset(queue, requests.query_min_offset(queue))

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message stored at or after a time, ms since 1970."""
        return self._offset(queue, requests.query_offset_by_timestamp(queue, timestamp_ms))

    def consumer_offset(self, queue: MessageQueue, group: str) -> int | None:
        """Return the offset from which a consumer group goes on with the queue; None if the broker
        knows none. The group gets the namespace of the options."""
        group = with_namespace(self.options.namespace, group)
        frame = requests.query_consumer_offset(queue, group)
        answer = self._invoke(queue, frame, {ResponseCode.QUERY_NOT_FOUND})
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        return responses.long_field(answer, "offset")

    def set_consumer_offset(self, queue: MessageQueue, group: str, offset: int) -> None:
        """Set the offset from which a consumer group goes on with the queue. The group gets the
        namespace of the options, as in Java's consumers (ClientConfig.withNamespace). A broker that
        does not have the group is asked to create it."""
        group = with_namespace(self.options.namespace, group)
        frame = requests.update_consumer_offset(queue, group, offset)
        missing = {ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST}
        if self._invoke(queue, frame, missing).code in missing:
            heartbeat = requests.heartbeat(client_id="rocket-sink", consumer_groups=(group,))
            self._invoke(queue, heartbeat)
            self._invoke(queue, requests.update_consumer_offset(queue, group, offset))

    def _offset(self, queue: MessageQueue, frame: Frame) -> int:
        return responses.long_field(self._invoke(queue, frame), "offset")

    def pull(
        self, queue: MessageQueue, offset: int, *, max_messages: int = 32
    ) -> tuple[list[StoredMessage], int]:
        """Return messages from `offset` on, and the offset of the next pull. The list is empty at
        the end of the queue. If `offset` has expired, the next offset is the oldest message's. A
        pull returns fewer messages if they would take over 16 MiB."""
        answer = self._pull(queue, offset, max_messages)
        messages, following = responses.decode_pull_answer(answer, begin=offset)
        for message in messages:
            warn_of_replaced(message, queue.broker_name)
        return messages, following

    def _pull(
        self, queue: MessageQueue, offset: int, max_messages: int, expression: str = "*"
    ) -> Frame:
        frame = requests.pull_message(
            queue,
            offset,
            consumer_group=_GROUP,
            max_msg_nums=max_messages,
            max_msg_bytes=PULL_BYTES,
            expression=expression,
        )
        return self._invoke(queue, frame, responses.PULL_CODES)

    def read_queue(
        self, queue: MessageQueue, begin: int | None = None, end: int | None = None
    ) -> Iterator[StoredMessage]:
        """Yield the queue's messages from offset `begin` (default: the oldest) up to `end`
        (exclusive; default: the present end)."""
        begin = self.min_offset(queue) if begin is None else begin
        end = self.max_offset(queue) if end is None else end
        for messages, _, _ in _pages(begin, end, partial(self.pull, queue)):
            yield from (message for message in messages if message.queue_offset < end)

    def read_bytes(
        self, queue: MessageQueue, begin: int, end: int, *, expression: str = "*"
    ) -> Iterator[tuple[tuple[bytes, int], int, int]]:
        """Yield the encoded messages of the queue from offset `begin` on, with the offsets of their
        pull and of the next pull. The bytes are empty if the broker passes over these offsets. With
        them comes the offset up to which the broker does not have the messages of the pull; below
        it the filter may have left messages out. `expression`: a filter by tags, such as `a || b`,
        that brokers apply by hash codes, so that messages with other tags may come, too."""

        def pull(offset: int, *, max_messages: int) -> tuple[tuple[bytes, int], int]:
            answer = self._pull(queue, offset, max_messages, expression)
            data, following = responses.pulled_bytes(answer)
            is_whole = expression != "*" and answer.code != ResponseCode.PULL_OFFSET_MOVED
            first = first_offset(data) if data else following
            return (data, offset if is_whole else first), following

        yield from _pages(begin, end, pull)

    def read_topic(self, topic: str) -> Iterator[StoredMessage]:
        """Yield the messages that the topic has at the start of the call, queue by queue."""
        ends = {queue: self.max_offset(queue) for queue in self.queues(topic)}
        for queue, end in ends.items():
            yield from self.read_queue(queue, end=end)

    def hidden_copies(self, topic: str, now_ms: int) -> Iterator[tuple[str, bool]]:
        """Yield (id, whether the message waits) of the copies of the topic's delayed messages that
        brokers keep in system topics, also after they have delivered a message. A message with a
        delay level waits until its broker has come to its copy (ScheduleMessageService
        .buildRunningStats), a timer (TIMER_OUT_MS) until a minute after `now_ms`, because brokers
        may be late."""
        topic = with_namespace(self.options.namespace, topic)
        for name, address in _masters(self._route(topic)).items():
            statistics = self.runtime_info(name, address)
            for hidden in HIDDEN_TOPICS:
                with contextlib.suppress(NoRouteError):  # A broker of 4.9 has no timers.
                    for queue in self.queues(hidden, to_read=False):
                        if queue.broker_name != name:
                            continue
                        level = statistics.get(f"scheduleMessageOffset_{queue.queue_id + 1}", "0")
                        delivered = int(level.partition(",")[0])
                        for message in self.read_queue(queue):
                            properties = message.properties
                            if properties.get("REAL_TOPIC") != topic:
                                continue
                            due_ms = properties.get("TIMER_OUT_MS")
                            waits = message.queue_offset >= delivered
                            if due_ms is not None:
                                waits = int(due_ms) > now_ms - _LATE_MS
                            yield message.message_id or "", waits

    def await_dispatched(self, topic: str, timeout_s: float = 30.0) -> bool:
        """Wait until the topic's brokers have dispatched all stored messages, of any topic, to
        queues, where consumers can see them. Return False after the time-out (for example under
        steady traffic), or if a broker refuses the request."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            try:
                masters = _masters(self._route(topic)).items()
                statistics = (self.runtime_info(name, address) for name, address in masters)
                if not any(int(values.get("dispatchBehindBytes", 0)) for values in statistics):
                    return True
            except RejectedError:
                return False
            except BrokerError:
                # A broker that has just started has no statistics yet, and answers SYSTEM_ERROR
                # with a NoSuchElementException (StoreStatsService; 4.9.7, 5.3.3).
                pass
            time.sleep(0.05)
        return False

    def runtime_info(self, name: str, address: str) -> dict[str, str]:
        """Return a broker's statistics (`mqadmin brokerStatus`)."""
        answer = self._call(name, address, Frame(RequestCode.GET_BROKER_RUNTIME_INFO))
        return responses.decode_runtime_info(answer)

    def count(self, topic: str) -> int:
        """Return the number of messages in the topic's queues; the topic may be write-only."""
        queues = self.queues(topic, to_read=False)
        return sum(self.max_offset(queue) - self.min_offset(queue) for queue in queues)

    def query_by_unique_key(
        self, topic: str, message_id: str, *, max_messages: int = 32, bodies: bool = True
    ) -> list[StoredMessage]:
        """Return the stored messages with this client id from all brokers of the topic; without
        `bodies`, their bodies are empty. Raise RemoteProtocolError if the messages exceed 64 MiB of
        memory."""
        topic = with_namespace(self.options.namespace, topic)
        frame = requests.query_message(
            topic=topic, key=message_id, max_num=max_messages, unique_key=True
        )
        return self._query(topic, frame, lambda own: own.get(UNIQ_KEY) == message_id, bodies)

    def query_by_key(self, topic: str, key: str, *, max_messages: int = 32) -> list[StoredMessage]:
        """Return stored messages with this index key from all brokers of the topic, at most
        `max_messages` of each. Raise RemoteProtocolError if they exceed 64 MiB of memory."""
        topic = with_namespace(self.options.namespace, topic)
        frame = requests.query_message(topic=topic, key=key, max_num=max_messages)
        return self._query(topic, frame, lambda own: key in split_keys(own), True)

    def view(self, topic: str, offset_message_id: str) -> StoredMessage:
        """Return the message with a broker's id (`SendResult.offset_message_id`), from the broker
        that the id names; the first one of a batch that is stored as a whole. Raise
        RemoteProtocolError if the text is no such id, and BrokerError if there is no message, for
        example after retention."""
        offset = decode_offset_message_id(offset_message_id)
        address = address_in_id(offset_message_id)
        brokers = self.topic_route(topic).brokers
        name = next((b.name for b in brokers if address in b.registered.values()), "")
        reached = self._name_servers.reached({name: {_MASTER: address}})
        answer = self._call(name, reached[name][_MASTER], requests.view_message(offset))
        message, *_ = decode_stored(answer.body)
        return message

    def _query(
        self, topic: str, frame: Frame, wanted: Callable[[Mapping[str, str]], bool], bodies: bool
    ) -> list[StoredMessage]:
        allowance = Allowance()
        messages: list[StoredMessage] = []
        # Fetch a fresh route, because a broker may be new, or at another address.
        for broker_name, address in _masters(self.topic_route(topic)).items():
            try:
                answer = self._call(broker_name, address, frame, {ResponseCode.QUERY_NOT_FOUND})
            except PermissionDeniedError as error:
                raise type(error)(f"{error}. {LACKS_SUB}", **error.facts) from error
            of_broker = decode_stored(
                answer.body, allowance=allowance, wanted=wanted, bodies=bodies
            )
            for message in of_broker:
                warn_of_replaced(message, broker_name)
            messages += of_broker
        return messages

    # --- topics ------------------------------------------------------------------------------

    def create_topic(
        self, topic: str, *, queues: int = 4, perm: int = PermName.READ | PermName.WRITE,
        attributes: Mapping[str, str] | None = None, brokers: list[str] | None = None,
    ) -> None:  # fmt: skip
        """Create or update the topic on every master (or on `brokers`)."""
        topic = with_namespace(self.options.namespace, topic)
        text = ",".join(f"+{name}={value}" for name, value in (attributes or {}).items())
        frame = requests.create_topic(
            topic=topic,
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=perm,
            attributes=text or None,
        )
        for name, addresses in self.cluster().items():
            if _MASTER in addresses and (brokers is None or name in brokers):
                self._call(name, addresses[_MASTER], frame)

    def topic_attributes(self, topic: str) -> dict[str, dict[str, str]]:
        """Return {broker: the topic's attributes, such as message.type}, without brokers that are
        older than 5.0 or do not have the topic."""
        topic = with_namespace(self.options.namespace, topic)
        frame = requests.get_topic_config(topic)
        unknown = {ResponseCode.REQUEST_CODE_NOT_SUPPORTED, ResponseCode.TOPIC_NOT_EXIST}
        attributes = {}
        for name, address in _masters(self._route(topic)).items():
            answer = self._call(name, address, frame, unknown)
            if answer.code not in unknown:
                attributes[name] = responses.decode_topic_attributes(answer)
        return attributes

    # --- requests ----------------------------------------------------------------------------

    def _route(self, topic: str) -> TopicRoute:
        return self._routes.get(topic) or self.topic_route(topic)

    def _remedy(self, topic: str) -> str:
        if DLQ_PREFIX in topic:
            return "check the group's name; brokers create this topic with its first dead letter"
        return f"check its name, or create it with {create_command(self.options, topic)}"

    def _invoke(self, queue: MessageQueue, frame: Frame, codes: Collection[int] = ()) -> Frame:
        """Send a request to the queue's master. After a failure retry with a fresh route: once, or
        until the patience ends while the broker is away."""
        until_s = time.monotonic() + self._patience_s
        is_retry = False
        while True:
            try:
                route = self.topic_route(queue.topic) if is_retry else self._route(queue.topic)
                address = _masters(route).get(queue.broker_name)
                if address is not None:
                    return self._call(queue.broker_name, address, frame, codes)
                raise NoRouteError(f"broker {queue.broker_name} has no master at present")
            except SendError as error:
                if is_retry and not (is_away(error) and time.monotonic() < until_s):
                    raise
                time.sleep(_PAUSE_S if is_retry else 0)
            is_retry = True

    def _call(self, name: str, address: str, frame: Frame, codes: Collection[int] = ()) -> Frame:
        """Return a successful answer, or one with a code in `codes`; raise an error otherwise."""
        try:
            answer = invoke(self._client, address, frame, self._timeout_s)
        except ConnectError as unreached:
            raise with_origin(unreached, name) from unreached.__cause__
        error = error_for_answer(
            answer.code, answer.remark, broker_name=name, broker_address=address
        )
        if error is not None and answer.code not in codes:
            raise error
        return answer

    def _ask(self, frame: Frame, *, of_all: bool = True) -> Answers:
        results: list[tuple[Answers, SendError | None, float]] = []
        now_s = self._client.clock()
        self._name_servers.ask(frame, lambda *end: results.append(end), now_s, of_all=of_all)
        while not results:
            self._client.poll(self._timeout_s)
        answers, error, _ = results[0]
        if error is not None:
            raise error
        return answers


T = TypeVar("T")


def _pages(
    begin: int, end: int, pull: Callable[..., tuple[T, int]]
) -> Iterator[tuple[T, int, int]]:
    """Yield the answers to pulls from `begin` to `end`, with the offsets of a pull and of the next
    one. `pull` takes the offset, and the largest number of messages as `max_messages`."""
    empty = 0
    while begin < end:
        answer, following = pull(begin, max_messages=min(end - begin, 1024))
        yield answer, begin, following
        # Repeat an empty pull: a broker may not have dispatched its last messages yet.
        empty = 0 if following > begin else empty + 1
        if empty:
            if empty > _EMPTY_PULLS:
                return
            time.sleep(0.05 * empty)
        begin = max(following, begin)


def is_away(error: SendError) -> bool:
    """Return whether the error means that a name server or a broker is away, or too busy to answer,
    and no refusal that a later request would meet, too."""
    is_silence = isinstance(error, (NotSentError, GoAwayError))
    return error.retriable and (is_silence or error.isolates is Isolate.BROKER)


def create_command(options: SinkOptions, topic: str, *more: str) -> str:
    """Return the command line that creates the topic on all brokers, or changes it there."""
    servers = ("-n", options.name_server) if options.name_server else ()
    space = ("-O", f"namespace={options.namespace}") if options.namespace else ()
    name = without_namespace(options.namespace, topic)
    return shlex.join(("rocket-sink", "topic", "create", name, *more, *servers, *space))


def closed_queues(options: SinkOptions, topic: str, data: QueueData) -> str:
    """Return the text about a broker on which a topic has more write queues than read queues."""
    command = create_command(options, topic, "--queues", str(max(data.write, data.read)))
    return (
        f"{data.broker_name} has {data.write} write queues and {data.read} read queues of the "
        f"topic, and lets nobody read the queues from {data.read} on, consumers neither. Open them "
        f"with {command}"
    )


_LACKING: Final = {
    "effectively_once": "does not look messages up by their ids, as a replay has to",
    "transactional": "does not let a client end its half messages",
}
"""{delivery: why it does not work behind a proxy}"""


def proxy_error(delivery: str, proxy: str) -> ConfigurationError:
    return ConfigurationError(
        f"delivery={delivery} does not work behind the RocketMQ proxy {proxy}, which "
        f"{_LACKING[delivery]}: use delivery=at_least_once, or give nameServer the name servers "
        "behind the proxy (docs/deploy/proxy.md)"
    )


def _masters(route: TopicRoute) -> dict[str, str]:
    return {
        broker.name: broker.addresses[_MASTER]
        for broker in route.brokers
        if _MASTER in broker.addresses
    }
