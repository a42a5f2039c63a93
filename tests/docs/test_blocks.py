"""The code blocks of the README and of docs/ run unchanged against a real cluster.

One Spark session, one cluster and one data folder serve all pages, and each page runs from top to
bottom in a folder of its own. Tests replace only addresses and /data, as a reader would. Blocks
that cannot run say why on the page (`blocks`), and are parsed.
"""

import contextlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rocket_sink.cli import cli
from rocket_sink.options import SinkOptions, find_option
from rocket_sink.producer.admin.admin import Admin
from tests.clusters import repair
from tests.docs.blocks import DRAWN, OUTPUT, READ, RUN, Block, all_blocks, blocks_of, pages
from tests.docs.blocks import ROOT as REPOSITORY
from tests.docs.checks import BadBlock, check_parsed
from tests.docs.shell import Shell

TOPICS = ("flights", "orders", "benchmark", "delays", "timers", "bookings", "%DLQ%billing")
ENGLISH = [page for page in pages() if "zh" not in page.relative_to(REPOSITORY).as_posix()]
"""The English pages; pages in Chinese have the same blocks (test_zh)."""


PATIENT = {
    "sendMsgTimeout": "60s", "deliveryTimeoutMs": "60s", "connectTimeoutMs": "20s",
}  # fmt: skip
"""Default options of pages: a busy machine must not make a healthy broker look slow."""


OWN_SESSION = "docs/guides/recipes.md"
"""The page that needs more packages of Spark; `test_recipes` runs it."""
LONG = (
    "docs/guides/shell.md", "docs/operate/alerts.md", "docs/operate/backfill.md",
    "docs/operate/ledger.md",
)  # fmt: skip
"""Pages whose commands are run by other tests, too."""


def _name(page):
    return page.relative_to(REPOSITORY).as_posix()


@dataclass
class World:
    """The cluster, data and session that all pages share."""

    name_server: str
    data: Path
    shell: Shell
    spark: Any

    def placed(self, text, folder):
        """Return a block's text with this world's addresses and folders."""
        text = text.replace("127.0.0.1:9876", self.name_server).replace("/tmp/flights", str(folder))
        return re.sub(r"(?<![\w.])/data\b", str(self.data), text)


@pytest.fixture(scope="module")
def world(local_cluster, spark):
    repair(local_cluster)
    with Admin(timeout_s=30.0, **local_cluster.client_options()) as admin:
        for topic in TOPICS:
            admin.create_topic(topic, queues=4)
    for topic in TOPICS:
        local_cluster.await_route(topic)
    patient = mock.patch.object(SinkOptions, "parse", staticmethod(_patiently(SinkOptions.parse)))
    # The folder's name is short because the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="docs-") as home, patient:
        shell = Shell(Path(home), spark)
        _make_data(Path(home) / "data", local_cluster.name_server, spark)
        yield World(local_cluster.name_server, Path(home) / "data", shell, spark)
        shell.close()


def _patiently(parse):
    def parse_patiently(given=None, **more):
        parse(given, **more)  # Errors shall name the options of the page, so parse these first.
        all_given = {**(given or {}), **more}
        names = {find_option(name).name for name in all_given}
        return parse({**{n: v for n, v in PATIENT.items() if n not in names}, **all_given})

    return parse_patiently


def _make_data(folder, name_server, spark):
    """Make input for the pages, and a ledger with sends and dead letters."""
    from rocket_sink import RocketSink

    flights = {
        "tailnum": [f"N{number % 5}" for number in range(50)],
        "carrier": ["AA", "UA"] * 25,
        "dest": ["MIA"] * 50,
    }
    old = {"id": list(range(20)), "payload": ["old"] * 20, "order_id": [f"o{n}" for n in range(20)]}
    for name, columns in (("in", flights), ("old", old)):
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / name / "rows.parquet")
    (folder / "events").mkdir()
    (folder / "events" / "rows.json").write_text('{"id": "7", "text": "seven"}\n')
    sink = RocketSink(nameServer=name_server, topic="flights", ledger=str(folder / "ledger"))
    sink.write(spark.createDataFrame([("one",), (None,)], "body STRING"))


