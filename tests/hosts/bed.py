"""Hosts at a bridge, inside a world.

with Bed() as bed:
    broker = bed.host("broker-a")
    client = bed.host("client")
    done = client.run(["python", "-c", "..."])      # on that host, in its pid namespace
    broker.impair(delay_ms=1000)                    # breaks its cable until broker.heal()
    broker.kill()                                   # ends the host and all its processes

The world itself is at the bridge, too (`GATEWAY`), for observers.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil

from rocket_sink.cluster.probe import accepts
from tests.hosts import world
from tests.hosts.forwarder import Impairment
from tests.producer.waiting import until

NETWORK = "10.99.0."
GATEWAY = f"{NETWORK}1"
DISK = Path("/run/disk")
"""The path of a host's own disk for its processes; the world sees `Host.disk`."""

_BRIDGE = "bed0"
_DISKS = Path("/run/bed")
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x19, 0x1F, 0x24, 0x2C)
"""Commands of ethtool: ETHTOOL_STXCSUM, SSG, STSO, SGSO, SGRO."""
_BOOT = """set -e
hostname "$NAME"
mount --bind "$FILES/hosts" /etc/hosts
mkdir -p "$DISK"
mount --bind "$FILES/disk" "$DISK"
ip link set lo up
echo up
exec sleep infinity
"""


class Bed:
    """The bridge and its hosts, as a context manager. A world has one bed at a time."""

    def __init__(self):
        assert world.inside(), "a bed is made inside a world: see world.enter"
        self.hosts = []
        self.names = {}
        """Names and addresses for every host's /etc/hosts; see `rename`."""
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{GATEWAY}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def close(self):
        for host in self.hosts:
            host.kill()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", _BRIDGE)
        shutil.rmtree(_DISKS, ignore_errors=True)

    def host(self, name):
        """Return a new running host at the next address."""
        host = Host(name, len(self.hosts) + 2)
        self.hosts.append(host)
        self.names[name] = host.address
        self._write_names()
        host.boot()
        return host

    def rename(self, names):
        """Change the addresses of names for all hosts and the world, as a DNS server would."""
        self.names.update(names)
        self._write_names()

    def _write_names(self):
        lines = ["127.0.0.1 localhost", *(f"{at} {name}" for name, at in self.names.items())]
        for file in (Path("/etc/hosts"), *(host.names_file for host in self.hosts)):
            # The file is bound over /etc/hosts, so it must be changed in place.
            file.write_text("\n".join(lines) + "\n")


