"""Points in time on a command line."""

from __future__ import annotations

import datetime as dt
from typing import Final

import click

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def time_value(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> dt.datetime | None:
    """A click callback: `2026-01-31T12:00` (UTC), or a duration back from now as `90m` or `2d`."""
    if value is None:
        return None
    try:
        found = dt.datetime.fromisoformat(value)
        return found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)
    except ValueError:
        pass
    seconds = _SECONDS.get(value[-1:])
    if seconds is None or not value[:-1].isdigit():
        raise click.BadParameter(
            f"{value!r} is neither a time as 2026-01-31T12:00 nor a duration as 90m"
        )
    return dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=int(value[:-1]) * seconds)