def _run(block, world, folder, names, environ):
    text = world.placed(block.text, folder)
    if block.language == "bash":
        world.shell.run(text, folder, environ)
    elif block.language == "sql":
        for statement in filter(str.strip, text.split(";")):
            world.spark.sql(statement).collect()
    else:
        # Tracebacks then show the lines of the page.
        code = compile("\n" * block.line + text, str(REPOSITORY / block.page), "exec")
        exec(code, names)


def _clear(spark):
    """Remove the views and queries of a page, because each page must run by itself."""
    for query in spark.streams.active:
        query.stop()
    for view in spark.sql("SHOW VIEWS").collect():
        spark.catalog.dropTempView(view.viewName)


@pytest.mark.cluster
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (_name(page) in LONG)) for page in ENGLISH],
    ids=_name,
)
def test_a_page_runs_from_top_to_bottom(page, request, tmp_path, monkeypatch):
    blocks = [block for block in blocks_of(page) if block.language in RUN and not block.reason]
    if not blocks or _name(page) == OWN_SESSION:
        return
    world = request.getfixturevalue("world")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    environ = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_clear, world.spark)
        for block in blocks:
            try:
                _run(block, world, tmp_path, names, environ)
            except Exception as error:
                raise AssertionError(f"the block at {block.place}: {error}") from error


@pytest.mark.parametrize("block", all_blocks(), ids=lambda block: block.place)
def test_a_block_is_run_or_parsed(block):
    if block.language in (*OUTPUT, *DRAWN):
        return
    assert block.language in (*RUN, *READ), f"{block.place}: no test runs {block.language!r}"
    if block.reason or block.language in READ:
        check_parsed(block)


def _examples(command, name):
    context = click.Context(command)
    if isinstance(command, click.Group):
        for child_name in command.list_commands(context):
            child = command.get_command(context, child_name)
            yield from _examples(child, f"{name} {child_name}")
    elif example := getattr(command, "example", ""):
        yield name, "\n".join(line.strip() for line in example.strip().splitlines())


@pytest.mark.parametrize(("name", "example"), list(_examples(cli, "rocket-sink")))
def test_the_example_that_help_shows_is_right(name, example):
    assert name in example
    check_parsed(Block(name, 1, "bash", example))


def test_reasons_are_reasons():
    for block in all_blocks():
        assert not block.reason or len(block.reason.split()) >= 3, block.place
        assert not block.reason or block.language in ("bash", "python"), block.place


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("bash", "rocket-sink report --lodger /data/ledger", "--lodger"),
        ("bash", "rocket-sink check -n a:1 -O nameServr=b:1", "nameServr"),
        ("bash", "rocket-sink stream --format rate -O ordering=strickt", "ordering"),
        ("bash", "rocket-sink check -n a:1;b:1 -t x", "quotes"),
        ("bash", "spark-submit --packages a:b:1 jobs/strem.py", "jobs/strem.py"),
        ("bash", "spark-submit --master yarn \\\n  jobs/report.py --leger x", "--leger"),
        ("bash", "if true; then rocket-sink check", "syntax error"),
        ("python", "RocketSink(nameServr='a:1')", "nameServr"),
        ("python", "print(", "never closed"),
        ("ini", "nameServer = a:1\nodering = strict", "odering"), ("yaml", "a: [1", "expected"),
        ("json", "{", "Expecting"),
    ],
)  # fmt: skip
def test_a_wrong_block_is_found(language, text, words):
    with pytest.raises(BadBlock) as caught:
        check_parsed(Block("page.md", 1, language, text))
    assert words in str(caught.value)


def test_fences_and_their_reasons_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- parsed only: needs\nsudo rights -->\n```bash\none\n```\n\n- in a list\n\n"
        "  ```bash\n  two\n  ```\n\n```{toctree}\nx\n```\n\n```\nno language\n```\n"
    )
    blocks = blocks_of(page, tmp_path)
    assert [(block.language, block.text, block.reason) for block in blocks] == [
        ("bash", "one\n", "needs sudo rights"), ("bash", "two\n", ""), ("", "no language\n", ""),
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="no test runs"):
        test_a_block_is_run_or_parsed(blocks[2])


def test_a_wrong_option_fails_the_page_that_has_it(tmp_path):
    with tempfile.TemporaryDirectory(prefix="docs-") as home:
        shell = Shell(Path(home), None)
        with contextlib.closing(shell), pytest.raises(AssertionError, match="--lodger"):
            shell.run("rocket-sink report --lodger x | cat", tmp_path, {})
