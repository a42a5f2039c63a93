"""A ledger's views by delta-rs and DuckDB; `test_report.py` compares them with Spark's views."""

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import duckdb
import pyarrow as pa
import pytest

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.query import duckdb_reader
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.ledger.views import rows_of
from tests.ledger.views import quick_ledger

from .night import store
from .values import accounts, context, forge, letter, session


def test_a_word_of_duckdbs_own_is_text_in_a_literal(tmp_path):
    """Quote no reserved words inside literals: queries of such names would be missed."""
    quick = quick_ledger(store(tmp_path, [accounts(context(query_id="shop-at"), acked=1)]))
    select = "SELECT query_id, at IS NULL AS never FROM epochs WHERE query_id = 'shop-at'"
    assert quick.query(select).to_pylist() == [{"query_id": "shop-at", "never": False}]
    (texts,) = quick.query("SELECT 'at' AS a, 'it''s at' AS b, '' AS c").to_pylist()
    assert texts == {"a": "at", "b": "it's at", "c": ""}


REPORT = """
import sys
from rocket_sink.cli import main
assert main(sys.argv[1:]) == 0
assert not {"pandas", "pyspark"} & sys.modules.keys()
"""


@pytest.mark.skipif(
    duckdb.__version__.startswith("1."), reason="DuckDB 1 imports pandas itself for Arrow tables"
)
def test_a_report_loads_no_pandas(tmp_path):
    """Read times and an empty spool without pandas, whose import takes longer than a query."""
    path = store(tmp_path, [accounts(context(), acked=1), letter(context())])
    for arguments in (["report", "--json"], ["ledger", "show", "epochs", "--json"]):
        command = [sys.executable, "-c", REPORT, *arguments, "--ledger", path]
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def test_letters_with_a_time_beyond_pythons_are_read(tmp_path):
    """Read tables of older writers, which did not drop such times."""
    field = LEDGER_SCHEMA.field("event_time")
    years = pa.array([10**18], pa.int64()).cast(field.type)
    place = LEDGER_SCHEMA.get_field_index("event_time")
    far = letter(context(partition=None), b"far").set_column(place, field, years)
    near = letter(context(partition=None), b"near", event_time_ms=pa.array([0]))
    quick = quick_ledger(store(tmp_path, [far, near]))
    rows = rows_of(quick.query("SELECT * FROM pending_letters"))
    moments = {row["body"]: row["event_time"] and row["event_time"].timestamp() for row in rows}
    assert moments == {b"far": None, b"near": 0}


@pytest.mark.parametrize("part", [b"footer", b"name"])
def test_damaged_files_are_a_ledgers_error(tmp_path, part):
    """Raise LedgerError also if DuckDB's error has no class of its own or is no text."""
    path = store(tmp_path, [accounts(context(), acked=1)])
    (file,) = tmp_path.glob("kind=epoch/*.parquet")
    data = file.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little")
    begin = len(data) - 8 - footer
    if part == b"footer":
        file.write_bytes(data[:begin] + b"\xff" * footer + data[-8:])
    else:
        file.write_bytes(data[:begin] + data[begin:].replace(b"query_id", b"\xff" * 8))
    with pytest.raises(LedgerError, match="gone or damaged"):
        quick_ledger(path).query("SELECT * FROM epochs")


def test_a_query_that_is_wrong_is_no_damage(tmp_path):
    quick = quick_ledger(store(tmp_path, [accounts(context(), acked=1)]))
    with pytest.raises(duckdb.Error, match="nonsense"):
        quick.query("SELECT nonsense FROM epochs")

    def fail(_):
        raise error

    quick._session, quick._files = SimpleNamespace(sql=fail), {}
    damages = (
        duckdb.IOException, duckdb.InvalidInputException, duckdb.ConversionException,
        duckdb.PermissionException, duckdb.Error, RuntimeError, OSError,
    )  # fmt: skip
    for error in (*(damage("x") for damage in damages), duckdb.OutOfMemoryException("x")):
        expected = LedgerError if type(error) in damages else duckdb.OutOfMemoryException
        with pytest.raises(expected):
            quick.query("SELECT 1")


