"""What was recorded of real traffic; `record` makes it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Final

RECORDED: Final = Path(__file__).with_name("recorded.json")


def recorded(target: str) -> list[bytes]:
    """What peers of all versions sent to what this target feeds."""
    kept = json.loads(RECORDED.read_text())
    return [base64.b64decode(one) for found in kept.values() for one in found.get(target, [])]
