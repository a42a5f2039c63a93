"""The mapped store: shared by processes, and safe against writers that die half-way."""

import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.brokers import Brokers
from rocket_sink.producer.engine.mapped_table import MappedFile, MappedTable
from rocket_sink.producer.engine.shared_state import SharedBrokerState, local_directory
from rocket_sink.routing.fault import FAILING, UNREACHABLE, FaultItem
from tests.routing.fault_views import isolate

OPTIONS = SinkOptions.parse(nameServer="h1:9876;h2:9876")
FORK = multiprocessing.get_context("fork")


def open_in(path, options=OPTIONS):
    return SharedBrokerState.open(options, directory=str(path))


def elsewhere(path):
    """Return the store as another process sees it: by a mapping of its own."""
    (file,) = path.glob("*.health")
    return SharedBrokerState(MappedFile(file, file.stat().st_size))


def open_files(path):
    """Return the number of mappings and descriptors that this process has of the folder's files."""
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return Path("/proc/self/maps").read_text().count(str(path)), str(links).count(str(path))


def test_what_one_store_learns_another_sees(tmp_path):
    first, second = open_in(tmp_path), elsewhere(tmp_path)
    item = FaultItem("broker-a", 12.5, 1234.5, 0.0, 1235.0, False, 3.0)
    first["broker-a"] = item
    assert second.get("broker-a") == item
    assert second.values() == [item]
    second.pop("broker-a", None)
    assert first.get("broker-a") is None and first.values() == []
    first.put_route("orders", b"{}" * 100, 17.25)
    assert second.route("orders") == (b"{}" * 100, 17.25)
    first.put_route("orders", bytes(70_000), 18.0)
    assert second.route("orders") == (b"{}" * 100, 17.25), "too long: not shared, nothing broken"
    assert second.route("other") is None
    for now_s, is_new in ((47.25, True), (77.0, False), (47.0, True), (77.0, True)):
        assert second.note_new_topic("orders", now_s, 30.0) is is_new
    name = f"{'b' * 127}\n{'t' * 255}"
    first.put_absence(name, 940.5, 1000.25)
    assert second.absence(name) == (940.5, 1000.25) and second.absence("other") is None
    second.end_absence(name)
    assert first.absence(name) is None and first.values() == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells the mappings")
def test_a_process_maps_a_store_once(tmp_path):
    """A worker that serves many queries has an engine for each."""
    stores = [open_in(tmp_path) for _ in range(5)]
    assert open_files(tmp_path) == (1, 2), "the mapping has a descriptor of its own"
    for store in stores[1:]:
        store.close()
    stores[0]["a"] = FaultItem("a")
    assert stores[0].get("a") == FaultItem("a")
    for _ in range(2):
        stores[0].close()
        assert stores[0].get("a") is None
    with pytest.raises(ValueError, match="empty"):
        MappedFile(tmp_path / "empty", 0)
    assert open_files(tmp_path) == (0, 0)


def test_a_store_that_closes_releases_no_other_lock(tmp_path):
    """fcntl drops all locks of a process on a file when the process closes any descriptor of it."""
    first, second = open_in(tmp_path), open_in(tmp_path)
    assert first._file is not None and first._file.lock()
    second.close()
    for is_free in (False, True):
        done = FORK.Process(target=lambda: os._exit(int(elsewhere(tmp_path)._file.lock())))
        done.start()
        done.join()
        assert done.exitcode == is_free, "whether the other process got the lock"
        if not is_free:
            first._file.unlock()


def test_a_new_file_under_the_old_name_is_another_store(tmp_path):
    old = open_in(tmp_path)
    old["a"] = FaultItem("a")
    next(tmp_path.glob("*.health")).unlink()
    new = open_in(tmp_path)
    assert new.get("a") is None
    old.close()
    assert open_in(tmp_path)._file is new._file


