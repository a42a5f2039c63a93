"""The fenced code blocks of the README and of docs/, and their treatment.

    python -m tests.docs.blocks        list the blocks that are not run, with their reasons

Tests run a block, unless a comment before it says why they cannot:

    <!-- parsed only: needs sudo -->

Such a block is parsed (`checks.check_parsed`). Blocks of output (`text`) are skipped. Any other
language is an error, so that no block is left out by accident.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
RUN = ("python", "bash", "sql")
"""Languages that tests run."""
READ = ("ini", "json", "yaml", "xml", "java")
"""Languages that are only parsed, if Python has a parser."""
OUTPUT = ("text",)
DRAWN = ("mermaid",)
"""Languages of pictures, which the build draws."""
_REASON = re.compile(r"<!--\s*parsed only:\s*(?P<reason>.+?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fence. `reason` says why it is only parsed; a block without a reason is run."""

    page: str
    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def place(self):
        return f"{self.page}:{self.line}"


def pages(root=ROOT):
    """Return the README in each language and all pages, in a fixed order."""
    return [*sorted(root.glob("README*.md")), *sorted((root / "docs").rglob("*.md"))]


def blocks_of(page, root=ROOT):
    """Return the fences of a page in order, without directives of the generator."""
    return list(_blocks(page.read_text(encoding="utf-8"), page.relative_to(root).as_posix()))


def _blocks(text, name):
    reason = ""
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "html_block" and (found := _REASON.search(token.content)):
            reason = " ".join(found["reason"].split())
            continue
        if token.type == "fence" and not token.info.startswith("{"):
            language = token.info.split()[0] if token.info else ""
            yield Block(name, token.map[0] + 1, language, token.content, reason)
        reason = ""


def all_blocks(root=ROOT):
    return [block for page in pages(root) for block in blocks_of(page, root)]


def headings_of(page):
    """Return the levels of a page's headings, in order."""
    tokens = MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8"))
    return [int(token.tag[1]) for token in tokens if token.type == "heading_open"]


if __name__ == "__main__":
    for block in all_blocks():
        if block.reason:
            print(f"{block.place} ({block.language}): {block.reason}")
