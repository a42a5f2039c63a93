"""Commands of the remoting protocol (RemotingCommand.java), their headers, and strict JSON.

A command is a request (flag bit 0 clear) or a response (bit 0 set); bit 1 marks a oneway request.

JSON (RemotingSerializable): unknown fields are ignored, as in Java. Header fields (`extFields`)
become text: integers and booleans as Java writes them. Nulls are left out, other values are
refused. NaN, repeated keys, lone surrogates, deep nesting and long integers are refused, too.

ROCKETMQ (RocketMQSerializable): a fixed part, the remark, then name-value pairs.

    short code, byte language, short version, int opaque, int flag,
    int remark length, remark, int length of all pairs,
    then pairs of: short name length, name, int value length, value        (UTF-8, big-endian)

The client writes JSON, which every server reads, and reads both: a broker whose own
`rocketmq.serialize.type` is ROCKETMQ writes its requests in that form."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from rocket_sink.errors import LocalProtocolError, RemoteProtocolError
from rocket_sink.text import clean
from rocket_sink.wire.codes import CURRENT_VERSION, LanguageCode

PREFIX: Final = struct.Struct(">II")
"""The two lengths before the header of a frame."""
RESPONSE_FLAG: Final = 0x1
ONEWAY_FLAG: Final = 0x2

Body = bytes | bytearray | memoryview


class Limits:
    """Limits on received data, for the memory and time of one frame. Data beyond a limit raises
    RemoteProtocolError, unless the limit's text says otherwise."""

    FRAME_BYTES: Final = 16 * 1024 * 1024
    """The whole frame with its length field (Java: com.rocketmq.remoting.frameMaxLength)."""
    HEADER_BYTES: Final = 1024 * 1024
    EXT_ENTRIES: Final = 4096
    JSON_DEPTH: Final = 64
    REMARK_CHARS: Final = 2048
    """Length to which a longer remark is cut."""
    BODY_BYTES: Final = 8 * 1024 * 1024
    """Largest body of a stored message after inflation."""
    ANSWER_BYTES: Final = 64 * 1024 * 1024
    """Memory of the decoded messages in the answer to a query."""
    POLL_BYTES: Final = 16 * 1024 * 1024
    """Memory of the decoded messages of one pull. Messages beyond it are pulled again."""
    ROUTE_BYTES: Final = 1024 * 1024
    ROUTE_QUEUES: Final = 65_536
    ROUTE_BROKERS: Final = 4096


@dataclass(slots=True)
class Frame:
    """A command of the remoting protocol; `ext` has its header fields as text. Only its creator
    changes a frame. The class is not frozen, because that takes three times as long to construct. A
    missing body is None, not empty. `code` and `language` may be unknown numbers."""

    code: int
    ext: Mapping[str, str] | None = None
    body: Body | None = None
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    version: int = CURRENT_VERSION
    language: int = LanguageCode.PYTHON

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)


def response_to(
    request: Frame,
    code: int,
    *,
    remark: str | None = None,
    ext: Mapping[str, str] | None = None,
    body: Body | None = None,
) -> Frame:
    """Return the response to `request`, with the request's opaque id."""
    return Frame(code, ext, body, request.opaque, RESPONSE_FLAG, remark)


INT32_MIN: Final = -(2**31)
INT32_MAX: Final = 2**31 - 1
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

_DECIMAL: Final = re.compile(r"[+-]?[0-9]{1,19}")


def parse_int64(text: object, what: str) -> int:
    """Return a 64-bit integer from its decimal text; a RemoteProtocolError names `what`."""
    if isinstance(text, str) and _DECIMAL.fullmatch(text):
        value = int(text)
        if INT64_MIN <= value <= INT64_MAX:
            return value
    raise RemoteProtocolError(f"{what} is not a 64-bit integer: {clean(text, 40)!r}")


def utf8_bytes(text: str, what: str) -> bytes:
    """Return the text in UTF-8; a LocalProtocolError says that `what` is not valid Unicode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"{what} is not valid Unicode: {error.reason}") from None


def utf8_text(data: bytes | memoryview, what: str) -> str:
    """Return a peer's text; a RemoteProtocolError says that `what` ("a text is") not UTF-8."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"{what} not UTF-8: {error.reason}") from None


def stored_text(data: bytes | memoryview) -> tuple[str, bool]:
    """Return a text of a stored message, and whether it is not UTF-8. Some clients write another
    encoding, and the message stays stored, so replace these bytes by U+FFFD, as Java does."""
    try:
        return str(data, "utf-8"), False
    except UnicodeDecodeError:
        return str(data, "utf-8", "replace"), True


