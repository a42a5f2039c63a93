"""Messages, queues and send results: values only, validated where they are made.

An illegal `Message` cannot exist, so the encoders never meet one. The size limit is the producer's,
not the message's, and is checked when it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from rocket_sink.errors import MessageError, Outcome
from rocket_sink.message_rules import (
    DELAY_LEVEL_MAX,
    NO_PROPERTIES,
    check_field,
    check_topic_once,
    checked_body,
    checked_flag,
    checked_keys,
    checked_properties,
    checked_tags,
)


@dataclass(frozen=True, order=True)
class MessageQueue:
    """One queue of a topic on one broker; sorts as Java's MessageQueue does."""

    topic: str
    broker_name: str
    queue_id: int


@dataclass(frozen=True, init=False)
class Message:
    """One message to send.

    Args:
        topic: 1 to 127 characters of letters, digits and `% | _ -`.
        body: 1 byte or more; text is encoded as UTF-8 by `Message.of_text`, never silently.
        tags: one tag for filters at the broker; blanks around it are cut off.
        keys: index keys; none may hold a blank, which separates them on the wire.
        sharding_key: chooses the queue (option `shardingHash`), and travels as `__SHARDINGKEY`.
        properties: user properties; names that RocketMQ reserves are refused.
        delay_level: 1 to 18, or 0 for none.
        delay_ms: deliver so many milliseconds after the broker stored it (5.x brokers).
        delivery_timestamp_ms: deliver at this time, milliseconds since 1970 (5.x brokers).
        flag: 32-bit user flag.
        wait_store: wait for the store's durability conditions (Java: waitStoreMsgOK).
        message_id: the client message id (`UNIQ_KEY`); made when absent.
        delay_s: as `delay_ms`, in seconds (Java: setDelayTimeSec).

    Raises:
        MessageError: with the code of the first rule that the message breaks.
    """

    topic: str
    body: bytes
    tags: str | None = None
    keys: tuple[str, ...] = ()
    sharding_key: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    """Read-only."""
    delay_level: int = 0
    delay_ms: int | None = None
    delivery_timestamp_ms: int | None = None
    flag: int = 0
    wait_store: bool = True
    message_id: str | None = None
    delay_s: int | None = None
    is_timed: bool = field(default=False, init=False, repr=False, compare=False)
    """True when the message is delivered later; such messages cannot be batched."""

    def __init__(
        self,
        topic: str,
        body: bytes,
        tags: str | None = None,
        keys: Iterable[str] | str = (),
        sharding_key: str | None = None,
        properties: Mapping[str, str] = NO_PROPERTIES,
        delay_level: int = 0,
        delay_ms: int | None = None,
        delivery_timestamp_ms: int | None = None,
        flag: int = 0,
        wait_store: bool = True,
        message_id: str | None = None,
        delay_s: int | None = None,
    ) -> None:
        # Written out because the generated one sets each field by a call, which costs more than all
        # these checks; a send of one message is mostly its objects. What is not given stays the
        # class's default: half the time and a third of the memory of an object with all fields.
        own = self.__dict__
        try:
            check_topic_once(topic)
            if type(body) is not bytes or not body:
                body = checked_body(body, topic)
            own["topic"], own["body"] = topic, body
            if tags is not None and tags != "":
                own["tags"] = checked_tags(tags)
            if keys != ():
                own["keys"] = checked_keys(keys)
            if sharding_key is not None:
                own["sharding_key"] = check_field("sharding_key", sharding_key)
            if message_id is not None:
                own["message_id"] = check_field("message_id", message_id)
            if properties is not NO_PROPERTIES:
                own["properties"] = checked_properties(properties)
            if flag != 0:
                own["flag"] = checked_flag(flag)
            if wait_store is not True:
                own["wait_store"] = wait_store
            if (
                delay_level != 0
                or delay_ms is not None
                or delivery_timestamp_ms is not None
                or delay_s is not None
            ):
                own.update(
                    delay_level=delay_level, delay_ms=delay_ms, is_timed=True,
                    delivery_timestamp_ms=delivery_timestamp_ms, delay_s=delay_s,
                )  # fmt: skip
                self._check_delay()
        except MessageError as error:
            raise error.about(topic, keys, body) from None
        except (AttributeError, TypeError) as error:
            wrong = MessageError(f"a field has the wrong type: {error}", code="INVALID_FIELD")
            raise wrong.about(topic, keys, body) from error

    def _check_delay(self) -> None:
        given = [
            name
            for name, present in (
                ("delay_level", self.delay_level != 0),
                ("delay_ms", self.delay_ms is not None),
                ("delivery_timestamp_ms", self.delivery_timestamp_ms is not None),
                ("delay_s", self.delay_s is not None),
            )
            if present
        ]
        if len(given) > 1:
            raise MessageError(
                f"only one of {', '.join(given)} may be set; the broker would silently drop the "
                "others",
                code="INVALID_DELAY",
            )
        if not 0 <= self.delay_level <= DELAY_LEVEL_MAX:
            raise MessageError(
                f"delay_level {self.delay_level} is not in 0..{DELAY_LEVEL_MAX}; for other "
                "delays use delay_ms",
                code="INVALID_DELAY",
            )
        for name in ("delay_ms", "delivery_timestamp_ms", "delay_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise MessageError(f"{name} {value} is negative", code="INVALID_DELAY")

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        return _rebuild_message, (type(self), {**values, "properties": dict(self.properties)})


# A dataclass takes no default without a hash, which a mapping proxy has from Python 3.12 on only.
setattr(Message, "properties", NO_PROPERTIES)  # noqa: B010 (mypy knows the class as frozen)


def _rebuild_message(cls: type[Message], values: dict[str, Any]) -> Message:
    return cls(**values)


class SendResult(NamedTuple):
    """What a broker answered to a send that it stored (Java: SendResult).

    `status` is SEND_OK, FLUSH_DISK_TIMEOUT, SLAVE_NOT_AVAILABLE or FLUSH_SLAVE_TIMEOUT.
    `offset_message_id` is the broker's id (address and commit-log offset); for a batch there is
    one per message, separated by commas, exactly as answered. `latency_ms` is write to answer of
    the last attempt. `maybe_duplicate` is True when an earlier attempt's outcome is unknown, so
    that the message may be stored twice under the same `message_id`.
    """

    outcome: Outcome
    status: str
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    broker_address: str
    attempts: int = 1
    latency_ms: float = 0.0
    maybe_duplicate: bool = False
    transaction_id: str | None = None
    region_id: str | None = None
    recall_handle: str | None = None
    trace_on: bool = True
