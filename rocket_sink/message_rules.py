"""Rules for the fields of messages, and namespaces in names of topics and groups.

Java checks in `Validators.checkMessage` and `Message.putUserProperty`, but not for the separators
0x01 and 0x02. These can inject properties (apache/rocketmq#4241) and are refused here. Other fields
that Java sends are legal here, too, if they can be encoded. A namespace is a prefix `namespace%`,
behind a retry or dead-letter prefix; RocketMQ's own topics and groups have none (NamespaceUtil)."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, SupportsIndex

from rocket_sink.errors import MessageError

TOPIC_MAX_LENGTH: Final = 127
"""The longest name of a topic, in characters (Validators.TOPIC_MAX_LENGTH)."""
PROPERTIES_MAX_BYTES: Final = 32_767
"""The largest size of a message's encoded properties (MessageExtEncoder: Short.MAX_VALUE)."""
PROPERTIES_HEADROOM_BYTES: Final = 256
"""The part of PROPERTIES_MAX_BYTES for properties that brokers add (CLUSTER, REAL_TOPIC, ...)."""
BATCH_MAX_MESSAGES: Final = 16_384
"""The largest number of messages in a batch. Brokers count messages in 16 bits: after a batch of
32,768 or more, later messages of the queue are lost (`CommitLog.asyncPutMessages` casts to short).
The answer's header, up to 57 bytes per message, also stays below its limit of 1 MiB."""
DELAY_LEVEL_MAX: Final = 18
"""The highest delay level. Brokers silently lower higher levels; here they are refused."""
DELAY_MAX_S: Final = 2**31 - 1
"""The longest delay (timerMaxDelaySec, an int). If a delay and the present time together exceed
2^63 - 1 ms, the broker's sum overflows, and it delivers the message at once (HookUtils)."""

PRIORITY_MAX: Final = 2**31 - 1
"""The highest priority: Message.setPriority takes an int from 0 on."""
LITE_TOPIC_PATTERN: Final = "[a-zA-Z0-9_-]{1,64}"
"""Names of lite topics (GrpcValidator.validateLiteTopic; maxLiteTopicSize is 64). Brokers do not
check names, and `$` or `,` in a name would put the message into other queues."""
NAME_PATTERN: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
FORBIDDEN_TOPICS: Final = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)
"""Topics to which no client may send (TopicValidator.NOT_ALLOWED_SEND_TOPIC_SET)."""
SYSTEM_TOPICS: Final = FORBIDDEN_TOPICS | {
    "TBW102", "BenchmarkTest", "RMQ_SYS_TRACE_TOPIC", "CHECKPOINT_TOPIC"
}  # fmt: skip
"""TopicValidator.SYSTEM_TOPIC_SET; topics with the prefix rmq_sys_ are system topics, too."""

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
    TRANSACTION_CHECK_TIMES ORIGIN_GROUP _SYS_MSG_PRIORITY_ __LITE_TOPIC PROPERTY_FORWARD_QUEUE_ID
    REDIRECT INNER_MULTI_DISPATCH TRACE_CONTEXT TRANS_OFFSET TIMER_ROLL_LABEL __STARTDELIVERTIME
    """.split()  # noqa: SIM905 (sixty quoted names read worse)
)
"""Illegal names of user properties: all that MessageConst has in 5.5.1 (Java refuses 54 of them),
and __STARTDELIVERTIME of the cloud's clients."""
RESERVED_PREFIX: Final = "__RMQ.TRANSIENT."
"""The prefix of properties that brokers use and never store (MessageConst)."""

