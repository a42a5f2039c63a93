"""Jars of other clients, fetched once into the cache of RocketMQ's jars; without a lock file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rocket_sink.cluster.jars import (
    FLAT,
    Progress,
    cache_folder,
    only_one,
    run_ivy,
)
from rocket_sink.java import find_java
from tools.rocketmq_lock import graph_module


def resolve_modules(
    name: str, modules: Sequence[str], *, tell: Progress, cache: Path | None = None
) -> list[Path]:
    """The jars of `group:name:version` modules with dependencies, from `<cache>/<name>/`.

    `tell` gets lines of text during a fetch. Raises ClusterError when it fails.
    """
    base = cache_folder(cache)
    folder = base / name
    with only_one(base / f"{name}.lock", tell):
        if not folder.is_dir():
            tell(f"fetching {', '.join(modules)}, once; this takes a minute or two")
            _fill(folder, modules)
    return sorted(folder.glob("*.jar"))


def _fill(folder: Path, modules: Sequence[str]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        jars = scratch / "jars"
        run_ivy(
            find_java(), scratch / "ivy", graph_module(modules), jars / FLAT, lambda: None,
            poms=True, label=", ".join(modules),
        )  # fmt: skip
        jars.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
