"""The recorded real traffic, which `record` writes."""

import base64
import json
from pathlib import Path
from typing import Final

RECORDED: Final = Path(__file__).with_name("recorded.json")


def recorded(target):
    """Return the inputs that peers of all versions sent to a target's decoder."""
    kept = json.loads(RECORDED.read_text())
    return [
        base64.b64decode(encoded)
        for by_target in kept.values()
        for encoded in by_target.get(target, [])
    ]
