"""The proof of tasks that they see the driver's ledger and can write to it.

File systems without hard links are refused before rows are sent, and before each commit.
"""

import datetime as dt
import errno
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException

from rocket_sink import Ledger
from rocket_sink.errors import LedgerError
from rocket_sink.ledger import storage
from rocket_sink.ledger import token as token_module
from rocket_sink.ledger.append import table as shared
from rocket_sink.ledger.append.table import ledger_token
from rocket_sink.ledger.path import LedgerPath, first_line, resolve_path
from rocket_sink.ledger.schema import LEDGER_SCHEMA, VERSION_PROPERTY
from rocket_sink.ledger.token import LedgerToken, token_names
from rocket_sink.options import SinkOptions
from rocket_sink.spark.checks import session_settings
from rocket_sink.spark.checks.session_settings import check_session
from tests.stores.server import StoreServer, s3_options

from .values import accounts, context, refusal, session, write_spool

OTHERS = pa.schema({"price": pa.int64()})


@pytest.fixture(autouse=True)
def pauses_s(monkeypatch):
    """Start a new process, as it were, which does not wait; return its pauses."""
    pauses = []
    monkeypatch.setattr(token_module, "_tried", set())
    monkeypatch.setattr(token_module, "time", SimpleNamespace(sleep=pauses.append))
    return pauses


def test_the_token_of_a_folder_is_one_and_nothing_else_stays(tmp_path, monkeypatch):
    place = resolve_path(tmp_path / "new" / "ledger")
    token = ledger_token(place, spools=True)
    Path(place.root, "_notes", "tokens", "other.tmp").touch()
    assert ledger_token(place, spools=True) == token
    with monkeypatch.context() as slow:  # Calls of the data source cannot wait for pyarrow.
        slow.setattr(LedgerPath, "filesystem", None)
        assert token_names(place) == [token.name] and "storage" not in repr(token)
    for _ in range(2):
        pickle.loads(pickle.dumps(token)).check()
    assert [path.name for path in Path(place.root).iterdir() if path.name != "_spool"] == ["_notes"]
    assert not list(Path(place.spool).iterdir())


def test_another_folder_of_the_same_path_is_refused_each_time(tmp_path, pauses_s):
    place = resolve_path(tmp_path / "ledger")
    token = ledger_token(place, spools=True)
    token.check()
    Path(place.root).rename(tmp_path / "elsewhere")
    for _ in range(2):
        with refusal(token.uri, r"^the .*_notes/tokens/\w+\.json, .* is not here.*mount storage"):
            token.check()
    ledger_token(place, spools=True)  # The other host has a token of its own.
    with refusal(token.uri, "not the one that the driver sees"):
        token.check()
    assert pauses_s == [1.0] * 9


def test_a_file_that_comes_into_view_late_is_waited_for(tmp_path, monkeypatch):
    token = ledger_token(resolve_path(tmp_path / "ledger"), spools=True)
    (tmp_path / "ledger").rename(tmp_path / "elsewhere")
    late = (tmp_path / "elsewhere").rename
    monkeypatch.setattr(token_module.time, "sleep", lambda _: late(tmp_path / "ledger"))
    token.check()


def test_a_spool_that_cannot_be_written(tmp_path):
    """A file stands in the way of the spool, because root may write everywhere."""
    token = ledger_token(resolve_path(tmp_path), spools=True)
    (tmp_path / "_spool").write_text("in the way")
    with refusal(token.uri, r"as user \d+.*ends before it sends or writes a row; .*let the users"):
        token.check()


def test_from_a_connect_client_the_table_is_looked_for(tmp_path):
    token = LedgerToken(resolve_path(tmp_path).uri, "", spools=False)
    with pytest.raises(LedgerError, match="_delta_log, which is there on the driver, is not here"):
        token.check()
    (tmp_path / "_delta_log").mkdir()
    token.check()
    assert [path.name for path in tmp_path.iterdir()] == ["_delta_log"]


def test_where_nothing_can_be_appended_the_look_is_one_per_process(tmp_path, monkeypatch, pauses_s):
    """Check an object store; a folder under another name stands in for it."""
    place = LedgerPath(f"file:{tmp_path}", str(tmp_path), is_local=False)
    looked = []
    monkeypatch.setattr(token_module, "resolve_path", lambda uri: looked.append(uri) or place)
    token = LedgerToken("s3://b/k", ledger_token(place, spools=True).name, spools=True)
    token.check()
    token.check()
    assert looked == ["s3://b/k"]
    assert not list((tmp_path / "_tries").iterdir())
    with refusal("s3://b/k", "different stores by that name"):
        LedgerToken("s3://b/k", "0", spools=True).check()
    assert pauses_s == []


