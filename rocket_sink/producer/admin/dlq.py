"""Dead-letter topics of consumer groups, `%DLQ%group`: read them, and send messages to where they
came from.

A broker puts a message there when its group has given it up (AbstractSendMessageProcessor): with
all its properties, `RETRY_TOPIC` the topic it came from and `ORIGIN_MESSAGE_ID` its first offset
id. Nothing ever leaves such a topic but by age, so what was sent again is told from what was not by
looking: a message goes out under its own client id with a counter, `ROCKET_SINK_RESENDS`, one
higher than before, and is not sent again while the origin topic has such a one. The counter comes
back with a message that fails again, and ends the loop.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from rocket_sink.errors import MessageError, NoRouteError, SendError
from rocket_sink.message import Message, MessageQueue, SendResult
from rocket_sink.message_rules import RESERVED_PROPERTIES
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.wire.properties import SHARDING_KEY, TAGS, split_keys
from rocket_sink.wire.stored import StoredMessage

PREFIX: Final = "%DLQ%"
"""MixAll.DLQ_GROUP_TOPIC_PREFIX."""
RETRY_TOPIC: Final = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
RESENDS: Final = "ROCKET_SINK_RESENDS"
"""User property: how often a message was sent again out of a dead-letter topic."""
MAX_RESENDS: Final = 3


@dataclass(frozen=True)
class DeadLetter:
    """A message that a consumer group has given up."""

    group: str
    broker_name: str
    message: StoredMessage

    @property
    def origin_topic(self) -> str | None:
        """The topic it came from."""
        properties = self.message.properties
        return properties.get(RETRY_TOPIC) or properties.get(DLQ_ORIGIN_TOPIC)

    @property
    def message_id(self) -> str:
        """Its client id; of a message without one, the offset id that it had first."""
        properties = self.message.properties
        return (
            self.message.message_id
            or properties.get(ORIGIN_MESSAGE_ID)
            or self.message.offset_message_id
        )

    @property
    def resends(self) -> int:
        """How often it has been sent again."""
        return resends_of(self.message)

    @property
    def keys(self) -> tuple[str, ...]:
        """Its index keys."""
        return split_keys(self.message.properties)

    def to_message(self, topic: str) -> Message:
        """The message to send: its fields and user properties, the counter one higher.

        Raises:
            MessageError: no producer may send it so (an illegal property).
        """
        properties = self.message.properties
        own = {n: value for n, value in properties.items() if n not in RESERVED_PROPERTIES}
        return Message(
            topic,
            self.message.body,
            tags=properties.get(TAGS),
            keys=self.keys,
            sharding_key=properties.get(SHARDING_KEY),
            properties={**own, RESENDS: str(self.resends + 1)},
            flag=self.message.flag,
            message_id=self.message_id,
        )


@dataclass(frozen=True)
class DlqQuery:
    """Which of a group's dead letters; times are when the group gave them up, ms since 1970."""

    group: str
    topic: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    key: str | None = None
    message_id: str | None = None
    limit: int | None = None

    def takes(self, dead_letter: DeadLetter) -> bool:
        """True for letters that are meant, the limit left aside."""
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
    """{group: messages in its dead-letter topic} of all groups that have one, without retry."""
    found = (topic for topic in admin.topics() if topic.startswith(PREFIX))
    return {topic.removeprefix(PREFIX): admin.count(topic) for topic in found}


def read(admin: Admin, query: DlqQuery) -> Iterator[DeadLetter]:
    """The letters that are there when the call starts, in the order in which they were given up.

    Raises:
        NoRouteError: the group has no dead-letter topic.
    """
    topic = query.group if query.group.startswith(PREFIX) else PREFIX + query.group
    group = topic.removeprefix(PREFIX)
    bounds = [
        (queue, _first_offset(admin, queue, query.since_ms), admin.max_offset(queue))
        for queue in admin.queues(topic)
    ]
    queues = [
        _of_queue(admin, group, queue, begin, end) for queue, begin, end in bounds if begin < end
    ]
    merged = heapq.merge(*queues, key=lambda dead_letter: dead_letter.message.store_ms)
    return itertools.islice(filter(query.takes, merged), query.limit)


def _of_queue(
    admin: Admin, group: str, queue: MessageQueue, begin: int, end: int
) -> Iterator[DeadLetter]:
    for message in admin.read_queue(queue, begin, end):
        yield DeadLetter(group, queue.broker_name, message)


def _first_offset(admin: Admin, queue: MessageQueue, since_ms: int | None) -> int:
    lowest = admin.min_offset(queue)
    return lowest if since_ms is None else max(lowest, admin.offset_by_time(queue, since_ms))


@dataclass
class ResendReport:
    """What became of the letters; numbers.

    `already`: the topic has it from an earlier resend. `left_alone`: sent again so often before.
    `homeless`: nothing says which topic it came from.
    """

    resent: int = 0
    already: int = 0
    left_alone: int = 0
    homeless: int = 0
    held_back: int = 0
    failed: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    first_error: str = ""

    @property
    def settled(self) -> bool:
        """Every letter is where it belongs, or was left out on purpose."""
        return not (self.failed or self.held_back or self.homeless)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "codes": dict(self.codes)}


class Resender:
    """Sends letters to the topics they came from, one by one, in the order given.

    A letter that fails holds back the later ones of its sharding key.

    Args:
        send: `Producer.send`.
        to_topic: this topic instead of the letters' own.
        max_resends: letters that were sent again so often are left alone.
        again: also those, and those that are there already.
    """

    def __init__(
        self,
        admin: Admin,
        send: Callable[[Message], SendResult],
        *,
        to_topic: str | None = None,
        max_resends: int = MAX_RESENDS,
        again: bool = False,
    ) -> None:
        self._admin = admin
        self._send = send
        self._to_topic = to_topic
        self._max_resends = max_resends
        self._again = again
        self._stopped: set[tuple[str, str]] = set()
        self.report = ResendReport()

    def resend(self, dead_letter: DeadLetter) -> SendResult | None:
        """Send it unless it is not to be sent; what happened is in the report.

        Raises:
            SendError: a fatal one (credentials).
        """
        topic, report = self._to_topic or dead_letter.origin_topic, self.report
        if not topic:
            report.homeless += 1
            return None
        key = (topic, dead_letter.message.properties.get(SHARDING_KEY, ""))
        if key in self._stopped:
            report.held_back += 1
            return None
        try:
            if not self._again and self._is_done(dead_letter, topic):
                return None
            result = self._send(dead_letter.to_message(topic))
        except (MessageError, SendError) as error:
            if getattr(error, "fatal", False):
                raise
            self._failed(error, key)
            return None
        report.resent += 1
        return result

    def _is_done(self, dead_letter: DeadLetter, topic: str) -> bool:
        if dead_letter.resends >= self._max_resends:
            self.report.left_alone += 1
            return True
        try:
            copies = self._admin.query_by_unique_key(topic, dead_letter.message_id, bodies=False)
        except NoRouteError:
            # There is no such topic, so nothing was sent to it; the producer may create it.
            return False
        if any(resends_of(copy) > dead_letter.resends for copy in copies):
            self.report.already += 1
            return True
        return False

    def _failed(self, error: MessageError | SendError, key: tuple[str, str]) -> None:
        report = self.report
        report.failed += 1
        report.codes[error.code] += 1
        report.first_error = report.first_error or str(error)
        if key[1]:
            self._stopped.add(key)


def resends_of(message: StoredMessage) -> int:
    """The message's counter; what is no number is 0."""
    text = message.properties.get(RESENDS, "0")
    return int(text) if text.isascii() and text.isdigit() else 0
