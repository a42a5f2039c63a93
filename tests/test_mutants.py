"""The mistakes that `python -m tools.mutants` plants, and its choice of lines."""

import subprocess
from random import Random

import pytest

pytest.importorskip("mutmut")
from tests.python import run_python
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
        ("f()", "deleted_statement", ["pass"]), ("self.a = 1", "deleted_statement", ["pass"]),
        ("a = f()", "deleted_statement", []), ("x = s * 1000", "dropped_unit", ["x = s"]),
        ("x = s * 7", "dropped_unit", []), ("x = a < b", "operator_swap_op", ["x = a <= b"]),
        ("assert a < b", "operator_swap_op", []),
        ("x: Final[1] = 2", "other_number", ["x: Final[1] = 3"]),
        ("x = 30_000", "other_number", ["x = 300000"]),
        ("zip(a, b, strict=True)", "operator_name", []),
        ("try: f()\nexcept OSError: pass", "widened_exception",
         ["try: f()\nexcept Exception: pass"]),
        ("try: f()\nexcept Exception: pass", "widened_exception", []),
    ],
)  # fmt: skip
def test_mistakes(text, operator, expected):
    source = Source(text)
    places = [place for place in source.places if place.operator == operator]
    assert [source.changed(place, other) for place in places for other in place.others] == expected


def test_only_changed_lines_are_drawn_and_no_equivalent_ones(tmp_path, monkeypatch):
    """The seed alone decides on the draw."""
    repository(tmp_path, {"rocket_sink/wire/x.py": "a = 1\nb = 2\n"}, monkeypatch)
    (tmp_path / "rocket_sink/wire/x.py").write_text("a = 1\nb = 3\nc = 5\n")
    equivalent = tmp_path / "equivalent.txt"
    equivalent.write_text("rocket_sink/wire/x.py: c = 6  # nobody reads it\n")
    monkeypatch.setattr(mutants, "EQUIVALENT", equivalent)
    lines = mutants.changed_lines("HEAD")
    assert lines == {"rocket_sink/wire/x.py": {2, 3}}
    paths = mutants.sources("wire")
    (drawn,) = mutants.draw(paths, lines, Random(1))
    assert [text for text in drawn.diff if text.startswith("+")] == ["+b = 4"]
    both = [[mutant.text for mutant in mutants.draw(paths, None, Random(7))] for _ in range(2)]
    assert both[0] == both[1]


SOURCE = "".join(f"def {name}(n):\n    return n > 1\n\n" for name in "fgh")
TEST = """from rocket_sink.x import f, g
def test_f(): assert not f(1)
def test_g(): assert g(1) is not None
"""
JUDGE = """import sys
from pathlib import Path
from random import Random
from tools import mutants
mutants.ROOT = root = Path(sys.argv[1])
test, source = "tests/test_x.py", root / "tree/rocket_sink/x.py"
suite = mutants.Suite(root / "tree", root / "map", False)
suite.note_lines_of([test])
for mutant in mutants.draw(["rocket_sink/x.py"], None, Random(1)):
    if mutant.place.operator == "operator_swap_op":
        print(mutant.place.line, suite.survival(mutant, [test]))
        last = mutant
print("not imported", suite.survival(last._replace(text="import not_there"), [test]))
text = source.read_text()
for change in ("# comment\\n" + text, text[:-3] + "2", text.replace("n > 1", "n > 2")):
    source.write_text(change)
    suite._contexts.cache_clear()
    contexts = suite._contexts(test, "rocket_sink/x.py")
    print(suite._is_stale(test), sorted(line for line in contexts if contexts[line]))
(root / test).write_text("import not_there")
try:
    mutants.Suite(root / "other", root / "map", False).note_lines_of([test])
except mutants.NotCollectedError as error:
    print(error)
"""


def test_verdicts(tmp_path, monkeypatch):
    """After a change, a file of tests has to run again if it ran a line beside the change. A file
    that cannot be imported is an error."""
    files = {"rocket_sink/__init__.py": "", "rocket_sink/x.py": SOURCE, "tests/test_x.py": TEST}
    repository(tmp_path, files, monkeypatch)
    done = run_python("-c", JUDGE, tmp_path, timeout_s=300, may_fail=True)
    assert done.stdout.splitlines() == [
        "8 no test runs the line", "2 None", "5 1 tests pass", "not imported None",
        "False [1, 2, 3, 5, 6, 8]", "False [1, 2, 4, 5, 7]", "True [1, 2, 4, 5, 7]",
        "NOT COLLECTED tests/test_x.py: E   ModuleNotFoundError: No module named 'not_there'",
    ], done.stderr  # fmt: skip


def repository(root, files, monkeypatch):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for command in ("init -q", "add .", "-c user.name=n -c user.email=e commit -qm x"):
        subprocess.run(["git", *command.split()], cwd=root, check=True)
    monkeypatch.setattr(mutants, "ROOT", root)
