"""Namespaces in names of topics and groups, and in endpoints.

A namespace is a prefix `namespace%`, set after a retry or dead-letter prefix. Names of the system's
own topics and groups have none. Sources: NamespaceUtil.java, NameServerAddressUtils.java.
"""

from __future__ import annotations

from typing import Final

from rocket_sink.message_rules import SYSTEM_TOPICS

NAMESPACE_SEPARATOR: Final = "%"
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"

_SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
_SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"


def is_system_resource(name: str) -> bool:
    """True for topics and groups that belong to RocketMQ itself."""
    return name in SYSTEM_TOPICS or name.startswith((_SYSTEM_TOPIC_PREFIX, _SYSTEM_GROUP_PREFIX))


def _split(name: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name


def with_namespace(namespace: str | None, name: str) -> str:
    """`name` within `namespace`; unchanged when it is there already or belongs to the system."""
    if not namespace or not name or is_system_resource(name):
        return name
    prefix, rest = _split(name)
    if rest.startswith(namespace + NAMESPACE_SEPARATOR):
        return name
    return f"{prefix}{namespace}{NAMESPACE_SEPARATOR}{rest}"
