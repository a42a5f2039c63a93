"""A TLS relay with a certificate of its own, before servers without TLS."""

import socket
import ssl
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace

from tests.net.test_transport import Echo, handshaken


class TlsRelay(Echo):
    """A relay that speaks TLS with its clients, passes the bytes on, and counts connections."""

    def __init__(self, upstream, files, prepare=lambda context: None):
        self.count = 0
        self._upstream = upstream
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files)
        prepare(context)
        super().__init__(context)

    def _serve(self, peer):
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


def _copy(source, target):
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

    def __init__(self, cluster, files, prepare=lambda context: None):
        self._front = TlsRelay(cluster.name_server, files("name server"))
        self.brokers = {
            broker.address: TlsRelay(broker.address, files(broker.name), prepare)
            for broker in cluster.brokers
        }
        route = cluster.route

        def led_through(topic):
            info = route(topic)
            brokers = tuple(
                replace(broker, addresses={n: self.brokers[at].address
                                        for n, at in broker.addresses.items()})
                for broker in info.brokers
            )  # fmt: skip
            return replace(info, brokers=brokers)

        cluster.route = led_through

    @property
    def name_server(self):
        return self._front.address

    @property
    def connections(self):
        """Return the number of connections to each broker so far."""
        return [relay.count for relay in self.brokers.values()]

    def close(self):
        for relay in (self._front, *self.brokers.values()):
            relay.close()
