"""A ledger on an S3 API, in a process of its own: the tests' own Spark has no S3A.

The long form is a command: `python -m tests.stores`.
"""

import contextlib
import json

import pytest
from pyarrow.fs import S3FileSystem

from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.transport.stream import read_batches
from tests.hosts import tables
from tests.ledger.values import context, sends
from tests.python import run_python
from tests.stores import __main__ as command
from tests.stores.cases import place_on
from tests.stores.server import S3Server

pytestmark = pytest.mark.timeout(1200)


SHORT = [case.name for case in command.CASES if case.short]


@pytest.mark.spark
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["lanes", "conditions"], id="lanes"),
        pytest.param(["one_query_twice"], id="two-drivers"),
        pytest.param(SHORT, id="all", marks=pytest.mark.slow),
    ],
)
def test_what_users_do_with_a_ledger_on_s3(names):
    only = [word for name in names for word in ("--only", name)]
    done = run_python("-m", "tests.stores", "--short", *only, timeout_s=1100, may_fail=True)
    # 1 is also how Python ends with a traceback.
    assert done.returncode in (0, 1) and done.stdout, done.stderr[-5000:]
    cases = json.loads(done.stdout)["cases"]
    broken = {case["name"]: case["broken"] for case in cases}
    assert broken == {name: [] for name in names}, done.stderr[-5000:]


def test_a_spool_file_is_written_and_read_by_one_request_each():
    """Arrow alone writes a file in three requests, and reads a stream in one for each part.

    An older Arrow, without the option for it, always needs the three.
    """
    with contextlib.closing(S3Server()) as server:
        server.client().create_bucket(Bucket="bucket")
        place = place_on(server, "bucket")
        writer = SpoolWriter(place, context())
        with server.counted() as writing:
            writer.append(sends(context(), 50))
            path = writer.seal()
        with server.counted() as reading:
            assert sum(b.num_rows for b in read_batches(path, place.filesystem())) == 50
    posts = 0 if "allow_delayed_open" in str(S3FileSystem.__doc__) else 2
    assert (writing.by_method["PUT"], writing.by_method["POST"]) == (1, posts)
    assert reading.by_method == {"HEAD": 1, "GET": 1}


def test_the_page_is_made_from_the_last_run():
    results = json.loads(command.RESULTS.read_text())
    page = command.PAGE.read_text()
    assert tables.with_part(page, "tried", command.table(results)) == page
    assert not [case["name"] for case in results["cases"] if case["broken"]]