class Host:
    """A machine at the bridge, made by `Bed.host`."""

    def __init__(self, name, number):
        self.name = name
        self.address = f"{NETWORK}{number}"
        self._number = number
        self._files = _DISKS / f"{number}-{name}"
        self.disk.mkdir(parents=True)
        self._kernel = None
        self._init = 0
        self._cable = None
        self._broken = Impairment()

    def __repr__(self):
        return f"<Host {self.name} {self.address}>"

    @property
    def names_file(self):
        return self._files / "hosts"

    @property
    def disk(self):
        """The path of the host's disk in the world."""
        return self._files / "disk"

    @property
    def _veth(self):
        return f"veth{self._number}"

    # --- power ------------------------------------------------------------------------------

    def boot(self):
        """Start the host with its old disk and without processes."""
        environ = {**os.environ, "NAME": self.name, "FILES": str(self._files), "DISK": str(DISK)}
        flags = ("--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
        self._kernel = subprocess.Popen(
            ["unshare", *flags, "--propagation", "private", "sh", "-c", _BOOT],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        assert self._kernel.stdout.readline() == "up\n", f"{self} did not start"
        (init,) = psutil.Process(self._kernel.pid).children()
        self._init = init.pid
        _ip("link", "add", self._veth, "type", "veth", "peer", "name", f"peer{self._number}")
        # The address stays the same after a reboot, because other hosts remember it.
        _ip("link", "set", f"peer{self._number}", "address", f"02:99:00:00:00:{self._number:02x}")
        # The forwarder passes raw frames, so checksums and sizes must be those of a cable.
        _without_offloads(self._veth)
        _without_offloads(f"peer{self._number}")
        _ip("link", "set", f"peer{self._number}", "netns", str(self._init), "name", "eth0")
        _ip("link", "set", self._veth, "master", _BRIDGE, "up")
        self._call("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self._call("ip", "link", "set", "eth0", "up")
        if self._broken != Impairment():
            self._put_forwarder()

    def kill(self):
        """Pull the plug: the host's processes and address disappear at once."""
        kernel, self._kernel = self._kernel, None
        if kernel is None:
            return
        self._remove_forwarder()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._veth)
        kernel.kill()
        kernel.wait()
        if kernel.stdout is not None:
            kernel.stdout.close()

    @property
    def running(self):
        return self._kernel is not None

    def processes(self):
        """Return the processes of the host's pid namespace without init, with the world's pids."""
        space = os.readlink(f"/proc/{self._init}/ns/pid")
        inside = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    inside.append(process)
        return [process for process in inside if process.pid != self._init]

    # --- processes --------------------------------------------------------------------------

    def prefix(self, *, own_pids=True):
        """Return the words before a command line that run it on this host.

        With `own_pids=False` the process is the world's own child, whose pid can be killed and
        frozen. It dies with the world, not with the host, and sees the world's disk.
        """
        assert self._kernel is not None, f"{self} is not running"
        # /proc belongs to the host's pid namespace: other processes need the world's mounts.
        own = ["--pid", "--mount", f"--wdns={os.getcwd()}"] if own_pids else []
        return ["nsenter", "-t", str(self._init), "--net", "--uts", *own, "--"]

    def start(self, command, **popen):
        """Start a command in the host's namespaces. It ends with the host at the latest."""
        return subprocess.Popen([*self.prefix(), *command], **popen)

    def run(self, command, *, env=None, timeout_s=60):
        """Run a command and return its output; raise AssertionError if the command fails."""
        done = subprocess.run(
            [*self.prefix(), *command], capture_output=True, text=True, check=False,
            env={**os.environ, **(env or {})}, timeout=timeout_s,
        )  # fmt: skip
        assert done.returncode == 0, f"{self}: {command}: {done.stderr[-3000:]}"
        return done.stdout

    def _call(self, *command):
        subprocess.run([*self.prefix(), *command], check=True)

    # --- its network ------------------------------------------------------------------------

    def impair(self, **what):
        """Break the host's cable by the fields of `Impairment`. Return when the cable is broken."""
        self._broken = replace(Impairment(), **what)
        if self._cable is None:
            self._put_forwarder()
        else:
            self._tell_forwarder()

    def heal(self):
        self.impair()

    def move(self):
        """Give the host another address; connections to the old address get no answer any more."""
        old, self.address = self.address, f"{NETWORK}{int(self.address.rpartition('.')[2]) + 100}"
        # The order matters: the kernel removes a network's other addresses with its first one.
        self._call("ip", "addr", "del", f"{old}/24", "dev", "eth0")
        self._call("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")

    def _put_forwarder(self):
        tap = f"tap{self._number}"
        self._cable = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.forwarder", self._veth, tap, str(self._number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert self._cable.stdout.readline() == "ready\n", f"no forwarder for {self}"
        self._tell_forwarder()
        # The bridge forgets the place of the host when the port is removed.
        _ip("link", "set", self._veth, "nomaster")
        _ip("link", "set", tap, "master", _BRIDGE, "up")

    def _tell_forwarder(self):
        self._cable.stdin.write(self._broken.line())
        assert self._cable.stdout.readline() == "done\n", f"the forwarder of {self} died"

    def _remove_forwarder(self):
        cable, self._cable = self._cable, None
        if cable is not None:
            cable.kill()
            cable.communicate()


def await_port(address, port, timeout_s=60):
    """Wait until a process listens at the port."""
    place = f"{address}:{port}"
    until(lambda: accepts(place), timeout_s, 0.1, f"nothing listens at {place}")


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


def _without_offloads(interface):
    """Do the same as `ethtool -K INTERFACE tx off sg off tso off gso off gro off`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for kind in _OFFLOADS:
            value = array.array("B", struct.pack("II", kind, 0))
            request = struct.pack("16sP16x", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
