"""Commits of delta-rs to a ledger on an S3 API, without Spark."""

import dataclasses
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from deltalake import DeltaTable

from rocket_sink.errors import LedgerError
from rocket_sink.ledger import lock as lock_module
from rocket_sink.ledger import notes as notes_module
from rocket_sink.ledger import storage
from rocket_sink.ledger.append import delta_rs
from rocket_sink.ledger.append import table as table_module
from rocket_sink.ledger.driver.fold import fold
from rocket_sink.ledger.epoch_starts import begin_write, end_write
from rocket_sink.ledger.schema import LEDGER_SCHEMA, SCHEMA_VERSION, VERSION_PROPERTY
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.ledger.upkeep.erase import erase_letters
from rocket_sink.ledger.upkeep.growth import keep_small
from rocket_sink.options import SinkOptions
from rocket_sink.routing.topic_publish_info import QueueList, TopicPublishInfo
from rocket_sink.task.queue_snapshot import QueueSnapshots, with_queues
from tests.killed import Killed, kill_at
from tests.ledger.values import context, letter, refusal, sends, write_spool
from tests.stores.cases import place_on, stored_keys
from tests.stores.server import S3Server

ROWS = 3
CONTEXT = SimpleNamespace(applicationId="app", master="local")
SESSION = SimpleNamespace(_jsparkSession=object(), sparkContext=CONTEXT)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(storage, "_PATIENCE", {})
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def folder(server):
    """Return the path of a ledger without a table."""
    # moto has one store for all servers of a process.
    bucket = f"b{uuid.uuid4().hex}"
    server.client().create_bucket(Bucket=bucket)
    return place_on(server, bucket)


@pytest.fixture
def place(server, folder):
    """Return the path of a ledger with a table."""
    options = server.storage_options
    DeltaTable.create(folder.uri, LEDGER_SCHEMA, partition_by=["kind"], storage_options=options)
    return folder


def commit(place, query, version, token=""):
    table = delta_rs.open_table(place)
    files = write_data_files(place, [sends(context(query_id=query), ROWS)])
    delta_rs.commit(place, table, files, query, version, token)
    append = SimpleNamespace(place=place, merges=True, rows=1, sequence=(table.version() + 1) << 32)
    keep_small(append)


def rows_in(server, place):
    """Return the number of rows per query, as another reader sees them."""
    table = DeltaTable(place.uri, storage_options=server.storage_options)
    query_ids = table.to_pyarrow_dataset().to_table(columns=["query_id"])["query_id"]
    return Counter(query_ids.to_pylist())


def test_two_commits_of_one_version_are_both_in(server, place):
    server.let_commits_meet(1)
    with server.counted() as asked, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda query: commit(place, query, 0), ("a", "b")))
    assert rows_in(server, place) == {"a": ROWS, "b": ROWS}
    assert Counter(status for _, _, status in asked.commits) == {"200": 2, "412": 1}
    assert all(condition for _, condition, _ in asked.commits)


@pytest.mark.parametrize("query", ["q", ""])
def test_a_commit_whose_answer_is_lost_is_in_once(server, place, query):
    """The store has the commit, answers 500, and refuses the commit when it is made again."""
    server.lose_answers(1)
    with server.counted() as asked:
        commit(place, query, 7)
    assert [status for _, _, status in asked.commits][:2] == ["500", "412"]
    assert sum(rows_in(server, place).values()) == ROWS
    commit(place, "next", 0)
    assert sum(rows_in(server, place).values()) == 2 * ROWS


def test_a_try_whose_answer_is_lost_was_a_commit(server, folder):
    """Otherwise Spark's Delta, which is for one driver there, would commit meanwhile."""
    server.lose_answers(1)
    with server.counted() as asked:
        delta_rs.try_commit(folder)
    assert [status for _, _, status in asked.commits] == ["500", "412"]
    server.fail(True, "403 Forbidden")
    with refusal(folder.uri, "delta-rs cannot commit to it"):
        delta_rs.try_commit(folder)


def test_a_checkpoint_sums_up_the_log(server, place):
    for version in range(12):
        commit(place, "q", version, f"token-{version}")
    names = stored_keys(server.client(), place.root.partition("/")[0], "ledger")
    assert sum(name.endswith(".checkpoint.parquet") for name in names) == 1
    assert rows_in(server, place) == {"q": 12 * ROWS}
    table = delta_rs.open_table(place)
    assert len(table.file_uris()) < 12 and table.transaction_version("q") == 11
    newest = table.version()
    assert delta_rs.added_rows(place, "token-4", 4, newest) == ROWS
    assert delta_rs.added_rows(place, "token-4", 5, newest) is None
    assert delta_rs.added_rows(place, "token", 0, newest) is None


@pytest.mark.parametrize(("commits", "is_cut"), [(101, False), (12, True)])
def test_a_fold_that_died_is_looked_for_in_all_later_commits(
    server, folder, monkeypatch, commits, is_cut
):
    """The fold's rows are in the table; while the log says so, no later fold adds them again."""
    place = folder
    monkeypatch.setattr(table_module, "_allowed", {("app", place): True})
    monkeypatch.setattr(lock_module, "_SETTLE_S", 0.01)
    delta_rs.create_table(place, LEDGER_SCHEMA, {VERSION_PROPERTY: str(SCHEMA_VERSION)})
    write_spool(place, context(), sends(context(), ROWS))
    with pytest.raises(Killed):
        fold(SESSION, place, on_step=kill_at("appended"))
    for version in range(commits):
        commit(place, "q", version)
    if is_cut:
        for version in range(3):
            place.filesystem().delete_file(f"{place.root}/_delta_log/{version:020}.json")
        text = r"not known whether .*/folds/0-\w+\.json lists"
        with pytest.raises(LedgerError, match=text) as unknown:
            fold(SESSION, place)
        assert "safe" not in str(unknown.value)
    else:
        summary = fold(SESSION, place)
        assert (summary.recovered, summary.rows) == (1, 0)
    rows = rows_in(server, place)
    assert rows == {"q": commits * ROWS, context().query_id: ROWS}


