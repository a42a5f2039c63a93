"""The option `addressMap`: brokers' addresses as this client reaches them.

A broker registers the address `brokerIP1:listenPort`. Behind NAT, in Docker or in Kubernetes this
address may lead nowhere. A map is a sequence of (source, target), and the first source that fits
an address counts. A source is `HOST:PORT`: HOST is the broker's name, the registered host, a
network (`10.1.0.0/16`) or `*`, and PORT is the registered port or `*`. In a target, the port `*`
stands for the registered port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import TypeAlias, TypeVar

from rocket_sink.errors import ConnectError, SendError
from rocket_sink.wire.route import TopicRoute

AddressMap: TypeAlias = Sequence[tuple[str, str]]
_E = TypeVar("_E", bound=SendError)


def mapped_addresses(
    entries: AddressMap, broker: str, addresses: Mapping[int, str]
) -> dict[int, str]:
    """Return a broker's addresses ({broker id: address}) as this client reaches them."""
    return {number: _mapped(entries, broker, address) for number, address in addresses.items()}


def mapped_route(entries: AddressMap, route: TopicRoute) -> TopicRoute:
    """Return the route with mapped addresses; its brokers keep the registered ones beside them."""
    if not entries:
        return route
    brokers = (
        replace(
            broker,
            addresses=mapped_addresses(entries, broker.name, broker.addresses),
            registered=broker.addresses,
        )
        for broker in route.brokers
    )
    return replace(route, brokers=tuple(brokers))


def _mapped(entries: AddressMap, broker: str, address: str) -> str:
    host, _, port = address.rpartition(":")
    for source, target in entries:
        source_host, _, source_port = source.rpartition(":")
        if source_port in ("*", port) and _fits(source_host, host, broker):
            target_host, _, target_port = target.rpartition(":")
            return f"{target_host}:{port if target_port == '*' else target_port}"
    return address


def _fits(pattern: str, host: str, broker: str) -> bool:
    if "/" not in pattern:
        return pattern in ("*", host, broker)
    try:
        return ip_address(host.strip("[]")) in ip_network(pattern.strip("[]"), strict=False)
    except ValueError:  # The broker has registered a name.
        return False


def with_origin(error: _E, broker: str) -> _E:
    """Return the error of a call to a broker; if the broker was not reached, with the origin of its
    address, and the remedy."""
    if not isinstance(error, ConnectError):
        return error
    text = (
        f"{error.text}; the address comes from the broker {broker}, which registered it (brokerIP1 "
        "in its configuration), or from addressMap. If it leads nowhere from here, as with Docker, "
        f"Kubernetes or NAT, set the option addressMap={broker}:*=HOST:PORT"
    )
    explained = type(error)(text, **error.facts)
    explained.__cause__ = error.__cause__
    return explained