def test_a_slot_without_a_value_serves_another_key_and_hides_none(tmp_path):
    (tmp_path / "t").write_bytes(bytes(100))
    file = MappedFile(tmp_path / "t", 4 * 64)
    assert (tmp_path / "t").stat().st_size == 4 * 64
    table = MappedTable(file, 0, 4, 64)
    keys = [f"key-{number}" for number in range(40)]
    for key in keys:
        kept = [name for name, _ in table.items()]
        assert all(table.get(name) for name in kept)
        if len(kept) == 3:
            assert table.put(kept[0], b"")
        assert table.put(key, key.encode())
        assert table.put(key, b"again")
        later = [name for name in kept[-2:] if table.get(name)]
        assert [table.get(name) for name in later] == [b"again"] * len(later)
        assert len([name for name, _ in table.items() if name == key]) == 1


def test_topics_that_were_isolated_do_not_fill_the_table(tmp_path):
    brokers, now_s = Brokers(OPTIONS, open_in(tmp_path)), 1000.0
    for number in range(600):
        brokers.faults.isolate_topic(f"topic-{number}", "broker-a", now_s, "NO_PERMISSION")
        brokers.view(now_s)
        now_s += 1.0
    assert not brokers.rank("broker-a", "topic-0")
    assert brokers.rank("broker-a", "topic-599") == FAILING
    isolate(brokers, "broker-b", now_s, reachable=False)
    brokers.view(now_s)
    assert brokers.rank("broker-b", "topic-0") == UNREACHABLE


def test_a_full_table_goes_on_isolating(tmp_path):
    """The broker that is usable soonest makes room first, and topics go before a dead broker."""
    brokers, now_s = Brokers(OPTIONS, open_in(tmp_path)), 1000.0
    isolate(brokers, "dead", now_s, reachable=False)
    for number in range(600):
        brokers.faults.isolate_topic(f"topic-{number}", "broker-a", now_s, "NO_PERMISSION")
        now_s += 0.01
    isolate(brokers, "slow", now_s, reachable=True)
    brokers.view(now_s)
    assert brokers.rank("dead", "topic-0") == UNREACHABLE
    assert brokers.rank("slow", "topic-0") == FAILING
    assert brokers.rank("broker-a", "topic-599") == FAILING
    assert not brokers.rank("broker-a", "topic-0")
    assert elsewhere(tmp_path).get("slow") == brokers.faults.store.get("slow")


def test_the_longest_names_have_a_place(tmp_path):
    brokers, topic, name = Brokers(OPTIONS, open_in(tmp_path)), "t" * 127, "b" * 127
    brokers.faults.isolate_topic(topic, name, 1000.0, "NO_PERMISSION")
    brokers.view(1001.0)
    assert brokers.rank(name, topic) == FAILING


@pytest.mark.parametrize("other", [{"nameServer": "h3:9876"}, {"namespaceV2": "ns"}])
def test_other_name_servers_or_namespaces_have_another_file(tmp_path, other):
    open_in(tmp_path)["a"] = FaultItem("a")
    names = {"nameServer": "h1:9876;h2:9876", **other}
    assert open_in(tmp_path, SinkOptions.parse(names)).get("a") is None
    same = open_in(tmp_path, SinkOptions.parse(nameServer="h2:9876;h1:9876"))
    assert same.get("a") == FaultItem("a")


def test_folders_of_processes_that_are_gone_are_removed(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    gone = multiprocessing.get_context("spawn").Process()
    gone.start()
    gone.join()
    names = {"gone": gone.pid, "alive": os.getpid(), "young": gone.pid + (1 << 22)}
    folders = {name: tmp_path / f"rocket-sink-{os.getuid()}-{pid}" for name, pid in names.items()}
    folders["other"] = tmp_path / f"rocket-sink-{os.getuid()}-x"
    folders["stranger"] = tmp_path / f"rocket-{gone.pid}"
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "it").touch()
        changed_s = time.time() - (3500 if name == "young" else 3700)
        os.utime(folder, (changed_s, changed_s))
    own = local_directory()
    assert own.name == f"rocket-sink-{os.getuid()}-{os.getppid()}" and own.is_dir()
    assert local_directory() == own and own.stat().st_mode & 0o777 == 0o700
    kept = {name for name, folder in folders.items() if folder.exists()}
    assert kept == {"alive", "young", "other", "stranger"}
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="another user"):
        local_directory()


