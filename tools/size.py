"""Count what has to stay small: code lines, options, attributes of a class.

    python -m tools.size     prints the counts; exit 1 if a count is above its limit

A code line holds code: blank lines, comments and docstrings are free, so that nobody shortens a
text to save a line. An attribute is a name that the methods of a class set on `self`.

Each limit is today's count. Lower a limit with the change that makes it possible; raise none."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rocket_sink.options import OPTIONS

_ROOT: Final = Path(__file__).resolve().parent.parent
MOST_LINES: Final = {"rocket_sink": 37_247, "tests": 50_000}
"""{folder: number of code lines}. The goals are 31,000 and 50,000."""
MOST_OPTIONS: Final = 75
"""Number of options."""
MOST_ATTRIBUTES: Final = 16
_NO_CODE: Final = frozenset((
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
))  # fmt: skip


def code_lines(text: str) -> int:
    """Return the number of lines of a Python source that hold code."""
    lines = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - set(_docstring_lines(ast.parse(text))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def attribute_counts(text: str) -> Iterator[tuple[str, int]]:
    """Yield (class, number of attributes) of each class in a Python source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            names = {
                target.attr
                for target in ast.walk(node)
                if isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
            yield node.name, len(names)


def excesses(lines: dict[str, int], options: int, classes: dict[str, int]) -> Iterator[str]:
    """Yield a sentence for each count that is above its limit.

    Args:
        lines: {folder: number of code lines}
        classes: {"file:class": number of attributes}
    """
    for folder, count in lines.items():
        if count > MOST_LINES[folder]:
            yield f"{folder} has {count} code lines, the limit is {MOST_LINES[folder]}"
    if options > MOST_OPTIONS:
        yield f"there are {options} options, the limit is {MOST_OPTIONS}"
    for name, count in classes.items():
        if count > MOST_ATTRIBUTES:
            limit = f"the limit is {MOST_ATTRIBUTES}"
            yield f"{name} has {count} attributes, {limit}: split it by its jobs"


def main() -> int:
    """Print the counts and what is above its limit; return the exit code."""
    lines = {
        folder: sum(code_lines(path.read_text()) for path in (_ROOT / folder).rglob("*.py"))
        for folder in MOST_LINES
    }
    classes = {
        f"{path.relative_to(_ROOT)}:{name}": count
        for path in sorted((_ROOT / "rocket_sink").rglob("*.py"))
        for name, count in attribute_counts(path.read_text())
    }
    for folder, count in lines.items():
        print(f"{folder}: {count} code lines (limit {MOST_LINES[folder]})")
    print(f"options: {len(OPTIONS)} (limit {MOST_OPTIONS})")
    large = sum(count > MOST_ATTRIBUTES for count in classes.values())
    print(f"classes of more than {MOST_ATTRIBUTES} attributes: {large}")
    complaints = list(excesses(lines, len(OPTIONS), classes))
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