@pytest.mark.parametrize("failing", ["", "check", "_prove", "try_commit"])
def test_spark_commits_on_a_store_that_executors_or_delta_rs_do_not_reach(
    failing, monkeypatch, caplog
):
    """Refuse before tasks send rows whose data files they could not write."""
    reached = not failing

    def fail(*given):
        if not reached:
            raise LedgerError("this process cannot read and write the ledger")

    token = SimpleNamespace(check=fail if failing == "check" else lambda: None)
    context = SimpleNamespace(applicationId="app", master="spark://host:7077")
    session = SimpleNamespace(sparkContext=context, _jsparkSession=object())
    place, table = LedgerPath("s3a://b/k", "b/k", is_local=False), object()
    stand_ins = {
        "_allowed": {}, "_not_before_s": {}, "open_table": lambda place, *, must: table,
        "store_refuses": lambda *given: True, "ledger_token": lambda place, spools: token,
        "_prove": fail if failing == "_prove" else lambda *given: None,
        "try_commit": fail if failing == "try_commit" else lambda *given: None,
        "time": SimpleNamespace(monotonic=lambda: 100.0),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(shared, name, stand_in)
    assert shared.open_for_commits(session, place) is (table if reached else None)
    assert (shared.executors_token(session, place) is not None) == reached
    assert ("Spark's Delta commits to the ledger s3a://b/k" in caplog.text) != reached
    # The store may have been away, so the driver asks executors again after five minutes.
    reached = True
    for now_s, result in ((399.0, None if failing else table), (400.0, table)):
        monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=lambda now_s=now_s: now_s))
        assert shared.open_for_commits(session, place) is result
    # A local session has no executors to ask. A store is asked once.
    context.master = "local"
    monkeypatch.setattr(shared, "_prove", None)
    for refuses in (True, False):
        monkeypatch.setattr(shared, "_allowed", {})
        monkeypatch.setattr(shared, "store_refuses", MagicMock(side_effect=[refuses]))
        for _ in range(2):
            assert shared.open_for_commits(session, place) is (table if refuses else None)


def test_a_new_session_has_its_own_keys(monkeypatch):
    """The driver has checked the token in the session before, and a task has no session."""

    def start(key):
        conf = SimpleNamespace(getPassword={"fs.s3a.access.key": key}.get)
        context = SimpleNamespace(_jsc=SimpleNamespace(hadoopConfiguration=lambda: conf))
        session = SimpleNamespace(sparkContext=context, _jsparkSession=object())
        monkeypatch.setattr(storage, "active_session", lambda: session)

    def key():
        return storage.properties_for("s3a://b/k")["fs.s3a.access.key"].reveal()

    monkeypatch.setattr(storage, "_remembered", {})
    start("old")
    token = LedgerToken("s3a://b/k", "", spools=False, storage=storage.properties_for("s3a://b/k"))
    token_module._tried.add(token)
    token.check()
    start("new")
    assert key() == "new"
    monkeypatch.setattr(storage, "active_session", lambda: None)
    assert key() == "old"


@pytest.mark.parametrize(
    ("schema", "configuration", "is_ours"),
    [
        (OTHERS, {}, False),
        (OTHERS, {"delta.enableDeletionVectors": "true"}, False),
        (OTHERS, {VERSION_PROPERTY: "99"}, True),  # The error about the version comes later.
        (LEDGER_SCHEMA, {}, True),
    ],
)
def test_another_delta_table_is_refused_before_a_file_is_written_there(
    tmp_path, schema, configuration, is_ours
):
    DeltaTable.create(tmp_path, schema, configuration=configuration, raise_if_key_not_exists=False)
    before = sorted(tmp_path.rglob("*"))
    refused = refusal(f"file:{tmp_path}", "is not a ledger of rocket-sink")
    with nullcontext() if is_ours else refused:
        ledger_token(resolve_path(tmp_path), spools=True)
    assert (sorted(tmp_path.rglob("*")) != before) == is_ours


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TypeError("'JavaPackage' object is not callable"), "has no Delta Lake"),
        (AnalysisException("[DELTA_CONFIGURE_SPARK_SESSION_WITH_EXTENSION_AND_CATALOG] This Delta "
                           "operation requires"), "without its settings: set spark.sql.extensions"),
        (Py4JError("Cannot call methods on a stopped SparkContext."), "was stopped"),
        (Py4JError("Checkpoint is damaged"), "from a backup"),
        (Py4JError("java.nio.file.AccessDeniedException: 403 Forbidden"), "cannot be asked now"),
    ],
)  # fmt: skip
def test_a_session_that_cannot_read_the_table_is_told_from_a_damaged_table(tmp_path, error, words):
    reading = shared.reading(resolve_path(tmp_path), "Sent. ")
    with pytest.raises(LedgerError, match=f"^Sent. .*{words}") as caught, reading:
        raise error
    assert ("backup" in str(caught.value)) == ("backup" in words)
    assert caught.value.path == f"file:{tmp_path}"
    with pytest.raises(TypeError), shared.reading(resolve_path(tmp_path)):
        raise TypeError("a defect")


