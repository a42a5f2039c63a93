"""Ways for bytes to arrive: every decode case must mean the same in each of them."""

import struct

from rocket_sink.wire.codes import LanguageCode, RequestCode
from rocket_sink.wire.frame import FrameReader, encode_frame
from rocket_sink.wire.headers import Frame


def request(**changes):
    values = {"code": RequestCode.REGISTER_BROKER, "language": LanguageCode.JAVA, "version": 2333}
    return Frame(**(values | changes))


def binary_header(frame):
    """Return the header in ROCKETMQ serialisation, as RocketMQSerializable writes it."""
    pairs = b"".join(
        struct.pack(">h", len(name.encode())) + name.encode()
        + struct.pack(">i", len(value.encode())) + value.encode()
        for name, value in (frame.ext or {}).items()
    )  # fmt: skip
    remark = (frame.remark or "").encode()
    fixed = frame.code, frame.language, frame.version, frame.opaque, frame.flag, len(remark)
    return struct.pack(">hBhiii", *fixed) + remark + struct.pack(">i", len(pairs)) + pairs


def binary_frame(frame):
    header, body = binary_header(frame), frame.body or b""
    lengths = struct.pack(">II", 4 + len(header) + len(body), 1 << 24 | len(header))
    return lengths + header + body


def drain(reader):
    frames = []
    while (frame := reader.next_frame()) is not None:
        frames.append(frame)
    return frames


def whole(data):
    reader = FrameReader()
    reader.receive_data(data)
    return drain(reader)


def byte_by_byte(data):
    reader = FrameReader()
    frames = []
    for at in range(len(data)):
        reader.receive_data(data[at : at + 1])
        frames += drain(reader)
    return frames


def with_trailing_bytes(data):
    """Append the start of another frame, which must neither be lost nor be read into this one."""
    following = encode_frame(Frame(310, opaque=7))
    reader = FrameReader()
    reader.receive_data(memoryview(data + following[:6]))
    frames = drain(reader)
    reader.receive_data(following[6:])
    assert [frame.opaque for frame in drain(reader)] == [7]
    return frames


FEEDS = (whole, byte_by_byte, with_trailing_bytes)
