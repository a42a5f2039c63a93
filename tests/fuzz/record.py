"""Seeds from real traffic of brokers and name servers of two generations.

`python -m tests.fuzz --record` starts a cluster of each generation, and lets producers and the
admin client do all that they can do. It keeps the input of each decoder in `recorded.json`, as
base64 by target. Inputs that differ only in digits are kept once.
"""

import base64
import contextlib
import json
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from rocket_sink import Message, Producer
from rocket_sink.cluster import LocalCluster
from rocket_sink.errors import RocketSinkError
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.transactions import TransactionState
from rocket_sink.wire import compress, headers, ids, properties, responses, route
from rocket_sink.wire import frame as frames
from rocket_sink.wire import stored as stored_module
from tests.fuzz.recorded import RECORDED

VERSIONS: Final = ("5.5.0", "4.9.7")
_MOST = 12
"""The most inputs to keep for a target, a version and a serialisation of headers."""
_LONGEST = 4096
_WAIT_S = 60.0
_DIGITS = re.compile(rb"[0-9A-F]{2,}|\d")


_TAKEN: Final = (
    (frames.FrameReader.receive_data, "data", ("frame",)),
    (headers.decode_json_header, "header", ("json header", "send answer")),
    (route.decode_route, "body", ("route",)),
    (stored_module.decode_stored, "buffer", ("stored", "stored rows", "query")),
    (responses.decode_pull_answer, "frame", ("pull",)),
    (responses.decode_cluster_info, "frame", ("cluster",)),
    (responses.decode_topics, "frame", ("topics",)),
    (responses.decode_runtime_info, "frame", ("runtime",)),
    (responses.decode_topic_attributes, "frame", ("attributes",)),
    (responses.decode_transaction_check, "frame", ("transaction check",)),
    (compress.inflate, "body", ("zlib",)),
    (properties.decode_properties, "text", ("properties",)),
    (ids.decode_offset_message_id, "text", ("offset message id",)),
    (ids.decode_recall_handle, "text", ("recall handle",)),
)
"""Decoders, the name of their input (of a frame, its body counts), and the targets that it fits."""


class Recorder:
    """A recorder that watches the calls of decoders in every new thread while it is entered."""

    def __init__(self):
        self.kept = {}
        self.hidden = {}
        """Private bytes, such as folders, and their replacements."""
        self._takes = {decode.__code__: (name, targets) for decode, name, targets in _TAKEN}

    def __enter__(self):
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        threading.setprofile(None)

    def _look(self, frame, event, _):
        decoder = self._takes.get(frame.f_code) if event == "call" else None
        if decoder is not None:
            argument, targets = decoder
            value = frame.f_locals[argument]
            value = getattr(value, "body", value)
            data = value.encode() if isinstance(value, str) else bytes(value or b"")
            for name in targets:
                self.keep(name, data)

    def keep(self, name, data):
        for word, other in self.hidden.items():
            if word in data and name in ("frame", "pull", "stored", "query"):
                # A replacement would make lengths in the input wrong.
                return
            data = data.replace(word, other)
        kept = self.kept.setdefault(name, {})
        if 0 < len(data) <= _LONGEST and len(kept) < _MOST:
            kept.setdefault(_DIGITS.sub(b"0", data), data)
        if name == "json header" and b'"code":326,' in data:
            self.keep("pushed reply", data)


def record(version):
    """Record a version's traffic and return it as base64 by target."""
    with (
        tempfile.TemporaryDirectory(prefix="recorded-") as folder,
        LocalCluster(
            brokers=1, home=Path(folder), version=version,
            broker_config={"transactionCheckInterval": "2000", "transactionTimeOut": "500"},
        ) as cluster,
        Recorder() as recorder,
    ):  # fmt: skip
        recorder.hidden = {folder.encode(): b"/data"}
        _talk(cluster, version)
    return {
        name: [base64.b64encode(data).decode() for data in kept.values()]
        for name, kept in sorted(recorder.kept.items())
    }


def _talk(cluster, version):
    options = {"nameServer": cluster.name_server}
    topic = "recorded"
    with Admin(**options, timeout_s=30.0) as admin:
        typed = {} if version.startswith("4") else {"message.type": "NORMAL"}
        admin.create_topic(topic, queues=2, attributes=typed)
        cluster.await_route(topic)
        _send(topic, options)
        _transaction(topic, options)
        _ask(admin, topic, options)
        admin.await_dispatched(topic)
        messages = list(admin.read_topic(topic))
        for message in messages[:3]:
            admin.query_by_unique_key(topic, message.message_id or "")
        admin.topics()
        admin.cluster()
        with contextlib.suppress(RocketSinkError):
            admin.topic_attributes(topic)
        for queue in admin.queues(topic):
            admin.offset_by_time(queue, 0)


def _send(topic, options):
    with Producer(**options, producerGroup="recorded", compressMsgBodyOverHowmuch=500) as one:
        one.send(Message(topic, b"body", tags="t", keys=["k1", "k2"], properties={"a": "1"}))
        one.send(Message(topic, "\u8239\u3044 \u00fc".encode(), sharding_key="s", flag=7))
        one.send(Message(topic, b"long " * 150, keys=["k1"]))
        one.send_batch([Message(topic, b"one"), Message(topic, b"two", keys=["k1"])])
        one.send_async(Message(topic, b"later", delay_level=1)).result(30)
        with contextlib.suppress(RocketSinkError):
            timed = one.send(Message(topic, b"timed", delay_ms=30_000))
            if timed.recall_handle:
                one.recall(topic, timed.recall_handle)
        with contextlib.suppress(RocketSinkError):
            one.send(Message("no-such-topic%", b"refused"))


def _transaction(topic, options):
    checked = threading.Event()

    def listen(*_):
        checked.set()
        return TransactionState.COMMIT

    with Producer(**options, producerGroup="decides", transaction_listener=listen) as one:
        message = Message(topic, b"half", keys=["k3"])
        one.send_in_transaction(message, lambda *_: TransactionState.UNKNOWN)
        checked.wait(_WAIT_S)
        time.sleep(1)


def _ask(admin, topic, options):
    with (
        Producer(**options, producerGroup="asks") as asker,
        Producer(**options, producerGroup="replies", instanceName="replies") as replier,
    ):
        asking = threading.Thread(target=lambda: asker.request(Message(topic, b"ping"), _WAIT_S))
        asking.start()
        until_s = time.monotonic() + _WAIT_S
        request = None
        while request is None and time.monotonic() < until_s:
            time.sleep(0.2)
            request = next((m for m in admin.read_topic(topic) if m.body == b"ping"), None)
        replier.reply(request, b"pong", properties={"x": "1"})
        asking.join()


def record_all():
    """Record all versions and write `recorded.json`."""
    kept = {version: record(version) for version in VERSIONS}
    RECORDED.write_text(json.dumps(kept, indent=0) + "\n")
