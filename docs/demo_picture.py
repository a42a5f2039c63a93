"""The picture of the demo in the README, made from what the demo prints.

    python docs/demo_picture.py              run `rocket-sink demo` and draw it
    python docs/demo_picture.py OUTPUT       draw what an earlier run printed
    python docs/demo_picture.py --keep FILE  also keep what it prints

The demo runs in a terminal of its own (a pty), so that its colours and bars are those that a user
sees; rich draws them as SVG, without the fonts that it would fetch from the network.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

PICTURE: Final = Path(__file__).parent / "pictures" / "demo.svg"
WIDTH: Final = 92
_FONTS: Final = re.compile(r"@font-face \{.*?\}", re.DOTALL)
_UNWANTED: Final = re.compile(r"^(?:WARNING|:: |Using incubator)|/(?:tmp|root|home)/")
"""Lines that tell of this machine only."""


def run_demo() -> str:
    """What the demo writes to a terminal of 92 columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "rocket-sink"), "demo"],
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        env={**os.environ, "COLUMNS": str(WIDTH), "LINES": "60", "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    written = io.BytesIO()
    while True:
        try:
            data = os.read(ours, 65_536)
        except OSError:
            break
        if not data:
            break
        written.write(data)
    if process.wait():
        raise SystemExit(f"the demo failed: {written.getvalue().decode(errors='replace')[-2000:]}")
    return written.getvalue().decode(errors="replace")


def last_forms(output: str) -> list[Text]:
    """The lines as they stand at the end: of one that was written over, its last form."""
    lines = []
    # a bar's end hides and shows the cursor, and clears the line
    plain = re.sub(r"\x1b\[(?:\?25[lh]|\d*[AKG]|2K)", "\r", output)
    for line in plain.replace("\r\n", "\n").split("\n"):
        form = next((part for part in reversed(line.split("\r")) if part.strip()), "")
        lines.append(Text.from_ansi(form))
    return lines


def svg(lines: list[Text]) -> str:
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False,
        color_system="truecolor",
    )  # fmt: skip
    console.print(Text("$ rocket-sink demo", style="bold"))
    for line in lines:
        console.print(line)
    made = console.export_svg(title="rocket-sink demo", theme=DIMMED_MONOKAI)
    made = made.replace("<!-- Generated with Rich https://www.textualize.io -->", "")
    return _FONTS.sub("", made).replace("Fira Code, monospace", "Menlo, Consolas, monospace")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args(arguments)
    output = given.output.read_bytes().decode() if given.output else run_demo()
    if given.keep:
        given.keep.write_bytes(output.encode())
    lines: list[Text] = []
    for line in last_forms(output):
        repeated = not line.plain.strip() and (not lines or not lines[-1].plain.strip())
        if not repeated and not _UNWANTED.search(line.plain):
            lines.append(line)
    PICTURE.write_text(svg(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
