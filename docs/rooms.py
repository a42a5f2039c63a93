"""The picture of the rooms in docs/architecture.md, made from the imports of the package.

    python docs/rooms.py            write it
    python docs/rooms.py --check    exit 1 when it is not what the code says (a test calls this)

Every folder of `rocket_sink` is a room, with its modules. An arrow goes from a room to the rooms
that it imports from; those that another room on the way already imports from are left out
(transitive reduction), else the picture would be all arrows.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "rocket_sink"
PAGE = REPOSITORY / "docs" / "architecture.md"
START = "<!-- rooms: made by `python docs/rooms.py` -->"
END = "<!-- /rooms -->"


def room_of(module: str) -> str:
    """The folder of a dotted module: `wire.columns.encode` -> `wire.columns`; top: `(values)`."""
    parts = module.split(".")
    while parts and not (PACKAGE / "/".join(parts)).is_dir():
        parts.pop()
    return ".".join(parts) or "top level"


def imported(path: Path) -> set[str]:
    """Dotted modules of ours that a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rocket_sink"):
            base = (node.module or "").partition(".")[2]
            for alias in node.names:
                name = f"{base}.{alias.name}" if base else alias.name
                file = PACKAGE / f"{name.replace('.', '/')}.py"
                found.add(name if file.exists() or file.with_suffix("").is_dir() else base)
    return found - {""}


@functools.cache
def rooms() -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """{room: its modules}, {room: rooms it imports from}."""
    modules: dict[str, list[str]] = {}
    uses: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if path.name == "__init__.py" or name == "cli":
            continue
        room = room_of(name.rpartition(".")[0])
        modules.setdefault(room, []).append(path.stem)
        uses.setdefault(room, set()).update(room_of(one) for one in imported(path))
        uses[room].discard(room)
    return modules, uses


def reduced(uses: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that a longer way stands for; a circle keeps all of its own."""

    def reach(room: str, seen: set[str]) -> set[str]:
        for other in uses.get(room, ()):
            if other not in seen:
                seen.add(other)
                reach(other, seen)
        return seen

    far = {room: reach(room, set()) for room in uses}
    return {
        room: {
            one
            for one in direct
            if not any(one in far.get(other, ()) and other != one and room not in far.get(other, ())
                       for other in direct)
        }
        for room, direct in uses.items()
    }  # fmt: skip


def drawn() -> str:
    """The picture as Mermaid, which GitHub and editors show."""
    modules, uses = rooms()
    ids = {room: room.replace(".", "_").replace(" ", "_") for room in modules}
    lines = ["```mermaid", "flowchart TD"]
    for room, names in modules.items():
        listed = "<br/>".join(" ".join(names[at : at + 4]) for at in range(0, len(names), 4))
        lines.append(f'  {ids[room]}["<b>{room.replace(".", "/")}</b><br/>{listed}"]')
    lines += [
        f"  {ids[room]} --> {' & '.join(ids[other] for other in sorted(others & ids.keys()))}"
        for room, others in reduced(uses).items()
        if others & ids.keys()
    ]
    return "\n".join([*lines, "```"])


def main(arguments: list[str]) -> int:
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    made = f"{before}{START}\n{drawn()}\n{END}{after}"
    if "--check" in arguments:
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
