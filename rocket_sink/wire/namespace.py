"""Namespaces in names of topics and groups, and in endpoints.

A namespace is a prefix `namespace%`, set after a retry or dead-letter prefix. Names of the system's
own topics and groups have none. Sources: NamespaceUtil.java, NameServerAddressUtils.java.
"""

from __future__ import annotations

import re
from typing import Final

from rocket_sink.message_rules import SYSTEM_TOPICS

NAMESPACE_SEPARATOR: Final = "%"
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"

_SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
_SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
_INSTANCE_ENDPOINT: Final = re.compile(r"(?:\w+://)?(MQ_INST_\w+_\w+)\..*", re.ASCII)


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


def without_namespace(name: str, namespace: str | None = None) -> str:
    """`name` without its namespace; with `namespace`, only when it is that one."""
    if not name or is_system_resource(name):
        return name
    prefix, rest = _split(name)
    if namespace and not rest.startswith(namespace + NAMESPACE_SEPARATOR):
        return name
    found, separator, bare = rest.partition(NAMESPACE_SEPARATOR)
    return f"{prefix}{bare}" if separator and found else name


def namespace_of(name: str) -> str:
    """The namespace of `name`, or empty text."""
    if not name or is_system_resource(name):
        return ""
    found, separator, _ = _split(name)[1].partition(NAMESPACE_SEPARATOR)
    return found if separator else ""


def name_server_address(endpoint: str) -> str:
    """`host:port` of a name server given with or without a scheme."""
    return endpoint[endpoint.rfind("/") + 1 :]


def instance_id(endpoint: str) -> str | None:
    """The instance id that the hosted service puts into an endpoint; None without one."""
    match = _INSTANCE_ENDPOINT.fullmatch(endpoint)
    return match.group(1) if match else None
