"""Messages that a killed broker kept in part."""

_SENT = {"UNIQ_KEY", "__SHARDINGKEY"}
"""The properties that these tests send; brokers append others behind them."""


def damaged(message):
    """Return whether the message lacks a property that was sent."""
    return message.torn and not message.properties.keys() >= _SENT
