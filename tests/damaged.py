"""Messages that a killed broker kept in part."""

from __future__ import annotations

from rocket_sink.wire.stored import StoredMessage

_SENT = {"UNIQ_KEY", "__SHARDINGKEY"}
"""What the rows of these tests are sent with; their brokers add to it, behind."""


def damaged(message: StoredMessage) -> bool:
    """It lacks something of what was sent."""
    return message.torn and not message.properties.keys() >= _SENT
