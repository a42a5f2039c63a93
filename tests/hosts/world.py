"""A command in namespaces of its own, which end with it.

A module's `__main__` calls `enter` first: it runs the same module again inside a new world and
exits with its code. Files outside /tmp and /run are the real ones, also for writing. A world has no
network but its own loopback and the bridge of `bed`, so fetch packages before.
"""

import os
import shutil
import subprocess
import sys

_INSIDE = "ROCKET_SINK_WORLD"
_PREPARE = """set -e
mount -t tmpfs none /run
mount -t tmpfs none /tmp
cp /etc/hosts /run/hosts
mount --bind /run/hosts /etc/hosts
ip link set lo up
exec "$@"
"""


def command(arguments):
    """Return the command line that runs `arguments` in a new world.

    The process that starts the world must outlive it: the kernel kills the world when the thread
    that started it ends (PR_SET_PDEATHSIG).
    """
    users = [] if os.geteuid() == 0 else ["--map-root-user"]
    return [
        "setpriv", "--pdeathsig", "KILL",
        "unshare", *users, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
        "--propagation", "private",
        "sh", "-c", _PREPARE, "world", "env", f"{_INSIDE}=1", *arguments,
    ]  # fmt: skip


def inside():
    """Return whether this process runs in a world."""
    return os.environ.get(_INSIDE) == "1"


def enter(module):
    """Run `module` again in a new world and exit with its code. Do nothing inside a world."""
    if inside():
        return
    if lacks := missing():
        raise SystemExit(f"no hosts can be made here: {lacks}")
    raise SystemExit(subprocess.call(command([sys.executable, "-m", module, *sys.argv[1:]])))


def missing():
    """Return what this machine lacks for a world with hosts; empty if nothing is missing."""
    for tool in ("setpriv", "unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: util-linux, iproute2)"
    trial = "ip link add trial0 type bridge && ip tuntap add trial1 mode tap"
    done = subprocess.run(command(["sh", "-c", trial]), capture_output=True, text=True, check=False)
    return done.stderr.strip().partition("\n")[0] if done.returncode else ""