def test_a_session_whose_java_takes_the_ledger_for_another_folder_is_refused(monkeypatch):
    checked = []
    monkeypatch.setattr(session_settings, "check_encoding", lambda _, path: checked.append(path))
    monkeypatch.setattr(session_settings, "warn_of_settings", lambda session: None)
    session = SimpleNamespace(conf=SimpleNamespace(get=lambda *names: None))
    check_session(SinkOptions.parse({"nameServer": "-:1", "ledger": "/data/\u8ba2\u5355"}), session)
    assert checked == ["/data/\u8ba2\u5355"]


def refuse(environ, start):
    """Answer like an S3 store that has the bucket, and refuses every access key."""
    is_bucket = (environ["REQUEST_METHOD"], environ["PATH_INFO"]) == ("HEAD", "/bucket")
    start("200 OK" if is_bucket else "403 Forbidden", [("x-amz-bucket-region", "eu-north-1")])
    return [b"<Error><Code>InvalidAccessKeyId</Code><Message>no such key</Message></Error>"]


@pytest.mark.parametrize("side", ["driver", "task"])
def test_a_store_that_refuses_the_keys_is_one_error_with_the_remedy(closing, side):
    """Run in a process of its own, because the S3 client reads its environment once."""
    looks = {
        "driver": "ledger_token(resolve_path('s3://bucket/ledger'), spools=True)",
        "task": "LedgerToken('s3://bucket/ledger', 'x', spools=True).check()",
    }
    code = (
        "from rocket_sink.ledger.path import resolve_path\n"
        "from rocket_sink.ledger.token import LedgerToken\n"
        "from rocket_sink.ledger.append.table import ledger_token\n"
        f"{looks[side]}"
    )
    keys = s3_options(closing(StoreServer(refuse)).endpoint)
    del keys["AWS_REGION"]
    environment = {**os.environ, **keys, "AWS_EC2_METADATA_DISABLED": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    error_line = done.stderr.strip().splitlines()[-1]
    assert error_line.startswith("rocket_sink.errors.LedgerError"), done.stderr
    assert {"driver": "no such key", "task": "ACCESS_DENIED"}[side] in error_line
    for word in ("AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL", "spark.executorEnv"):
        assert word in error_line


def test_what_a_task_says_is_in_the_first_line():
    error = RuntimeError(
        "Job aborted due to stage failure\nTraceback (most recent call last):\n"
        "rocket_sink.errors.LedgerError: the ledger is another one\n\tat java.Stack"
    )
    assert first_line(error) == "LedgerError: the ledger is another one"
    written = RuntimeError("TASK_WRITE_FAILED")
    written._stackTrace = f"Task failed while writing rows\n{error}"
    assert first_line(written) == "LedgerError: the ledger is another one"
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


SPARK = session()


def refuse_links(monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV]
)
def test_the_first_start_is_refused(tmp_path, monkeypatch, number):
    """Refuse a start on file systems like FAT, blobfuse and some SMB mounts."""
    refuse_links(monkeypatch, number)
    place = resolve_path(tmp_path / "ledger")
    with pytest.raises(LedgerError, match=r"the file system \w+ at /.*: it has no hard links"):
        ledger_token(place, spools=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("mounts", "words"),
    [
        (["", "/data", "/else"], "the file system ext at {}/data: it has no"),
        ([], "on this file system: it has no"),
        (None, "on this file system: it has no"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(tmp_path, monkeypatch, mounts, words):
    disks = [SimpleNamespace(fstype="ext", mountpoint=f"{tmp_path}{name}") for name in mounts or ()]
    answers = [OSError() if mounts is None else disks]
    (tmp_path / "data").mkdir()
    refuse_links(monkeypatch, errno.EPERM)
    monkeypatch.setattr("psutil.disk_partitions", MagicMock(side_effect=answers))
    place = resolve_path(tmp_path / "data" / "ledger")
    with pytest.raises(LedgerError, match=words.format(tmp_path)):
        ledger_token(place, spools=True)
    refuse_links(monkeypatch, errno.EIO)
    with refusal(place.uri, r"cannot read and write .*\[Errno 5\]"):
        ledger_token(place, spools=True)
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EXDEV])
def test_nothing_commits_and_a_report_reads(tmp_path, monkeypatch, caplog, number):
    """Mount a ledger that was made elsewhere on a disk without links, with rows in its spool."""
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(SPARK, accounts(context(), acked=1))
    write_spool(ledger.path, context(epoch=1), accounts(context(epoch=1), acked=1))
    refuse_links(monkeypatch, number)
    before = sorted(Path(ledger.path).rglob("*"))
    for work, *arguments in (
        (ledger.sync,), (ledger.append, accounts(context(epoch=2), acked=1)), (ledger.optimize,),
        (ledger.vacuum,), (ledger.expire, {"send": dt.timedelta(days=1)}),
        (Ledger(tmp_path / "other").create,),
    ):  # fmt: skip
        with pytest.raises(LedgerError, match="no hard links"):
            work(SPARK, *arguments)
    report = ledger.report(SPARK)
    assert (report.totals.epochs, report.unfolded_epochs) == (1, 1)
    assert "lacks the rows that are not folded yet" in caplog.text
    assert sorted(Path(ledger.path).rglob("*")) == before
