"""How far a consumer group has come with a ledger's messages: the ledger has the offsets of the
messages, and brokers have the group's positions."""
# ruff: noqa: S608 (the SQL has our own names, numbers, and texts in hexadecimal digits)

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from rocket_sink.errors import RocketSinkError
from rocket_sink.ledger.sql import STORED, Scoped
from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.text import clean, counted

_SUMS: Final = """CAST(sum(n) AS BIGINT) AS messages, CAST(sum(waiting) AS BIGINT) AS waiting,
    CAST(sum(deleted) AS BIGINT) AS deleted, min(CASE WHEN waiting > 0 THEN at END) AS oldest"""


@dataclass(frozen=True)
class ConsumptionSums:
    """Messages that the ledger has stored. `waiting` ones are at or behind the group's position;
    the `oldest` of them was sent at that time. `deleted` ones were at or behind the position when
    they were removed, by retention or with the whole topic, so the group can never read them."""

    topic: str
    messages: int
    waiting: int
    deleted: int
    oldest: dt.datetime | None


@dataclass(frozen=True)
class QueueConsumption(ConsumptionSums):
    """The messages in one queue. `end_offset` follows the ledger's last one. The group reads
    `position` next; None: its broker knows no position, so the group has consumed nothing."""

    broker: str
    queue_id: int
    end_offset: int
    position: int | None


@dataclass(frozen=True)
class QueryConsumption(ConsumptionSums):
    """The messages of one query. No message of an epoch before `first_waiting` waits, up to
    `last_epoch` if it is None; `epochs_waiting` epochs have messages that wait."""

    query_id: str
    last_epoch: int
    first_waiting: int | None
    epochs_waiting: int

    def says(self, group: str) -> str:
        """Return up to which epoch the group has consumed the messages, as a sentence."""
        name, query = clean(group, max_chars=80), clean(self.query_id, max_chars=80)
        of = f"of {clean(self.topic, max_chars=80)} by the query {query}"
        if self.first_waiting is None:
            all_of_them = f"{counted(self.messages, 'message')} {of}"
            text = f"The group {name} is past all {all_of_them}, up to epoch {self.last_epoch:,}"
            lost = f", but {self.deleted:,} of them were deleted before the group came to them"
            return text + lost if self.deleted else text
        return (
            f"{counted(self.waiting, 'message')} {of} wait for the group {name}, in "
            f"{counted(self.epochs_waiting, 'epoch')} from epoch {self.first_waiting:,} on; the "
            f"oldest was sent at {self.oldest:%Y-%m-%d %H:%M:%S} UTC"
        )


@dataclass(frozen=True)
class Consumption:
    """The progress of a consumer group in the ledger's messages, in the topics that it reads.
    `without_offset` counts messages whose offset the ledger does not know: those with a delay or a
    timer, and those of transactions. `without_broker` counts messages by their broker if their
    topic's route lacks it, so nobody knows the group's positions there. Nothing else counts these
    messages."""

    group: str
    without_offset: int
    queues: list[QueueConsumption] = field(default_factory=list)
    queries: list[QueryConsumption] = field(default_factory=list)
    without_broker: dict[str, int] = field(default_factory=dict)

    @property
    def uncounted(self) -> list[str]:
        """The messages that only `without_offset` and `without_broker` count, as texts."""
        texts = [
            f"{counted(messages, 'message')} on the broker {clean(broker, max_chars=80)}, which "
            "has left the route (position unknown)"
            for broker, messages in self.without_broker.items()
        ]
        if self.without_offset:
            delayed = counted(self.without_offset, "message")
            texts.append(f"{delayed} of transactions, or with a delay or a timer (offset unknown)")
        return texts


