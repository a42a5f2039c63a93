"""The readiness probe of brokers: fetch the route, store a message.

The probe has its own minimal implementation of the remoting protocol, with one request per
connection, so it shares no code with the producer under test. Its message goes to the topic with
the broker's name, which every broker creates for itself.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rocket_sink.cluster.conf import Secrets

_SEND_MESSAGE = 10
_UPDATE_BROKER_CONFIG = 25
_GET_ROUTE = 105
_STORED = (0, 10, 11, 12)
_TIMEOUT_S = 3.0
_FRAME_LIMIT_BYTES = 16 << 20


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
        code, _ = self._ask(address, _SEND_MESSAGE, _send_header(name), b"ready?")
        if code not in _STORED:
            raise ProbeFailed(f"{name} at {address} does not store messages (code {code})")

    def register_now(self, address: str, permission: int) -> None:
        """Make the broker register at the name server; raise ProbeFailed if the request fails.

        A broker's first registration may fail, because the broker is not connected yet, and the
        second follows ten seconds later. A broker whose permission is set registers at once, even
        if the value stays the same (AdminBrokerProcessor.updateBrokerConfig).
        """
        code, _ = self._ask(
            address, _UPDATE_BROKER_CONFIG, {}, f"brokerPermission={permission}\n".encode()
        )
        if code != 0:
            raise ProbeFailed(f"{address} does not register (code {code})")

    def check_route(self, name_server: str, topic: str, address: str) -> None:
        """Raise ProbeFailed unless the topic's route has the broker's address."""
        code, body = self._ask(name_server, _GET_ROUTE, {"topic": topic}, b"")
        if code != 0:
            raise ProbeFailed(f"the name server knows no route of {topic} (code {code})")
        # Search the text: name servers before 4.9.4 write numbers as keys, which is no legal JSON.
        if f'"{address}"'.encode() not in body:
            raise ProbeFailed(f"the route of {topic} lacks {address}: {body[:500]!r}")

    def _ask(
        self, address: str, code: int, header: dict[str, str], body: bytes
    ) -> tuple[int, bytes]:
        host, port = address.rsplit(":", 1)
        try:
            with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as raw:
                if self.tls_ca is None:
                    return _exchange(raw, code, self._signed(header, body), body)
                context = ssl.create_default_context(cafile=str(self.tls_ca))
                if self.tls_client is not None:
                    context.load_cert_chain(*self.tls_client)
                with context.wrap_socket(raw, server_hostname=host) as secure:
                    return _exchange(secure, code, self._signed(header, body), body)
        except (OSError, ValueError, KeyError) as error:
            raise ProbeFailed(f"{address} does not answer ({error})") from error

    def _signed(self, header: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        if self.secrets is None:
            return header
        fields = {**header, "AccessKey": self.secrets.access_key}
        content = "".join(fields[key] for key in sorted(fields)).encode() + body
        # AclSigner.java uses SHA-1.
        digest = hmac.new(self.secrets.secret_key.encode(), content, hashlib.sha1).digest()
        return {**fields, "Signature": base64.b64encode(digest).decode()}


def accepts(address: str) -> bool:
    """Return whether a process listens at "host:port"."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _send_header(topic: str) -> dict[str, str]:
    return {
        "producerGroup": "rocket_sink_probe",
        "topic": topic,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "1",
        "queueId": "0",
        "sysFlag": "0",
        "bornTimestamp": str(int(time.time() * 1000)),
        "flag": "0",
        "properties": "",
        "reconsumeTimes": "0",
        "unitMode": "false",
        "batch": "false",
    }


def _exchange(
    sock: socket.socket, code: int, fields: Mapping[str, str], body: bytes
) -> tuple[int, bytes]:
    command = {"code": code, "language": "JAVA", "version": 401, "opaque": 1, "flag": 0}
    header = json.dumps({**command, "extFields": fields}).encode()
    # A frame begins with its length, and a word of serialise type (0 = JSON) and header length.
    prefix = struct.pack(">II", 4 + len(header) + len(body), len(header))
    sock.sendall(prefix + header + body)
    with sock.makefile("rb") as answer:
        total, header_word = struct.unpack(">II", _read(answer, 8))
        header_length = header_word & 0xFFFFFF
        if not header_length <= total - 4 <= _FRAME_LIMIT_BYTES:
            raise ValueError(f"an answer of {total} bytes with a header of {header_length}")
        frame = _read(answer, total - 4)
    return int(json.loads(frame[:header_length])["code"]), frame[header_length:]


def _read(answer: BinaryIO, count: int) -> bytes:
    data = answer.read(count)
    if len(data) < count:
        raise ValueError("the connection was closed in the middle of an answer")
    return data
