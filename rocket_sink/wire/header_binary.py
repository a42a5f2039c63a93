"""The ROCKETMQ header: a fixed part, the remark, then name-value pairs (RocketMQSerializable).

    short code, byte language, short version, int opaque, int flag,
    int remark length, remark, int length of all pairs,
    then pairs of: short name length, name, int value length, value        (UTF-8, big-endian)

Java reads an empty text as null (`readStr`), so that a field sent empty is lost, and a signature
over it with it: empty values are left out when written. Codes and versions that do not fit 16 bits
cannot be said (Java cuts them silently).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

from rocket_sink.errors import LocalProtocolError, RemoteProtocolError
from rocket_sink.text import clean
from rocket_sink.wire.command import Frame, Limits

_FIXED: Final = struct.Struct(">hBhiii")
_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")
_INT16_MAX: Final = 2**15 - 1


def encode_binary_header(frame: Frame) -> bytes:
    """The header of `frame` in ROCKETMQ serialisation.

    Raises:
        LocalProtocolError: a number or a text that this form cannot hold.
    """
    for name, number in (("code", frame.code), ("version", frame.version)):
        if not -(2**15) <= number <= _INT16_MAX:
            raise LocalProtocolError(
                f"{name} {number} does not fit the 16 bits of the ROCKETMQ header; use JSON"
            )
    remark = _utf8(frame.remark or "", "remark")
    pairs = encode_pairs(frame.ext) if frame.ext else b""
    fixed = _FIXED.pack(
        frame.code, frame.language, frame.version, frame.opaque, frame.flag, len(remark)
    )
    return b"".join((fixed, remark, _INT.pack(len(pairs)), pairs))


def encode_pairs(ext: Mapping[str, str]) -> bytes:
    """The name-value pairs of a header, without their length; empty values are left out."""
    parts: list[bytes] = []
    for name, value in ext.items():
        if value == "":
            continue
        key = _utf8(name, "a header field's name")
        if not 0 < len(key) <= _INT16_MAX:
            raise LocalProtocolError(
                f"the header field's name {name[:40]!r} is empty or longer than {_INT16_MAX} bytes"
            )
        text = _utf8(value, f"the header field {name!r}")
        parts += (_SHORT.pack(len(key)), key, _INT.pack(len(text)), text)
    return b"".join(parts)


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"{what} is not valid Unicode: {error.reason}") from None


def decode_binary_header(header: bytes, limits: Limits) -> Frame:
    """The command in `header`, without its body.

    Raises:
        RemoteProtocolError: lengths that contradict each other, text that is not UTF-8, doubled or
            missing names, more entries than allowed.
    """
    if len(header) < _FIXED.size + _INT.size:
        raise RemoteProtocolError(f"a binary header of {len(header)} bytes is too short")
    code, language, version, opaque, flag, remark_length = _FIXED.unpack_from(header)
    at = _FIXED.size
    if not 0 <= remark_length <= len(header) - at - _INT.size:
        raise RemoteProtocolError(f"a remark of {remark_length} bytes passes the header's end")
    remark = _text(header, at, remark_length)
    at += remark_length
    (pairs_length,) = _INT.unpack_from(header, at)
    at += _INT.size
    if pairs_length != len(header) - at:
        raise RemoteProtocolError(
            f"the header says {pairs_length} bytes of fields and has {len(header) - at}"
        )
    return Frame(
        code,
        _decode_pairs(header, at, limits) if pairs_length else None,
        None,
        opaque,
        flag,
        clean(remark, limits.remark_chars) if remark else None,
        version,
        language,
        "rocketmq",
    )


def _decode_pairs(header: bytes, at: int, limits: Limits) -> dict[str, str]:
    ext: dict[str, str] = {}
    entries = 0
    while at < len(header):
        name, at = _sized(header, at, _SHORT)
        value, at = _sized(header, at, _INT)
        entries += 1
        if entries > limits.ext_entries:
            raise RemoteProtocolError(f"the header has more than {limits.ext_entries} fields")
        if not name or name in ext:
            raise RemoteProtocolError("a header field's name is empty or occurs twice")
        if value:  # Java reads an empty value as null (C14)
            ext[name] = value
    return ext


def _sized(header: bytes, at: int, size: struct.Struct) -> tuple[str, int]:
    if at + size.size > len(header):
        raise RemoteProtocolError("the header ends inside a field")
    (length,) = size.unpack_from(header, at)
    at += size.size
    if not 0 <= length <= len(header) - at:
        raise RemoteProtocolError(f"a header field of {length} bytes passes the header's end")
    return _text(header, at, length), at + length


def _text(header: bytes, at: int, length: int) -> str:
    try:
        return header[at : at + length].decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"a header text is not UTF-8: {error.reason}") from None
