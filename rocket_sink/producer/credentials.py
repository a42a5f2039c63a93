"""Credentials from options or a callable; asked for again once when a broker refuses them."""

from __future__ import annotations

from collections.abc import Callable

from rocket_sink.options import SinkOptions
from rocket_sink.secret_source import resolve
from rocket_sink.wire.acl import Credentials

CredentialsProvider = Callable[[], Credentials]
"""Asked for credentials when a client starts and when a broker refuses those it has. It may be
called on any thread that drives the client, and everything waits for it."""


def credentials_of(options: SinkOptions) -> Credentials | None:
    """The options' credentials, resolved now; None when there are none.

    Raises:
        OptionError: a variable or file is missing, or empty.
    """
    if not options.access_key or not options.secret_key:
        return None
    token = options.security_token
    return Credentials(
        resolve("accessKey", options.access_key).reveal(),
        resolve("secretKey", options.secret_key),
        resolve("securityToken", token) if token else None,
    )
