"""The scripts of docs/: what they make is stored, and follows the code."""

import importlib.util
import sys

import pytest

from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"


def module(name, monkeypatch):
    """Import a script of docs/, which is no package."""
    monkeypatch.syspath_prepend(str(DOCS))
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, script)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("name", ["reference_tables", "pictures"])
def test_what_scripts_make_is_what_is_stored(name, monkeypatch):
    assert module(name, monkeypatch).main(["--check"]) == 0, f"run: python docs/{name}.py"


def test_an_old_table_is_found(monkeypatch):
    script = module("reference_tables", monkeypatch)
    text = (DOCS / "reference" / "errors.md").read_text("utf-8")
    assert script.with_tables("reference/errors.md", text) == text
    old = text.replace("| `UNWRITTEN` `", "| `UNWRITEN` `")
    assert old != text and script.with_tables("reference/errors.md", old) == text


def test_every_room_is_in_the_picture(monkeypatch):
    rooms = module("rooms", monkeypatch)
    drawn = module("drawn_rooms", monkeypatch).svg()
    modules, _ = rooms.rooms()
    for room, names in modules.items():
        assert room.replace(".", "/") in drawn
        assert all(name in drawn for name in names)


def test_no_way_becomes_longer(monkeypatch):
    ways = module("ways", monkeypatch)
    # A row takes 52 files and a message 28, and a busy machine may add some: the shapes of answers
    # are a file of their own (wire/answers.py). A message passes the ranked brokers
    # (routing/selectors.py), and is asked whether a span is open (net/telemetry.py). It passes from
    # its caller to the producer's thread and back (four files).
    for way, most in ((ways.of_a_message(), 29), (ways.of_a_row(), 56)):
        assert len(way) <= most, sorted(way)


def test_a_demo_becomes_a_picture(monkeypatch):
    script = module("demo_picture", monkeypatch)
    output = "start\r\n\x1b[32m1/9\x1b[0m\r\x1b[32m9/9\x1b[0m\r\nledger: /tmp/x\r\n\r\nPASSED\r\n"
    assert [line.plain for line in script.last_forms(output)] == [
        "start", "9/9", "ledger: /tmp/x", "", "PASSED", "",
    ]  # fmt: skip
    picture = script.svg(script.last_forms(output))
    assert "PASSED" in picture and "1/9" not in picture and "@font-face" not in picture
