"""Messages, queues and send results: values only, validated where they are made.

An illegal `Message` cannot exist, so the encoders never meet one (Java checks in
`Validators.checkMessage` and `Message.putUserProperty`, and not at all for control characters,
which can inject properties: apache/rocketmq#4241). The size limit is the producer's, not the
message's, and is checked when it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from rocket_sink.errors import MessageError, Outcome

TOPIC_MAX_LENGTH: Final = 127
"""Characters (Validators.TOPIC_MAX_LENGTH)."""
GROUP_MAX_LENGTH: Final = 120
"""Characters; the documented limit (Validators 5.3 lets 255 pass, brokers differ)."""
PROPERTIES_MAX_BYTES: Final = 32_767
"""Encoded properties, UTF-8 bytes (MessageExtEncoder: Short.MAX_VALUE)."""
PROPERTIES_HEADROOM_BYTES: Final = 256
"""Left free for what a broker adds itself (CLUSTER, REAL_TOPIC, REAL_QID, ...)."""
DELAY_LEVEL_MAX: Final = 18
"""The broker clamps higher levels to its last one, silently; we refuse them."""

NAME_PATTERN: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
FORBIDDEN_TOPICS: Final = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)
"""Topics no client may send to (TopicValidator.NOT_ALLOWED_SEND_TOPIC_SET)."""
SYSTEM_TOPICS: Final = FORBIDDEN_TOPICS | {
    "TBW102", "BenchmarkTest", "RMQ_SYS_TRACE_TOPIC", "CHECKPOINT_TOPIC"
}  # fmt: skip
"""TopicValidator.SYSTEM_TOPIC_SET; the prefix rmq_sys_ is a system topic too."""

RESERVED_PROPERTIES: Final = frozenset(
    """
    TRACE_ON MSG_REGION KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP
    MIN_OFFSET MAX_OFFSET BUYER_ID ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG
    RECONSUME_TIME UNIQ_KEY MAX_RECONSUME_TIMES CONSUME_START_TIME POP_CK POP_CK_OFFSET
    1ST_POP_TIME TRAN_PREPARED_QUEUE_OFFSET DUP_INFO EXTEND_UNIQ_INFO INSTANCE_ID CORRELATION_ID
    REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER MSG_TYPE INNER_MULTI_QUEUE_OFFSET
    TIMER_DELAY_MS TIMER_DELAY_SEC TIMER_DELIVER_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS
    TIMER_ROLL_TIMES TIMER_OUT_MS TIMER_DEL_UNIQKEY TIMER_DELAY_LEVEL __BORNHOST BORN_TIMESTAMP
    DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID __CRC32#
    __SHARDINGKEY __transactionId__ INNER_NUM INNER_BASE CHECK_IMMUNITY_TIME_IN_SECONDS
    TRANSACTION_CHECK_TIMES PROPERTY_FORWARD_QUEUE_ID REDIRECT INNER_MULTI_DISPATCH TRACE_CONTEXT
    """.split()  # noqa: SIM905 (sixty quoted names read worse)
)
"""Names a user property may not have: MessageConst.STRING_HASH_SET (51 names), and the names
that this package's own columns and fields write, so that one message cannot say two things."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def is_control_free(text: str) -> bool:
    """True when `text` has no C0 control character or DEL.

    0x01 and 0x02 separate properties on the wire and cannot be escaped (MessageDecoder).
    """
    return _CONTROL.search(text) is None


def check_topic(topic: str) -> None:
    """Raise MessageError(INVALID_TOPIC) unless `topic` may be sent to (Validators.checkTopic)."""
    if not isinstance(topic, str) or not topic.strip():
        raise MessageError("the topic is blank", code="INVALID_TOPIC", topic=topic)
    if len(topic) > TOPIC_MAX_LENGTH:
        raise MessageError(
            f"the topic {topic[:40]!r}... has {len(topic)} characters; the limit is "
            f"{TOPIC_MAX_LENGTH}",
            code="INVALID_TOPIC", topic=topic, size=len(topic), limit=TOPIC_MAX_LENGTH,
        )  # fmt: skip
    if NAME_PATTERN.fullmatch(topic) is None:
        raise MessageError(
            f"the topic {topic!r} has illegal characters; allowed are letters, digits and % | _ -",
            code="INVALID_TOPIC", topic=topic,
        )  # fmt: skip
    if topic in FORBIDDEN_TOPICS:
        raise MessageError(
            f"sending to the system topic {topic!r} is forbidden",
            code="INVALID_TOPIC", topic=topic,
        )  # fmt: skip


def check_property(name: str, value: str) -> None:
    """Raise MessageError unless `name` and `value` may be a user property.

    Codes: RESERVED_PROPERTY, INVALID_PROPERTY (blank, not a string, a control character,
    a lone surrogate).
    """
    for part, text in (("name", name), ("value", value)):
        if not isinstance(text, str) or not text.strip():
            raise MessageError(f"a property's {part} is blank: {name!r}", code="INVALID_PROPERTY")
        if not is_control_free(text):
            raise MessageError(
                f"the {part} of the property {name!r} has a control character; 0x01 and 0x02 "
                "separate properties on the wire and cannot be escaped",
                code="INVALID_PROPERTY",
            )
        _check_utf8(text, f"the {part} of the property {name!r}")
    if name in RESERVED_PROPERTIES:
        raise MessageError(
            f"the property name {name!r} is reserved by RocketMQ; use the field or column made "
            "for it",
            code="RESERVED_PROPERTY",
        )


