"""Targets for hostile bytes: every decoder, and readers of files that other processes write.

A target takes any bytes and returns a value or raises one of its own errors; another error is a
finding. Samples are inputs of a correct peer, with which a fuzzer begins.
"""

import io
import struct
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
from pyarrow import fs

from rocket_sink.errors import InvalidAnswerError, LedgerError, MessageError, RemoteProtocolError
from rocket_sink.ledger.records import RunContext, epoch_row
from rocket_sink.ledger.transport.stream import BatchWriter, read_batches
from rocket_sink.producer.engine.mapped_table import MappedFile, MappedTable
from rocket_sink.rows.stored_rows import STORED_SCHEMA, stored_batch, stored_batches
from rocket_sink.wire.batch import encode_inner, iter_batch
from rocket_sink.wire.compress import CompressionType, compress, inflate
from rocket_sink.wire.frame import FrameReader, encode_frame
from rocket_sink.wire.headers import (
    Frame,
    decode_binary_header,
    decode_json_header,
    encode_json_header,
)
from rocket_sink.wire.ids import decode_offset_message_id, decode_recall_handle
from rocket_sink.wire.properties import decode_properties
from rocket_sink.wire.responses import (
    decode_cluster_info,
    decode_pull_answer,
    decode_pushed_reply,
    decode_runtime_info,
    decode_send_answer,
    decode_topic_attributes,
    decode_topics,
    decode_transaction_check,
)
from rocket_sink.wire.route import BrokerData, QueueData, TopicRoute, decode_route, encode_route
from rocket_sink.wire.stored import StoredMessage, decode_stored, encode_stored, iter_stored
from tests.wire.feeding import binary_frame, binary_header, drain

ANSWER: Final = Frame(0, {"queueId": "3", "queueOffset": "12", "msgId": "7F"}, b"body", 5, 1)
ROUTE: Final = TopicRoute(
    (QueueData("broker-a", 8, 8),), (BrokerData("c", "broker-a", {0: "10.0.0.1:1", 1: "h:2"}),)
)
STORED: Final = StoredMessage("topic", b"body", properties={"k": "v"}, sys_flag=0)
COMPRESSED: Final = encode_stored(
    StoredMessage("topic", b"", sys_flag=1), stored_body=zlib.compress(b"body" * 20)
)
"""A body over the target's limit, which the target must refuse."""


class Target(NamedTuple):
    """A decoder with samples. `refuses` are the right errors for bytes that are no value."""

    decode: Callable[[bytes], object]
    samples: tuple[bytes, ...]
    refuses: tuple[type[Exception], ...] = (RemoteProtocolError,)


def _frames(data):
    """Decode frames from two pieces. The first byte says where the cut is."""
    reader = FrameReader()
    cut = data[0] % (len(data) + 1) if data else 0
    frames = []
    for piece in (data[:cut], data[cut:]):
        reader.receive_data(piece)
        frames += drain(reader)
    return frames


def _pull(data):
    offsets = {"nextBeginOffset": "1", "minOffset": "0", "maxOffset": "9"}
    return decode_pull_answer(Frame(0, offsets, data))


def _rows(data):
    """Decode by columns. The rows and the refusals must be those of decoding one by one."""
    try:
        expected = stored_batch([("b", each) for each in iter_stored(data)]).to_pylist()
    except RemoteProtocolError:
        expected = None
    try:
        batches = stored_batches([data], "b", lambda offset, _: offset == offset, lambda _: None)
        rows = pa.Table.from_batches(batches, STORED_SCHEMA).to_pylist()
    except RemoteProtocolError:
        assert expected is None
        raise
    assert rows == expected
    return rows


def _send_answer(data):
    """Decode the fields of a header that says "stored"."""
    return decode_send_answer(Frame(0, decode_json_header(data).ext))


def _body(decode):
    return lambda data: decode(Frame(0, None, data))


def _text(decode):
    return lambda data: decode(data.decode("utf-8", "replace"))


class _OnDisk:
    """A decoder that feeds a reader of files."""

    def __init__(self, read):
        self._read, self._folder = read, None

    def __call__(self, data):
        if self._folder is None:
            memory = Path("/dev/shm")
            self._folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        file = Path(self._folder.name, "file")
        file.write_bytes(data)
        return self._read(file)


def _spool_file(file):
    return list(read_batches(str(file), fs.LocalFileSystem()))


_SLOTS: Final = 4
_SLOT_BYTES: Final = 64


def _mapped_table(file):
    """Read another worker's writes, torn or not, and put a value.

    The table must return the value, or be full.
    """
    with file.open("r+b") as opened:
        opened.truncate(_SLOTS * _SLOT_BYTES)
    mapped = MappedFile.shared(file, _SLOTS * _SLOT_BYTES)
    try:
        table = MappedTable(mapped, 0, _SLOTS, _SLOT_BYTES)
        values = {key: table.get(key) for key, _ in table.items()}
        if table.put("broker-a", b"value"):
            assert table.get("broker-a") == b"value"
        return values
    finally:
        mapped.close()