JAVA_BLANKS: Final = "".join(map(chr, range(0x21)))
"""The characters that `String.trim` removes and `Message.putUserProperty` takes for blank."""
TAG_BLANKS: Final = JAVA_BLANKS[3:]
"""The characters that are removed at both ends of a tag, as FilterAPI removes them in consumers'
filters. 0x00 to 0x02 are not among them: a tag with these is refused."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_UNCARRIED: Final = re.compile(r"[\x01\x02]|\x00\Z")
NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({})


def is_control_free(text: str) -> bool:
    """Return whether `text` has no C0 control character or DEL."""
    return _CONTROL.search(text) is None


def is_carried(text: str) -> bool:
    """Return whether the text of a property can be encoded and decoded. 0x01 and 0x02 separate
    properties and cannot be escaped (MessageDecoder). 0x00 at the end marks properties that a
    killed broker wrote in part (`wire.stored`)."""
    return _UNCARRIED.search(text) is None


@lru_cache(maxsize=1000)
def check_topic(topic: str) -> None:
    """Raise MessageError(INVALID_TOPIC) if clients may not send to `topic`."""
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
    """Raise MessageError if `name` and `value` are no legal user property. Codes:
    RESERVED_PROPERTY, INVALID_PROPERTY (blank, not a string, 0x01, 0x02, 0x00 at the end),
    INVALID_TEXT (a lone surrogate)."""
    for part, text in (("name", name), ("value", value)):
        if not isinstance(text, str) or not text.strip(JAVA_BLANKS):
            raise MessageError(
                f"a property's {part} is blank or no text: {name!r}", code="INVALID_PROPERTY"
            )
        if not is_carried(text):
            raise MessageError(
                f"the {part} of the property {name!r} has 0x01 or 0x02, which separate properties "
                "on the wire and cannot be escaped, or 0x00 at its end",
                code="INVALID_PROPERTY",
            )
        _check_utf8(text, f"the {part} of the property {name!r}")
    if name in RESERVED_PROPERTIES or name.startswith(RESERVED_PREFIX):
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


def checked_body(body: Any, topic: str) -> bytes:
    """Return the body as bytes; raise MessageError (NULL_BODY, INVALID_BODY, EMPTY_BODY)."""
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


def _is_word(text: str) -> bool:
    """Return whether the text is visible ASCII without blanks, as most keys and tags are."""
    return text.isascii() and text.isprintable() and " " not in text and text != ""


def checked_properties(properties: Mapping[str, str]) -> Mapping[str, str]:
    """Return a read-only copy of the user properties; raise the errors of `check_property`."""
    for name, value in properties.items():
        check_property(name, value)
    return MappingProxyType(dict(properties))


def checked_keys(keys: Iterable[str] | str) -> tuple[str, ...]:
    """Return the index keys as a tuple; raise MessageError (INVALID_KEYS)."""
    if type(keys) is tuple and len(keys) == 1 and type(keys[0]) is str and _is_word(keys[0]):
        return keys  # most messages with keys have one key
    keys = (keys,) if isinstance(keys, str) else tuple(keys)
    for key in keys:
        if type(key) is str and _is_word(key):
            continue
        if not key or " " in key:
            raise MessageError(
                f"the key {key!r} is empty or holds a blank; blanks separate keys on the wire",
                code="INVALID_KEYS",
            )
        check_field("a key", key, code="INVALID_KEYS")
    return keys


def checked_tags(tags: str) -> str:
    """Return the tag without TAG_BLANKS around it; raise MessageError (INVALID_TAGS)."""
    if type(tags) is str and _is_word(tags) and "|" not in tags:
        return tags
    tags = tags.strip(TAG_BLANKS)
    if not tags or "||" in tags:
        raise MessageError(
            f"tags {tags!r}: one tag without '||' (a message has one tag; '||' is the "
            "consumer's filter syntax)",
            code="INVALID_TAGS",
        )
    check_field("tags", tags, code="INVALID_TAGS")
    return tags


def check_field(what: str, text: str, code: str = "INVALID_TEXT") -> str:
    """Return the text; raise MessageError(`code`) if it is empty or cannot be encoded."""
    if not isinstance(text, str) or not text or not is_carried(text):
        raise MessageError(
            f"{what} {text!r} is empty or no text, has 0x01 or 0x02, or ends with 0x00", code=code
        )
    _check_utf8(text, what)
    return text


def checked_flag(flag: int) -> int:
    """Return the user flag as an `int`; raise MessageError (INVALID_FLAG)."""
    flag = checked_integer("flag", flag, code="INVALID_FLAG")
    if not -(2**31) <= flag < 2**31:
        raise MessageError(f"flag {flag} is not a 32-bit integer", code="INVALID_FLAG")
    return flag


def checked_integer(what: str, value: SupportsIndex, code: str) -> int:
    """Return the number as an `int`; raise MessageError(`code`) for a fraction, text or boolean."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise MessageError(f"{what} {value!r} is not a whole number", code=code)
    return operator.index(value)


NAMESPACE_SEPARATOR: Final = "%"
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"

_SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
_SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"


def is_system_resource(name: str) -> bool:
    """Return whether a topic or group is RocketMQ's own."""
    return name in SYSTEM_TOPICS or name.startswith((_SYSTEM_TOPIC_PREFIX, _SYSTEM_GROUP_PREFIX))


SYSTEM_TOPIC_PATTERN: Final = "^(?i:rmq_sys_)|^%(RETRY|DLQ|LMQ)%"
"""The pattern of brokers' own topics that are not in SYSTEM_TOPICS. Brokers would treat messages in
these topics as failed, timed or transactional messages."""
_SYSTEM_TOPIC: Final = re.compile(SYSTEM_TOPIC_PATTERN)


def is_system_topic(topic: str) -> bool:
    """Return whether brokers use a topic of this name themselves."""
    return topic in SYSTEM_TOPICS or _SYSTEM_TOPIC.match(topic) is not None


def check_no_system_topic(topic: str, *, is_system: bool = False) -> None:
    """Raise MessageError(INVALID_TOPIC) if brokers use the topic themselves, by its name or by
    `is_system` of its route (`TopicPublishInfo.is_system`)."""
    if is_system or is_system_topic(topic):
        raise MessageError(
            f"the topic column names {topic!r}, a topic of RocketMQ's own; option "
            "allowSystemTopics=true sends to it",
            code="INVALID_TOPIC", topic=topic,
        )  # fmt: skip


def _split(name: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name


def with_namespace(namespace: str | None, name: str) -> str:
    """Return `name` with `namespace`. Names that have it, and RocketMQ's own, stay as they are."""
    if not namespace or not name or is_system_resource(name):
        return name
    prefix, base_name = _split(name)
    if base_name.startswith(namespace + NAMESPACE_SEPARATOR):
        return name
    return f"{prefix}{namespace}{NAMESPACE_SEPARATOR}{base_name}"


def without_namespace(namespace: str | None, name: str) -> str:
    """Return `name` without `namespace`, as it was before `with_namespace`."""
    prefix, base_name = _split(name)
    return (
        prefix + base_name.removeprefix(f"{namespace}{NAMESPACE_SEPARATOR}") if namespace else name
    )


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return the parts of `host:port` or `[v6]:port`; None if the text is neither."""
    host, _, port = address.strip().rpartition(":")
    # `isdigit` alone accepts digits that `int` refuses, as in '²'.
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or not is_number or not 0 < int(port) < 65_536 or re.search(r"[\s,/]", host):
        return None
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Return whether `host:port` is on this host's loopback."""
    host, _ = host_and_port(address) or ("", 0)
    return host in ("localhost", "::1") or host.startswith("127.")
