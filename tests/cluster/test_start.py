"""The start and the end of a cluster, without Java: order, ports, what stays, the admin tool."""

import itertools
import json
import os
import queue
import signal
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import psutil
import pytest

from rocket_sink.cluster import LocalCluster, conf, detached, guard, layout, local, node, probe
from rocket_sink.cluster.conf import Ports
from rocket_sink.cluster.jars import DEFAULT_VERSION
from rocket_sink.cluster.layout import MARK_PROPERTY, Nodes, Runtime, Wanted, launch
from rocket_sink.cluster.node import Broker, NodeSpec, PortTakenError
from rocket_sink.cluster.probe import Probe, ProbeFailed
from rocket_sink.cluster.tls import make_certificates
from rocket_sink.errors import ClusterError
from rocket_sink.java import Java
from rocket_sink.private_file import FileLock
from rocket_sink.testing import Answer
from rocket_sink.wire.headers import Frame
from tests.cluster.test_jars import java_that
from tests.cluster.test_layout import Keys
from tests.clusters import scripted_cluster
from tests.tls_relay import TlsRelay

cluster = scripted_cluster(1, **{"broker-a": 1})
JAVA, KEYS = Java(Path("/jdk"), 17, "test"), Keys("user", "key")


class Process:
    """Stands for a process of a cluster: notes what is done with it."""

    def __init__(self, name, events, errors=None):
        self.name, self.address = name, f"127.0.0.1:{len(name)}"
        self.pid, self.alive = os.getpid(), False
        self._events, self._errors = events, errors or []

    def __getattr__(self, verb):
        def act(*arguments):
            self._events.append(f"{verb} {self.name}")
            self.alive = verb != "kill"
            if verb == "wait_ready":
                assert 1 <= arguments[0] <= 240
                if self._errors:
                    raise self._errors.pop()

        return act


def processes(events, errors=None):
    names = ("name-server", "broker-a", "broker-b")
    server, *brokers = (
        Process(name, events, errors if name == "broker-b" else None) for name in names
    )
    return Nodes(server, brokers)


@pytest.fixture
def runtime(tmp_path):
    return Runtime(Wanted(), tmp_path, JAVA, "/jars/a.jar", "the-mark", lambda text: None)


ALL = [
    "spawn name-server", "saved", "wait_ready name-server", "spawn broker-a", "saved",
    "spawn broker-b", "saved", "wait_ready broker-a", "wait_ready broker-b",
]  # fmt: skip
KILLS = [f"kill {name}" for name in ("name-server", "broker-a", "broker-b")]
TAKEN = [PortTakenError("taken")]


@pytest.mark.parametrize(
    ("alive", "errors", "events", "tries"),
    [
        ((), [], ALL, 1),
        (("name-server", "broker-a"), [], ["spawn broker-b", "saved", "wait_ready broker-b"], 1),
        ((), 2 * TAKEN, 2 * (ALL + KILLS) + ALL, 3), ((), 9 * TAKEN, 3 * (ALL + KILLS), 3),
        ((), [ClusterError("no memory")], ALL + KILLS, 1),
    ],
)  # fmt: skip
def test_a_start(alive, errors, events, tries, runtime, monkeypatch):
    """Begin with the ports of the last start; after an error take others, and leave no process."""
    done, texts = [], []
    runtime = replace(runtime, tell=texts.append)
    errors, before = list(errors), Ports(1, (2, 3))
    chosen = MagicMock(side_effect=lambda count, wanted: wanted or Ports(4, (5, 6)))
    monkeypatch.setattr(layout, "choose_ports", chosen)
    monkeypatch.setattr(layout, "build", lambda *_: processes(done, errors))
    before.save(runtime.home / "ports.json")
    fails = len(errors) in (1, 9)
    try:
        launch(runtime, dict, timeout_s=240, spawned=lambda _: done.append("saved"), alive=alive)
    except ClusterError:
        assert fails
    assert done == events
    assert texts[0] == ("starting 1 broker" if alive else "starting the name server")
    assert fails or texts[-1] == "broker-b is ready at 127.0.0.1:8"
    assert [each.kwargs["wanted"] for each in chosen.call_args_list] == [before, None, None][:tries]
    kept = before if tries == 1 or fails else Ports(4, (5, 6))
    assert conf.load_ports(runtime.home / "ports.json") == kept


