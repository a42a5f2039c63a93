"""The trials of hosts and cables that `test_hosts.py` runs in a world."""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from tests.hosts.bed import DISK, Bed, await_port

PORT = 7000
_ECHO = """
import socket, threading
def serve(one):
    try:
        while data := one.recv(1 << 16):
            one.sendall(data)
    except OSError:
        pass
server = socket.create_server(("0.0.0.0", 7000))
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
_CLIENT = """
import json, socket, sys, time
results = []
connection = None
for _ in range(int(sys.argv[3])):
    began = time.monotonic()
    try:
        if connection is None:
            connection = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[4]))
        connection.sendall(b"x" * int(sys.argv[2]))
        remaining = int(sys.argv[2])
        while remaining:
            data = connection.recv(remaining)
            if not data:
                raise ConnectionError("closed")
            remaining -= len(data)
        results.append(time.monotonic() - began)
    except OSError as error:
        results.append(type(error).__name__)
        connection = None
print(json.dumps(results))
"""


def _echo(host):
    host.start([sys.executable, "-c", _ECHO])
    await_port(host.address, PORT)


def _ask(client, server, size=100, times=5, timeout_s=30):
    """Return the seconds of each round trip, or the name of its error."""
    words = [server, str(size), str(times), str(timeout_s)]
    return list(json.loads(client.run([sys.executable, "-c", _CLIENT, *words])))


def _fails(client, server, *errors, size=100):
    """Try a round trip, which ends with one of these errors."""
    (result,) = _ask(client, server, size, times=1, timeout_s=1)
    assert result in errors, result


def _answers(client, server, size=100, times=5):
    """Make round trips and return their seconds; none fails."""
    results = _ask(client, server, size, times)
    assert all(isinstance(time_s, float) for time_s in results), results
    return results


def hosts(bed):
    """Try names, pids, disks and power."""
    first, second = bed.host("one"), bed.host("two")
    first.run(["sh", "-c", f"echo mine > {DISK}/file"])
    _echo(second)
    assert first.run(["hostname"]) == "one\n"
    assert len(first.run(["ps", "-e", "-o", "pid="]).split()) == 2, "init and ps"
    assert (first.disk / "file").read_text() == "mine\n"
    assert second.run(["ls", str(DISK)]) == ""
    _answers(first, "two")
    second.kill()
    _fails(first, second.address, "TimeoutError", "OSError")
    second.boot()
    _echo(second)
    bed.rename({"service": second.address})
    _answers(first, "service", times=1)
    second.move()
    _fails(first, "service", "TimeoutError", "OSError")
    bed.rename({"service": second.address})
    _answers(first, "service", times=1)


def cables(bed):
    """Try each impairment, and a healed cable after it."""
    client, server = bed.host("client"), bed.host("server")
    at = server.address
    _echo(server)
    _answers(client, at, size=20_000)

    def is_delayed():
        assert min(_answers(client, at)) >= 0.3, "twice the delay each way"

    def times_out(size=100):
        _fails(client, at, "TimeoutError", size=size)

    def answers():
        _answers(client, at)

    for impairment, *looks in (
        ({"delay_ms": 150}, is_delayed),
        ({"loss_in": 1}, times_out),
        ({"loss_out": 1}, times_out),
        ({"longest_frame": 1000}, answers, partial(times_out, 5000)),
        ({"reject": PORT}, partial(_fails, client, at, "ConnectionRefusedError")),
        # Frames take longer than the first period, and the trial ends before the second period.
        ({"reset_every_s": 0.0001}, lambda: "ConnectionResetError" in _ask(client, at, times=20)),
        ({"reset_every_s": 3600}, answers),
    ):  # fmt: skip
        server.impair(**impairment)
        for look in looks:
            assert look() in (None, True), impairment
        server.heal()
        _answers(client, at, times=1)


def alive(bed):
    """Keep a host with a process until this process is killed."""
    host = bed.host("one")
    _echo(host)
    host.impair(delay_ms=1)
    mark = os.environ["MARK"]
    Path("/tmp", mark).write_text("")
    Path("/run", mark).write_text("")
    host.start(["env", f"{mark}=1", "sleep", "600"])
    print("standing", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    with Bed() as bed_of_trial:
        globals()[sys.argv[1]](bed_of_trial)
