"""The senders that run as processes of their own, here in this one, against scripted brokers."""

import contextlib
import io
import json
import os
import sys
from collections import Counter

import pytest

from benchmarks.faults import read_numbers
from benchmarks.figures import Case
from benchmarks.processes import Ended, Launcher, ProcessRun
from benchmarks.rows import number_of
from benchmarks.sender import __main__ as sender
from benchmarks.stub.server import StubServers
from rocket_sink.errors import RocketSinkError
from rocket_sink.testing import Answer
from tests.clusters import scripted_cluster

cluster = scripted_cluster(t=4)


@pytest.fixture(autouse=True)
def go_on(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))


def run(capsys, name_server, **arguments):
    words = [f"{name}={value}" for name, value in arguments.items()]
    sender.main([f"nameServer={name_server}", "topic=t", *words])
    ready, printed = capsys.readouterr().out.splitlines()
    assert ready == "READY"
    return json.loads(printed)


@pytest.mark.parametrize("mode", ["sync", "hash", "async", "autobatch", "batch"])
def test_each_mode_sends_every_number_once(mode, cluster, capsys, tmp_path):
    path = tmp_path / "numbers"
    figures = run(
        capsys, cluster.name_server, mode=mode, messages=50, warmup=7, batch=20, threads=2,
        inflight=9, numbers=path,
    )  # fmt: skip
    assert (figures["ok"], figures["failed"], figures["doubtful"]) == (50, 0, 0)
    assert figures["cpu_s"] > 0
    stored = Counter(number_of(message.body) for message in cluster.messages("t"))
    assert stored == Counter([*range(-7, 0), *range(50)])
    assert read_numbers(path) == (set(range(50)), set())


def test_arrow_with_a_ledger_leaves_its_rows_in_a_spool(cluster, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "benchmarks.sender.arrow.TemporaryDirectory",
        lambda prefix: contextlib.nullcontext(str(tmp_path)),
    )
    figures = run(capsys, cluster.name_server, mode="arrow", messages=500, ledger="yes")
    assert figures["ok"] == 500
    assert len(list(tmp_path.glob("_spool/*/*/*.arrow"))) == 1


def test_replay_sends_a_refused_request_again(cluster, capsys):
    cluster.brokers[0].on_send(Answer(2, "busy"), times=2)
    figures = run(capsys, cluster.name_server, mode="replay", messages=9000)
    assert len(cluster.messages("t")) == figures["ok"] >= 9000


def test_a_failed_send_is_counted_with_its_cause(cluster, capsys):
    cluster.on_send(Answer(13, "illegal"), times=1)
    figures = run(capsys, cluster.name_server, mode="sync", messages=10)
    assert figures["ok"] + figures["failed"] == 10
    assert figures["failed"] == sum(figures["causes"].values()) > 0


def test_the_stub_takes_batches_on_many_brokers(capsys):
    servers = StubServers(30, 2)
    try:
        figures = run(capsys, servers.name_server, mode="arrow", messages=60_000)
    finally:
        servers.close()
    assert (figures["ok"], figures["failed"]) == (60_000, 0)


@pytest.mark.parametrize(("mode", "fair"), [("async", False), ("replay", True)])
def test_a_sender_that_reports_too_many_messages(mode, fair):
    class Liar:
        def run(self, *_, **__):
            return Ended({"ok": 101, "failed": 0, "seconds": 1.0, "cpu_s": 1.0}, 1.0, 1.0, 1.0)

    run = ProcessRun(
        Case("it", "g"), Liar(), {"mode": mode}, messages=100, brokers_s=lambda: 0.0, count=None
    )
    if fair:
        assert run.run().messages == 101
    else:
        with pytest.raises(RocketSinkError, match="asked for 100 messages and tells of 101"):
            run.run()


def test_the_memory_of_a_sender_is_not_its_parents():
    """Linux counts the memory of the process that starts a program in the program's ru_maxrss."""
    large = bytearray(300 << 20)
    large[:: 1 << 12] = b"x" * (len(large) >> 12)  # A written page is resident.
    script = """
import json, resource, time
print("READY", flush=True)
input()
time.sleep(0.5)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"peak_mb": peak, "start_mb": peak}))
"""
    launcher = Launcher((sys.executable, "-c", script), os.environ)
    assert 0 < launcher.run({}, lambda: 0.0).peak_mb < 100