@pytest.mark.parametrize("tls", [None, "enforcing"])
def test_what_a_start_needs_is_made(tls, tmp_path, monkeypatch):
    make, jars = MagicMock(), MagicMock(return_value=[Path("/a.jar"), Path("/b.jar")])
    make.return_value.jvm_flags.return_value = ["-Dtls"]
    monkeypatch.setattr(layout, "find_java", lambda: JAVA)
    monkeypatch.setattr(layout, "resolve_jars", jars)
    monkeypatch.setattr(layout, "write_loopback_jar", lambda jars, home: home / "loopback.jar")
    monkeypatch.setattr(layout, "make_certificates", make)
    wanted = Wanted(version="5.3.3", tls=tls, tls_client_auth="require")
    runtime = Runtime.make(wanted, tmp_path, print)
    assert runtime.class_path == f"{tmp_path}/loopback.jar:/a.jar:/b.jar"
    assert jars.call_args == call("5.3.3", java=JAVA, progress=print)
    assert runtime.mark != Runtime.make(wanted, tmp_path, None).mark
    if tls is None:
        assert not make.called and runtime.certificates is None
        assert runtime.tls_flags == ("-Dtls.server.mode=disabled",)
        return
    assert make.call_args == call(tmp_path / "tls") and runtime.certificates is make.return_value
    flags = make.return_value.jvm_flags.call_args
    assert flags == call("enforcing", tmp_path / "tls" / "tls.properties", "require")
    spec = runtime.spec("broker", "broker-a", 7, ["-Xmx1m"], {"a": "b"})
    assert {"-Dtls", f"-D{MARK_PROPERTY}={runtime.mark}", "-Xmx1m"} <= {*spec.command}
    assert (spec.name, spec.address, spec.settings) == ("broker-a", "127.0.0.1:7", {"a": "b"})


# --- detached -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "keeps", "fails"),
    [({}, True, False), ({"queues": 8}, False, False), ({"version": "5.3.3"}, False, False),
     ({"tls": "enforcing"}, False, False), ({"brokers": 1}, False, False), ({}, True, True),
     ({"queues": 8}, False, "early"), ({"queues": 8}, False, "late"), ({"dead": 0}, False, False),
     ({"ready": False}, False, False)],
)  # fmt: skip
def test_dead_brokers_are_started_again_if_nothing_else_changes(
    change, keeps, fails, tmp_path, monkeypatch
):
    """Each process is saved at once: if `up` is killed, `down` finds it."""
    home = tmp_path / "new" / "home"
    events = []
    dead = change.pop("dead", 2)
    own = detached.NodeState
    names = ("name-server", "broker-a", "broker-b")
    nodes = tuple(own(name, f"127.0.0.1:{n}0", n, 0.0, "m") for n, name in enumerate(names, 1))
    lives = {n for n in (1, 2, 3) if n != dead + 1}
    monkeypatch.setattr(own, "process", lambda node: node if node.pid in lives else None)
    state = detached.ClusterState(home, DEFAULT_VERSION, nodes, ready=change.pop("ready", True))
    monkeypatch.setattr(detached, "status", lambda folder: state)
    end, make = MagicMock(), MagicMock()
    settings = {"brokers": 2, "queues": 4, "version": DEFAULT_VERSION, "tls": None, **change}
    new_runtime = SimpleNamespace(wanted=SimpleNamespace(**settings), home=home, mark="new")
    make.return_value = new_runtime
    monkeypatch.setattr(detached, "_end", end)
    monkeypatch.setattr(detached.Runtime, "make", make)
    file = home / "cluster.json"

    def launched(runtime, popen_options, *, spawned, **more):
        assert runtime is new_runtime and popen_options() == {"start_new_session": True}
        assert more["timeout_s"] == layout.START_S
        started = processes(events)
        if fails == "early":
            raise ClusterError("no port")
        for each in started:
            if each.name not in more["alive"]:
                each.spawn()
                spawned(started)
                saved = json.loads(file.read_text())
                noted = names if keeps else names[: names.index(each.name) + 1]
                assert saved["ready"] is False
                assert [own["name"] for own in saved["nodes"]] == [*noted]
        events.append(f"alive {sorted(more['alive'])} {more['ports']}")
        if fails:
            raise ClusterError("no memory")
        return started

    monkeypatch.setattr(detached, "launch", launched)
    try:
        up = detached.up(home, progress=print, **change)
    except ClusterError:
        assert fails and file.exists() is keeps
    else:
        saved = json.loads(file.read_text())
        assert saved["ready"] and up.ready and [each["name"] for each in saved["nodes"]] == [*names]
        marks = [each["mark"] for each in saved["nodes"]]
        assert marks == (["m", "m", "new"] if keeps else ["new"] * 3)
        assert saved["nodes"][2]["started_s"] == psutil.Process().create_time()
        shown = {"queues": up.queues, "tls": up.tls, "version": up.version, "brokers": 2}
        assert shown == {**settings, "brokers": 2}
        assert [event for event in events if "release" in event] == [f"release {n}" for n in names]
    asked, *rest = make.call_args.args
    assert rest == [home, print] and asked == Wanted(**settings)
    alive = ["broker-a", "name-server"] if keeps else []
    ports = Ports(10, (20, 30)) if keeps else None
    assert end.called is not keeps
    assert f"alive {alive} {ports}" in events or (fails and not keeps)


