"""A TLS relay with a certificate of its own, before servers without TLS."""

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rocket_sink.testing import FakeCluster
from tests.net.test_transport import Echo, handshaken


class TlsRelay(Echo):
    """A relay that speaks TLS with its clients, passes the bytes on, and counts connections."""

    def __init__(
        self, upstream: str, files: tuple[Path, Path],
        prepare: Callable[[ssl.SSLContext], None] = lambda context: None,
    ) -> None:  # fmt: skip
        self.count = 0
        self._upstream = upstream
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files)
        prepare(context)
        super().__init__(context)

    def _serve(self, peer: socket.socket) -> None:
        self.count += 1
        host, _, port = self._upstream.rpartition(":")
        with ExitStack() as closed:
            try:
                peer = closed.enter_context(handshaken(self._context, peer))
                behind = closed.enter_context(socket.create_connection((host, int(port))))
            except OSError:
                return
            back = threading.Thread(target=_copy, args=(behind, peer), daemon=True)
            back.start()
            _copy(peer, behind)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65_536):
            target.sendall(data)
    except OSError:
        pass
    finally:
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class TlsFront:
    """Relays before the name server and the brokers of a scripted cluster.

    Args:
        files: the certificate and key of each relay, by what it stands before ("name server",
            or a broker's name).
        prepare: what else a relay before a broker asks for.
    """

    def __init__(
        self, cluster: FakeCluster, files: Callable[[str], tuple[Path, Path]],
        prepare: Callable[[ssl.SSLContext], None] = lambda context: None,
    ) -> None:  # fmt: skip
        self._front = TlsRelay(cluster.name_server, files("name server"))
        self.brokers = {
            broker.address: TlsRelay(broker.address, files(broker.name), prepare)
            for broker in cluster.brokers
        }
        route = cluster.route

        def led_through(topic: str) -> Any:
            info = route(topic)
            brokers = tuple(
                replace(broker, addresses={n: self.brokers[at].address
                                        for n, at in broker.addresses.items()})
                for broker in info.brokers
            )  # fmt: skip
            return replace(info, brokers=brokers)

        cluster.route = led_through  # type: ignore[method-assign]

    @property
    def name_server(self) -> str:
        return self._front.address

    @property
    def connections(self) -> list[int]:
        """Return the number of connections to each broker so far."""
        return [relay.count for relay in self.brokers.values()]

    def close(self) -> None:
        for relay in (self._front, *self.brokers.values()):
            relay.close()
