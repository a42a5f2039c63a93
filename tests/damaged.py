"""Messages that a killed broker kept in part."""

from rocket_sink.wire.stored import StoredMessage

_SENT = {"UNIQ_KEY", "__SHARDINGKEY"}
"""The properties that these tests send; brokers append others behind them."""


def damaged(message: StoredMessage) -> bool:
    """Return whether the message lacks a property that was sent."""
    return message.torn and not message.properties.keys() >= _SENT