def test_one_command_at_a_time_is_at_work_on_a_cluster(tmp_path):
    (tmp_path / "cluster.json").write_text('{"version": "1", "nodes": []}')
    told: queue.Queue[str] = queue.Queue()
    lock = FileLock(tmp_path / ".lock")
    lock.acquire()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(detached.down, tmp_path, progress=told.put)
        try:
            assert f"is at work on the cluster in {tmp_path}: waiting" in told.get(timeout=60)
            (tmp_path / "cluster.json").unlink()
        finally:
            lock.release()
        assert ended.result(60) is False, "the other command has ended the cluster"
    (tmp_path / "cluster.json").write_text("x")
    tmp_path.chmod(0o777)
    with pytest.raises(ClusterError, match="Everybody may write"):
        detached.down(tmp_path)


@pytest.mark.parametrize(
    ("script", "text"),
    [(None, "needs the openssl program"), ("echo no >&2; exit 1", "req failed: no")],
)
def test_certificates_need_openssl(script, text, tmp_path, monkeypatch):
    if script:
        (tmp_path / "openssl").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "openssl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=text):
        make_certificates(tmp_path / "tls")
    assert (tmp_path / "tls").stat().st_mode & 0o777 == 0o700


# --- of this process ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_own", [False, True])
def test_only_a_temporary_folder_goes_with_the_cluster(is_own, tmp_path, monkeypatch):
    """A store that stays is shut down cleanly. A forked child stops nothing."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    nodes, made = MagicMock(), MagicMock()
    launched = MagicMock(return_value=nodes)
    nodes.name_server.address = "127.0.0.1:9876"
    nodes.brokers = [MagicMock(**{"cpu_s.return_value": n}) for n in (1, 2)]
    monkeypatch.setattr(local, "launch", launched)
    monkeypatch.setattr(local.Runtime, "make", made)
    home = tmp_path / "new" / "home" if is_own else None
    running = LocalCluster(
        2, home, "5.3.3", acl=KEYS, tls="permissive", queues=3, heap_mb=64, progress=print,
        broker_config={"a": "b"}, tls_client_auth="optional",
    )  # fmt: skip
    monkeypatch.setattr(running, "_guard", MagicMock())
    assert "not started" in repr(running)
    with running:
        wanted, folder, *_ = made.call_args.args
        made.return_value.home = folder
        made.return_value.certificates = None
        assert wanted == Wanted(2, "5.3.3", KEYS, "permissive", 3, {"a": "b"}, 64, "optional")
        assert folder.is_dir() and (is_own or folder.name.startswith("rocket-sink-cluster-"))
        assert running.start(timeout_s=1) is running
        made.assert_called_once_with(wanted, folder, print)
        (runtime, join), more = launched.call_args
        assert runtime is made.return_value and more == {"timeout_s": 240}
        assert join == running._guard.join and launched.call_count == 1
        assert repr(running) == "<LocalCluster 5.3.3, 2 brokers, at 127.0.0.1:9876>"
        keys = {"accessKey": "user", "secretKey": "key"}
        assert running.client_options() == {"nameServer": "127.0.0.1:9876", **keys}
        assert (running.tls_ca, running.tls_client, running.cpu_s()) == (None, None, 3)
        made.return_value.certificates = SimpleNamespace(ca="/ca", client=("/c", "/k"))
        assert running.client_options()["tlsCa"] == "/ca" and running.tls_client == ("/c", "/k")
        assert running.await_route("x") is None
        assert all(broker.wait_routed.call_args == call("x", 90) for broker in nodes.brokers)
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: -1)
            running.stop()
        assert not nodes.kill.called and not nodes.stop.called
    running.stop()
    assert (nodes.kill.call_count, nodes.stop.call_count) == ((0, 1) if is_own else (1, 0))
    assert folder.exists() is is_own and running._guard.close.call_count == 1
    running._remove_home(folder)


def test_topics_are_made_by_the_admin_tool(monkeypatch):
    running, ran = LocalCluster(), MagicMock()
    brokers = [MagicMock(), MagicMock()]
    running._nodes = Nodes(MagicMock(), brokers)
    monkeypatch.setattr(running, "admin", ran)
    for options, count in (({}, "4"), ({"queues": 2}, "2")):
        running.create_topic("x", **options)
        topic = ("-c", "DefaultCluster", "-t", "x")
        assert ran.call_args == call("updateTopic", *topic, "-r", count, "-w", count)
    assert all(broker.wait_routed.call_args == call("x", 90) for broker in brokers)
    ask = MagicMock()
    monkeypatch.setattr(local, "admin", ask)
    other = LocalCluster(version="4.9.7", acl=KEYS)
    other._nodes, other._runtime = running._nodes, MagicMock()
    for options, timeout_s in (({}, 240), ({"timeout_s": 7}, 7)):
        assert other.admin("topicList", **options) is ask.return_value
        assert ask.call_args == call(
            other.name_server, "topicList", version="4.9.7", acl=KEYS,
            tls=other._runtime.certificates, timeout_s=timeout_s,
        )  # fmt: skip
    running.delete_topic("x")
    assert ran.call_args == call("deleteTopic", "-c", "DefaultCluster", "-t", "x")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ('printf "$NAMESRV_ADDR $CLASSPATH \\377 $*"; cat', ""), ("echo no; exit 3", "exit code 3"),
        ("seq 9999; exit 4", r"exit code 4.*printed:\n9200\n"),
        ("echo 'Caused by: x'", "exit code 0"), ("echo 'a.b.CError: x' >&2", "exit code 0"),
        ("echo '  ERROR: x'", "exit code 0"), ("exec sleep 60", "not done after 0 s"),
    ],
)  # fmt: skip
def test_a_failure_of_the_admin_tool_is_an_error(script, error, tmp_path, monkeypatch):
    """The tool's exit code may be 0 even after a stack trace."""
    monkeypatch.setattr(local, "find_java", lambda: java_that(tmp_path, script))
    monkeypatch.setattr(local, "resolve_jars", lambda *_, **__: [Path("/a"), Path("/b")])
    timeout_s = 0.3 if "sleep" in script else 60
    if error:
        with pytest.raises(ClusterError, match=error):
            local.admin("n:1", "topicList", timeout_s=timeout_s)
        return
    certificates = MagicMock(**{"client_flags.return_value": ["-Dtls=yes"]})
    folders = []
    monkeypatch.setattr(conf, "write_rocketmq_home", lambda *told: folders.append(told))
    printed = local.admin("n:1", "topicList", "-t", "x", acl=KEYS, tls=certificates)
    server, jars, sign, *words = printed.split()
    assert (server, jars, sign) == ("n:1", "/a:/b", "\ufffd")
    ((folder, version, keys),) = folders
    assert (version, keys, folder.exists()) == (DEFAULT_VERSION, KEYS, False)
    assert certificates.client_flags.call_args == call(folder / "tls.properties")
    main = "org.apache.rocketmq.tools.command.MQAdminStartup"
    assert {"-Xmx192m", f"-Duser.home={folder}", "-Dtls=yes"} <= {*words}
    assert words[-4:] == [main, "topicList", "-t", "x"]


