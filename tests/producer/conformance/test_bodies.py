"""Bodies of every codec, level and size, read by the official Java client of each generation.

Java's consumer skips a message that it cannot inflate, and the messages behind it in the same
answer, without an error: only Java's own reading shows that none is lost.
"""

import functools
import random
import re
from dataclasses import dataclass
from typing import Any

import lz4.frame
import pytest
import zstandard

from rocket_sink.errors import ProtocolError
from rocket_sink.message import Message
from rocket_sink.producer.producer import Producer
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.compress import CompressionType, compress, inflate
from tests.clusters import make_topic
from tests.java_client import FOLDER, GENERATIONS, octets, read_with_java, run_java

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

TOPIC = "bodies"
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB, 4 * MIB - 1, 4 * MIB)
LEVELS = range(10)
CODECS = ("zlib", "lz4", "zstd")


@functools.cache
def words(size):
    """Return a text that shrinks to about a third, with repetitions that are far apart."""
    rng = random.Random(size)
    some = [rng.randbytes(rng.randint(2, 9)).hex().encode() for _ in range(2000)]
    return b" ".join(rng.choices(some, k=size // 4 + 1))[:size]


@functools.cache
def noise(size):
    """Return bytes that no codec shrinks."""
    return random.Random(size).randbytes(size)


@dataclass(frozen=True)
class Case:
    codec: str
    level: int
    make: Any
    size: int

    def __str__(self):
        return f"{self.codec}-{self.level}-{self.make.__name__}-{self.size}"


CASES = [
    *(Case(codec, 5, make, size) for codec in CODECS for make in (words, noise) for size in SIZES),
    *(Case(codec, level, words, 200_000) for codec in CODECS for level in LEVELS),
    # The body is over the brokers' limit before compression: two blocks of LZ4.
    *(Case(codec, 5, words, 4 * MIB + 1) for codec in CODECS),
]


@pytest.fixture(scope="module")
def sent(real):
    """Send all cases, between small messages that a consumer would lose if it skipped a case."""
    make_topic(real, TOPIC)
    for codec in CODECS:
        for level in LEVELS:
            with Producer(
                nameServer=real.name_server, compressType=codec, compressLevel=level,
                maxMessageSize="8MiB", sendMsgTimeout="60s",
            ) as producer:  # fmt: skip
                for case in CASES:
                    if (case.codec, case.level) == (codec, level):
                        body = case.make(case.size)
                        producer.send(Message(TOPIC, body, keys=[str(case)]))
                        producer.send(Message(TOPIC, b"small", keys=[f"after-{case}"]))
    yield real


@pytest.mark.parametrize("version", GENERATIONS)
def test_java_reads_every_body(sent, version):
    messages = {message.keys: message for message in read_with_java(sent, TOPIC, version)}
    names = [str(case) for case in CASES]
    assert set(messages) == {*names, *(f"after-{name}" for name in names)}
    for case in CASES:
        message = messages[str(case)]
        assert message.has_body(case.make(case.size)), str(case)
        assert message.body_length == case.size
        shrinks = case.make is words and not (case.codec == "zlib" and case.level == 0)
        # 5.x clears COMPRESSED when it has inflated a body, and keeps the type.
        assert bool(message.sys_flag & SysFlag.COMPRESSION_MASK) == shrinks, str(case)


def linked(body):
    return bytes(lz4.frame.compress(body, block_linked=True))


def streams():
    """Return named streams, some of which Java refuses."""
    body = words(100_000)
    cases = []
    for kind in CompressionType:
        stream = compress(body, kind)
        cases += [
            ("whole", kind, stream),
            ("cut", kind, stream[:-3]),
            ("cut early", kind, stream[: len(stream) // 2]),
            ("bytes behind", kind, stream + b"behind"),
            ("no stream", kind, b"no stream at all"),
        ]
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(body)
    independent = {"block_linked": False, "content_checksum": True, "block_checksum": True}
    summed = bytes(lz4.frame.compress(body, **independent))
    return [
        *cases,
        ("linked", CompressionType.LZ4, linked(body)),
        ("linked in one block", CompressionType.LZ4, one_linked_block()),
        ("with checksums", CompressionType.LZ4, summed),
        ("wrong checksum", CompressionType.LZ4, summed[:-1] + bytes([summed[-1] ^ 1])),
        ("with checksum", CompressionType.ZSTD, checked),
        ("wrong checksum", CompressionType.ZSTD, checked[:-1] + bytes([checked[-1] ^ 1])),
    ]


def one_linked_block():
    """Return a stream with a linked block; the library links none in a frame of a single block."""
    with lz4.frame.LZ4FrameCompressor(block_linked=True) as compressor:
        return bytes(compressor.begin() + compressor.compress(b"body" * 9) + compressor.flush())


@pytest.mark.parametrize("version", GENERATIONS)
def test_we_refuse_what_java_refuses(version):
    cases = streams()
    lines = "".join(f"{kind.name} {data.hex()}\n" for _, kind, data in cases)
    answers = run_java(FOLDER / "Inflate.java", version=version, lines=lines)
    refused = set()
    for (name, kind, data), (answer, body) in zip(cases, answers, strict=True):
        try:
            inflated = inflate(data, kind)
        except ProtocolError as error:
            assert answer == "refused", f"{kind} {name}: {error}"
            refused.add(f"{kind.name} {name}")
        else:
            assert (answer, octets(body)) == ("inflated", inflated), f"{kind} {name}"
    assert {"LZ4 linked", "LZ4 linked in one block", "ZSTD bytes behind"} <= refused
    assert not [name for name in refused if re.search("whole|with checksum", name)]
