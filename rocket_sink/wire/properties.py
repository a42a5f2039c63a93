"""Message properties as text: name 0x01 value 0x02, without any escape (MessageDecoder).

A separator inside a name or value would inject other properties. `Message` and the column checks
refuse it; the encoder checks again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rocket_sink.errors import LocalProtocolError, MessageError
from rocket_sink.message import Message
from rocket_sink.message_rules import PROPERTIES_HEADROOM_BYTES, PROPERTIES_MAX_BYTES
from rocket_sink.wire.codes import V5_0_0, V5_4_0, V5_5_0

NAME_VALUE_SEPARATOR: Final = "\x01"
PROPERTY_SEPARATOR: Final = "\x02"
KEY_SEPARATOR: Final = " "

KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
UNIQ_KEY: Final = "UNIQ_KEY"
SHARDING_KEY: Final = "__SHARDINGKEY"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
PRIORITY: Final = "_SYS_MSG_PRIORITY_"
LITE_TOPIC: Final = "__LITE_TOPIC"
TRAN_MSG: Final = "TRAN_MSG"
PGROUP: Final = "PGROUP"
CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"
MSG_TYPE: Final = "MSG_TYPE"
CLUSTER: Final = "CLUSTER"
"""A property that brokers set in every stored message."""

LEAST_VERSIONS: Final = {
    TIMER_DELAY_MS: V5_0_0,
    TIMER_DELAY_SEC: V5_0_0,
    TIMER_DELIVER_MS: V5_0_0,
    PRIORITY: V5_4_0,
    LITE_TOPIC: V5_5_0,
}
"""{property: MQVersion ordinal of the oldest broker that supports it}; older brokers ignore it."""

ENCODED_LIMIT: Final = PROPERTIES_MAX_BYTES - PROPERTIES_HEADROOM_BYTES
"""Limit of a message's properties in UTF-8 bytes. Brokers add properties of their own."""


def encode_properties(properties: Mapping[str, str | int | None]) -> str:
    """Return the wire text, in the mapping's order; None values are left out. Raise
    LocalProtocolError if a name or a value holds a separator, or a name is empty."""
    pairs = [f"{name}\x01{value}\x02" for name, value in properties.items() if value is not None]
    text = "".join(pairs)
    # A pair has one separator of each kind; further separators are inside a name or a value.
    if text.count("\x01") != len(pairs) or text.count("\x02") != len(pairs) or "" in properties:
        separators = {NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR}
        refused = next(n for n, v in properties.items() if not n or separators & set(f"{n}{v}"))
        raise LocalProtocolError(
            f"the property {refused[:40]!r} is nameless or holds 0x01 or 0x02, which separate "
            "properties and cannot be escaped"
        )
    return text


def decode_properties(text: str) -> dict[str, str]:
    """Return the properties in a wire text (MessageDecoder.string2messageProperties). Pairs without
    a name, value or separator are dropped; the last of equal names counts."""
    properties = {}
    for pair in text.split(PROPERTY_SEPARATOR):
        name, separator, value = pair.partition(NAME_VALUE_SEPARATOR)
        if separator and name and value:
            properties[name] = value
    return properties


def properties_of(
    message: Message, *, message_id: str, extra: Mapping[str, str] | None = None
) -> str:
    """Return the wire text of a message's fields and user properties. UNIQ_KEY is the message's own
    id, else `message_id`. The producer's properties in `extra` (TRAN_MSG, PGROUP, INSTANCE_ID,
    CORRELATION_ID, ...) take precedence. Raise MessageError (PROPERTIES_TOO_LARGE)."""
    delay_level = message.delay_level
    if message.properties or extra or (message.is_single and not delay_level):
        return _all_properties(message, message_id, extra)
    # Build the common case without a mapping; `Message` has checked these texts.
    keys, tags, sharding_key = message.keys, message.tags, message.sharding_key
    text = (
        f"UNIQ_KEY\x01{message.message_id or message_id}\x02"
        f"WAIT\x01{'true' if message.wait_store else 'false'}\x02"
    )
    if tags is not None:
        text = f"TAGS\x01{tags}\x02{text}"
    if keys:
        text = f"KEYS\x01{keys[0] if len(keys) == 1 else KEY_SEPARATOR.join(keys)}\x02{text}"
    if delay_level:
        text = f"{text}DELAY\x01{delay_level}\x02"
    if sharding_key is not None:
        text = f"{text}__SHARDINGKEY\x01{sharding_key}\x02"
    # A character takes at most 4 bytes, so most texts need no encoding for the check.
    return text if len(text) * 4 <= ENCODED_LIMIT else _within_limit(text, message)


def _all_properties(message: Message, message_id: str, extra: Mapping[str, str] | None) -> str:
    fields: dict[str, str | int | None] = {
        KEYS: KEY_SEPARATOR.join(message.keys) or None,
        TAGS: message.tags,
        UNIQ_KEY: message.message_id or message_id,
        WAIT: "true" if message.wait_store else "false",
        DELAY: message.delay_level or None,
        TIMER_DELAY_MS: message.delay_ms,
        TIMER_DELIVER_MS: message.delivery_timestamp_ms,
        TIMER_DELAY_SEC: message.delay_s,
        SHARDING_KEY: message.sharding_key,
        PRIORITY: message.priority,
        LITE_TOPIC: message.lite_topic,
    }
    fields.update(message.properties)
    if extra:
        fields.update(extra)
    return _within_limit(encode_properties(fields), message)


def least_version(text: str) -> int:
    """Return the MQVersion ordinal of the oldest broker that supports the properties; 0 for any."""
    properties = decode_properties(text)
    return max((LEAST_VERSIONS.get(name, 0) for name in properties), default=0)


def split_keys(properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the index keys among a message's properties. Only blanks separate them, not tabs or
    no-break spaces (IndexService.buildIndex)."""
    return tuple([key for key in properties.get(KEYS, "").split(KEY_SEPARATOR) if key])


def _within_limit(text: str, message: Message) -> str:
    size = len(text.encode())
    if size > ENCODED_LIMIT:
        raise MessageError(
            f"the properties take {size} bytes on the wire; the limit is {ENCODED_LIMIT} "
            f"({PROPERTIES_MAX_BYTES} less what brokers add)",
            code="PROPERTIES_TOO_LARGE",
            topic=message.topic,
            keys=message.keys,
            size=size,
            limit=ENCODED_LIMIT,
        )
    return text
