"""Names of brokers, clusters and their like, as name servers tell them.

They end in logs, ledgers, terminals and error texts, so those that cannot be shown are refused
where they are decoded.
"""

from __future__ import annotations

from typing import Final

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.text import clean

NAME_MAX_CHARACTERS: Final = 255
"""Of a broker, cluster, zone or scope. Java has no rule for these names: brokers take any text from
their configuration, the host's name by default (BrokerIdentity), name servers store what registers
(RouteInfoManager.registerBroker). Host names have 255 characters at most."""


def checked_name(what: str, name: str) -> str:
    """The name, or RemoteProtocolError: too long, or not printable."""
    if len(name) > NAME_MAX_CHARACTERS:
        raise RemoteProtocolError(
            f"{what} {clean(name, 40)!r} has {len(name)} characters; the limit is "
            f"{NAME_MAX_CHARACTERS}"
        )
    return checked_text(what, name)


def checked_text(what: str, text: str) -> str:
    """The text, or RemoteProtocolError: not printable."""
    if not text.isprintable():
        raise RemoteProtocolError(
            f"the name server tells a {what} with characters that cannot be printed: "
            f"{clean(text, 80)}; look for a broker that should not be there (mqadmin clusterList)"
        )
    return text
