"""Our bytes equal those that RocketMQ's own Java classes write, fresh in each run.

`golden/Golden.java` prints random cases from a seed. The seed is in the test's name, so that a
failure can be run again (`ROCKET_SINK_GOLDEN_SEED`).
"""

import os
import random
from collections import defaultdict
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from rocket_sink.cluster import DEFAULT_VERSION
from rocket_sink.routing.hashing import java_hash, java_hash_array, java_index
from rocket_sink.rows.stored_rows import stored_batch, stored_batches
from rocket_sink.wire.acl import Credentials, canonical_fields
from rocket_sink.wire.batch import encode_inner, iter_batch
from rocket_sink.wire.codes import mq_version, version_name
from rocket_sink.wire.columns.stored import StoredColumns
from rocket_sink.wire.compress import CompressionType, compress, inflate
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.ids import offset_message_id
from rocket_sink.wire.properties import decode_properties, encode_properties
from rocket_sink.wire.requests import send_message_v2
from rocket_sink.wire.responses import decode_send_answer
from rocket_sink.wire.route import decode_route
from rocket_sink.wire.send_header import SendTemplate
from rocket_sink.wire.stored import decode_stored, encode_stored
from rocket_sink.wire.trace import encode_traces
from tests.decoding import decode_message_id, decode_trace
from tests.java_client import octets, run_java, text

from .feeding import byte_by_byte, whole, with_trailing_bytes

pytestmark = pytest.mark.cluster

run_golden = partial(
    run_java, Path(__file__).parent / "golden" / "Golden.java", version=DEFAULT_VERSION
)
SEED = os.environ.get("ROCKET_SINK_GOLDEN_SEED", "2026")


@pytest.fixture(scope="module", params=[SEED], ids=lambda seed: f"seed {seed}")
def golden(request):
    cases = defaultdict(list)
    for kind, *fields in run_golden(request.param):
        cases[kind].append(fields)
    return cases


def mapping(field):
    if field == "-":
        return None
    pairs = (pair.split("=") for pair in field[1:].split(",") if pair)
    return {text(name): text(value) for name, value in pairs}


def described(fields):
    code, opaque, flag, version, language, remark, ext, body = fields
    return Frame(
        int(code), mapping(ext) or None, octets(body) or None, int(opaque), int(flag),
        text(remark), int(version), int(language),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["frame", "send", "answer"])
@pytest.mark.parametrize("feed", [whole, byte_by_byte, with_trailing_bytes])
def test_frames_of_java_are_read(golden, kind, feed):
    for _, encoded, *fields in golden[kind]:
        (frame,) = feed(octets(encoded))
        frame.ext = frame.ext or None
        assert frame == described(fields)


def test_send_headers_have_javas_fields(golden):
    for _, encoded, *_ in golden["send"]:
        (frame,) = whole(octets(encoded))
        ext = frame.ext
        header = send_message_v2(
            producer_group=ext["a"], topic=ext["b"], default_topic=ext["c"],
            default_topic_queue_nums=int(ext["d"]), queue_id=int(ext["e"]), sys_flag=int(ext["f"]),
            born_ms=int(ext["g"]), flag=int(ext["h"]), properties=ext["i"],
            batch=ext["m"] == "true", broker_name=ext["n"],
        )  # fmt: skip
        assert header.ext == ext


def test_send_answers_are_read(golden):
    for _, encoded, *_ in golden["answer"]:
        (frame,) = whole(octets(encoded))
        answer = decode_send_answer(frame)
        assert str(answer.queue_id) == frame.ext["queueId"]
        assert str(answer.queue_offset) == frame.ext["queueOffset"]


def test_java_reads_our_frames():
    """The other direction: Java describes our frames, also those written from templates."""
    rng = random.Random(11)
    alphabet = 'abc"\\\x01\x02\x1f\x7fé中\u2028😀'
    frames = []
    lines = []
    for number in range(120):
        words = ["".join(rng.choices(alphabet, k=rng.randint(1, 12))) for _ in range(3)]
        body = rng.randbytes(rng.randint(1, 30))
        frame = Frame(310, {"i": words[0], "n": words[1]}, body, number, 2, words[2] or None)
        data = encode_frame(frame)
        if number % 3 == 0:
            template = SendTemplate(
                producer_group=words[0], topic=words[1],
                signer=Credentials("ak", "sk").signer(),
            )  # fmt: skip
            data = template.head(number, 3, 5, words[2], len(body), words[0], body=body) + body
            (frame,) = whole(data)
        frames.append(frame)
        lines.append(f"frame {data.hex()}")
    answers = run_golden("decode", lines="\n".join(lines))
    for frame, fields in zip(frames, answers, strict=True):
        assert described(fields) == frame


def test_java_reads_the_namespace_that_its_own_hook_sets():
    namespaces = ["prod", 'é中"\\']
    lines = []
    for namespace in namespaces:
        template = SendTemplate(
            producer_group="g", topic="t", namespace=namespace,
            signer=Credentials("ak", "sk").signer(),
        )  # fmt: skip
        head = template.head(1, 3, 5, "", 1, "broker-a", body=b"x") + b"x"
        lines += [f"frame {head.hex()}", f"namespace {namespace.encode().hex()}"]
    answers = iter(run_golden("decode", lines="\n".join(lines)))
    for namespace, sent, (hooked,) in zip(namespaces, answers, answers, strict=True):
        ext = mapping(sent[6])
        assert {name: ext[name] for name in ext if name[:2] == "ns"} == mapping(hooked)
        signature = Credentials("ak", "sk").signer().signature(canonical_fields(ext), b"x")
        assert (ext["ns"], ext["Signature"]) == (namespace, signature)


