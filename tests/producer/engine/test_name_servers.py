"""Name servers that know different things: one has restarted, or has another cluster."""

from random import Random

import pytest

from rocket_sink.commands.check import look
from rocket_sink.errors import NoRouteError, Outcome, RequestTimeoutError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.engine.routes import PROXY_HINT, NameServers
from rocket_sink.testing import Drop, FakeCluster
from rocket_sink.testing.server import Port
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.requests import get_route
from tests.clusters import scripted_cluster
from tests.producer.conftest import drive_until, request, send


class _InOrder(Random):
    """A generator that leaves the name servers in the order of the option."""

    def shuffle(self, x):
        pass


class _Silent:
    """A client whose calls end at their deadlines, without an answer."""

    def __init__(self):
        self.calls, self._due = [], []

    def peek(self, address):
        return None

    def call(self, address, frame, on_end, *, deadline_s, now_s):
        self.calls.append((address, round(deadline_s - now_s, 3)))
        self._due.append((deadline_s, on_end))

    def answer(self, frame):
        self._due.pop(0)[1].on_end(frame, None, 100.0)

    def run(self):
        while self._due:
            deadline_s, on_end = self._due.pop(0)
            on_end.on_end(RequestTimeoutError("silent"), None, deadline_s)


@pytest.mark.parametrize(
    ("names", "timeout_s", "of_all", "waits_s"),
    [
        ("abc", 30.0, False, [1.0, 1.0, 1.0]), ("abc", 1.5, False, [0.5, 0.5, 0.5]),
        ("abc", 0.15, False, [0.1, 0.1]), ("abc", 30.0, True, [1.0, 1.0, 1.0]),
        ("abc", 0.6, True, [0.6, 0.6, 0.6]),
    ],
)  # fmt: skip
def test_each_silent_server_gets_its_share_of_the_time(names, timeout_s, of_all, waits_s):
    client, ends = _Silent(), []
    options = SinkOptions.parse(nameServer=";".join(f"{name}:1" for name in names))
    servers = NameServers(options, client, _InOrder(), timeout_s)
    servers.ask(get_route("t"), lambda *end: ends.append(end), 100.0, of_all=of_all)
    client.run()
    assert client.calls == [(f"{n}:1", s) for n, s in zip(names, waits_s, strict=False)]
    ((answers, error, _),) = ends
    assert not answers and [*error.reasons] == [f"{name}:1" for name in names]
    untold = [name for name, reason in error.reasons.items() if "no time was left" in reason]
    assert len(untold) == len(names) - len(waits_s)


@pytest.mark.parametrize(
    ("code", "reason"), [(3, f"answered 3: no way{PROXY_HINT}"), (1, "answered 1: no way")]
)
def test_a_server_that_refuses_the_question_is_named_with_its_answer(code, reason):
    client, ends = _Silent(), []
    servers = NameServers(SinkOptions.parse(nameServer="a:1"), client, _InOrder(), 30.0)
    servers.ask(get_route("t"), lambda *end: ends.append(end), 100.0)
    client.answer(Frame(code, remark="no\nway", flag=1))
    assert ends[0][1].reasons == {"a:1": reason}


def test_all_other_servers_are_asked_at_once_after_one_that_does_not_know_the_topic():
    client = _Silent()
    options = SinkOptions.parse(nameServer="a:1;b:1;c:1")
    servers = NameServers(options, client, _InOrder(), 30.0)
    servers.ask(get_route("t"), lambda *_: None, 100.0)
    client.answer(Frame(17, flag=1))
    assert [address for address, _ in client.calls] == ["a:1", "b:1", "c:1"]


other = scripted_cluster()
"""Another cluster, whose brokers have the same names and make topics on the fly."""


