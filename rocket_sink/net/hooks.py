"""Hooks around every request of a client, of any request code (RPCHook.java).

All hooks of a client run on the thread that drives its connections, so they must not wait: a hook
that waits delays all requests and answers of the client. Java (5.x) calls `doBeforeRequest` on the
thread that sends, and `doAfterResponse` on a thread for callbacks, before the callback. Here the
driving thread calls both, because it makes the frame of each attempt, once the broker is known, and
a hook's fields must be in the frame before it is signed. It also makes frames for retries and
heartbeats, of which no caller knows. For work that waits, use a `SendHook`: its methods run on the
thread that sends and on the thread for callbacks. Exceptions of hooks are logged and ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from rocket_sink.net import log
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.requests import fields

_LOG: Final = log.logger(__name__)
_Hook = TypeVar("_Hook")


class RpcHook:
    """Base class of RPC hooks; override one or both methods. They must not wait, because the thread
    that drives all connections of the client calls them."""

    def before_request(self, address: str, request: Frame) -> None:
        """Called before the request is written. Fields added to `request.ext` are sent and signed;
        numbers become text, True becomes `true`, and None is left out."""

    def after_response(self, address: str, request: Frame, response: Frame) -> None:
        """Called after a response with any code. It is not called if there is no response: after a
        oneway request, a time-out or a lost connection."""


class RpcHooks(list[RpcHook]):
    """The hooks of one client."""

    def before(self, address: str, request: Frame) -> Frame:
        """Call the hooks, and return the request with their changes."""
        changed = dataclasses.replace(request, ext=dict(request.ext or {}))
        call_each("RPC", self, lambda hook: hook.before_request(address, changed))
        if any(type(value) is not str for value in (changed.ext or {}).values()):
            changed.ext = fields(changed.ext or {})
        return changed

    def after(self, address: str, request: Frame, response: Frame) -> None:
        call_each("RPC", self, lambda hook: hook.after_response(address, request, response))


def call_each(kind: str, hooks: Iterable[_Hook], call: Callable[[_Hook], None]) -> None:
    """Call each hook. Exceptions are logged, with the `kind` of the hooks, and ignored."""
    for hook in hooks:
        try:
            call(hook)
        except KeyboardInterrupt:
            raise
        except BaseException:  # asyncio.CancelledError is not an Exception.
            _LOG.exception("the %s hook %r raised; the request goes on without it", kind, hook)


class Watched:
    """The owner of a request with hooks: calls the hooks, then the real owner."""

    __slots__ = ("_address", "_hooks", "_owner", "_request")

    def __init__(self, hooks: RpcHooks, owner: Any, address: str, request: Frame) -> None:
        self._hooks, self._owner = hooks, owner
        self._address, self._request = address, request

    def on_end(self, result: Any, sent_s: float | None, now_s: float) -> None:
        if isinstance(result, Frame):
            self._hooks.after(self._address, self._request, result)
        self._owner.on_end(result, sent_s, now_s)
