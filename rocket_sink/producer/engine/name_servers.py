"""The name servers as one: each question goes to one after the other until one answers.

Java 5.x tries a single server per look-up; here all are tried, at most `TRY_S` each, beginning with
the one that answered last. Nothing blocks: the answer comes by callback while the client is driven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from rocket_sink.errors import NameServerUnavailableError, SendError, TlsRefusedError
from rocket_sink.net.client import Call, NetworkClient
from rocket_sink.text import clean
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.frame import Frame

TRY_S: Final = 1.0
"""Longest wait for one name server."""
ANSWERS: Final = frozenset((ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST))
"""Codes that settle a question; others ("name server not ready") send it to the next server."""

Unavailable = NameServerUnavailableError | TlsRefusedError
Done = Callable[[Frame | None, Unavailable | None, float], None]


class NameServers:
    """Asks in a random order at first, then the one that answered last first."""

    def __init__(
        self, addresses: Sequence[str], client: NetworkClient, rng: Random, timeout_s: float
    ) -> None:
        self._addresses = list(addresses)
        rng.shuffle(self._addresses)
        self._client = client
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<NameServers {';'.join(self._addresses)}>"

    def ask(self, frame: Frame, done: Done, now_s: float) -> None:
        """`done(answer, None, now)` with code 0 or 17, or `done(None, error, now)`: a
        TlsRefusedError when every server failed by one, which will be so the next time."""
        _Question(
            self, self._client, list(self._addresses), frame, done, now_s + self._timeout_s
        ).next(now_s)

    def prefer(self, address: str) -> None:
        """It answered: begin with it next time."""
        if self._addresses[0] != address:
            self._addresses.remove(address)
            self._addresses.insert(0, address)


@dataclass
class _Question:
    servers: NameServers
    client: NetworkClient
    left: list[str]
    frame: Frame
    done: Done
    deadline_s: float
    reasons: dict[str, str] = field(default_factory=dict)
    errors: list[SendError] = field(default_factory=list)

    def next(self, now_s: float) -> None:
        if not self.left or now_s >= self.deadline_s:
            for address in self.left:
                self.reasons.setdefault(address, "not asked: no time was left")
            self.done(None, self._unavailable(), now_s)
            return
        address = self.left.pop(0)
        share_s = (self.deadline_s - now_s) / (len(self.left) + 1)
        deadline_s = now_s + min(TRY_S, max(share_s, 0.1))

        def ended(answer: Frame | None, error: SendError | None, at_s: float) -> None:
            self._ended(address, answer, error, at_s)

        self.client.call(address, self.frame, Call(ended), deadline_s=deadline_s, now_s=now_s)

    def _ended(
        self, address: str, answer: Frame | None, error: SendError | None, now_s: float
    ) -> None:
        if answer is not None and answer.code in ANSWERS:
            self.servers.prefer(address)
            self.done(answer, None, now_s)
            return
        if answer is not None:
            self.reasons[address] = f"answered {answer.code}: {clean(answer.remark or '', 200)}"
        else:
            self.reasons[address] = str(error)
            if error is not None:
                self.errors.append(error)
        self.next(now_s)

    def _unavailable(self) -> Unavailable:
        errors = [one for one in self.errors if isinstance(one, TlsRefusedError)]
        if errors and len(errors) == len(self.reasons):
            # each refuses us or is refused by us: to ask again would change nothing
            return TlsRefusedError("; ".join(one.text for one in errors), **errors[-1].facts)
        lines = "; ".join(f"{address}: {reason}" for address, reason in self.reasons.items())
        return NameServerUnavailableError(
            f"no name server answered ({lines}); check the option nameServer",
            reasons=dict(self.reasons),
        )
