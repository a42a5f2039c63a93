"""The trials of hosts and cables that `test_hosts.py` runs in a world. Prints a JSON object."""

import json
import os
import sys
import time
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


def _vain(client, server, size=100):
    """Try a round trip that is not expected to end."""
    return _ask(client, server.address, size, times=1, timeout_s=1)


def hosts(bed):
    """Try names, pids, disks and power."""
    first, second = bed.host("one"), bed.host("two")
    first.run(["sh", "-c", f"echo mine > {DISK}/file"])
    _echo(second)
    answers = _ask(first, "two")
    results = {
        "name": first.run(["hostname"]).strip(),
        "pids": len(first.run(["ps", "-e", "-o", "pid="]).split()),
        "mine": (first.disk / "file").read_text(),
        "theirs": second.run(["ls", str(DISK)]),
        "answered": sum(isinstance(time_s, float) for time_s in answers),
    }
    second.kill()
    results["dead"] = _vain(first, second)
    second.boot()
    _echo(second)
    bed.rename({"service": second.address})
    results["rebooted"] = _ask(first, "service", times=1)
    second.move()
    results["moved_from"] = _ask(first, "service", times=1, timeout_s=1)
    bed.rename({"service": second.address})
    results["moved_to"] = _ask(first, "service", times=1)
    return results


def cables(bed):
    """Try each impairment, and a healed cable after it."""
    client, server = bed.host("client"), bed.host("server")
    _echo(server)
    results = {"plain": _ask(client, server.address, size=20_000)}
    cases = {
        "delay": ({"delay_ms": 150}, lambda: _ask(client, server.address)),
        "nothing_in": ({"loss_in": 1}, lambda: _vain(client, server)),
        "nothing_out": ({"loss_out": 1}, lambda: _vain(client, server)),
        "small_through_hole": ({"longest_frame": 1000}, lambda: _ask(client, server.address)),
        "large_through_hole": (
            {"longest_frame": 1000}, lambda: _vain(client, server, size=5000),
        ),
        "reject": ({"reject": PORT}, lambda: _ask(client, server.address, times=1)),
        # Frames take longer than the first period, and the trial ends before the second period.
        "resets": ({"reset_every_s": 0.0001}, lambda: _ask(client, server.address, times=20)),
        "between_resets": ({"reset_every_s": 3600}, lambda: _ask(client, server.address)),
    }  # fmt: skip
    for name, (what, look) in cases.items():
        server.impair(**what)
        results[name] = look()
        server.heal()
        results[f"{name}_healed"] = _ask(client, server.address, times=1)
    return results


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
    return {}


if __name__ == "__main__":
    with Bed() as made:
        print(json.dumps(globals()[sys.argv[1]](made)))
