"""Look-ups of host names. They run in threads, because the system's resolver has no time-out.

Literal addresses need no look-up. Each name has at most one daemon thread at a time. Answers are
cached for `KEEP_S`. An answer is dropped if no connection to its addresses succeeds, because
brokers move (apache/rocketmq#2763). Addresses that failed are tried last."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rocket_sink.message_rules import host_and_port

KEEP_S: Final = 5.0
_FAILED_MAX: Final = 64


@dataclass(slots=True)
class LookUp:
    """A look-up. When `done`, it has `targets` (of `socket.getaddrinfo`) or an `error`."""

    done: bool = False
    error: OSError | None = None
    targets: list[Any] = field(default_factory=list)

    def run(self, host: str, port: int, flags: int = 0) -> LookUp:
        """Look the name up; blocks, except with the flag AI_NUMERICHOST."""
        try:
            self.targets = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        except OSError as error:
            self.error = error
        except UnicodeError as error:  # A label is empty, or too long for IDNA.
            self.error = OSError(str(error))
        self.done = True
        return self


def resolved(addresses: Iterable[str]) -> set[str]:
    """Return the addresses to which the host names in `addresses` (`host:port`) lead; blocks. Leave
    out unknown names."""
    look_ups = [LookUp().run(*(host_and_port(address) or ("", 0))) for address in addresses]
    sockets = (target[4][:2] for look_up in look_ups for target in look_up.targets)
    return {f"{host}:{port}" for host, port in sockets}


class Resolver:
    """The look-ups of one client. Their threads call `wake`, which ends the selector's wait."""

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        self._wake = wake
        self._clock = clock
        self._known: dict[tuple[str, int], tuple[LookUp, float]] = {}
        self._failed: dict[tuple[str, int], dict[Any, None]] = {}
        """{(host, port): failed addresses, in order}; only for names with several addresses"""

    def look_up(self, host: str, port: int) -> LookUp:
        """Return a look-up. It is done if the address is literal or cached; otherwise it runs."""
        literal = LookUp().run(host, port, socket.AI_NUMERICHOST)
        if literal.error is None:
            return literal
        key, now_s = (host, port), self._clock()
        last_look_up, since_s = self._known.get(key, (None, 0.0))
        fresh = last_look_up is not None and now_s - since_s < KEEP_S and last_look_up.error is None
        if last_look_up is not None and (not last_look_up.done or fresh):
            return last_look_up
        look_up = LookUp()
        self._known[key] = (look_up, now_s)
        work = threading.Thread(
            target=self._work, args=(look_up, host, port), name="rocket-sink-look-up", daemon=True
        )
        try:
            work.start()
        except RuntimeError:  # No thread can start, for example because Python is ending.
            look_up.run(host, port)
        return look_up

    def forget(self, host: str, port: int) -> None:
        """Drop the cached answer, because a connection to each of its addresses failed."""
        look_up, _ = self._known.get((host, port), (None, 0.0))
        if look_up is not None and look_up.done:
            del self._known[host, port]

    def note(self, host: str, port: int, address: Any, *, works: bool) -> None:
        """Remember whether the last connection to this address of the name worked."""
        failed = self._failed.setdefault((host, port), {})
        failed.pop(address, None)
        if not works:
            failed[address] = None
            if len(failed) > _FAILED_MAX:
                del failed[next(iter(failed))]

    def in_order(self, host: str, port: int, targets: Sequence[Any]) -> list[Any]:
        """Return the targets of a look-up; targets that failed come last, in order of failure."""
        failed = list(self._failed.get((host, port), ()))
        return sorted(
            targets, key=lambda target: target[4] in failed and failed.index(target[4]) + 1
        )

    def _work(self, begun: LookUp, host: str, port: int) -> None:
        begun.run(host, port)
        self._wake()
