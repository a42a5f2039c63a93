"""Name servers that know different things: one has restarted, or has another cluster."""

from random import Random
from types import SimpleNamespace

import pytest

from rocket_sink import errors
from rocket_sink.commands.check import look
from rocket_sink.net.channel import HEARD_RECENTLY_S
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.engine.routes import PROXY_HINT, NameServers, Routes
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.testing import Drop, FakeCluster
from rocket_sink.testing.server import Port
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.requests import get_route
from rocket_sink.wire.route import BrokerData, QueueData, TopicRoute, decode_route, encode_route
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
            on_end.on_end(errors.RequestTimeoutError("silent"), None, deadline_s)


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
        assert send(engine, number).outcome is errors.Outcome.ACKED
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
    assert isinstance(error, errors.NoRouteError) and all(
        server in str(error) for server in servers
    )
    assert not cluster.messages("fresh") and not other.messages("fresh")
    cluster.create_topic("fresh", 4)  # The error advises to make the topic.
    assert [completion.outcome for completion in engine.drain()] == [errors.Outcome.ACKED]
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
    assert send(engine, topic="fresh").outcome is errors.Outcome.ACKED
    assert len(cluster.messages("fresh")) == 1


def test_an_empty_server_makes_no_topic_unknown_for_good(engine_of):
    """The server's brokers may register within 30 s, and bring the topic."""
    with FakeCluster(queues=0) as cluster, FakeCluster() as other:
        other.forget_brokers()
        engine = engine_of(other.name_server, cluster.name_server, sendMsgTimeout=30_000)
        assert isinstance(_refused(engine, "orders"), errors.NoRouteError)
        cluster.create_topic("orders")
        assert [completion.outcome for completion in engine.drain()] == [errors.Outcome.ACKED]


def test_topics_and_brokers_are_those_of_all_servers(cluster, other):
    other.forget_brokers()
    for servers in ([cluster, other], [other, cluster]):
        with Admin(nameServer=";".join(server.name_server for server in servers)) as admin:
            assert sorted(admin.cluster()) == ["broker-a", "broker-b"]
            assert "orders" in admin.topics()
    other.register()
    with (
        Admin(nameServer=f"{cluster.name_server};{other.name_server}") as admin,
        pytest.raises(errors.NoRouteError, match="different clusters"),
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


# --- the routes of one engine ------------------------------------------------------------------


class _Servers:
    """Name servers whose answers a test gives; the route is that of four queues of a."""

    def __init__(self):
        self.asked = []

    def ask(self, frame, done, now_s, **more):
        self.asked.append((frame, done, more["of_all"]))

    def route(self, body):
        return decode_route(body)

    def end(self, now_s, error=None, code=0):
        """Answer the only question, or let it fail."""
        [(_, done, _)], self.asked = self.asked, []
        route = TopicRoute((QueueData("a", 4, 4),), (BrokerData("c", "a", {0: "a:1"}),))
        answers = {"h:1": Frame(code, body=encode_route(route))}
        done({} if error else answers, error, now_s)


def _routes(shared):
    servers, events = _Servers(), set()
    options = SinkOptions.parse(nameServer="h:1", pollNameServerInterval="100s")
    return servers, events, Routes(options, servers, shared, events)


def test_the_times_of_look_ups():
    servers, events, routes = _routes(shared := SharedBrokerState.in_process())
    down = errors.NameServerUnavailableError("down")
    assert routes.get("t", 100.0) is None and routes.fetching("t") and not routes.addresses()
    routes.refresh("t", 102.0)
    servers.end(100.5)
    assert (events, routes.look_ups, routes.addresses()) == ({"t"}, 1, {"a": "a:1"})
    assert routes.get("t", 200.4) is routes.peek("t") and not servers.asked
    routes.get("t", 200.5)
    servers.end(201.0, down)
    assert routes.get("t", 201.9) and not servers.asked and routes.error("t") is down
    assert routes.get("t", 202.0)
    servers.end(202.0)
    assert routes.error("t") is None and not routes.fetching("t")
    routes.refresh("t", 202.5)
    routes.start_planned(202.9)
    assert routes.wait_s(5.0, 202.5) == 0.5 and routes.wait_s(0.1, 202.5) == 0.1
    assert not servers.asked and routes.fetching("t")
    routes.start_planned(203.0)
    assert routes.wait_s(5.0, 203.0) == 5.0
    servers.end(203.25)
    assert (routes.topics_in_use(403.25), routes.topics_in_use(403.5)) == ({"a": "t"}, {})
    routes.refresh_old(302.9)
    assert not servers.asked
    routes.refresh_old(303.0)
    servers.end(303.0, errors.TlsRefusedError("no"))
    assert not routes.is_unresolvable("t"), "a known route stays"
    for now_s, questions in ((305.0, []), (306.0, [(RequestCode.GET_BROKER_CLUSTER_INFO, True)])):
        routes.refresh("t", now_s)
        servers.end(now_s, code=17)
        assert [(frame.code, of_all) for frame, _, of_all in servers.asked] == questions
    servers.end(306.0)
    assert routes.peek("t") and routes.look_ups == 7, "an unreadable answer drops no route"
    for now_s, is_taken in ((203.0, False), (303.0, True), (303.25, False)):
        servers, _, routes = _routes(shared)
        assert bool(routes.get("t", now_s)) is is_taken is not bool(servers.asked)
    servers.end(304.0, down)
    assert routes.get("t", 304.0) and routes.error("t") is None, "an old route is better than none"
    routes.get("u", 304.0)
    servers.end(304.0, errors.TlsRefusedError("no"))
    routes.refresh("u", 304.5)
    assert routes.is_unresolvable("u") and not routes.fetching("u") and not servers.asked
    with pytest.raises(errors.TlsRefusedError):
        routes.check_resolvable("u")
    routes.get("new", 305.0)
    topics = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
    for code, question in ((17, RequestCode.GET_ROUTEINFO_BY_TOPIC), (0, topics)):
        servers.end(305.0, code=code)
        assert [(frame.code, of_all) for frame, _, of_all in servers.asked] == [(question, True)]
    assert routes.get("new", 305.0).masters == {"a": "a:1"}


def test_the_server_that_answered_last_is_asked_first_unless_it_is_silent():
    client, ends, silences = _Silent(), [], {}
    client.peek = lambda address: silences.get(address)
    servers = NameServers(SinkOptions.parse(nameServer="a:1;b:1;c:1"), client, _InOrder(), 30.0)

    def first(*codes, **more):
        client.calls.clear()
        servers.ask(get_route("t"), lambda *end: ends.append(end), 100.0, **more)
        for code in codes:
            client.answer(Frame(code, flag=1))
        client.run()
        return client.calls[0][0], [*ends[-1][0]]

    assert first(17, 0, 17) == ("a:1", ["b:1"]) and len(ends) == 1
    assert len(client.calls) == 3, "all others are asked at once after one without the topic"
    assert first(17, 17, 17, of_all=True) == ("b:1", ["b:1", "a:1", "c:1"])
    for silence_s, address in ((HEARD_RECENTLY_S, "b:1"), (HEARD_RECENTLY_S + 0.1, "a:1")):
        silences["b:1"] = SimpleNamespace(silent_s=lambda now_s, age_s=silence_s: age_s)
        assert first() == (address, [])
    assert "cluster up" not in str(ends[-1][1])
    servers = NameServers(SinkOptions.parse(nameServer="127.0.0.1:1"), client, _InOrder(), 30.0)
    assert first() == ("127.0.0.1:1", []) and "rocket-sink cluster up" in str(ends[-1][1])
