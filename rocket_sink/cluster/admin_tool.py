"""RocketMQ's admin tool (mqadmin), from the same jars."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from rocket_sink.cluster import conf
from rocket_sink.cluster.jars import DEFAULT_VERSION, resolve_jars
from rocket_sink.cluster.tls import TestCertificates
from rocket_sink.errors import ClusterError
from rocket_sink.java import find_java

_TIMEOUT_S = 120.0
# The tool exits with code 0 after a stack trace or an error text, too.
_FAILURE = re.compile(
    r"^(Exception in thread|Caused by: |[\w.]+(Exception|Error)(:|$)|The sub command )"
    r"|^\s*ERROR: |create topic to .* failed|\[error\]",
    re.MULTILINE,
)


def admin(
    name_server: str,
    *arguments: str,
    version: str = DEFAULT_VERSION,
    acl: conf.Secrets | None = None,
    tls: TestCertificates | None = None,
    cache: Path | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> str:
    """The output of a command of the admin tool, `admin(server, "topicStatus", "-t", "t")`.

    Takes some seconds. Raises ClusterError with the output when the tool fails, prints an error, or
    exceeds `timeout_s`.
    """
    java = find_java()
    jars = resolve_jars(version, cache=cache, java=java)
    with tempfile.TemporaryDirectory(prefix="rocket-sink-admin-") as name:
        folder = Path(name)
        conf.write_rocketmq_home(folder, version, acl)
        extra = tls.client_flags(folder / "tls.properties") if tls else []
        command = conf.jvm_command(
            "admin",
            java=java.executable,
            folder=folder,
            version=version,
            memory=("-Xmx192m", "-XX:TieredStopAtLevel=1"),
            extra=extra,
        )
        environ = {
            **os.environ,
            "CLASSPATH": conf.class_path(folder, os.pathsep.join(map(str, jars))),
            "NAMESRV_ADDR": name_server,
        }
        return _run([*command, *arguments], environ, timeout_s)


def _run(command: list[str], environ: dict[str, str], timeout_s: float) -> str:
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"The admin tool was not done after {timeout_s:.0f} s: check that the name server "
            "runs, or give it more time (timeout_s)."
        ) from error
    printed = done.stdout + done.stderr
    if done.returncode != 0 or _FAILURE.search(printed):
        raise ClusterError(
            f"The admin tool failed (exit code {done.returncode}). It printed:\n{printed[-4000:]}"
        )
    return done.stdout
