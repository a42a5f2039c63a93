"""docs/architecture.md shows the rooms that the code has."""

import importlib.util
from pathlib import Path

import pytest

from tests.test_layers import circle

SCRIPT = Path(__file__).parent.parent / "docs" / "rooms.py"


@pytest.fixture
def rooms():
    spec = importlib.util.spec_from_file_location("rooms", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_matches_the_code(rooms):
    assert rooms.main(["--check"]) == 0, "run: python docs/rooms.py"


def test_a_picture_without_a_module_is_an_old_one(rooms, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(rooms.PAGE.read_text().replace("selectors", ""))
    monkeypatch.setattr(rooms, "PAGE", page)
    assert rooms.main(["--check"]) == 1
    assert rooms.main([]) == 0
    assert page.read_text() == (SCRIPT.parent / "architecture.md").read_text()


def test_arrows_that_a_longer_way_stands_for_are_left_out(rooms):
    uses = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"e"}, "e": {"d"}}
    assert rooms.reduced(uses) == {"a": {"b"}, "b": {"c"}, "c": set(), "d": {"e"}, "e": {"d"}}


def test_arrows_between_rooms_have_one_direction(rooms):
    assert circle(rooms.rooms()[1]) == []
    assert set(circle({"a": {"b"}, "b": {"c", "top"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
