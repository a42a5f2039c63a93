"""What happens on a connection, as values (connection.py makes them)."""

from __future__ import annotations

from typing import NamedTuple

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.command import Frame


class Answered(NamedTuple):
    """The response to the request of `token`; `sent_s` is the time given to `mark_written`."""

    token: object
    frame: Frame
    sent_s: float | None


class PeerRequest(NamedTuple):
    """A request from the broker; `Connection.respond` answers it."""

    frame: Frame


class LateAnswer(NamedTuple):
    """A response to a request of ours that has left the table already: ignore it."""

    frame: Frame


class ForeignAnswer(NamedTuple):
    """A response to a request that we never made: ignore it."""

    frame: Frame


class Violation(NamedTuple):
    """The peer broke the protocol after the events before this one: close the connection."""

    error: RemoteProtocolError


Event = Answered | PeerRequest | LateAnswer | ForeignAnswer | Violation


class Expired(NamedTuple):
    """A request whose deadline has passed; `written` tells whether its last byte had left."""

    token: object
    written: bool


class Lost(NamedTuple):
    """A request in flight when the connection ended; `written` as in `Expired`."""

    token: object
    written: bool


class Pending:
    """One request in flight, as the request table keeps it; `settled` once it has left."""

    __slots__ = ("deadline_s", "latest_s", "opaque", "sent_s", "settled", "token", "written")

    def __init__(self, opaque: int, token: object, deadline_s: float, latest_s: float) -> None:
        self.opaque = opaque
        self.token = token
        self.deadline_s = deadline_s
        self.latest_s = latest_s
        self.sent_s: float | None = None
        self.written = False
        self.settled = False