@pytest.mark.parametrize(
    ("files", "body_bytes", "queries", "is_gathered"),
    [(16, 9, 2, True), (15, 9, 2, False), (16, 9, 1, False), (16, 80_000, 2, False)],
)
def test_many_small_files_are_read_once(tmp_path, files, body_bytes, queries, is_gathered):
    """After the second query they may be gone. If each query opened all files, a report of 3,000
    folds would take 230 s and 10 GB."""
    for _ in range(files):
        path = store(tmp_path, [letter(context(), os.urandom(body_bytes))])
    quick, select = quick_ledger(path), "SELECT count(DISTINCT body) AS n FROM ledger_rows"
    for _ in range(queries):
        assert quick.query(select).to_pylist() == [{"n": files}]
    for file in tmp_path.glob("kind=*/*.parquet"):
        file.unlink()
    with contextlib.nullcontext() if is_gathered else pytest.raises(LedgerError, match="are gone"):
        assert quick.query(select).to_pylist() == [{"n": files}]


@pytest.mark.parametrize(
    ("size", "is_classic", "has_duckdb", "reads"),
    [
        (16 * 1024 * 1024, True, True, "DuckDB"), (16 * 1024 * 1024 + 1, True, True, "Spark"),
        (1, False, True, "Spark"), (1, True, False, "Spark"), (None, True, True, None),
    ],
)  # fmt: skip
def test_who_reads_a_ledger_on_a_store(tmp_path, monkeypatch, size, is_classic, has_duckdb, reads):
    place = LedgerPath("s3a://b/l", "b/l", is_local=False, problem="no keys")
    stats = SimpleNamespace(stats=lambda: SimpleNamespace(sizeInBytes=lambda: size))
    execution = SimpleNamespace(optimizedPlan=lambda: stats)
    frame = SimpleNamespace(
        sparkSession=session() if is_classic else SimpleNamespace(),
        _jdf=SimpleNamespace(queryExecution=lambda: execution), toArrow=LEDGER_SCHEMA.empty_table,
    )  # fmt: skip
    monkeypatch.setattr(duckdb_reader, "is_table", lambda *_: size is not None)
    monkeypatch.setattr(duckdb_reader, "read_table", lambda *_: frame)
    monkeypatch.setattr(duckdb_reader, "reader", lambda *_: "Spark")
    monkeypatch.setattr(duckdb_reader, "find_spec", lambda _: has_duckdb or None)
    query = duckdb_reader.reader_of(session(), place)
    if reads == "DuckDB":
        assert query("SELECT count(*) AS n FROM epochs").to_pylist() == [{"n": 0}]
    else:
        assert query == reads
    opens = duckdb_reader.open_quick, duckdb_reader.open_spool
    assert [read("s3a://b/l") for read in opens] == [None, None]
    local = store(tmp_path / "l[1]", [accounts(context(), acked=1)])
    quick = [read(local) for read in opens]
    assert [each is not None for each in quick] == [has_duckdb] * 2
    if has_duckdb:
        counts = [each.query("SELECT count(*) AS n FROM epochs").to_pylist() for each in quick]
        assert counts == [[{"n": 1}], [{"n": 0}]]


def test_sql_in_a_partition_value_runs_nothing(tmp_path):
    """Planted SQL could write any file, such as a `.pth` file of the reader, and read any file."""
    ledger, target = tmp_path / "ledger", tmp_path / "written.pth"
    path = store(ledger, [accounts(context(), acked=1)])
    (file,) = ledger.glob("kind=epoch/*.parquet")
    kind = f"zz' AS kind; COPY (SELECT 'import os') TO '{target}'; --"
    forge(ledger, f"kind=epoch/{file.name}", kind)
    with pytest.raises(LedgerError, match="no rocket-sink wrote"):
        open_quick(path)
    assert not target.exists()


