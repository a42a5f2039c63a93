"""The stored messages, read by the official Java client as they come; each takes few bytes."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from rocket_sink.cluster import DEFAULT_VERSION
from tests.crash import ledger_log
from tests.crash.judge import Copy
from tests.java_client import java_command
from tests.soak.feed import Source

_SOURCE = Path(__file__).with_name("FollowTopics.java")


@dataclass
class Topic:
    """The messages of a topic, each queue's in their order.

    Attributes:
        stored: (number, broker and queue id, offset, id, whether it is whole) of each message.
        strange: bodies that are no row of the source, or have another row's key.
        skipped: ranges of offsets at which the client found no message.
    """

    source: Source
    stored: list = field(default_factory=list)
    _queues: dict = field(default_factory=dict)
    marks: bytearray = field(default_factory=bytearray)
    strange: list[bytes] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def take(self, fields):
        """Take in a line of the client's output."""
        if fields[0] == "skipped":
            self.skipped.append(" ".join(fields[1:]))
            return
        broker, queue_id, offset, message_id, intact, body = fields[1:]
        try:
            key, number = ledger_log.row_of(bytes.fromhex(body))
        except ValueError:
            key, number = "", -1
        if not 0 <= number < self.source.written or key != self.source.key(number):
            self.strange.append(bytes.fromhex(body))
            return
        queue = (broker, int(queue_id))
        queue = self._queues.setdefault(queue, queue)
        self.stored.append((number, queue, int(offset), message_id.encode(), intact == "1"))
        if intact == "1":
            self.marks.extend(bytes(max(0, number + 1 - len(self.marks))))
            self.marks[number] = 1

    def missing(self, rows):
        """Return how many of the first `rows` are not stored."""
        return rows - sum(self.marks[:rows])

    def copies(self, addresses):
        """Return the copies for the judge; `addresses` are those of the brokers by name."""
        return [
            Copy(
                (self.source.key(number), number), message_id.decode(),
                (addresses[broker], queue_id), offset, torn=not intact,
            )
            for number, (broker, queue_id), offset, message_id, intact in self.stored
        ]  # fmt: skip


class Reader:
    """The Java process; any thread may call `read`."""

    def __init__(self, name_server, log):
        self._lock = threading.Lock()
        command, class_path = java_command(_SOURCE, DEFAULT_VERSION)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, f"-Duser.home={log.parent}", _SOURCE.stem, name_server],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1,
                env={**os.environ, "CLASSPATH": class_path},
            )  # fmt: skip

    def read(self, name, topic):
        """Read a topic's new messages; return the queues that did not answer."""
        failed = []
        with self._lock:
            self._process.stdin.write(name + "\n")
            for text in self._process.stdout:
                if not text.startswith("judge "):
                    continue
                kind, *rest = text.rstrip("\n").split(" ")[1:]
                if kind == "end":
                    return failed
                if kind == "failed":
                    failed.append(" ".join(rest))
                else:
                    topic.take([kind, *rest])
        raise AssertionError("the Java client ended")

    def close(self):
        self._process.kill()
        self._process.wait()
