"""Facts about the machine and the versions."""

from __future__ import annotations

import datetime as dt
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil

from rocket_sink import __version__
from rocket_sink.cluster.jars import DEFAULT_VERSION
from rocket_sink.java import find_java

_PACKAGES: Final = ("pyspark", "delta-spark", "pyarrow", "numpy")


def machine_facts() -> dict[str, Any]:
    """Cores, memory and versions, without names of machine or user."""
    return {
        "at": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else
        os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": sys.version.split()[0],
        "java": find_java().version,
        "rocketmq": DEFAULT_VERSION,
        "rocket-sink": __version__,
        **{name: _version(name) for name in _PACKAGES},
    }  # fmt: skip


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"