@pytest.mark.parametrize("way", ["above", "encoded", "absolute", "uri", "glob", "list", "hidden"])
def test_files_outside_the_ledger_are_not_read(tmp_path, way):
    path = store(tmp_path / "ledger", [accounts(context(), acked=1)])
    store(tmp_path / "other", [accounts(context(query_id="secret"), acked=1)])
    (file,) = (tmp_path / "other").glob("kind=epoch/*.parquet")
    below = file.relative_to(tmp_path)
    name = {
        "above": f"../{below}", "encoded": f"%2E%2E/{below}", "absolute": str(file),
        "uri": file.as_uri(), "glob": "kind=epoch/*.parquet", "list": "kind=epoch/{a,b}.parquet",
        "hidden": ".other/x.parquet",
    }[way]  # fmt: skip
    forge(tmp_path / "ledger", name, "epoch")
    with pytest.raises(LedgerError, match="no rocket-sink wrote"):
        open_quick(path)


@pytest.mark.parametrize("what", ["_last_checkpoint", "commit", "data"])
def test_a_pipe_makes_no_reader_wait(tmp_path, what):
    path = store(tmp_path, [accounts(context(), acked=1)])
    log = tmp_path / "_delta_log"
    (file,) = tmp_path.glob("kind=epoch/*.parquet")
    name = {"_last_checkpoint": log / what, "commit": log / f"{1:020}.json", "data": file}[what]
    name.unlink(missing_ok=True)
    os.mkfifo(name)
    with pytest.raises(LedgerError, match=f"{name.name}.*no plain file|no plain file.*{name.name}"):
        open_quick(path)


@pytest.mark.parametrize("folder", ["_delta_log", "kind=epoch"])
def test_folders_behind_links_are_not_read(tmp_path, folder):
    path = store(tmp_path / "ledger", [accounts(context(), acked=1)])
    (tmp_path / "ledger" / folder).rename(tmp_path / "elsewhere")
    (tmp_path / "ledger" / folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match="is a link"):
        open_quick(path)
    (tmp_path / "ledger" / folder).unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "ledger" / folder)
    # The user's own path to the ledger has a link.
    (tmp_path / "link").symlink_to(tmp_path / "ledger")
    assert quick_ledger(str(tmp_path / "link")).query("SELECT acked FROM epochs").num_rows == 1


def test_a_session_reads_the_ledgers_files_only(tmp_path):
    """Prevent harm from a text that reaches a query in spite of all checks."""
    ledger, secret = tmp_path / "ledger", tmp_path / "secret"
    secret.write_text("secret")
    quick = quick_ledger(store(ledger, [accounts(context(), acked=1)]))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for statement in (
        f"SELECT * FROM read_text('{secret}')",
        f"COPY (SELECT 1) TO '{tmp_path}/written'",
        f"COPY (SELECT 1) TO '{next(ledger.glob('kind=epoch/*.parquet'))}'",
        f"ATTACH '{tmp_path}/written'",
        "SET enable_external_access = true",
        "RESET allowed_paths",
        "INSTALL httpfs",
    ):
        with pytest.raises((duckdb.Error, LedgerError)):
            quick.query(statement)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert quick.query("SELECT acked FROM epochs").to_pylist() == [{"acked": 1}]


def test_what_does_not_fit_into_memory_is_private(tmp_path, monkeypatch):
    """Use a folder with a random name: links could wait in a folder with a known name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    guessed = tmp_path / "tmp" / f"rocket-sink-duckdb-{os.getpid()}"
    guessed.mkdir()
    quick = quick_ledger(store(tmp_path / "ledger", [accounts(context(), acked=1)]))
    (folder,) = [path for path in (tmp_path / "tmp").iterdir() if path != guessed]
    (row,) = quick.query("SELECT current_setting('temp_directory') AS name").to_pylist()
    assert row["name"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(guessed.iterdir())
    del quick
    assert not folder.exists()
