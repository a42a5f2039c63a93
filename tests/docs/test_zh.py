"""The Chinese pages have the blocks, headings and tables of the English ones."""

import re

import pytest
from markdown_it import MarkdownIt

from tests.docs.blocks import ROOT, blocks_of, headings_of

ZH = ROOT / "docs" / "zh"
PAIRS = {
    ROOT / "README.zh.md": ROOT / "README.md",
    **{page: ROOT / "docs" / page.relative_to(ZH) for page in sorted(ZH.rglob("*.md"))},
}
"""The English page of each Chinese page. Each language has an index of its own."""
del PAIRS[ZH / "index.md"]


def shape(page):
    """Return the shape that both languages share: blocks, levels of headings, table rows."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    kinds = ("heading_open", "tr_open", "list_item_open", "fence", "paragraph_open")
    return [f"{token.type} {token.tag} {token.info}" for token in tokens if token.type in kinds]


def spans(page):
    """Return the names in backquotes that are in any table: options, codes, commands."""
    rows = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| ")]
    return sorted(name for row in rows for name in re.findall(r"`[^`]+`", row))


def differences(page, english):
    """Return the aspects in which a Chinese page differs from the English one."""
    looks = {
        "blocks": lambda one: [(b.language, b.text, b.reason) for b in blocks_of(one, one.parent)],
        "headings": headings_of, "parts": shape, "names in tables": spans,
    }  # fmt: skip
    return [what for what, look in looks.items() if look(page) != look(english)]


@pytest.mark.parametrize("page", PAIRS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_chinese_page_has_what_the_english_one_has(page):
    assert PAIRS[page].exists(), f"{page} has no English page"
    assert differences(page, PAIRS[page]) == []


def test_each_guide_is_there_in_chinese():
    wanted = {"quickstart.md", "operate/paged-at-night.md"}
    wanted |= {f"guides/{page.name}" for page in (ROOT / "docs" / "guides").glob("*.md")}
    assert {page.relative_to(ZH).as_posix() for page in PAIRS if ZH in page.parents} == wanted


@pytest.mark.parametrize(
    ("name", "old", "new", "difference"),
    [
        ("batch", "print(summary)", "print(sumary)", "blocks"),
        ("batch", "## A write that died", "### A write that died", "headings"),
        ("batch", "In a notebook", "- In a notebook", "parts"),
        ("testing", "| `Drop()` |", "| `Drip()` |", "names in tables"),
        ("quickstart", "<!-- parsed only: takes", "<!-- takes", "blocks"),
    ],
)
def test_a_change_on_one_side_is_found(name, old, new, difference, tmp_path):
    page, english = next((zh, en) for zh, en in PAIRS.items() if zh.stem == name)
    text = english.read_text("utf-8")
    assert old in text
    (changed := tmp_path / "page.md").write_text(text.replace(old, new), encoding="utf-8")
    assert difference in differences(page, changed)
