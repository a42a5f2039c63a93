"""The site builds offline without a warning, and links between pages and files have targets."""

import json
import re
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

from tests.docs.blocks import ROOT, pages
from tests.python import run_python

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site by README's command. The caches of the build are beside it."""
    out = tmp_path_factory.mktemp("site")
    run_python(
        "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", out / "doctrees", DOCS,
        out / "html",
    )  # fmt: skip
    return out / "html"


def test_the_site_builds_without_a_warning(site):
    for page in DOCS.rglob("*.md"):
        if "_build" not in page.parts:
            assert (site / page.relative_to(DOCS).with_suffix(".html")).exists(), page
    assert (site / "searchindex.js").stat().st_size > 10_000
    for words in ("autoBatch", "rocket-sink-ledger-park", "MessageIllegalError", "half_messages"):
        texts = [page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html")]
        assert any(words in text for text in texts), words
    for page in site.rglob("*.html"):
        # A directive in the wrong markup becomes text without a warning.
        text = re.sub(r"<pre>.*?</pre>", "", page.read_text("utf-8"), flags=re.DOTALL)
        assert not re.search(r"\.\. (option|program|rubric|code-block|class|method)::", text), page


QUERIES = {
    "exactly once": "guarantees/effectively-once", "idempotent": "guarantees/effectively-once",
    "duplicates": "guarantees/at-least-once", "twice": "guarantees/at-least-once",
    "fifo": "guarantees/order", "failover": "guarantees/brokers",
    "slow broker": "guarantees/brokers", "late": "reference/columns",
    "schedule": "reference/columns", "settings": "reference/options",
    "error codes": "reference/errors", "password": "deploy/acl", "login": "deploy/acl",
    "certificate": "deploy/tls", "ssl": "deploy/tls", "pip": "deploy/install",
    "remove": "deploy/uninstall", "grpc": "deploy/proxy",
    "customer erase": "operate/personal-data", "gdpr": "operate/personal-data",
    "troubleshooting": "operate/paged-at-night", "outage": "operate/paged-at-night",
    "resend": "operate/backfill", "count messages": "operate/verify",
    "prometheus": "operate/metrics", "alarm": "operate/alerts", "performance": "operate/tune",
    "audit": "operate/ledger", "dlq": "guides/dead-letters", "migrate": "coming-from/kafka",
}  # fmt: skip
"""{what somebody types into the search: the page that must be among the results}"""


def test_the_search_finds_the_pages(site):
    """Look as the site's searchtools.js does: an index entry that has the query as a part."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    assert len(QUERIES) == 30
    for query, page in QUERIES.items():
        numbers = {
            number
            for entry, places in index["indexentries"].items()
            if query in entry and 2 * len(query) >= len(entry)
            for number, *_ in places
        }
        assert page in {index["docnames"][number] for number in numbers}, query


def test_the_site_loads_nothing_from_the_network(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe|object)\b[^>]*?(?:src|href|data)=\"(https?:[^\"]+)\"",
            page.read_text(encoding="utf-8"),
        )
        assert loaded == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(
            r"url\(\s*['\"]?https?:|@import\s+['\"]?http", sheet.read_text("utf-8")
        )
    for picture in DOCS.rglob("*.svg"):
        linked = set(re.findall(r"https?://[^\"'<) ]+", picture.read_text("utf-8")))
        assert linked <= {"http://www.w3.org/2000/svg"}, picture


def links(page):
    """Return the targets of a page's links and pictures."""
    targets = []
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8")):
        for child in token.children or ():
            targets += [str(child.attrs[name]) for name in ("href", "src") if name in child.attrs]
    return targets


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    heads = re.findall(r"^#{1,4} (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "page",
    [*pages(), *ROOT.glob("[A-QS-Z]*.md"), ROOT / "benchmarks" / "README.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_between_files_lead_somewhere(page):
    for target in links(page):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            assert file.exists(), f"{page}: {target}"
            if anchor:
                assert unquote(anchor) in anchors(file), f"{page}: {target}"


def lines_of(name):
    return len((ROOT / name).read_text(encoding="utf-8").splitlines())


def test_what_newcomers_read_is_short():
    assert lines_of("README.md") <= 150 and lines_of("README.zh.md") <= 150
    assert lines_of("CONTRIBUTING.md") + lines_of("docs/architecture.md") < 250


def test_each_row_of_the_identities_names_a_test_that_exists():
    text = (DOCS / "guarantees" / "identity.md").read_text("utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    tests = [row[5] for row in rows if row[5].strip() not in {"test", "---"}]
    assert len(tests) > 20
    for cell in tests:
        words = re.findall("`([^`]+)`", cell)
        sources = [(ROOT / "tests" / word).read_text("utf-8") for word in words if "/" in word]
        for name in (word for word in words if "/" not in word):
            assert any(name in source for source in sources), cell
