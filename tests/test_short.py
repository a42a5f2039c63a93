"""The short form names tests that exist, and sees planted defects in every room."""

import ast
import functools
from pathlib import Path

import pytest

from tests.crash.schedule import CI
from tests.mutation.defects import DEFECTS
from tests.short import LONG_WITHOUT_JAVA, WITH_JAVA, is_long

TESTS = Path(__file__).parent
ROOT = TESTS.parent

FEWEST = 10
"""Planted defects that the short form sees in each room of at least as many."""


def has_java_mark(text):
    return "mark.spark" in text or "mark.cluster" in text


@functools.cache
def java_by_test(path):
    """Return {name of a test, `Class::name` in a class: whether it starts Java}."""

    def walk(body, prefix, java):
        for node in body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                java = java or has_java_mark(ast.unparse(node.value))
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                marks = "".join(map(ast.unparse, node.decorator_list))
                own = java or has_java_mark(marks)
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{node.name}::", own)
                elif node.name.startswith("test_"):
                    yield prefix + node.name, own

    return dict(walk(ast.parse((ROOT / path).read_text("utf-8")).body, "", False))


@pytest.mark.parametrize("path", WITH_JAVA)
def test_what_the_table_names_is_there_and_starts_java(path):
    known = java_by_test(f"tests/{path}")
    for name in WITH_JAVA[path]:
        assert known.get(name.partition("[")[0]), f"{path}::{name}"


def test_parameters_of_the_table_are_there():
    schedules = {schedule.name.replace(":", "_") for schedule in CI}
    named = {name.partition("[")[2].rstrip("]") for name in WITH_JAVA["crash/test_crash.py"]}
    assert named - {""} <= schedules and len(named - {""}) == 3
    for name in WITH_JAVA["docs/test_blocks.py"]:
        assert (ROOT / name.partition("[")[2].rstrip("]")).exists(), name


def test_long_files_and_folders_are_there():
    for name in LONG_WITHOUT_JAVA:
        assert (TESTS / name.partition("::")[0]).exists(), name


def test_what_is_long():
    lanes = "tests/integration/test_lanes.py"
    kept = "test_rows_arrive_whole_in_order_and_the_ledger_adds_up"
    assert not is_long(f"{lanes}::{kept}[foreach]", java=True)
    assert is_long(f"{lanes}::test_of_tomorrow", java=True)
    assert not is_long("tests/wire/test_of_tomorrow.py::test_x", java=False)
    assert is_long("tests/hosts/test_hosts.py::test_x", java=False)


def is_seen(defect):
    """Tell whether all tests of one of a defect's names (file, class or test) are short."""
    for test in defect.tests:
        path, _, name = test.partition("[")[0].partition("::")
        below = {
            each: java
            for each, java in java_by_test(path).items()
            if not name or each == name or each.startswith(f"{name}::")
        }
        assert below, test
        if not any(is_long(f"{path}::{each}", java=java) for each, java in below.items()):
            return True
    return False


def room(defect):
    parts = Path(defect.path).parts
    return parts[1] if len(parts) > 2 else "top"


def test_the_short_form_sees_defects_in_every_room():
    seen, unseen = {}, {}
    for defect in DEFECTS:
        (seen if is_seen(defect) else unseen).setdefault(room(defect), []).append(defect.name)
    for name in {**seen, **unseen}:
        short, long = seen.get(name, ()), unseen.get(name, ())
        assert len(short) >= min(FEWEST, len(short) + len(long) - 1), (name, long)
    assert sum(map(len, seen.values())) >= 0.85 * len(DEFECTS), unseen
