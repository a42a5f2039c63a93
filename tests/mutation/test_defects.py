"""The table of defects is true to the code: its texts are in the files, and its tests exist."""

import ast
from pathlib import Path

import pytest

from tests.mutation.defects import DEFECTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_what_is_planted_is_there_once_and_is_python(defect):
    text = (ROOT / defect.path).read_text()
    assert text.count(defect.before) == 1
    planted = text.replace(defect.before, defect.after)
    if defect.path.endswith(".py"):
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_the_tests_that_must_see_it_exist(defect):
    assert defect.tests
    for test in defect.tests:
        path, *names = test.partition("[")[0].split("::")
        node = ast.parse((ROOT / path).read_text())
        for name in names:
            inside = {getattr(child, "name", ""): child for child in getattr(node, "body", ())}
            assert name in inside, test
            node = inside[name]


def test_each_defect_has_its_own_name():
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