@pytest.fixture
def engine_of(make_engine):
    return lambda *servers, **options: make_engine(
        nameServer=";".join(servers), rng=_InOrder(), **options
    )


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_server_that_does_not_know_the_topic_settles_nothing(cluster, other, engine_of, is_empty):
    if is_empty:
        other.forget_brokers()
    engine = engine_of(other.name_server, cluster.name_server)
    for number in range(12):
        assert send(engine, number).outcome is Outcome.ACKED
    assert len(cluster.messages("orders")) == 12 and not other.messages("orders")
    with Admin(nameServer=f"{other.name_server};{cluster.name_server}") as admin:
        assert len(admin.topic_route("orders").brokers) == 2


@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_topic_is_made_only_where_all_servers_that_answer_say(
    cluster, other, engine_of, is_empty, is_first
):
    """Java's client makes the topic on the brokers of whichever server it asks."""
    if is_empty:
        other.forget_brokers()
    servers = [other.name_server, cluster.name_server]
    engine = engine_of(*(servers if is_first else servers[::-1]), sendMsgTimeout=60_000)
    error = _refused(engine, "fresh")
    assert isinstance(error, NoRouteError) and all(server in str(error) for server in servers)
    assert not cluster.messages("fresh") and not other.messages("fresh")
    cluster.create_topic("fresh", 4)  # The error advises to make the topic.
    assert [completion.outcome for completion in engine.drain()] == [Outcome.ACKED]
    assert len(cluster.messages("fresh")) == 1


def _refused(engine, topic):
    """Submit a request and return the reason why it has no route; the request goes on waiting."""
    engine.submit(request(1, topic))
    drive_until(engine, lambda: engine.routes.error(topic))
    assert engine.pending and not engine.routes.is_unresolvable(topic)
    return engine.routes.error(topic)


@pytest.mark.parametrize("fault", ["stopped", "silent", "agrees"])
def test_servers_that_agree_or_do_not_answer_leave_the_template(cluster, other, engine_of, fault):
    second = other.name_server
    if fault == "stopped":
        other.stop_name_server()
    elif fault == "silent":
        other.on_route(Drop(), times=None)
    else:
        port = Port(other._loop, cluster._handle)
        other._loop.call(port.open)
        second = port.address
    engine = engine_of(second, cluster.name_server, sendMsgTimeout=30_000)
    assert send(engine, topic="fresh").outcome is Outcome.ACKED
    assert len(cluster.messages("fresh")) == 1


def test_an_empty_server_makes_no_topic_unknown_for_good(engine_of):
    """The server's brokers may register within 30 s, and bring the topic."""
    with FakeCluster(queues=0) as cluster, FakeCluster() as other:
        other.forget_brokers()
        engine = engine_of(other.name_server, cluster.name_server, sendMsgTimeout=30_000)
        assert isinstance(_refused(engine, "orders"), NoRouteError)
        cluster.create_topic("orders")
        assert [completion.outcome for completion in engine.drain()] == [Outcome.ACKED]


def test_topics_and_brokers_are_those_of_all_servers(cluster, other):
    other.forget_brokers()
    for servers in ([cluster, other], [other, cluster]):
        with Admin(nameServer=";".join(server.name_server for server in servers)) as admin:
            assert sorted(admin.cluster()) == ["broker-a", "broker-b"]
            assert "orders" in admin.topics()
    other.register()
    with (
        Admin(nameServer=f"{cluster.name_server};{other.name_server}") as admin,
        pytest.raises(NoRouteError, match="different clusters"),
    ):
        admin.create_topic("pays")


def test_check_names_the_server_that_disagrees(cluster, other):
    def states(*servers):
        checks = look(SinkOptions.parse(nameServer=";".join(servers)))
        return [(each.state, each.text) for each in checks if each.what.startswith("name serv")]

    port = Port(other._loop, cluster._handle)
    other._loop.call(port.open)
    own = [cluster.name_server, port.address]
    assert [state for state, _ in states(*own, other.name_server)] == ["ok", "ok", "fail"]
    two = states(own[0], other.name_server)
    assert [state for state, _ in two] == ["fail", "fail"]
    assert own[0] in two[1][1] and "another cluster" in two[1][1]
    other.forget_brokers()
    (_, (state, text)) = states(own[0], other.name_server)
    assert state == "fail" and "knows no broker" in text
