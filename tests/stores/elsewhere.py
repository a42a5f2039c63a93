"""A ledger's uses of a store, on Azure, Google's store and HDFS, each in a process of its own.

    python -m tests.stores.elsewhere azure|google|hdfs     prints what held

The environment names the store. Spark takes no part: its file systems of Azure and Google do not
reach emulators.
"""

import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import deltalake

from rocket_sink.ledger.append import delta_rs
from rocket_sink.ledger.lock import LedgerLock
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.ledger.storage import remember
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.ledger.transport.files import sealed_files
from rocket_sink.ledger.transport.stream import read_batches
from rocket_sink.option_spec import Secret
from tests.ledger.values import context, sends
from tests.python import run_python
from tests.stores.cases import Judge, spool
from tests.stores.contend import TIMES
from tests.stores.emulators import AzureServer, GoogleServer, HdfsServer
from tests.stores.server import AZURE_HOST, AZURE_KEY

_SERVERS = {"azure": AzureServer, "google": GoogleServer, "hdfs": HdfsServer}
_BUCKET = "bucket"
_PER_COMMIT = 3


def azure(world, judge):
    """Play on Azurite."""
    return _of_process("azure", judge)


def google(world, judge):
    """Play on fake-gcs-server."""
    return _of_process("google", judge)


def hdfs(world, judge):
    """Play on a name node and a data node."""
    return _of_process("hdfs", judge)


def _of_process(name, judge):
    done = run_python("-m", "tests.stores.elsewhere", name, timeout_s=3600, may_fail=True)
    if done.returncode:
        judge.broken.append(done.stderr[-5000:])
        return {}
    figures, broken = json.loads(done.stdout.splitlines()[-1])
    judge.broken += broken
    return figures


def _commit(place, query, version):
    table = delta_rs.open_table(place, must=True)
    files = write_data_files(place, [sends(context(query_id=query), _PER_COMMIT)])
    delta_rs.commit(place, table, files, query, version)


def _commits(server, place, judge):
    """Let two writers commit at once, and then one whose answers get lost."""
    delta_rs.try_commit(place)
    judge.same("table made", delta_rs.create_table(place, LEDGER_SCHEMA, {}), True)

    def write(query):
        for version in range(TIMES):
            _commit(place, query, version)

    server.let_commits_meet(TIMES)
    with server.counted() as requests, ThreadPoolExecutor(2) as threads:
        list(threads.map(write, "ab"))
    server.let_commits_meet(0)
    server.lose_answers(TIMES // 2)
    with server.counted() as repeated:
        write("c")
    uri, options = delta_rs._where(place)
    rows = deltalake.DeltaTable(uri, storage_options=options).to_pyarrow_dataset().to_table()
    judge.same(
        "rows", Counter(rows["query_id"].to_pylist()), Counter(dict.fromkeys("abc", TIMES * 3))
    )
    statuses = Counter(status for _, _, status in (*requests.commits, *repeated.commits))
    refused = statuses["409"] + statuses["412"]
    if requests.commits:
        judge.same("all commits on condition", all(c for _, c, _ in requests.commits), True)
        judge.same("answers lost", statuses["500"], TIMES // 2)
        judge.same("two commits met", refused > TIMES // 2, True)
    return {
        "rows": rows.num_rows, "refused by the store": refused, "answers lost": statuses["500"]
    }  # fmt: skip


def _files(place, judge):
    """Write and read a spool file, agree on notes, and take a lock."""
    spool(place, 1)
    filesystem = place.filesystem()
    [file] = sealed_files(place, filesystem)
    judge.same("rows in the spool", sum(b.num_rows for b in read_batches(file.path, filesystem)), 2)
    rounds = 3
    for number in range(rounds):
        with ThreadPoolExecutor(3) as threads:
            agreed = list(threads.map(lambda n, name=str(number): _agree(place, name, n), range(3)))
        judge.same("notes", len({note for note, _ in agreed}), 1)
        judge.same("writers of a note", sum(is_own for _, is_own in agreed), 1)
        notes = NoteStore(place, "writes")
        judge.same("note", notes.read(str(number)), agreed[0][0])
        for _ in range(2):
            notes.remove(str(number))
    locks = [LedgerLock(place) for _ in range(2)]
    judge.same("locks", [lock.acquire(0) for lock in locks], [True, False])
    locks[0].release()
    return {"notes": rounds}


def _agree(place, name, value):
    return NoteStore(place, "writes").agree(name, value)


def main(name):
    """Start a store, or use the one below the URI `name`.

    pyarrow asks Google's store for a file's size with Python's lock held, so that a server in the
    same process could not answer: the files are written and read in another process.
    """
    remember({f"fs.azure.account.key.{AZURE_HOST}": Secret(AZURE_KEY)})
    judge = Judge()
    if name not in _SERVERS:
        figures = _files(resolve_path(name), judge)
    else:
        server = _SERVERS[name]()
        try:
            server.make_bucket(_BUCKET)
            uri = server.uri(_BUCKET, "ledger")
            figures = _commits(server, resolve_path(uri), judge)
            figures |= _of_process(uri, judge)
        finally:
            server.close()
    print(json.dumps([figures, judge.broken]))


if __name__ == "__main__":
    main(sys.argv[1])
