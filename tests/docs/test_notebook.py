"""examples/quickstart.ipynb runs from top to bottom in a kernel of its own.

The kernel's client has a process of its own, too. In a worker of pytest, pyzmq's objects would be
garbage-collected beside those of all other tests, which once caused a segmentation fault.
"""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.jvms import SMALL_PLANS, submit_args

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


def _index(cells, text):
    (found,) = (n for n, cell in enumerate(cells) if text in cell.source)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quickstart_runs_and_a_query_started_again_leaves_no_thread(tmp_path):
    notebook = nbformat.read(FILE, as_version=4)
    cells = notebook.cells
    query, wait = cells[_index(cells, QUERY)], cells[_index(cells, WAIT)]
    make = nbformat.v4.new_code_cell
    after = _index(cells, WAIT) + 1
    cells[after:after] = [
        make(f"import threading; before = {THREADS}"),
        make(query.source), make(wait.source.replace("< 5", "< 7")),
        make(f"assert before == {THREADS}, {THREADS}"),
    ]  # fmt: skip
    file = tmp_path / "quickstart.ipynb"
    nbformat.write(notebook, file)
    environ = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": submit_args(conf=SMALL_PLANS), "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(file)], cwd=tmp_path, env=environ, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
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
