"""Free loopback ports for a cluster.

A broker binds three: its listen port, the "fast" one two below (BrokerController) and the one for
replication, one above. Ports are chosen below the range of outgoing connections (32768 up on
Linux), so that few are taken before the broker binds them; then the start is repeated with others.
"""

from __future__ import annotations

import errno
import json
import random
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rocket_sink.errors import ClusterError

LOOPBACK = "127.0.0.1"
RANGE = range(20_000, 32_000)
_BLOCK = 4


@dataclass(frozen=True)
class Ports:
    """The name server's port and each broker's listen port."""

    name_server: int
    brokers: tuple[int, ...]

    def all(self) -> list[int]:
        """All ports that the cluster binds."""
        return [self.name_server, *(p for broker in self.brokers for p in broker_ports(broker))]

    def save(self, file: Path) -> None:
        """Write them to `file`, for the next start in the same home."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


def broker_ports(listen: int) -> tuple[int, int, int]:
    """The ports that a broker listening on `listen` binds: fast, own, replication."""
    return listen - 2, listen, listen + 1


def load_ports(file: Path) -> Ports | None:
    """The ports saved in `file`; None if it is missing or unreadable."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        return Ports(int(saved["name_server"]), tuple(int(port) for port in saved["brokers"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_free(port: int) -> bool:
    """True when `port` can be bound now, on loopback and on all interfaces."""
    for host in (LOOPBACK, ""):
        with socket.socket() as probe:
            # as the JVM does, so that TIME_WAIT does not count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    return False
                raise
    return True


def choose_ports(
    brokers: int, *, wanted: Ports | None = None, free: Callable[[int], bool] = is_free
) -> Ports:
    """Free ports for a name server and `brokers` brokers; `wanted` ones if all of them are free.

    Blocks never overlap. Raises ClusterError when the range holds no free block.
    """
    if wanted and len(wanted.brokers) == brokers and all(free(port) for port in wanted.all()):
        return wanted
    blocks: list[int] = []
    starts = range(RANGE.start, RANGE.stop - _BLOCK, _BLOCK)
    for start in random.sample(starts, len(starts)):
        if all(free(port) for port in range(start, start + _BLOCK)):
            blocks.append(start)
        if len(blocks) == brokers + 1:
            return Ports(blocks[0], tuple(block + 2 for block in blocks[1:]))
    raise ClusterError(
        f"No {brokers + 1} free blocks of {_BLOCK} ports between {RANGE.start} and {RANGE.stop}: "
        "stop clusters that run on this machine (rocket-sink cluster down) and try again."
    )
