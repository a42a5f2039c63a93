"""Proxies before all brokers of a real cluster.

with FaultProxies("127.0.0.1:9876") as proxies:
    producer = Producer(nameServer=proxies.name_server)
    proxies.of("127.0.0.1:10911").freeze()
"""

from __future__ import annotations

import threading
from dataclasses import replace

from rocket_sink.testing.proxy import FaultProxy
from rocket_sink.wire.command import Frame
from rocket_sink.wire.route import decode_route, encode_route


class FaultProxies:
    """A proxy before a name server, whose routes lead through a proxy before each broker.

    Args:
        address: the real name server's, "host:port"; without TLS, for routes are rewritten.
        seed: of every chance.

    Attributes:
        front: the proxy before the name server.
    """

    def __init__(self, address: str, *, seed: int = 0) -> None:
        self._seed = seed
        self._proxies: dict[str, FaultProxy] = {}
        self._lock = threading.Lock()
        self.front = FaultProxy(address, seed=seed)
        self.front.on_route(self._led_through)

    def __enter__(self) -> FaultProxies:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name_server(self) -> str:
        """The address for the option nameServer."""
        return self.front.address

    def of(self, address: str) -> FaultProxy:
        """The proxy before the broker at this address."""
        with self._lock:
            if address not in self._proxies:
                self._proxies[address] = FaultProxy(address, seed=self._seed)
            return self._proxies[address]

    def close(self) -> None:
        """Stop them all."""
        self.front.close()
        with self._lock:
            for proxy in self._proxies.values():
                proxy.close()

    def _led_through(self, answer: Frame) -> Frame:
        route = decode_route(bytes(answer.body or b""))
        brokers = tuple(
            replace(
                broker, addresses={n: self.of(at).address for n, at in broker.addresses.items()}
            )
            for broker in route.brokers
        )
        return replace(answer, body=encode_route(replace(route, brokers=brokers)))
