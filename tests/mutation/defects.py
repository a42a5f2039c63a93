"""Defects that the suite must catch: realistic mistakes, each with the narrowest tests that see it.

`python -m tests.mutation` plants them one at a time. They stand in `defects.toml`, as plain text.
`test_defects.py` keeps that file true to the code: `before` is in its file exactly once, the
planted file parses, the named tests exist.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib


@dataclass(frozen=True)
class Defect:
    """A realistic mistake and the tests that see it.

    Attributes:
        path: the file, from the root of the tree.
        before, after: the text that is there, and the mistake in its place.
        tests: files or ids for pytest, of which at least one must fail.
        why: what a user would lose.
    """

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]
    why: str


FILE = Path(__file__).parent / "defects.toml"
DEFECTS = tuple(
    Defect(**{**table, "tests": tuple(table["tests"])})
    for table in tomllib.loads(FILE.read_text(encoding="utf-8"))["defects"]
)
