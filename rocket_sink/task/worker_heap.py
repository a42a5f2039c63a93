"""Keeps PySpark's collections cheap in the worker processes that it reuses.

`pyspark.daemon` runs a full `gc.collect()` after every task, and after every plan and commit of a
data source. The collection visits all loaded objects, mostly modules, which are never freed: 25 ms
for pyspark and pyarrow alone, 50 ms with pandas (two shared cores), while a task without rows takes
3 ms. So `gc.freeze`, once per process, hides the objects that exist after the first task from the
collector. Reference counts free them as before; only a dropped cycle of such objects is never
freed.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

_DAEMON: Final = "pyspark.daemon"
_frozen_pid = 0


def freeze_once() -> None:
    """Freeze the heap at the end of the process's first task, only in PySpark's workers."""
    global _frozen_pid
    pid = os.getpid()
    if _frozen_pid == pid or not _is_worker():
        return
    _frozen_pid = pid
    gc.collect()
    gc.freeze()


def _is_worker() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == _DAEMON
