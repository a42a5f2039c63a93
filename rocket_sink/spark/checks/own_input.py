"""Refuses writes that read the files of their own ledger or checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from pyspark.sql import DataFrame

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.storage import is_classic
from rocket_sink.spark.checks.plans import input_folders


def refuse_own_input(df: DataFrame, ledger: str) -> None:
    """Raise a ConfigurationError if the frame reads a folder that contains the ledger."""
    if ledger and is_classic(df.sparkSession):
        reason = own_input_error(df._jdf.queryExecution().analyzed(), [("ledger", ledger)])
        if reason:
            raise ConfigurationError(reason)


def own_input_error(plan: Any, files: Iterable[tuple[str, str]]) -> str:
    """Return an error text if the plan reads a folder with one of `files` (name, path), else ""."""
    for folder in input_folders(plan):
        for name, path in files:
            if _reads(_parts(folder), _parts(path)):
                return (
                    f"the {name} {path} is inside {folder}, which this query reads: its files "
                    f"would be sent as rows. Put the {name} into another folder"
                )
    return ""


def _reads(pattern: Sequence[str], place: Sequence[str]) -> bool:
    """Return whether an input folder, or a pattern of folders, includes the folder `place` (parts
    of paths). Spark skips names that begin with `_` or `.`, except partitions (`_a=1`)."""
    below = place[len(pattern) :]
    is_hidden = any(part.startswith(("_", ".")) and "=" not in part for part in below)
    is_inside = len(pattern) <= len(place) and all(map(fnmatchcase, place, pattern))
    return is_inside and not is_hidden


def _parts(path: str) -> tuple[str, ...]:
    path = re.sub("^file:/+", "/", path)
    return PurePosixPath(path if ":/" in path else Path(path).absolute()).parts
