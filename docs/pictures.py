"""The pictures of docs/pictures, drawn from the lists below.

    python docs/pictures.py            write them
    python docs/pictures.py --check    exit 1 when one is not what the lists say (a test calls this)

Each is a sequence: lifelines, arrows between them from top to bottom, notes. Plain SVG on a light
ground, so that they look the same on GitHub, in the site, in light and dark.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "pictures"
STEP: Final = 46
HEAD: Final = 34
SIDE: Final = 104
APART: Final = 190
INK: Final = "#1f2933"
COLOURS: Final = {"": "#2563a8", "bad": "#b3261e", "good": "#1b7f4b"}
"""Of arrows and notes: ordinary, a failure, what mends it."""


@dataclass(frozen=True)
class Say:
    """An arrow from one lifeline to another; `lost`: it ends before it arrives."""

    start: str
    end: str
    text: str
    colour: str = ""
    lost: bool = False


@dataclass(frozen=True)
class Note:
    """A box on one lifeline."""

    at: str
    text: str
    colour: str = ""


Step = Say | Note

AT_LEAST_ONCE: Final[tuple[Step, ...]] = (
    Say("Spark", "task", "rows of an epoch"),
    Say("task", "broker", "batch, message ids 1 to 4"),
    Note("broker", "stored"),
    Say("broker", "task", "answer", "bad", lost=True),
    Note("task", "outcome unknown", "bad"),
    Say("task", "broker", "the same ids again"),
    Note("broker", "stored twice, one id", "bad"),
    Say("broker", "task", "acknowledged", "good"),
    Say("task", "ledger", "acked, possible duplicates: 4", "good"),
)
EFFECTIVELY_ONCE: Final[tuple[Step, ...]] = (
    Say("Spark", "task", "rows of an epoch"),
    Say("task", "ledger", "epoch begun (a note)"),
    Say("task", "broker", "batch, ids made of the rows"),
    Note("broker", "stored"),
    Say("broker", "task", "answer", "bad", lost=True),
    Note("task", "outcome unknown", "bad"),
    Say("task", "broker", "QUERY_MESSAGE: have you id 1?"),
    Say("broker", "task", "yes", "good"),
    Note("task", "nothing is sent again", "good"),
    Say("task", "ledger", "acked, found_stored: 4", "good"),
)
TRANSACTIONAL: Final[tuple[Step, ...]] = (
    Say("driver", "task", "rows of an epoch"),
    Say("task", "broker", "half messages (not visible)"),
    Say("broker", "task", "stored as halves"),
    Say("task", "driver", "data files of the ledger"),
    Say("driver", "ledger", "append: the decision", "good"),
    Say("driver", "broker", "commit, each once, in order", "good"),
    Note("broker", "consumers see them", "good"),
    Say("driver", "ledger", "the end is noted"),
    Note("driver", "killed before the end?", "bad"),
    Say("ledger", "driver", "the next start finds it open"),
    Say("driver", "broker", "commits what is left", "good"),
)
STRICT: Final[tuple[Step, ...]] = (
    Say("task", "broker-a", "key N1, row 1"),
    Say("broker-a", "task", "acknowledged", "good"),
    Note("broker-b", "frozen", "bad"),
    Say("task", "broker-b", "key N2, row 1", "bad", lost=True),
    Note("task", "N2 waits (orderWaitMs)", "bad"),
    Say("task", "broker-a", "key N1, row 2: flows on"),
    Say("broker-a", "task", "acknowledged", "good"),
    Note("broker-b", "back", "good"),
    Say("task", "broker-b", "key N2, rows 1, 2, 3"),
    Say("broker-b", "task", "acknowledged, in order", "good"),
)
PICTURES: Final[dict[str, tuple[Step, ...]]] = {
    "at-least-once": AT_LEAST_ONCE,
    "effectively-once": EFFECTIVELY_ONCE,
    "transactional": TRANSACTIONAL,
    "strict-order": STRICT,
}


def drawn(steps: tuple[Step, ...]) -> str:
    """One picture as SVG."""
    names = list(dict.fromkeys(
        name for step in steps
        for name in ((step.start, step.end) if isinstance(step, Say) else (step.at,))
    ))  # fmt: skip
    if "ledger" in names:  # the outermost: nobody else stands between it and its writer
        names = [*(name for name in names if name != "ledger"), "ledger"]
    x_of = {name: SIDE + APART * at for at, name in enumerate(names)}
    width, height = 2 * SIDE + APART * (len(names) - 1), HEAD + 44 + STEP * len(steps)
    parts = [f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff" stroke="#d5dbe1"/>']
    for name, x in x_of.items():
        parts.append(
            f'<line x1="{x}" y1="{HEAD + 12}" x2="{x}" y2="{height - 12}" stroke="#9aa5b1"'
            ' stroke-dasharray="3 4"/>'
            f'<rect x="{x - 62}" y="12" width="124" height="{HEAD}" rx="6" fill="#eef2f6"'
            ' stroke="#9aa5b1"/>'
            f'<text x="{x}" y="34" text-anchor="middle" font-weight="600">{escape(name)}</text>'
        )
    for at, step in enumerate(steps):
        y = HEAD + 52 + STEP * at
        parts.append(_said(step, x_of, y) if isinstance(step, Say) else _noted(step, x_of, y))
    markers = "".join(
        f'<marker id="tip{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8"'
        f' markerHeight="8" orient="auto"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
        for name, colour in COLOURS.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
        f"<defs>{markers}</defs>{''.join(parts)}</svg>\n"
    )


def _said(step: Say, x_of: dict[str, int], y: int) -> str:
    start, end, colour = x_of[step.start], x_of[step.end], COLOURS[step.colour]
    if step.lost:
        end = start + (end - start) * 6 // 10
    tip = (
        f'<text x="{end}" y="{y + 5}" text-anchor="middle" font-size="16" font-weight="700"'
        f' fill="{colour}">✕</text>'
        if step.lost
        else ""
    )
    marker = "" if step.lost else f' marker-end="url(#tip{step.colour})"'
    middle = (x_of[step.start] + x_of[step.end]) / 2
    return (
        f'<line x1="{start}" y1="{y}" x2="{end}" y2="{y}" stroke="{colour}" stroke-width="1.6"'
        f'{marker}/>{tip}<text x="{middle:g}" y="{y - 7}" text-anchor="middle" fill="{colour}"'
        ' paint-order="stroke" stroke="#ffffff" stroke-width="4" stroke-linejoin="round">'
        f"{escape(step.text)}</text>"
    )


def _noted(step: Note, x_of: dict[str, int], y: int) -> str:
    x, colour, wide = x_of[step.at], COLOURS[step.colour], 7.4 * len(step.text) + 22
    return (
        f'<rect x="{x - wide / 2:g}" y="{y - 16}" width="{wide:g}" height="25" rx="5"'
        f' fill="#ffffff" stroke="{colour}"/>'
        f'<text x="{x}" y="{y + 1}" text-anchor="middle" fill="{colour}">{escape(step.text)}</text>'
    )


def main(arguments: list[str]) -> int:
    made = {FOLDER / f"{name}.svg": drawn(steps) for name, steps in PICTURES.items()}
    if "--check" in arguments:
        return int(any(not p.exists() or p.read_text("utf-8") != text for p, text in made.items()))
    FOLDER.mkdir(exist_ok=True)
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