def test_batches(golden):
    for fields, encoded in golden["batch"]:
        data = octets(encoded)
        parts = [part.split(":") for part in fields.split(";")]
        inner = [encode_inner(octets(body), text(p), int(flag)) for flag, body, p in parts]
        assert b"".join(inner) == data
        for message, (flag, body, properties) in zip(iter_batch(data), parts, strict=True):
            assert (message.flag, message.body) == (int(flag), octets(body))
            assert message.properties == decode_properties(text(properties))


def test_properties(golden):
    for properties, encoded in golden["properties"]:
        assert encode_properties(mapping(properties)) == text(encoded)
    for encoded, properties in golden["parse"]:
        assert decode_properties(text(encoded)) == mapping(properties)


def test_message_ids(golden):
    import ipaddress

    for address, port, offset, expected in golden["offset-id"]:
        host = str(ipaddress.ip_address(octets(address)))
        assert offset_message_id(host, int(port), int(offset)) == expected
    previous = None
    for message_id, ip, pid, time_ms, now_ms in golden["unique-id"]:
        decoded = decode_message_id(message_id)
        assert (decoded.ip, decoded.pid) == (octets(ip), int(pid))
        assert decoded.nearest_time_ms(int(now_ms) + 1) == int(time_ms)
        assert previous is None or decoded.counter == (previous + 1) & 0xFFFF
        previous = decoded.counter


def test_signatures(golden):
    for ext, body, secret, expected in golden["signature"]:
        signer = Credentials("unused", text(secret)).signer()
        assert signer.signature(canonical_fields(mapping(ext)), octets(body)) == expected


def test_stored_messages(golden):
    for encoded, *fields in golden["stored"]:
        (message,) = decode_stored(octets(encoded))
        assert [
            message.topic, message.body or None, message.flag, message.queue_id,
            message.queue_offset, message.commit_log_offset, message.born_ms, message.store_ms,
            message.reconsume_times, message.prepared_transaction_offset,
            message.offset_message_id, message.properties,
        ] == [
            text(fields[0]), octets(fields[1]) or None, *map(int, fields[2:10]), fields[10],
            mapping(fields[11]) or {},
        ]  # fmt: skip
        data = bytearray(encode_stored(message))
        data[8:12] = bytes(4)  # Java's encoder leaves the CRC to the store.
        assert len(data) == len(octets(encoded))

    encoded = [octets(each) for each, *_ in golden["stored"]]
    data = b"".join(each for each in encoded if StoredColumns.of(each).regular.all())
    (batch,) = stored_batches([data], "b", lambda offset, _: offset == offset, pytest.fail)
    assert 0 < batch.num_rows < len(encoded)
    singles = [("b", message) for message in decode_stored(data)]
    assert batch.to_pylist() == stored_batch(singles).to_pylist()


def test_compressed_bodies(golden):
    for flag, body, encoded in golden["compressed"]:
        kind = CompressionType.of_sys_flag(int(flag) | 1)
        assert inflate(octets(encoded), kind) == octets(body)


def test_java_inflates_our_bodies():
    bodies = [bytes([n % 251]) * n * 37 + b"end" for n in range(12)]
    lines = [
        f"inflate {kind.name} {compress(body, kind).hex()}"
        for kind in CompressionType
        for body in bodies
    ]
    inflated = run_golden("decode", lines="\n".join(lines))
    assert [octets(field) for (field,) in inflated] == bodies * len(CompressionType)


def test_routes_in_the_legacy_form(golden):
    for fields, order, encoded in golden["route"]:
        route = decode_route(octets(encoded))
        assert route.order_topic_conf == text(order)
        addresses = {broker.name: len(broker.addresses) for broker in route.brokers}
        assert ";".join(
            f"{q.broker_name}:{q.read}:{q.write}:{q.perm}:{addresses[q.broker_name]}"
            for q in route.queues
        ) == fields  # fmt: skip
        for broker in route.brokers:
            assert set(broker.addresses.values()) == {
                f'10.0.0.{number}:10911,{{0:"x",7:' for number in broker.addresses
            }


def test_traces(golden):
    for line, keys in golden["trace"]:
        traces = decode_trace(text(line))
        [(encoded, trace_keys)] = encode_traces(traces)
        assert (encoded, sorted(trace_keys)) == (text(line), text(keys).split(" "))


def test_versions(golden):
    ordinals = {name: int(ordinal) for name, ordinal in golden["version"]}
    for major, minor, patch in ((4, 0, 0), (4, 3, 0), (4, 9, 8), (5, 0, 0), (5, 3, 3), (5, 9, 9)):
        ordinal = ordinals[f"V{major}_{minor}_{patch}"]
        assert mq_version(major, minor, patch) == ordinal
        assert version_name(ordinal) == f"{major}.{minor}.{patch}"
        assert version_name(ordinal - 1) == f"{major}.{minor}.{patch}-SNAPSHOT"


def test_javas_hash(golden):
    keys = [text(key) for key, *_ in golden["hash"]]
    column = java_hash_array(pa.array(keys)).tolist()
    for key, in_column, (_, expected, count, chosen) in zip(
        keys, column, golden["hash"], strict=True
    ):
        assert java_hash(key) == in_column == int(expected)
        assert java_index(java_hash(key), int(count)) == int(chosen)
