"""A topic as the official Java client sees it: the judge of the messages that our producer stores.

`ReadTopic.java` runs on the jars of a RocketMQ version. It pulls and decodes like an application's
consumer (by MessageDecoder, which inflates bodies). That decoder stops at the first message that it
cannot read, and the consumer goes on behind that batch. So a message that is missing from the list
is lost to every Java consumer.
"""

import atexit
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rocket_sink.cluster import find_java, resolve_jars
from rocket_sink.producer.admin.admin import Admin

FOLDER = Path(__file__).parent
GENERATIONS = ("5.3.3", "4.9.7", "5.5.0")
"""Client versions that tests read with; their jars come from the cluster's cache."""

_OPENS = ("java.base/java.lang", "java.base/java.nio", "java.base/sun.nio.ch")
"""Packages that the 4.9 client opens by reflection, which Java 17 refuses otherwise."""


@dataclass(frozen=True)
class JavaMessage:
    """A message as the consumer's application gets it.

    `message_id` is the client's id (UNIQ_KEY); times are ms since 1970. `body` is None if it is
    longer than `longest_body`. `body_length` and `body_sha256` describe the inflated body.
    """

    broker_name: str
    queue_id: int
    queue_offset: int
    sys_flag: int
    born_ms: int
    store_ms: int
    offset_message_id: str
    message_id: str
    keys: str | None
    tags: str | None
    properties: dict[str, str]
    body_length: int
    body_sha256: bytes
    body: bytes | None

    def has_body(self, body):
        """Return whether the message has this body, even if the body was not printed."""
        return self.body_sha256 == hashlib.sha256(body).digest()


def read_with_java(
    cluster, topic, version = GENERATIONS[0], *,
    longest_body = 1 << 16, may_skip = False, timeout_s = 280,
):  # fmt: skip
    """Return all messages of a topic, queue by queue, in queue order.

    Args:
        cluster: a cluster without authentication and TLS, or its name server.
        version: the client's version; any that `resolve_jars` knows.
        longest_body: in bytes; only length and digest of longer bodies are returned.
        may_skip: the client may leave out offsets (otherwise an AssertionError is raised).

    Raises:
        AssertionError: the client failed, or went over offsets without a message.
    """
    name_server = cluster if isinstance(cluster, str) else cluster.name_server
    with Admin(nameServer=name_server, timeout_s=30.0) as admin:
        admin.await_dispatched(topic)
    lines = run_java(
        FOLDER / "ReadTopic.java", name_server, topic, str(longest_body),
        version=version, timeout_s=timeout_s,
    )  # fmt: skip
    skipped = [" ".join(fields) for kind, *fields in lines if kind == "skipped"]
    assert may_skip or not skipped, f"the Java client {version} skipped {topic}: {skipped}"
    return [_message(fields) for kind, *fields in lines if kind == "message"]


def run_java(
    source, *arguments, version, jars = (), lines = "",
    timeout_s = 280,
):  # fmt: skip
    """Run a source file on a version's jars and return the fields of its lines "judge ...".

    Other lines are the libraries' logs. `jars` replace those of RocketMQ's server modules.

    Raises:
        AssertionError: the program failed, or its last line is not "judge end".
    """
    command, class_path = java_command(source, version, jars)
    with tempfile.TemporaryDirectory(prefix="rocket-sink-java-") as home:
        done = subprocess.run(
            # Logs go to the home folder.
            [*command, f"-Duser.home={home}", source.stem, *arguments],
            input=lines, capture_output=True, text=True, encoding="utf-8", timeout=timeout_s,
            check=False, env={**os.environ, "CLASSPATH": class_path},
        )  # fmt: skip
    judged = [line.split(" ")[1:] for line in done.stdout.splitlines() if line.startswith("judge ")]
    assert done.returncode == 0, done.stderr[-3000:] or done.stdout[-3000:]
    assert judged[-1:] == [["end"]], done.stdout[-3000:] + done.stderr[-3000:]
    return judged[:-1]


def java_command(source, version, jars=()):
    """Return Java with its options for a source file on a version's jars, and the class path."""
    java = find_java()
    jars = tuple(jars) or tuple(resolve_jars(version, java=java))
    classes = [_compiled(source, jars), *jars]
    opens = [f"--add-opens={package}=ALL-UNNAMED" for package in _OPENS]
    options = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    return [str(java.executable), *options, *opens], os.pathsep.join(map(str, classes))


def fetch_generations():
    """Fetch the jars of all `GENERATIONS`, before tests begin that have no network."""
    for version in GENERATIONS:
        resolve_jars(version, progress=lambda text: print(text, file=sys.stderr))


@functools.cache
def _compiled(source, jars):
    """Return a folder with the classes of a source file, compiled once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="rocket-sink-java-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    java = find_java()
    done = subprocess.run(
        [str(java.executable), "-XX:TieredStopAtLevel=1", "-m",
         "jdk.compiler/com.sun.tools.javac.Main", "-nowarn", "-proc:none", "-encoding", "UTF-8",
         "-cp", os.pathsep.join(map(str, jars)), "-d", str(folder), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def octets(field):
    """Return the bytes of a field, or None for "-"."""
    return None if field == "-" else bytes.fromhex(field[1:])


def text(field):
    """Return the text of a field, or None for "-"."""
    data = octets(field)
    return None if data is None else data.decode()


def _message(fields):
    broker, *numbers, offset_id, message_id, keys, tags, properties, length, digest, body = fields
    queue_id, offset, sys_flag, born_ms, store_ms = map(int, numbers)
    pairs = [pair.split("=") for pair in properties[1:].split(",") if pair]
    return JavaMessage(
        broker, queue_id, offset, sys_flag, born_ms, store_ms, offset_id, message_id,
        text(keys), text(tags), {text(name) or "": text(value) or "" for name, value in pairs},
        int(length), octets(digest) or b"", octets(body),
    )  # fmt: skip
