"""Dead-letter topics of consumer groups, `%DLQ%group`: reading, and resending to the origin topic.

After the last delivery attempt a broker moves the message to this topic, and adds the origin topic
(`RETRY_TOPIC`) and the first offset id (`ORIGIN_MESSAGE_ID`) to the message's properties
(AbstractSendMessageProcessor). Dead letters stay in the topic until they expire.

A resent message has the client id and the content of its dead letter. Its counter
`ROCKET_SINK_RESENDS` is one higher, and its `ROCKET_SINK_ORIGIN` is the ORIGIN_MESSAGE_ID. If the
origin topic contains such a message, the dead letter is not sent again. Neither the client id nor
the content would do: programs may give several messages one id, such as that of an order, and these
may be equal or differ in any property. A resent message that becomes a dead letter keeps the
counter, so the counter also limits resends."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from rocket_sink.errors import MessageError, NoRouteError, SendError
from rocket_sink.message import Message, MessageQueue, SendResult
from rocket_sink.message_rules import DLQ_PREFIX, RESERVED_PROPERTIES, with_namespace
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.wire.properties import SHARDING_KEY, TAGS, split_keys
from rocket_sink.wire.stored import StoredMessage

RETRY_TOPIC: Final = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
RESENDS: Final = "ROCKET_SINK_RESENDS"
"""User property: how often the message was resent from a dead-letter topic."""
ORIGIN: Final = "ROCKET_SINK_ORIGIN"
"""User property of a resent message: `DeadLetter.origin_id` of the message that it is a copy of."""
FAILURES_MAX: Final = 1000


@dataclass(frozen=True)
class DeadLetter:
    """A message in a dead-letter topic."""

    group: str
    broker_name: str
    message: StoredMessage

    @property
    def origin_topic(self) -> str | None:
        properties = self.message.properties
        return properties.get(RETRY_TOPIC) or properties.get(DLQ_ORIGIN_TOPIC)

    @property
    def message_id(self) -> str:
        """The client id of the message; if it has none, its first offset id."""
        return self.message.message_id or self.origin_id

    @property
    def origin_id(self) -> str:
        """The first offset id of the message; if it is unknown, that of the dead letter."""
        properties = self.message.properties
        return properties.get(ORIGIN_MESSAGE_ID) or self.message.offset_message_id

    @property
    def resends(self) -> int:
        return resends_of(self.message)

    @property
    def keys(self) -> tuple[str, ...]:
        return split_keys(self.message.properties)

    def to_message(self, topic: str) -> Message:
        """Return the copy to resend, counter + 1. Raise MessageError if a property is illegal."""
        properties = self.message.properties
        own = {n: value for n, value in properties.items() if n not in RESERVED_PROPERTIES}
        return Message(
            topic,
            self.message.body,
            tags=properties.get(TAGS),
            keys=self.keys,
            sharding_key=properties.get(SHARDING_KEY),
            properties={**own, RESENDS: str(self.resends + 1), ORIGIN: self.origin_id},
            flag=self.message.flag,
            message_id=self.message_id,
        )


@dataclass(frozen=True)
class DlqQuery:
    """A selection of a group's dead letters; times are store times, ms since 1970."""

    group: str
    topic: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    key: str | None = None
    message_id: str | None = None
    limit: int | None = None

    def takes(self, dead_letter: DeadLetter) -> bool:
        """Return whether the dead letter is selected; the limit is not checked."""
        at_ms = dead_letter.message.store_ms
        ids = (dead_letter.message_id, dead_letter.message.properties.get(ORIGIN_MESSAGE_ID),
               dead_letter.message.offset_message_id)  # fmt: skip
        return (
            (self.topic is None or dead_letter.origin_topic == self.topic)
            and (self.since_ms is None or at_ms >= self.since_ms)
            and (self.until_ms is None or at_ms < self.until_ms)
            and (self.key is None or self.key in dead_letter.keys)
            and (self.message_id is None or self.message_id in ids)
        )


def groups(admin: Admin) -> dict[str, int]:
    """Return {group: number of its dead letters} for all groups with a dead-letter topic."""
    dlq_topics = (topic for topic in admin.topics() if topic.startswith(DLQ_PREFIX))
    return {topic.removeprefix(DLQ_PREFIX): admin.count(topic) for topic in dlq_topics}