def _check_utf8(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MessageError(
            f"{what} is not valid Unicode text: {error}", code="INVALID_TEXT"
        ) from None


@dataclass(frozen=True, order=True)
class MessageQueue:
    """One queue of a topic on one broker; sorts as Java's MessageQueue does."""

    topic: str
    broker_name: str
    queue_id: int


@dataclass(frozen=True)
class Message:
    """One message to send.

    Args:
        topic: 1 to 127 characters of letters, digits and `% | _ -`.
        body: 1 byte or more; text is encoded as UTF-8 by `Message.of_text`, never silently.
        tags: one tag for filters at the broker.
        keys: index keys; none may hold blanks, which separate them on the wire.
        sharding_key: chooses the queue, and travels as `__SHARDINGKEY`.
        properties: user properties; names that RocketMQ reserves are refused.
        delay_level: 1 to 18, or 0 for none.
        delay_ms: deliver so many milliseconds after the broker stored it (5.x brokers).
        delivery_timestamp_ms: deliver at this time, milliseconds since 1970 (5.x brokers).
        flag: 32-bit user flag.
        wait_store: wait for the store's durability conditions (Java: waitStoreMsgOK).
        message_id: the client message id (`UNIQ_KEY`); made when absent.

    Raises:
        MessageError: with the code of the first rule that the message breaks.
    """

    topic: str
    body: bytes
    tags: str | None = None
    keys: tuple[str, ...] = ()
    sharding_key: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    delay_level: int = 0
    delay_ms: int | None = None
    delivery_timestamp_ms: int | None = None
    flag: int = 0
    wait_store: bool = True
    message_id: str | None = None

    def __post_init__(self) -> None:
        try:
            self._check()
        except MessageError as error:
            raise error.about(self.topic, self.keys, self.body) from None
        except (AttributeError, TypeError) as error:
            wrong = MessageError(f"a field has the wrong type: {error}", code="INVALID_FIELD")
            raise wrong.about(self.topic, self.keys, self.body) from error

    def _check(self) -> None:
        check_topic(self.topic)
        object.__setattr__(self, "body", _checked_body(self.body, self.topic))
        object.__setattr__(self, "keys", _checked_keys(self.keys))
        object.__setattr__(self, "tags", _checked_tags(self.tags))
        for name, value in self.properties.items():
            check_property(name, value)
        object.__setattr__(self, "properties", MappingProxyType(dict(self.properties)))
        for what, text in (("sharding_key", self.sharding_key), ("message_id", self.message_id)):
            _checked_field(what, text)
        self._check_delay()
        if not -(2**31) <= self.flag < 2**31:
            raise MessageError(f"flag {self.flag} is not a 32-bit integer", code="INVALID_FLAG")

    def _check_delay(self) -> None:
        given = [
            name
            for name, present in (
                ("delay_level", self.delay_level != 0),
                ("delay_ms", self.delay_ms is not None),
                ("delivery_timestamp_ms", self.delivery_timestamp_ms is not None),
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
        for name in ("delay_ms", "delivery_timestamp_ms"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise MessageError(f"{name} {value} is negative", code="INVALID_DELAY")

    def __reduce__(self) -> tuple[Any, ...]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _rebuild_message, (type(self), {**values, "properties": dict(self.properties)})

    @property
    def is_timed(self) -> bool:
        """True when the message is delivered later; such messages cannot be batched."""
        return (
            self.delay_level != 0
            or self.delay_ms is not None
            or self.delivery_timestamp_ms is not None
        )


def _rebuild_message(cls: type[Message], values: dict[str, Any]) -> Message:
    return cls(**values)


def _checked_body(body: Any, topic: str) -> bytes:
    if body is None:
        raise MessageError("the message body is null", code="NULL_BODY", topic=topic)
    if isinstance(body, (bytearray, memoryview)):
        body = bytes(body)
    if not isinstance(body, bytes):
        raise MessageError(
            f"the message body is {type(body).__name__}, not bytes; encode text as UTF-8",
            code="INVALID_BODY", topic=topic,
        )  # fmt: skip
    if not body:
        raise MessageError("the message body length is zero", code="EMPTY_BODY", topic=topic)
    return body


def _checked_keys(keys: Iterable[str] | str) -> tuple[str, ...]:
    keys = (keys,) if isinstance(keys, str) else tuple(keys)
    for key in keys:
        if not key or any(character.isspace() for character in key):
            raise MessageError(
                f"the key {key!r} is empty or holds a blank; blanks separate keys on the wire",
                code="INVALID_KEYS",
            )
        _checked_field("a key", key, code="INVALID_KEYS")
    return keys


def _checked_tags(tags: str | None) -> str | None:
    if tags is None or tags == "":
        return None
    tags = tags.strip()
    if not tags or "||" in tags:
        raise MessageError(
            f"tags {tags!r}: one tag without '||' (a message has one tag; '||' is the "
            "consumer's filter syntax)",
            code="INVALID_TAGS",
        )
    _checked_field("tags", tags, code="INVALID_TAGS")
    return tags


def _checked_field(what: str, text: str | None, code: str = "INVALID_TEXT") -> None:
    if text is None:
        return
    if not isinstance(text, str) or not text or not is_control_free(text):
        raise MessageError(f"{what} {text!r} is empty or has a control character", code=code)
    _check_utf8(text, what)


@dataclass(frozen=True)
class SendResult:
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
