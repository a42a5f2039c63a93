"""Port choice: blocks that do not overlap, free ones only, the old ones when they are free."""

import errno
import socket
from unittest.mock import MagicMock

import pytest

from rocket_sink.cluster.conf import RANGE, Ports, choose_ports, is_free, load_ports
from rocket_sink.errors import ClusterError


def test_the_ports_of_a_broker_are_java_s():
    assert Ports(9876, (10911,)).all() == [9876, 10909, 10911, 10912]


@pytest.mark.parametrize("brokers", [1, 2, 64])
def test_no_port_is_given_twice_nor_outside_the_range(brokers):
    ports = choose_ports(brokers, free=lambda _port: True)
    assert len(ports.brokers) == brokers
    assert len(set(ports.all())) == len(ports.all()) == 1 + 3 * brokers
    assert all(port in RANGE for port in ports.all())


def test_a_taken_port_spoils_its_block():
    free = set(range(20_000, 20_012)) - {20_005}
    ports = choose_ports(1, free=free.__contains__)
    assert all(port in free for port in ports.all())
    for brokers, few in ((2, free), (1, {*range(31_990, 33_000)})):
        with pytest.raises(ClusterError, match=f"No {brokers + 1} free blocks"):
            choose_ports(brokers, free=few.__contains__)


def test_wanted_ports_are_kept_when_all_are_free():
    wanted = Ports(21_000, (22_002,))
    assert choose_ports(1, wanted=wanted, free=lambda _port: True) == wanted
    assert choose_ports(1, wanted=wanted, free=lambda port: port != 22_000) != wanted
    assert choose_ports(2, wanted=wanted, free=lambda _port: True) != wanted


def test_a_bound_port_is_not_free():
    port = choose_ports(1).name_server
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not is_free(port)
        with socket.create_connection(taken.getsockname()):
            taken.accept()[0].close()
    assert is_free(port), "although a connection is in TIME_WAIT"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"name_server": "x", "brokers": []}'])
def test_a_damaged_file_is_forgotten(tmp_path, text):
    (tmp_path / "ports.json").write_text(text)
    assert load_ports(tmp_path / "ports.json") is None
    assert load_ports(tmp_path / "absent.json") is None


@pytest.mark.parametrize("code", [errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL])
def test_only_a_taken_port_is_not_free(code, monkeypatch):
    """Without loopback no port can be bound: that is no reason to try all of them."""
    made = MagicMock()
    made.return_value.__enter__.return_value.bind.side_effect = OSError(code, "no")
    monkeypatch.setattr(socket, "socket", made)
    if code == errno.EADDRNOTAVAIL:
        with pytest.raises(OSError, match="no"):
            is_free(20_000)
    else:
        assert not is_free(20_000)
