"""Two users of one ledger, as YARN has them: tasks run as one user, the driver as another one."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.python import run_python

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")

TASK, DRIVER, GROUP = 54321, 54322, 54320
SCRIPT = f"""\
import os, sys
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from rocket_sink.ledger.append.delta_rs import commit, create_table, open_table
from rocket_sink.ledger.append.table import PROPERTIES, ledger_token
from rocket_sink.ledger.lock import ledger_lock
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.ledger.transport.files import sealed_files
from rocket_sink.ledger.transport.spool import SpoolWriter
from tests.ledger.values import context, sends

folder = sys.argv[1]
os.umask(0o022)
os.setgroups([{GROUP}])

@contextmanager
def user(number):
    os.setegid(number)
    os.seteuid(number)
    yield
    os.seteuid(0)
    os.setegid(0)

def task(place):
    ledger_token(place, spools=True).check()
    writer = SpoolWriter(place, context(partition=os.geteuid()))
    writer.append(sends(writer._ctx, 2))
    writer.seal()

def driver(place):
    ledger_token(place, spools=True).check()
    with ledger_lock(place, 0) as lock:
        assert lock is not None
        files = place.filesystem()
        for info in sealed_files(place, files):
            files.delete_file(info.path)
            Path(info.path).parent.rmdir()
            Path(info.path).parent.parent.rmdir()
    create_table(place, LEDGER_SCHEMA, PROPERTIES)
    rows = write_data_files(place, [sends(context(), 2)])
    commit(place, open_table(place), rows, "", 0, uuid4().hex)
    assert open_table(place).create_checkpoint() is None

with user(0):  # Python may be in root's home: import everything before.
    task(resolve_path(folder + "-first"))
    driver(resolve_path(folder + "-first"))
place = resolve_path(folder)
for number in ({TASK}, {DRIVER}, {TASK}):
    with user(number):
        task(place)
    with user({DRIVER + TASK} - number):
        driver(place)
"""


def play(folder):
    return run_python("-c", SCRIPT, folder, may_fail=True)


@pytest.fixture
def ledger():
    """Yield a folder that all users reach; pytest closes its own folders to other users."""
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        folder = Path(above, "ledger")
        folder.mkdir()
        yield folder


@pytest.mark.parametrize("mode", [0o770, 0o2775, 0o777])
def test_files_folders_and_locks_take_the_mode_of_the_ledgers_folder(ledger, mode):
    if mode != 0o777:
        os.chown(ledger, DRIVER, GROUP)
    ledger.chmod(mode)
    result = play(ledger)
    assert result.returncode == 0, result.stderr
    made = [path for path in ledger.rglob("*") if path.is_dir() or "_delta_log" not in path.parts]
    assert {path.stat().st_mode & 0o7777 for path in made if path.is_dir()} == {mode}
    files = {path: path.stat() for path in made if path.is_file()}
    locks = {path for path in files if path.parent.name == "locks"}
    assert locks and {files[path].st_mode & 0o777 for path in locks} == {
        0o666 if mode == 0o777 else 0o660
    }
    assert {files[path].st_mode & 0o777 for path in files.keys() - locks} == {mode & 0o666}
    if mode != 0o777:
        assert {status.st_gid for status in files.values()} == {GROUP}


def test_a_folder_of_one_user_names_its_owner_and_what_to_do(ledger):
    os.chown(ledger, TASK, TASK)
    ledger.chmod(0o755)
    result = play(ledger)
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert f"as user {DRIVER}" in error
    assert f"{ledger} is drwxr-xr-x of {TASK}:{TASK}" in error
    assert "umask 002" in error and "chmod g+s" in error


def test_a_lock_of_another_user_names_its_owner_and_what_to_do(ledger):
    """Another program has made the locks by the umask."""
    os.chown(ledger, DRIVER, GROUP)
    ledger.chmod(0o2770)
    locks = ledger / "_notes" / "locks"
    locks.mkdir(parents=True)
    for folder in (locks, locks.parent):
        folder.chmod(0o2770)
        os.chown(folder, TASK, GROUP)
    (locks / "lock").touch(0o600)
    os.chown(locks / "lock", TASK, GROUP)
    error = play(ledger).stderr.splitlines()[-1]
    assert "LedgerError: cannot use the lock" in error
    assert f"lock is -rw------- of {TASK}:{GROUP}" in error
    assert "umask 002" in error
