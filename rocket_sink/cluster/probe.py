"""The readiness probe of brokers: fetch the route, store a message. The probe shares only the wire
format with the sink, and opens a blocking connection for each request. Its message goes to the
topic with the broker's name, which every broker creates for itself."""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rocket_sink.cluster.conf import Secrets
from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire import requests
from rocket_sink.wire.acl import Credentials
from rocket_sink.wire.frame import FrameReader, encode_frame
from rocket_sink.wire.headers import Frame

_UPDATE_BROKER_CONFIG = 25
_STORED = (0, 10, 11, 12)
_TIMEOUT_S = 3.0
_READ_BYTES = 65_536


class ProbeFailed(Exception):
    """The broker or name server is not ready; the text is the reason."""


@dataclass(frozen=True)
class Probe:
    """The probe of one cluster, with the cluster's credentials and TLS files."""

    secrets: Secrets | None = None
    tls_ca: Path | None = None
    tls_client: tuple[Path, Path] | None = None
    """The client's certificate and key."""

    def check_broker(self, name_server: str, name: str, address: str) -> None:
        """Raise ProbeFailed unless the broker is registered and stores a message."""
        self.check_route(name_server, name, address)
        message = requests.send_message_v2(
            producer_group="rocket_sink_probe",
            topic=name,
            queue_id=0,
            born_ms=int(time.time() * 1000),
            properties="",
            broker_name=None,
            body=b"ready?",
            default_topic_queue_nums=1,
        )
        code = self._ask(address, message).code
        if code not in _STORED:
            raise ProbeFailed(f"{name} at {address} does not store messages (code {code})")

    def register_now(self, address: str, permission: int) -> None:
        """Make the broker register at the name server; raise ProbeFailed if the request fails. A
        broker's first registration may fail, because the broker is not connected yet; the second
        follows ten seconds later. A broker whose permission is set registers at once, even if the
        value stays the same (AdminBrokerProcessor.updateBrokerConfig)."""
        settings = f"brokerPermission={permission}\n".encode()
        code = self._ask(address, Frame(_UPDATE_BROKER_CONFIG, body=settings)).code
        if code != 0:
            raise ProbeFailed(f"{address} does not register (code {code})")

    def check_route(self, name_server: str, topic: str, address: str) -> None:
        """Raise ProbeFailed unless the topic's route has the broker's address."""
        answer = self._ask(name_server, requests.get_route(topic))
        if answer.code != 0:
            raise ProbeFailed(f"the name server knows no route of {topic} (code {answer.code})")
        # Search the text: name servers before 4.9.4 write numbers as keys, which is no legal JSON.
        body = bytes(answer.body or b"")
        if f'"{address}"'.encode() not in body:
            raise ProbeFailed(f"the route of {topic} lacks {address}: {body[:500]!r}")

    def _ask(self, address: str, request: Frame) -> Frame:
        if self.secrets is not None:
            credentials = Credentials(self.secrets.access_key, self.secrets.secret_key)
            ext = request.ext or {}
            request = replace(request, ext={**ext, **credentials.signer()(ext, request.body)})
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as raw:
                if self.tls_ca is None:
                    return _exchange(raw, request)
                context = ssl.create_default_context(cafile=str(self.tls_ca))
                if self.tls_client is not None:
                    context.load_cert_chain(*self.tls_client)
                with context.wrap_socket(raw, server_hostname=host) as secure:
                    return _exchange(secure, request)
        except (OSError, RemoteProtocolError) as error:
            raise ProbeFailed(f"{address} does not answer ({error})") from error


def accepts(address: str) -> bool:
    """Return whether a process listens at "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _exchange(sock: socket.socket, request: Frame) -> Frame:
    sock.sendall(encode_frame(request))
    reader = FrameReader()
    while (answer := reader.next_frame()) is None:
        data = sock.recv(_READ_BYTES)
        if not data:
            raise OSError("the connection was closed in the middle of an answer")
        reader.receive_data(data)
    return answer
