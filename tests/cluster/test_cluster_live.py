"""A real cluster starts, stores, freezes, dies and comes back."""

import psutil
import pytest

from rocket_sink.cluster import LocalCluster, down, status, up
from rocket_sink.cluster.conf import Ports
from rocket_sink.cluster.probe import Probe
from rocket_sink.errors import ClusterError
from rocket_sink.producer.admin.admin import Admin
from tests.clusters import repair
from tests.producer.waiting import until

pytestmark = pytest.mark.cluster


def stored(cluster, topic):
    """Count the messages of a topic. The admin tool's JVM would take longer than most tests."""
    with Admin(timeout_s=30.0, **cluster.client_options()) as admin:
        return admin.count(topic)


def assert_on_loopback(cluster):
    """Check that the processes listen on the cluster's ports only, by the system's sockets."""
    home, ports = f"-Duser.home={cluster.home}/", []
    for process in psutil.process_iter(["cmdline"]):
        if not any(part.startswith(home) for part in process.info["cmdline"] or ()):
            continue
        for socket in process.net_connections("inet"):
            if socket.status == psutil.CONN_LISTEN:
                assert socket.laddr.ip in ("127.0.0.1", "::ffff:127.0.0.1"), socket
                ports.append(socket.laddr.port)
    numbers = [int(address.rpartition(":")[2]) for address in (
        cluster.name_server, *(broker.address for broker in cluster.brokers)
    )]  # fmt: skip
    assert sorted(ports) == sorted(Ports(numbers[0], tuple(numbers[1:])).all())


@pytest.fixture
def cluster(local_cluster):
    return repair(local_cluster)


def test_no_process_listens_beyond_loopback(cluster):
    assert_on_loopback(cluster)


def test_the_admin_tool_sees_what_the_probe_stored(cluster):
    broker = cluster.brokers[0]
    before = stored(cluster, broker.name)
    Probe().check_broker(cluster.name_server, broker.name, broker.address)
    until(lambda: stored(cluster, broker.name) > before, timeout_s=60)

    # A broker counts a message shortly after it answers, so the count may still grow.
    def admin_tool_agrees():
        rows = cluster.admin("topicStatus", "-t", broker.name).splitlines()
        shown = sum(int(row.split()[3]) for row in rows if row.startswith("broker-"))
        return before < shown == stored(cluster, broker.name)

    until(admin_tool_agrees, timeout_s=60)


def test_the_admin_tools_failure_is_an_error(cluster):
    with pytest.raises(ClusterError, match="No topic route info"):
        cluster.admin("topicStatus", "-t", "no_such_topic")
    with pytest.raises(ClusterError):
        cluster.admin("noSuchCommand")


@pytest.mark.slow
def test_the_same_home_gives_the_same_ports_and_data_with_version_4(tmp_path):
    with LocalCluster(brokers=1, home=tmp_path / "home", version="4.9.7") as first:
        address, home = first.name_server, first.home
        assert_on_loopback(first)
        before = stored(first, "broker-a")
    with LocalCluster(brokers=1, home=home, version="4.9.7") as second:
        assert second.name_server == address
        until(lambda: stored(second, "broker-a") > before, timeout_s=60)


def test_up_and_down_twice(tmp_path):
    state = up(tmp_path, brokers=1)
    try:
        assert state.running and status(tmp_path) == state
        assert up(tmp_path, brokers=1) == state
        Probe().check_broker(state.name_server, "broker-a", state.brokers[0].address)
        # `up` starts a dead broker again at the same address, and the name server goes on.
        process = state.brokers[0].process()
        process.kill()
        process.wait()
        assert not status(tmp_path).running
        mended = up(tmp_path, brokers=1)
        assert mended.running and mended.brokers[0].pid != process.pid
        assert mended.nodes[0] == state.nodes[0], "the same process"
        assert mended.brokers[0].address == state.brokers[0].address
    finally:
        assert down(tmp_path) is True
    assert not any(node.alive for node in (*state.nodes, *mended.nodes))
