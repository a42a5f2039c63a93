"""The scripts of docs/: their texts are stored, and follow the code; rooms have no circle."""

from importlib import import_module

import pytest

from tests.docs.blocks import ROOT
from tests.test_layers import circle

DOCS = ROOT / "docs"


@pytest.fixture(scope="module", autouse=True)
def importable():
    """Let tests import scripts of docs/, which is no package."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(DOCS))
        yield


@pytest.mark.parametrize("name", ["reference_tables", "pictures", "rooms"])
def test_what_scripts_make_is_what_is_stored(name):
    assert import_module(name).main(["--check"]) == 0, f"run: python docs/{name}.py"


def test_an_old_table_is_found():
    script = import_module("reference_tables")
    text = (DOCS / "reference" / "errors.md").read_text("utf-8")
    assert script.with_tables("reference/errors.md", text) == text
    old = text.replace("| `UNWRITTEN` `", "| `UNWRITEN` `")
    assert old != text and script.with_tables("reference/errors.md", old) == text


def test_every_room_is_in_the_picture():
    rooms = import_module("rooms")
    drawn = import_module("drawn_rooms").svg()
    modules, _ = rooms.rooms()
    for room, names in modules.items():
        assert room.replace(".", "/") in drawn
        assert all(name in drawn for name in names)


def test_a_picture_without_a_module_is_an_old_one(tmp_path, monkeypatch):
    rooms = import_module("rooms")
    page, text = tmp_path / "page.md", rooms.PAGE.read_text()
    page.write_text(text.replace("selectors", ""))
    monkeypatch.setattr(rooms, "PAGE", page)
    assert rooms.main(["--check"]) == 1 and rooms.main([]) == 0
    assert page.read_text() == text


def test_arrows_between_rooms_have_one_direction():
    """Arrows that a longer way stands for are left out."""
    rooms = import_module("rooms")
    assert circle(rooms.rooms()[1]) == []
    assert set(circle({"a": {"b"}, "b": {"c", "top"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    uses = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"e"}, "e": {"d"}}
    assert rooms.reduced(uses) == {"a": {"b"}, "b": {"c"}, "c": set(), "d": {"e"}, "e": {"d"}}


def test_no_way_becomes_longer():
    ways = import_module("ways")
    # A row takes 52 files and a message 28, and a busy machine may add some: the shapes of answers
    # are a file of their own (wire/answers.py). A message passes the ranked brokers
    # (routing/selectors.py), and is asked whether a span is open (net/telemetry.py). It passes from
    # its caller to the producer's thread and back (four files).
    for way, most in ((ways.of_a_message(), 29), (ways.of_a_row(), 56)):
        assert len(way) <= most, sorted(way)


def test_a_demo_becomes_a_picture():
    script = import_module("demo_picture")
    output = "start\r\n\x1b[32m1/9\x1b[0m\r\x1b[32m9/9\x1b[0m\r\nledger: /tmp/x\r\n\r\nPASSED\r\n"
    assert [line.plain for line in script.last_forms(output)] == [
        "start", "9/9", "ledger: /tmp/x", "", "PASSED", "",
    ]  # fmt: skip
    picture = script.svg(script.last_forms(output))
    assert "PASSED" in picture and "1/9" not in picture and "@font-face" not in picture