_STRING_OR_BRACKET: Final = re.compile(rb'"(?:[^"\\]|\\.)*\\?(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)
_STRING_OR_NUMERIC_KEY: Final = re.compile(
    r'"(?:[^"\\]|\\.)*\\?(?:"|\Z)|(?<=[{,])\s*(-?\d{1,20})(?=\s*:)', re.DOTALL
)

_MOST_VALUES: Final = 500_000
"""Limit of values in a JSON text. It bounds memory: an empty list takes 3 bytes on the wire, but 64
in memory. The answer with all topics of a large cluster has a tenth as many values."""


class _Refused(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Refused("a key occurs twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"the constant {name}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused("a number is too large")
    return value


def _int64(text: str) -> int:
    if len(text) <= 20 and INT64_MIN <= (value := int(text)) <= INT64_MAX:
        return value
    raise _Refused("an integer has more than 64 bits")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_constant=_refuse_constant,
    parse_float=_finite,
    parse_int=_int64,
)


def load_json(data: bytes, what: str) -> Any:
    """Return the value of one JSON text in UTF-8; `what` names the text in errors. Raise
    RemoteProtocolError for a text that is not UTF-8, not JSON, or beyond a limit of this module."""
    _check_values(data)
    try:
        _check_depth(data)
        text = data.decode().strip(" \t\r\n")
        value, end = _DECODER.raw_decode(text)
        if end != len(text):
            raise _Refused("text after the value")
        if b"\\u" in data:
            _check_surrogates(value)
    except (ValueError, RecursionError) as error:
        # The texts of these errors contain positions, or one byte, but no data of the peer.
        raise RemoteProtocolError(
            f"{what} is not acceptable JSON: {clean(str(error), 200)}"
        ) from None
    return value


def _check_values(data: bytes) -> None:
    if data.count(b",") > _MOST_VALUES:
        raise RemoteProtocolError(f"JSON of more than {_MOST_VALUES} values")


def _check_depth(data: bytes) -> None:
    limit = Limits.JSON_DEPTH
    if data.count(b"{") + data.count(b"[") <= limit:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        token = match.group()[:1]
        if token in b"[{":
            depth += 1
            if depth > limit:
                raise _Refused(f"nested deeper than {limit}")
        elif token in b"]}":
            depth -= 1


def _check_surrogates(value: Any) -> None:
    if isinstance(value, str):
        value.encode()  # raises UnicodeEncodeError, a ValueError
    elif isinstance(value, dict):
        for key, item in value.items():
            key.encode()
            _check_surrogates(item)
    elif isinstance(value, list):
        for item in value:
            _check_surrogates(item)


def quote_numeric_keys(data: bytes) -> bytes:
    """Return fastjson's text as strict JSON: `{0:"a"}` becomes `{"0":"a"}`. Name servers write bare
    integer keys if the request does not ask for strict JSON (by
    GetRouteInfoRequestHeader.acceptStandardJsonOnly, or by a version from 4.9.4 on). The time is
    linear in the input. Raises RemoteProtocolError for text that `load_json` refuses, too."""
    _check_values(data)
    quoted = _STRING_OR_NUMERIC_KEY.sub(
        lambda match: match.group() if match.group(1) is None else f'"{match.group(1)}"',
        utf8_text(data, "the body is"),
    )
    return quoted.encode()


_LANGUAGE_NAMES: Final = {language.value: language.name for language in LanguageCode}
dump_json: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def language_name(language: int) -> str:
    """Return the name of Java's enum; OTHER for an unknown number."""
    return _LANGUAGE_NAMES.get(language, "OTHER")


def encode_json_header(frame: Frame) -> bytes:
    """Return the header of `frame` as UTF-8 JSON. Raise LocalProtocolError for invalid Unicode."""
    fields: dict[str, Any] = {"code": int(frame.code)}
    if frame.ext:
        fields["extFields"] = dict(frame.ext)
    fields["flag"] = frame.flag
    fields["language"] = language_name(frame.language)
    fields["opaque"] = frame.opaque
    if frame.remark is not None:
        fields["remark"] = frame.remark
    fields["serializeTypeCurrentRPC"] = "JSON"
    fields["version"] = frame.version
    return utf8_bytes(dump_json(fields), "a header field holds text that")


_HOLE: Final = -987_654_321
"""The placeholder of a value. `cut_json_header` searches for `"name":-987654321`. No text in a
header contains that, because quotes in texts are escaped."""


def cut_json_header(frame: Frame, holes: Sequence[str]) -> list[str]:
    """Return the pieces of a JSON header without the opaque id and the values of fields `holes`.
    The caller gives `holes` in the header's order; fields that `frame` lacks come at the end."""
    ext: dict[str, Any] = {**(frame.ext or {}), **dict.fromkeys(holes, _HOLE)}
    text, parts, quote = encode_json_header(replace(frame, ext=ext, opaque=_HOLE)).decode(), [], ""
    for name in holes:
        before, _, text = text.partition(f"{dump_json(name)}:{_HOLE}")
        parts.append(f'{quote}{before}{dump_json(name)}:"')
        quote = '"'
    before, _, after = text.partition(f'"opaque":{_HOLE}')
    return [*parts, f'{quote}{before}"opaque":', after]


_LONG: Final = 1024
"""Headers of more bytes consist mostly of message ids (the answer to a batch)."""
_IDS_KEY: Final = b'"msgId":"'
_IDS_ALPHABET: Final = b"0123456789ABCDEFabcdef,"


def decode_json_header(header: bytes) -> Frame:
    """Decode a header to a frame without body. Raise RemoteProtocolError if the header is not JSON
    within the limits."""
    ids = None
    if len(header) > _LONG:
        # Cut out the ids before parsing: a batch of 3,000 messages has 100 kB of them.
        start = header.find(_IDS_KEY) + len(_IDS_KEY)
        end = header.find(b'"', start)
        if len(_IDS_KEY) <= start <= end and not header[start:end].translate(None, _IDS_ALPHABET):
            ids, header = header[start:end].decode("ascii"), header[:start] + header[end:]
    fields = load_json(header, "the header")
    if not isinstance(fields, dict):
        raise RemoteProtocolError("the header is not a JSON object")
    get = fields.get
    remark, ext = get("remark"), _ext(get("extFields"))
    if ids is not None and ext is not None and ext.get("msgId") == "":
        ext["msgId"] = ids
    return Frame(
        _int32(get("code"), "code"),
        ext,
        None,
        _int32(get("opaque"), "opaque"),
        _int32(get("flag", 0), "flag"),
        None if remark is None else _remark(remark),
        _int32(get("version", 0), "version"),
        _language(get("language", "JAVA")),
    )


def _int32(value: Any, name: str) -> int:
    if type(value) is int and INT32_MIN <= value <= INT32_MAX:
        return value
    raise RemoteProtocolError(
        f"the header's {name} is not a 32-bit integer: {clean(repr(value), 40)}"
    )


def _language(name: Any) -> int:
    # A later release may add languages.
    known = LanguageCode.__members__
    return known[name] if isinstance(name, str) and name in known else LanguageCode.OTHER


def _remark(remark: Any) -> str:
    if not isinstance(remark, str):
        raise RemoteProtocolError("the header's remark is not text")
    return clean(remark, Limits.REMARK_CHARS)


def _ext(ext: Any) -> dict[str, str] | None:
    if ext is None:
        return None
    if not isinstance(ext, dict):
        raise RemoteProtocolError("the header's extFields is not a JSON object")
    if len(ext) > Limits.EXT_ENTRIES:
        raise RemoteProtocolError(
            f"the header has {len(ext)} extFields; the limit is {Limits.EXT_ENTRIES}"
        )
    for value in ext.values():
        if type(value) is not str:
            return _texts(ext)
    return ext


def _texts(ext: dict[str, Any]) -> dict[str, str]:
    texts = {}
    for name, value in ext.items():
        if isinstance(value, str):
            texts[name] = value
        elif isinstance(value, bool):
            texts[name] = "true" if value else "false"
        elif isinstance(value, int) and INT64_MIN <= value <= INT64_MAX:
            texts[name] = str(value)
        elif value is not None:
            raise RemoteProtocolError(f"the header field {clean(name, 40)!r} is not text")
    return texts


_FIXED: Final = struct.Struct(">hBhiii")
_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")


def decode_binary_header(header: bytes) -> Frame:
    """Decode a header to a frame without body. Raise RemoteProtocolError for inconsistent lengths,
    text that is not UTF-8, repeated or missing names, or too many entries."""
    if len(header) < _FIXED.size + _INT.size:
        raise RemoteProtocolError(f"a binary header of {len(header)} bytes is too short")
    code, language, version, opaque, flag, remark_length = _FIXED.unpack_from(header)
    at = _FIXED.size
    if not 0 <= remark_length <= len(header) - at - _INT.size:
        raise RemoteProtocolError(f"a remark of {remark_length} bytes passes the header's end")
    remark = utf8_text(header[at : at + remark_length], "a header text is")
    at += remark_length
    (pairs_length,) = _INT.unpack_from(header, at)
    at += _INT.size
    if pairs_length != len(header) - at:
        raise RemoteProtocolError(
            f"the header says {pairs_length} bytes of fields and has {len(header) - at}"
        )
    return Frame(
        code,
        _decode_pairs(header, at) if pairs_length else None,
        None,
        opaque,
        flag,
        clean(remark, Limits.REMARK_CHARS) if remark else None,
        version,
        language,
    )


def _decode_pairs(header: bytes, at: int) -> dict[str, str]:
    ext: dict[str, str] = {}
    entries = 0
    while at < len(header):
        name, at = _sized_text(header, at, _SHORT)
        value, at = _sized_text(header, at, _INT)
        entries += 1
        if entries > Limits.EXT_ENTRIES:
            raise RemoteProtocolError(f"the header has more than {Limits.EXT_ENTRIES} fields")
        if not name or name in ext:
            raise RemoteProtocolError("a header field's name is empty or occurs twice")
        if value:  # Java reads an empty value as null.
            ext[name] = value
    return ext


def _sized_text(header: bytes, at: int, size: struct.Struct) -> tuple[str, int]:
    if at + size.size > len(header):
        raise RemoteProtocolError("the header ends inside a field")
    (length,) = size.unpack_from(header, at)
    at += size.size
    if not 0 <= length <= len(header) - at:
        raise RemoteProtocolError(f"a header field of {length} bytes passes the header's end")
    return utf8_text(header[at : at + length], "a header text is"), at + length
