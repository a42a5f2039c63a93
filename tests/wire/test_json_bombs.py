"""JSON that `json` alone would accept, or refuse with another exception (reliability F77)."""

import json
import tracemalloc

import pytest

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.headers import Frame, decode_json_header
from rocket_sink.wire.responses import decode_runtime_info

JSON_BOMBS = [
    pytest.param(b'{"code":1,"opaque":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="depth"),
    pytest.param(b'{"code":1,"opaque":1,"x":' + b'{"a":' * 65 + b"1" + b"}" * 66, id="depth 66"),
    pytest.param(b'{"code":' + b"9" * 5000 + b',"opaque":1}', id="integer of 5000 digits"),
    pytest.param(b'{"code":1,"opaque":1,"x":' + b"9" * 5000 + b"}", id="the same, unknown field"),
    pytest.param(b'{"code":1,"opaque":1,"x":9223372036854775808}', id="integer of 65 bits"),
    pytest.param(b'{"code":4294967297,"opaque":1}', id="code of 33 bits"),
    pytest.param(b'{"code":1.0,"opaque":1}', id="code with a fraction"),
    pytest.param(b'{"code":true,"opaque":1}', id="code true"),
    pytest.param(b'{"code":"%s","opaque":1}' % (b"1" * 999), id="code as text"),
    pytest.param(b'{"code":NaN,"opaque":1}', id="NaN"),
    pytest.param(b'{"code":1,"opaque":1,"x":Infinity}', id="Infinity"),
    pytest.param(b'{"code":1,"opaque":1,"x":1e999}', id="1e999"),
    pytest.param(b'{"code":1,"code":0,"opaque":1}', id="doubled key"),
    pytest.param(
        b'{"code":0,"extFields":{"a":"1","a":"2"},"flag":1,"language":"JAVA","opaque":1,'
        b'"serializeTypeCurrentRPC":"JSON","version":479}',
        id="doubled key in a common header",
    ),
    pytest.param(b'{"code":1,"opaque":1,"remark":"\\ud800"}', id="lone surrogate"),
    pytest.param(b'{"code":1,"opaque":1,"extFields":{"\\udc00":"v"}}', id="lone surrogate name"),
    pytest.param(b'{"code":1,"opaque":1,"remark":"\xff"}', id="not UTF-8"),
    pytest.param(b'{"code":1,"opaque":1} {}', id="two values"),
    pytest.param(b'{"code":1,"opaque":1,"extFields":{"a":{}}}', id="nested field"),
    pytest.param(b'{"code":1,"opaque":1,"extFields":{"a":0.5}}', id="field with a fraction"),
    pytest.param(b'{"code":1,"opaque":1,"extFields":[]}', id="fields as a list"),
    pytest.param(b"[]", id="a list"),
    pytest.param(b"", id="nothing"),
]


@pytest.mark.parametrize("header", JSON_BOMBS)
def test_json_bombs_are_refused(header: bytes):
    with pytest.raises(RemoteProtocolError, match=r"^.{1,300}$"):  # Texts of the peer are cut.
        decode_json_header(header)


def test_values_without_number_are_refused():
    """Otherwise 16 MiB of empty lists or of short names would take half a gigabyte."""
    names = ",".join(f'"{number:x}":{{}}' for number in range(600_000))
    for table in (b"[" + b"[]," * 5_000_000 + b"[]]", b"{" + names.encode() + b"}"):
        body = b'{"table":' + table + b"}"
        tracemalloc.start()
        with pytest.raises(RemoteProtocolError, match="values"):
            decode_runtime_info(Frame(0, {}, body))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10 * len(body)


def test_depth_within_the_limit_and_braces_in_text_pass():
    for extra in (b'{"a":' * 62 + b"1" + b"}" * 62, json.dumps("[{" * 200 + '\\"').encode()):
        header = b'{"code":1,"opaque":1,"x":' + extra + b"}"
        assert decode_json_header(header).code == 1


def test_other_implementations_may_write_numbers_and_booleans_as_such():
    header = b' {"opaque":1,"code":0,"extFields":{"a":5,"b":true,"c":null,"d":"x"}}\n'
    frame = decode_json_header(header)
    assert frame.ext == {"a": "5", "b": "true", "d": "x"}
