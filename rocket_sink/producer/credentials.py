"""Credentials from values, the environment, files or a callable.

`env:NAME` and `file:PATH` are read where they are used (the executor), not where they are
configured; whatever the source, it is asked again once when a broker refuses them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rocket_sink.errors import OptionError
from rocket_sink.option_spec import Secret
from rocket_sink.options import SinkOptions
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


def resolve(name: str, value: Secret) -> Secret:
    """The secret that `value` is or refers to.

    Raises:
        OptionError: what it refers to is missing or empty.
    """
    kind, colon, where = value.reveal().partition(":")
    if not colon or kind not in ("env", "file"):
        return value
    if kind == "env":
        text = os.environ.get(where, "")
    else:
        try:
            text = Path(where).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"option {name}: cannot read {where}: {error}", option=name) from None
    if not text:
        raise OptionError(f"option {name}: {kind}:{where} is missing or empty", option=name)
    return Secret(text)
