"""Sphinx: `python -m sphinx -W -b html docs docs/_build`. Nothing in the site needs a network."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import click  # noqa: E402
from search_words import add_words  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

import rocket_sink  # noqa: E402

project = "rocket-sink"
author = "the rocket-sink authors"
version = release = rocket_sink.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    # the commands' pages, from click itself
    "sphinx_click",
    "sphinx_copybutton",
    "drawn_rooms",
]
exclude_patterns = ["_build"]
# the toctree has room for pages that may not be there; this warning has no type to suppress it by
logging.getLogger("sphinx.sphinx.directives.other").addFilter(
    lambda record: getattr(record, "subtype", "") != "empty_glob"
)

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# docs/architecture.md has its picture as Mermaid, which GitHub draws; here `drawn_rooms` does
myst_fence_as_directive = ["mermaid"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# "--option" stays as it is typed
smartquotes = False
# names in docstrings stand in single backquotes
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"rocket-sink {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"


def add_example(app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Put a command's example, which `--help` shows, below its options."""
    example = getattr(context.command, "example", "").strip()
    if example:
        lines += ["", ".. rubric:: Example", "", ".. code-block:: bash", ""]
        lines += [f"   {line.strip()}" for line in example.splitlines()]


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_words)
    app.connect("sphinx-click-process-epilog", add_example)
