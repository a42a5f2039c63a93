"""Shell blocks, run by bash, with a `rocket-sink` that this process answers with its own session.

A real command would start a JVM each time. So the `rocket-sink` that bash finds first is a client
of a socket: it sends arguments, folder, environment and standard input, and receives output and
exit code. Pipes, redirections and variables are bash's own.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

from tests.run_command import run_command

CLIENT = """#!{python} -S
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
stdin = "" if "--file" not in sys.argv else sys.stdin.read()
request = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ),
           "stdin": stdin}}
server.sendall(json.dumps(request).encode() + b"\\n")
answer = json.loads(server.makefile().read())
sys.stderr.write(answer["err"])
sys.stdout.write(answer["out"])
sys.exit(answer["code"])
"""


class Shell:
    """A runner of shell blocks. `transcript` holds the output of our commands."""

    def __init__(self, home, spark):
        self._bin = home / "bin"
        self._bin.mkdir()
        self._spark = spark
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(home / "s"))
        self._server.listen()
        self._server.settimeout(0.05)
        client = self._bin / "rocket-sink"
        client.write_text(CLIENT.format(python=sys.executable, path=str(home / "s")))
        client.chmod(0o755)
        self.transcript = []

    def close(self):
        self._server.close()

    def run(self, text, folder, environment):
        """Run a block in a folder, and add its exported variables to `environment`.

        Raises:
            AssertionError: a command of the block failed.
        """
        self.transcript = []
        exports = self._bin.parent / "exports"
        script = f"set -euo pipefail\n{text}\nenv -0 > {exports}\n"
        path = os.pathsep.join(
            [str(self._bin), str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env={**os.environ, **environment, "PATH": path},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        with contextlib.closing(process.stdout):
            while process.poll() is None:
                with contextlib.suppress(TimeoutError):
                    connection, _ = self._server.accept()
                    self._answer(connection)
            output = process.stdout.read()
        answers = "\n".join([*self.transcript, output])
        assert process.returncode == 0, f"exit code {process.returncode}\n{text}\n{answers}"
        environment.update(_exported(exports))

    def _answer(self, connection):
        with connection:
            connection.settimeout(30)
            request = json.loads(connection.makefile().readline())
            with _in(request["folder"], request["environment"]):
                done = run_command(*request["arguments"], spark=self._spark, stdin=request["stdin"])
            command = " ".join(request["arguments"])
            self.transcript.append(f"$ rocket-sink {command}\n{done.out}{done.err}")
            connection.sendall(json.dumps(done._asdict()).encode())


def _exported(path):
    """Return the variables that a block exported, without the shell's own."""
    pairs = (entry.partition("=") for entry in path.read_text().split("\0") if entry)
    return {
        name: value
        for name, _, value in pairs
        if name not in ("PATH", "PWD", "OLDPWD", "SHLVL", "_") and os.environ.get(name) != value
    }


@contextlib.contextmanager
def _in(folder, environment):
    before = Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, environment):
            yield
    finally:
        os.chdir(before)
