"""Hooks on the remoting layer: around every request of a client, whatever its code (RPCHook.java).

They see sends, heartbeats, look-ups at the name servers and the ends of transactions alike, run on
the thread that drives the connections and must not block. A hook that raises is logged and
otherwise ignored. Without hooks a request costs one look at an empty tuple.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from rocket_sink.errors import SendError
from rocket_sink.net import log
from rocket_sink.wire.frame import Frame

_LOG: Final = log.logger(__name__)


class RpcHook:
    """Override what is of interest."""

    def before_request(self, address: str, request: Frame) -> None:
        """The request is about to go; fields put into `request.ext` travel, and are signed."""

    def after_response(self, address: str, request: Frame, response: Frame) -> None:
        """The response has come, of whatever code. A request without one (oneway, time-out, lost
        connection) is not told."""


class RpcHooks:
    """The hooks of one client, in the order in which they were added."""

    def __init__(self) -> None:
        self.hooks: tuple[RpcHook, ...] = ()
        """Public, for a look at an attribute is all that a send without hooks shall cost."""

    def __bool__(self) -> bool:
        return bool(self.hooks)

    def add(self, hook: RpcHook) -> None:
        self.hooks = (*self.hooks, hook)

    def before(self, address: str, request: Frame) -> Frame:
        """The request as the hooks leave it."""
        shown = dataclasses.replace(request, ext=dict(request.ext or {}))
        self._each(lambda hook: hook.before_request(address, shown))
        return shown

    def after(self, address: str, request: Frame, response: Frame) -> None:
        self._each(lambda hook: hook.after_response(address, request, response))

    def watched(self, owner: Any, address: str, request: Frame) -> Watched:
        """The owner of a request in whose place the hooks hear of the answer first."""
        return Watched(self, owner, address, request)

    def _each(self, call: Callable[[RpcHook], None]) -> None:
        for hook in self.hooks:
            try:
                call(hook)
            except Exception:
                _LOG.exception("the RPC hook %r raised; the request goes on", hook)


class Watched:
    """Tells the hooks, then the owner."""

    __slots__ = ("_address", "_hooks", "_owner", "_request")

    def __init__(self, hooks: RpcHooks, owner: Any, address: str, request: Frame) -> None:
        self._hooks, self._owner = hooks, owner
        self._address, self._request = address, request

    def on_answer(self, frame: Frame, sent_s: float | None, now_s: float) -> None:
        self._hooks.after(self._address, self._request, frame)
        self._owner.on_answer(frame, sent_s, now_s)

    def on_failed(self, error: SendError, now_s: float) -> None:
        self._owner.on_failed(error, now_s)