# --- readiness ----------------------------------------------------------------------------------


def test_the_probe_of_a_broker(cluster):
    """A broker is ready if it is in the route, and has stored a message."""
    broker, server = cluster.brokers[0], cluster.name_server
    Probe().check_broker(server, "broker-a", broker.address)
    (message,) = cluster.messages("broker-a")
    assert bytes(message.body) == b"ready?" and abs(message.born_ms / 1000 - time.time()) < 900
    sent = broker.requests[-1].ext
    assert (sent["d"], sent["e"], sent["a"]) == ("1", "0", "rocket_sink_probe")
    for code in (10, 11, 12):
        broker.on_send(Answer(code))
        Probe().check_broker(server, "broker-a", broker.address)
    broker.on_send(Answer(1))
    with pytest.raises(ProbeFailed, match=r"does not store messages \(code 1\)"):
        Probe().check_broker(server, "broker-a", broker.address)
    with pytest.raises(ProbeFailed, match=r"knows no route of x \(code 17\)"):
        Probe().check_route(server, "x", broker.address)
    with pytest.raises(ProbeFailed, match=r"the route of broker-a lacks 127\.0\.0\.1:1"):
        Probe().check_route(server, "broker-a", "127.0.0.1:1")
    with pytest.raises(ProbeFailed, match=r"does not register \(code 3\)"):
        Probe().register_now(broker.address, 6)
    broker.on(25, Answer(0))
    Probe(KEYS).register_now(broker.address, 4)
    frame = broker.requests[-1]
    assert bytes(frame.body) == b"brokerPermission=4\n"
    assert frame.ext["AccessKey"] == "user" and frame.ext["Signature"]


