"""The identity of a client: address, group, client id, generator of message ids."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import Final
from weakref import WeakValueDictionary

from rocket_sink.errors import ConfigurationError
from rocket_sink.forks import ForkLock
from rocket_sink.message_rules import with_namespace
from rocket_sink.options import SinkOptions
from rocket_sink.wire.ids import MessageIds

_claimed: Final[WeakValueDictionary[tuple[int, str, str], Identity]] = WeakValueDictionary()
_claiming: Final = ForkLock()
_named: Final[dict[str, int]] = {}
"""{client id with an `instanceName`: pid of its first user}; forked children inherit this."""


def local_ip() -> str:
    """Return this host's address on its default route, or 127.0.0.1. Nothing is sent."""
    for target in ("192.0.2.1", "198.51.100.1"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


class Identity:
    """The identity of a client in one process (`of_pid`); a forked child needs another."""

    def __init__(self, options: SinkOptions) -> None:
        self.of_pid = os.getpid()
        self.ip = options.client_ip or local_ip()
        instance = options.instance_name or f"{self.of_pid}#{secrets.token_hex(4)}"
        client_id = f"{self.ip}@{instance}"
        if options.instance_name and _named.setdefault(client_id, self.of_pid) != self.of_pid:
            # A forked child needs another id, because brokers know one connection per client id
            # (ProducerManager.clientChannelTable). With the same id its replies would go to the
            # parent, or to nobody after one of the two processes has unregistered.
            client_id = f"{client_id}#{self.of_pid}"
        self.client_id = client_id
        self.group = with_namespace(options.namespace, options.producer_group)
        """The producer group with its namespace."""
        self.message_ids = new_message_ids(self.ip)
        """The generator of message ids; not thread-safe."""

    def claim(self) -> None:
        """Reserve this client id and group in this process, until `release`. Brokers identify a
        client by id and group. If two clients shared them, the first to close would unregister the
        other, too. The other would get no more transaction checks and replies. Raises
        ConfigurationError if another client has them (MQClientInstance.registerProducer)."""
        key = (self.of_pid, self.client_id, self.group)
        with _claiming:
            if _claimed.setdefault(key, self) is not self:
                raise ConfigurationError(
                    f"a producer of group {self.group!r} has the client id {self.client_id!r} in "
                    "this process already; close it, or give another instanceName (or none)"
                )

    def release(self) -> None:
        """End the reservation, if there is one."""
        key = (self.of_pid, self.client_id, self.group)
        with _claiming:
            if _claimed.get(key) is self:
                del _claimed[key]


def new_message_ids(ip: str) -> MessageIds:
    """Return a generator of message ids for this process, with 32 random bits."""
    try:
        packed = socket.inet_pton(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip)
    except OSError:
        packed = socket.inet_aton("127.0.0.1")
    return MessageIds(ip=packed, pid=os.getpid(), class_hash=secrets.randbits(32))
