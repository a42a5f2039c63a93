"""Files as signals between the harness and its drivers."""

from __future__ import annotations

import time
from pathlib import Path

WAIT_S = 900.0


def write_whole(path: Path, text: str) -> None:
    """Readers see the file whole or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text)
    partial.rename(path)


def await_file(path: Path) -> None:
    """Raises TimeoutError when it is not written."""
    until_s = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.05)