def test_in_process_when_the_directory_cannot_be_written():
    store = open_in("/proc/nowhere")
    store["a"] = FaultItem("a")
    assert store.get("a") == FaultItem("a")
    store.pop("a")
    assert store.get("a") is None and store.values() == []
    store.put_route("t", b"x", 1.0)
    assert store.route("t") == (b"x", 1.0)


def test_the_executors_directory_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/elsewhere")
    assert local_directory() == tmp_path
    SharedBrokerState.open(OPTIONS)
    (found,) = tmp_path.iterdir()
    assert found.stat().st_mode & 0o077 == 0
    assert found.stat().st_size == 512 * 512 + 32 * 65_536 + 128 * 512
    assert found.stat().st_blocks * 512 >= found.stat().st_size, "a hole is a SIGBUS on a full disk"


def _table(path):
    file = MappedFile(path / "table", 64 * 256)
    return file, MappedTable(file, 0, 64, 256)


def test_a_torn_slot_hides_no_other_key_and_is_repaired(tmp_path):
    file, table = _table(tmp_path)
    keys = [f"key-{n}" for n in range(40)]
    for key in keys:
        assert table.put(key, key.encode())
    at = file.data.find(b"key-7key-7")
    file.data[at + 6 : at + 7] = b"\xff"
    assert [key for key in keys if table.get(key) is None] == ["key-7"]
    assert "key-7" not in dict(table.items())
    assert table.put("key-7", b"two") and table.get("key-7") == b"two"


def test_a_full_table_refuses(tmp_path):
    _, table = _table(tmp_path)
    assert [table.put(f"k{n}", b"v") for n in range(70)].count(True) == 64
    assert not table.put("new", b"v")
    assert table.put("k1", b"w") and table.get("k1") == b"w"
    largest = max(size for size in range(300) if table.put("k1", bytes(size)))
    assert largest == 256 - 10 - len("k1"), "the rest of a slot beside its head and the key"
    assert table.get("k1") == bytes(largest) and len(table.items()) == 64


def _write_for_ever(path):
    _, table = _table(path)
    for number in itertools.count():
        table.put("hot", b"%08d" % number * 20)


@pytest.mark.parametrize("round_", range(4))
def test_killed_writers_leave_a_readable_table(tmp_path, round_):
    """SIGKILL comes at random moments: values are whole or absent, and no process is locked out."""
    _, table = _table(tmp_path)
    writers = [FORK.Process(target=_write_for_ever, args=(tmp_path,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    reads = 0
    until = time.monotonic() + 0.15 + round_ * 0.013
    # A slow writer may not have begun by then.
    while time.monotonic() < until or not reads:
        value = table.get("hot")
        if value is not None:
            reads += 1
            assert value == value[:8] * 20
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    value = table.get("hot")
    assert value is None or value == value[:8] * 20
    assert table.put("hot", b"after") and table.get("hot") == b"after"


def _hold_the_lock(path, held):
    file, _ = _table(path)
    assert file.lock()
    held.set()
    time.sleep(30)


def test_a_stopped_writer_blocks_no_process(tmp_path):
    _, table = _table(tmp_path)
    is_held = FORK.Event()
    holder = FORK.Process(target=_hold_the_lock, args=(tmp_path, is_held))
    holder.start()
    assert is_held.wait(5)
    started = time.monotonic()
    assert table.put("a", b"1") is False
    assert time.monotonic() - started < 10, "the lock is held for 30 s"
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert table.put("a", b"1")


@pytest.mark.parametrize("attack", [Path.symlink_to, Path.hardlink_to])
def test_a_link_to_a_file_of_the_users_is_neither_mapped_nor_extended(tmp_path, attack):
    (tmp_path / "made").mkdir()
    open_in(tmp_path / "made").close()
    name = next((tmp_path / "made").glob("*.health")).name
    precious = tmp_path / "precious"
    precious.write_text("precious")
    attack(tmp_path / name, precious)
    health = open_in(tmp_path)
    health["broker-a"] = FaultItem("broker-a", 1.0, failing_until_s=2.0, reachable=False)
    assert open_in(tmp_path).get("broker-a") is None, "in process"
    assert precious.read_text() == "precious"