def _spool_sample():
    buffer = io.BytesIO()
    writer = BatchWriter(buffer)
    ctx = RunContext("query", "run", 1, 0, 1, 7, 0, worker="host:1", lane="foreach")
    for acked in (3, 4):
        writer.write(epoch_row({"rows_in": acked, "acked": acked}, ctx, complete=True))
    writer.flush()
    return buffer.getvalue()


def _table_sample():
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "table")
        mapped = MappedFile.shared(file, _SLOTS * _SLOT_BYTES)
        table = MappedTable(mapped, 0, _SLOTS, _SLOT_BYTES)
        table.put("broker-a", b"[1.0, 2.0]")
        table.put("broker-b", b"")
        mapped.close()
        return file.read_bytes()


TARGETS: Final[dict[str, Target]] = {
    "frame": Target(_frames, (encode_frame(ANSWER), binary_frame(ANSWER))),
    "json header": Target(
        decode_json_header,
        (
            encode_json_header(ANSWER), encode_json_header(Frame(1, None, remark="r")),
            b'{"code":0,"extFields":{"a":1},"flag":1,"opaque":2}',
        ),
    ),
    "binary header": Target(
        decode_binary_header,
        (binary_header(ANSWER), binary_header(Frame(1, None, remark="r"))),
    ),
    "send answer": Target(
        _send_answer, (encode_json_header(ANSWER),), (RemoteProtocolError, InvalidAnswerError)
    ),
    "route": Target(decode_route, (encode_route(ROUTE), encode_route(ROUTE, legacy_keys=True))),
    "stored": Target(decode_stored, (encode_stored(STORED), COMPRESSED, encode_stored(STORED) * 2)),
    "stored rows": Target(_rows, (encode_stored(STORED), COMPRESSED, encode_stored(STORED) * 3)),
    "pull": Target(_pull, (encode_stored(STORED),)),
    "query": Target(lambda data: decode_stored(data, bodies=False), (encode_stored(STORED),)),
    "batch": Target(
        lambda data: list(iter_batch(data)), (encode_inner(b"body", "k\x01v\x02", 1) * 2,)
    ),
    **{
        kind.name.lower(): Target(
            partial(inflate, kind=kind, cap=1000),
            tuple(compress(text * 100, kind) for text in (b"a", b"abcdefgh")),
        )
        for kind in CompressionType
    },
    "properties": Target(_text(decode_properties), (b"k\x01v\x02UNIQ_KEY\x017F\x02",)),
    "offset message id": Target(
        _text(decode_offset_message_id), (b"7F00000100002A9F" + b"0" * 16,)
    ),
    "recall handle": Target(_text(decode_recall_handle), (b"djEgdCBiIDEgaWQ=",), (MessageError,)),
    "cluster": Target(
        _body(decode_cluster_info),
        (b'{"brokerAddrTable":{"b":{"brokerAddrs":{0:"h:1"}}},"clusterAddrTable":{"c":["b"]}}',),
    ),
    "topics": Target(_body(decode_topics), (b'{"topicList":["a","b"]}',)),
    "runtime": Target(_body(decode_runtime_info), (b'{"table":{"a":"1"}}',)),
    "attributes": Target(
        _body(decode_topic_attributes), (b'{"attributes":{"message.type":"FIFO"}}',)
    ),
    "transaction check": Target(
        lambda data: decode_transaction_check(
            Frame(39, {"tranStateTableOffset": "1", "commitLogOffset": "2"}, data)
        ),
        (encode_stored(StoredMessage("t", b"b", properties={"PGROUP": "g", "UNIQ_KEY": "1"})),),
    ),
    "pushed reply": Target(
        lambda data: decode_pushed_reply(decode_json_header(data)),
        (encode_json_header(Frame(326, {
            "topic": "t", "bornHost": "h:1", "bornTimestamp": "1", "storeHost": "h:2",
            "storeTimestamp": "2", "sysFlag": "0", "flag": "0",
            "properties": "CORRELATION_ID\x011\x02",
        })),),
    ),
    "spool file": Target(_OnDisk(_spool_file), (_spool_sample(),), (LedgerError,)),
    "shared table": Target(
        _OnDisk(_mapped_table), (_table_sample(), struct.pack("<16I", *range(16)))
    ),
}  # fmt: skip


def feed(target, data):
    """Return the value, or the target's own error.

    Raises:
        Exception: a finding.
    """
    try:
        return target.decode(data)
    except target.refuses as error:
        assert str(error).isprintable(), "an error's text must be fit for a log"
        return error