@pytest.mark.parametrize("commits", [True, False])
def test_letters_are_erased_only_if_this_driver_commits_by_delta_rs(
    server, folder, monkeypatch, commits
):
    """Spark's Delta may overwrite the erasure's commit, whose old files are deleted."""
    monkeypatch.setattr(table_module, "_allowed", {("app", folder): commits})
    delta_rs.create_table(folder, LEDGER_SCHEMA, {VERSION_PROPERTY: str(SCHEMA_VERSION)})
    table, row = delta_rs.open_table(folder), letter(context())
    delta_rs.commit(folder, table, write_data_files(folder, [row]), "q", 0)
    ids = row["letter_id"].to_pylist()
    if commits:
        assert erase_letters(SESSION, folder, ids, "request 7").letters == 1
    else:
        with pytest.raises(LedgerError, match="cannot be removed: Spark's Delta commits"):
            erase_letters(SESSION, folder, ids, "request 7")
    table = DeltaTable(folder.uri, storage_options=server.storage_options)
    assert (table.version() > 1) == commits
    assert table.to_pyarrow_table()["body"].to_pylist() == [None if commits else b"body"]


def test_a_store_that_is_away_is_no_case_for_sparks_delta(server, place):
    """Spark's Delta could overwrite a commit that delta-rs made there."""
    assert delta_rs.open_table(place, must=True) is not None
    server.fail(True)
    with pytest.raises(LedgerError, match=r"cannot be read now: .* Nothing was appended") as caught:
        delta_rs.open_table(place, must=True)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
    assert delta_rs.open_table(place) is None


def test_a_commit_of_which_nothing_is_known(server, place):
    """The store has the commit, and does not answer when it is asked for it."""
    table = delta_rs.open_table(place)
    files = write_data_files(place, [sends(context(query_id="q"), ROWS)])
    server.lose_answers(1, then_fail=True)
    with pytest.raises(LedgerError, match="it is not known whether the rows are in"):
        delta_rs.commit(place, table, files, "q", 0)
    server.fail(False)
    assert rows_in(server, place) == {"q": ROWS}
    assert delta_rs.last_version(place, delta_rs.open_table(place), "q") == 0


@pytest.mark.parametrize("only", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_environment_names_the_store(server, place, monkeypatch, only):
    for name, value in server.storage_options.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    monkeypatch.setenv(only, server.endpoint)
    commit(dataclasses.replace(place, storage={}), "q", 0)
    assert rows_in(server, place) == {"q": ROWS}


def test_settings_of_spark_come_before_the_environment(server, place, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        commit(place, "q", 0)
        patch.setenv("AWS_SESSION_TOKEN", "of other keys")
        with pytest.raises(LedgerError, match=r"set fs\.s3a\.session\.token"):
            delta_rs.open_table(place, must=True)
    assert rows_in(server, place) == {"q": ROWS}


def test_where_no_table_is_there_is_none(server, folder):
    """The code asks pyarrow first, because delta-rs would try for minutes."""
    assert delta_rs.open_table(folder) is None
    server.close()
    assert delta_rs.open_table(folder) is None


ROUTES = ((("a", 4), ("b", 4)), (("a", 4),))
"""The queues that two first tasks see, while a broker restarts."""


@pytest.mark.parametrize("conditional", [True, False])
def test_first_tasks_with_different_routes_go_by_the_same_queues(
    server, folder, monkeypatch, *, conditional
):
    """If the store takes no condition, it is the wait that makes the two tasks agree."""
    server.conditional = conditional
    monkeypatch.setattr(notes_module, "_SETTLE_S", 0.0 if conditional else 2.0)
    monkeypatch.setitem(storage._remembered, folder.uri, folder.storage)
    monkeypatch.setattr(storage, "active_session", lambda: None)
    options = SinkOptions.parse({"nameServer": "-:1", "ledger": folder.uri})

    def pinned(number, query):
        queues = QueueList("t", ROUTES[number])
        info = with_queues(TopicPublishInfo("t", (), {}, False, {}), queues)
        return QueueSnapshots(options, query).pin(info).queues.spans

    for query in "abc":
        server.let_commits_meet(1)
        with server.counted() as asked, ThreadPoolExecutor(2) as pool:
            first, second = pool.map(pinned, range(2), query * 2)
        assert first == second == pinned(1, query) and first in ROUTES
        statuses = {"200", "412"} if conditional else {"200"}
        assert {status for _, _, status in asked.commits} == statuses
        assert all(condition for _, condition, _ in asked.commits)


def test_a_note_that_was_removed_can_be_written_again(server, folder, monkeypatch):
    monkeypatch.setattr(notes_module, "_SETTLE_S", 0.0)
    assert begin_write(folder, "nightly", "first", "d") == ("first", False)
    assert begin_write(folder, "nightly", "second", "d") == ("first", True)
    assert end_write(folder, "nightly", "second")
    keys = stored_keys(server.client(), folder.root.partition("/")[0], "ledger")
    assert all(key.endswith("/") for key in keys)  # pyarrow leaves folders.
    assert begin_write(folder, "nightly", "third", "d") == ("third", False)
