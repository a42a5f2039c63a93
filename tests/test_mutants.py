"""The mistakes that `python -m tools.mutants` plants, and its choice of lines."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("mutmut")
from tools import mutants
from tools.mutant_places import Source


@pytest.mark.parametrize(
    ("text", "operator", "expected"),
    [
        ("f(a, b, 1)", "swapped_arguments", ["f(b, a, 1)"]),
        ("f(a, key=b)", "dropped_argument", ["f(a, )"]),
        ("x = a and b", "dropped_operand", ["x = a", "x = b"]),
        ("x = 1, 2, 3", "dropped_element", ["x = 2, 3", "x = 1, 3", "x = 1, 2, "]),
        ("if a: f()", "ignored_condition", ["if False: f()"]),
        ("f()", "deleted_statement", ["pass"]),
        ("self.a = 1", "deleted_statement", ["pass"]),
        ("a = f()", "deleted_statement", []),
        ("x = s * 1000", "dropped_unit", ["x = s"]),
        ("x = s * 7", "dropped_unit", []),
        ("x = a < b", "operator_swap_op", ["x = a <= b"]),
        ("assert a < b", "operator_swap_op", []),
        ("x: Final[1] = 2", "other_number", ["x: Final[1] = 3"]),
        ("x = 30_000", "other_number", ["x = 300000"]),
        ("zip(a, b, strict=True)", "operator_name", []),
        ("try: f()\nexcept OSError: pass", "widened_exception",
         ["try: f()\nexcept Exception: pass"]),
        ("try: f()\nexcept Exception: pass", "widened_exception", []),
    ],
)  # fmt: skip
def test_mistakes(text: str, operator: str, expected: Sequence[str]) -> None:
    source = Source(text)
    places = [place for place in source.places if place.operator == operator]
    assert [source.changed(place, other) for place in places for other in place.others] == expected


def test_only_changed_lines_are_drawn_and_no_equivalent_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed alone decides on the draw."""
    file = tmp_path / "rocket_sink" / "wire" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("a = 1\nb = 2\n")
    for command in ("init -q", "add .", "-c user.name=n -c user.email=e commit -qm x"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    file.write_text("a = 1\nb = 3\nc = 5\n")
    equivalent = tmp_path / "equivalent.txt"
    equivalent.write_text("rocket_sink/wire/x.py: c = 6  # nobody reads it\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "EQUIVALENT", equivalent)
    lines = mutants.changed_lines("HEAD")
    assert lines == {"rocket_sink/wire/x.py": {2, 3}}
    paths = mutants.sources("wire")
    (drawn,) = mutants.draw(paths, lines, 9, Random(1))
    assert [text for text in drawn.diff if text.startswith("+")] == ["+b = 4"]
    both = [[mutant.text for mutant in mutants.draw(paths, None, 2, Random(7))] for _ in range(2)]
    assert both[0] == both[1]