@pytest.mark.parametrize("needs_client", [False, True])
def test_the_probe_trusts_its_authority_only(needs_client, cluster, tmp_path, closing):
    def prepare(context):
        if needs_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(own.ca)

    own, other = (make_certificates(tmp_path / name) for name in ("own", "other"))
    broker = cluster.brokers[0]
    broker.on(25, Answer(0), times=None)
    relay = closing(TlsRelay(broker.address, (own.server_cert, own.server_key), prepare))
    Probe(None, own.ca, own.client).register_now(relay.address, 6)
    for stranger in (Probe(), Probe(None, other.ca), *[Probe(None, own.ca)] * needs_client):
        with pytest.raises(ProbeFailed, match=f"{relay.address} does not answer"):
            stranger.register_now(relay.address, 6)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match="closed in the middle"):
        theirs.shutdown(socket.SHUT_WR)
        probe._exchange(ours, Frame(25))


@pytest.mark.parametrize(("settings", "permission"), [({}, 6), ({"brokerPermission": "4"}, 4)])
@pytest.mark.parametrize("what", ["wait_ready", "wait_routed"])
def test_a_broker_that_listens_is_registered(settings, permission, what, monkeypatch):
    listens = iter([False, True, True, True, True])
    fails = iter([True] * 5 + [False])
    probe = MagicMock()

    def check(*arguments):
        name = "broker-a" if what == "wait_ready" else "t"
        assert arguments == ("n:1", name, "127.0.0.1:7")
        if next(fails):
            raise ProbeFailed("not yet")

    probe.check_broker = probe.check_route = check
    monkeypatch.setattr(node, "accepts", lambda address: next(listens))
    monkeypatch.setattr(node, "_POLL_S", 0)
    moments = MagicMock(side_effect=(0.2 * number for number in itertools.count()))
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=moments, sleep=bool))
    monkeypatch.setattr(Broker, "alive", True)
    spec = NodeSpec("broker-a", 7, Path("/x"), (), "", settings)
    broker = Broker(spec, dict, "n:1", probe)
    arguments = (1000,) if what == "wait_ready" else ("t", 1000)
    getattr(broker, what)(*arguments)
    assert probe.register_now.call_args_list == [call("127.0.0.1:7", permission)] * 2, "each 0.5 s"


@pytest.mark.parametrize(
    ("parents", "reads", "looks"),
    [([2], [], 0), ([1, 1, 2], [None, None], 2), ([1, 1, 1], [None, b"x", b""], 3)],
    ids=["another parent", "the parent ends", "the pipe closes"],
)
def test_the_guard_kills_its_group(parents, reads, looks, monkeypatch):
    kill, ignored = MagicMock(), MagicMock()
    seen: list[bytes | None] = []

    def select(inputs, *more):
        assert inputs == [0] and more[2] <= 1
        seen.append(reads[len(seen)])
        return ([0] if seen[-1] is not None else []), [], []

    own = SimpleNamespace(getppid=lambda: parents.pop(0), killpg=kill, read=lambda *_: seen[-1])
    monkeypatch.setattr(guard, "os", own)
    monkeypatch.setattr(guard, "select", SimpleNamespace(select=select))
    monkeypatch.setattr(guard.signal, "signal", ignored)
    guard.watch(1)
    assert kill.call_args == call(0, signal.SIGKILL) and len(seen) == looks
    assert [each.args for each in ignored.call_args_list] == [
        (number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]