def read(admin: Admin, query: DlqQuery) -> Iterator[DeadLetter]:
    """Yield the dead letters that are stored at the start of the call, by store time. Raises
    NoRouteError if the group has no dead-letter topic."""
    topic = query.group if query.group.startswith(DLQ_PREFIX) else DLQ_PREFIX + query.group
    group = topic.removeprefix(DLQ_PREFIX)
    if query.topic is not None:
        query = replace(query, topic=with_namespace(admin.options.namespace, query.topic))
    bounds = [
        (queue, _first_offset(admin, queue, query.since_ms), admin.max_offset(queue))
        for queue in admin.queues(topic)
    ]
    queues = [
        map(partial(DeadLetter, group, queue.broker_name), admin.read_queue(queue, begin, end))
        for queue, begin, end in bounds
        if begin < end
    ]
    merged = heapq.merge(*queues, key=lambda dead_letter: dead_letter.message.store_ms)
    return itertools.islice(filter(query.takes, merged), query.limit)


def _first_offset(admin: Admin, queue: MessageQueue, since_ms: int | None) -> int:
    lowest = admin.min_offset(queue)
    return lowest if since_ms is None else max(lowest, admin.offset_by_time(queue, since_ms))


@dataclass
class ResendReport:
    """Numbers of dead letters by result, and the first `FAILURES_MAX` failures.

    Attributes:
        degraded: part of `resent`: stored, but not flushed or replicated in time.
        already: not sent, because an earlier resend is in the topic.
        left_alone: not sent, because the limit of resends is reached.
        homeless: not sent, because the origin topic is unknown.
        held_back: not sent, because an earlier dead letter with this sharding key failed.
    """

    resent: int = 0
    degraded: int = 0
    already: int = 0
    left_alone: int = 0
    homeless: int = 0
    held_back: int = 0
    failed: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, str]] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """Whether no dead letter has failed, was held back, or is homeless."""
        return not (self.failed or self.held_back or self.homeless)


@dataclass
class Resender:
    """Sends dead letters to their origin topics, one at a time, in the caller's order. After a
    failure it holds back later dead letters with the same sharding key.

    Args:
        send: `Producer.send`.
        to_topic: send to this topic, instead of the origin topics.
        max_resends: skip dead letters that were resent this often.
        again: resend even if an earlier resend is in the topic, or `max_resends` is reached.
    """

    admin: Admin
    send: Callable[[Message], SendResult]
    to_topic: str | None = None
    max_resends: int = 3
    again: bool = False
    report: ResendReport = field(default_factory=ResendReport)
    _stopped: set[tuple[str, str]] = field(default_factory=set)

    def resend(self, dead_letter: DeadLetter) -> SendResult | None:
        """Send a dead letter, or skip it or hold it back, and count it in the report. Return None
        if it was not sent. Raises fatal errors (SendError: wrong credentials)."""
        topic, report = self.to_topic or dead_letter.origin_topic, self.report
        if not topic:
            report.homeless += 1
            return None
        key = (topic, dead_letter.message.properties.get(SHARDING_KEY, ""))
        if key in self._stopped:
            report.held_back += 1
            return None
        try:
            if not self.again and self._is_done(dead_letter, topic):
                return None
            result = self.send(dead_letter.to_message(topic))
        except (MessageError, SendError) as error:
            if error.fatal:
                raise
            report.failed += 1
            report.codes[error.code] += 1
            if len(report.failures) < FAILURES_MAX:
                failure = {"message_id": dead_letter.message_id, "topic": topic}
                report.failures.append({**failure, "code": error.code, "error": str(error)})
            if key[1]:
                self._stopped.add(key)
            return None
        report.resent += 1
        report.degraded += result.status != "SEND_OK"
        return result

    def _is_done(self, letter: DeadLetter, topic: str) -> bool:
        if letter.resends >= self.max_resends:
            self.report.left_alone += 1
            return True
        try:
            copies = self.admin.query_by_unique_key(topic, letter.message_id, bodies=False)
        except NoRouteError:
            # A topic without a route contains no resent message, and the send may create it.
            return False
        is_done = any(
            copy.properties.get(ORIGIN) == letter.origin_id and resends_of(copy) > letter.resends
            for copy in copies
        )
        self.report.already += is_done
        return is_done


def resends_of(message: StoredMessage) -> int:
    """Return the message's counter of resends; 0 if it is not a number."""
    text = message.properties.get(RESENDS, "0")
    return int(text) if text.isascii() and text.isdigit() else 0