def consumption(read: Scoped, group: str, options: SinkOptions | None) -> Consumption:
    """Compare the offsets of the messages in the scope with the group's positions.

    Raises:
        RocketSinkError: no broker knows a position of the group in any topic of the ledger.
        SendError: name servers or brokers do not answer, or refuse to.
    """
    has_offset = "queue_offset IS NOT NULL AND NOT coalesce(half, false)"
    stored = f"FROM answered WHERE {STORED} AND coalesce(request, 1) > 0 AND {read.where}"
    columns = "topic, broker_name AS broker, queue_id"
    count = "CAST(sum(message_count) AS BIGINT) AS n"
    queues = read(
        f"SELECT {columns}, {count} {stored} AND {has_offset} GROUP BY topic, broker_name, queue_id"
    )
    (others,) = read(f"SELECT {count} {stored} AND NOT ({has_offset})")
    result = Consumption(group, others["n"] or 0)
    if not queues:
        return result
    sums = {(row["topic"], row["broker"], row["queue_id"]): row["n"] for row in queues}
    positions = _positions(sums, group, options)
    topics = {topic for topic, *_ in positions}
    for (topic, broker, queue_id), messages in sums.items():
        if topic in topics and (topic, broker, queue_id) not in positions:
            missing = result.without_broker
            missing[broker] = missing.get(broker, 0) + messages
    values = ", ".join(
        f"('{topic.encode().hex().upper()}', '{broker.encode().hex().upper()}', {queue_id}, "
        f"{position or 0}, {begin}, {end})"
        for (topic, broker, queue_id), (position, begin, end) in positions.items()
    )
    messages = f"""(
        SELECT w.*, greatest(ends - greatest(first, next_read), 0) - waiting AS deleted
        FROM (
            SELECT *, greatest(least(ends, stops) - greatest(first, next_read, begins), 0)
                AS waiting
            FROM (
                SELECT {columns}, query_id, epoch, at, queue_offset AS first,
                    CAST(message_count AS BIGINT) AS n, queue_offset + message_count AS ends
                {stored} AND {has_offset}
            ) s
            JOIN (VALUES {values}) AS p(of_topic, of_broker, of_queue, next_read, begins, stops)
                ON hex(topic) = of_topic AND hex(broker) = of_broker AND queue_id = of_queue
        ) w
    ) m"""
    for row in read(
        f"SELECT topic, broker, queue_id, max(ends) AS end_offset, {_SUMS} FROM {messages} "
        "GROUP BY topic, broker, queue_id ORDER BY topic, broker, queue_id"
    ):
        position, *_ = positions[row["topic"], row["broker"], row["queue_id"]]
        result.queues.append(QueueConsumption(**row, position=position))
    for row in read(
        f"""SELECT query_id, topic, max(epoch) AS last_epoch, {_SUMS},
            min(CASE WHEN waiting > 0 THEN epoch END) AS first_waiting,
            count(DISTINCT CASE WHEN waiting > 0 THEN epoch END) AS epochs_waiting
        FROM {messages} GROUP BY query_id, topic ORDER BY topic, query_id"""
    ):
        result.queries.append(QueryConsumption(**row))
    return result


def _positions(
    queues: Collection[tuple[str, str, int]], group: str, options: SinkOptions | None
) -> dict[tuple[str, str, int], tuple[int | None, int, int]]:
    """Return {(topic, broker, queue): (the group's position, offsets of the oldest message and of
    the next one)} for the queues of topics in which the group has any position. Leave out queues
    whose broker has left the topic's route."""
    positions = {}
    with Admin(options) as admin:
        known = set(admin.topics())  # A topic of an old query may be gone.
        routed = {
            (topic, broker.name)
            for topic in known.intersection(topic for topic, *_ in queues)
            for broker in admin.topic_route(topic).brokers
        }
        for place in itertools.starmap(MessageQueue, queues):
            if (place.topic, place.broker_name) in routed:
                offset = admin.consumer_offset(place, group)
                bounds = admin.min_offset(place), admin.max_offset(place)
                positions[place.topic, place.broker_name, place.queue_id] = (offset, *bounds)
    topics = {topic for (topic, *_), (offset, *_) in positions.items() if offset is not None}
    if not topics:
        raise RocketSinkError(
            f"no broker knows a position of the group {group} in a topic of this ledger: check the "
            "group's name. Groups that broadcast keep their positions to themselves"
        )
    return {key: value for key, value in positions.items() if key[0] in topics}
