"""Where a secret option's value comes from: itself, `env:NAME` or `file:PATH`.

Both are read where they are used (the executor), not where they are configured.
"""

from __future__ import annotations

import os
from pathlib import Path

from rocket_sink.errors import OptionError
from rocket_sink.option_spec import Secret


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
