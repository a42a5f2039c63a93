"""examples/quickstart.ipynb runs from top to bottom in a kernel of its own.

The kernel's client has a process of its own, too. In a worker of pytest, pyzmq's objects would be
garbage-collected beside those of all other tests, which once caused a segmentation fault.
"""

import os
import sys
from pathlib import Path

import nbformat
import pytest

from tests.jvms import SMALL_PLANS, submit_args
from tests.python import run_python

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "quickstart.ipynb"
THREADS = "sorted(t.name for t in threading.enumerate() if t.name.startswith('rocket-sink'))"
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""
QUERY, WAIT = "sink.stream(ticks)", "query.lastProgress"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quickstart_runs_and_a_query_started_again_leaves_no_thread(tmp_path):
    notebook = nbformat.read(FILE, as_version=4)
    cells = notebook.cells
    (query,), (wait,) = ([c for c in cells if text in c.source] for text in (QUERY, WAIT))
    make = nbformat.v4.new_code_cell
    after = cells.index(wait) + 1
    cells[after:after] = [
        make(f"import threading; before = {THREADS}"),
        make(query.source), make(wait.source.replace("< 5", "< 7")),
        make(f"assert before == {THREADS}, {THREADS}"),
    ]  # fmt: skip
    file = tmp_path / "quickstart.ipynb"
    nbformat.write(notebook, file)
    environ = {
        **os.environ, "PYSPARK_PYTHON": sys.executable, "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYSPARK_SUBMIT_ARGS": submit_args(conf=SMALL_PLANS),
    }  # fmt: skip
    run_python("-c", RUN, file, environ=environ, cwd=tmp_path)
    shown = [
        output["data"].get("text/html", "")
        for cell in nbformat.read(file, as_version=4).cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "execute_result"
    ]
    assert sum("<iframe" in page and "vegaEmbed" in page for page in shown) == 1
    assert sum("<table" in page or "<pre" in page for page in shown) >= 3


def test_the_stored_notebook_has_no_output():
    for cell in nbformat.read(FILE, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
