"""Compression types, and inflation that stops."""

from __future__ import annotations

import builtins
import contextlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import ConfigurationError, RemoteProtocolError
from rocket_sink.wire.compress import CompressionType, compress, inflate

KINDS = list(CompressionType)


@pytest.mark.parametrize("kind", KINDS)
@given(body=st.binary(max_size=2000), repeat=st.integers(1, 20))
def test_c33_round_trips(kind: CompressionType, body: bytes, repeat: int):
    data = compress(body * repeat, kind)
    assert inflate(data, kind) == body * repeat
    assert inflate(data, kind, cap=len(body) * repeat) == body * repeat


@pytest.mark.parametrize(
    ("name", "kind"),
    [("zlib", "ZLIB"), (" LZ4 ", "LZ4"), ("Zstd", "ZSTD")],
)
def test_c33_names(name: str, kind: str):
    assert CompressionType.of(name) is CompressionType[kind]
    with pytest.raises(ConfigurationError, match="snappy"):
        CompressionType.of("snappy")


@pytest.mark.parametrize(
    ("flag", "kind"), [(0x1, "ZLIB"), (0x101, "LZ4"), (0x201, "ZSTD"), (0x301, "ZLIB")]
)
def test_c33_flags(flag: int, kind: str):
    assert CompressionType.of_sys_flag(flag) is CompressionType[kind]
    if flag != 0x1:
        assert CompressionType[kind].sys_flag == flag
    with pytest.raises(RemoteProtocolError):
        CompressionType.of_sys_flag(0x401)


@pytest.mark.parametrize("kind", KINDS)
def test_f78_a_bomb_stops_at_the_cap(kind: CompressionType):
    bomb = compress(bytes(32 * 1024 * 1024), kind)
    assert len(bomb) < 200_000
    with pytest.raises(RemoteProtocolError, match="more than 8388608"):
        inflate(bomb, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_broken_streams_are_refused(kind: CompressionType):
    data = compress(bytes(range(256)) * 8, kind)
    for cut in (1, len(data) // 2, len(data)):
        with pytest.raises(RemoteProtocolError):
            inflate(data[:-cut], kind)
    with pytest.raises(RemoteProtocolError):
        inflate(b"\xff" * 40, kind)


@pytest.mark.parametrize("kind", KINDS)
@given(st.binary(max_size=200))
def test_any_bytes(kind: CompressionType, data: bytes):
    with contextlib.suppress(RemoteProtocolError):
        inflate(data, kind, cap=1000)


@pytest.mark.parametrize("kind", KINDS)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255))
def test_mutated_streams(kind: CompressionType, at: int, value: int):
    data = bytearray(compress(b"abcdefgh" * 100, kind))
    data[at % len(data)] = value
    with contextlib.suppress(RemoteProtocolError):
        inflate(bytes(data), kind, cap=1000)


def test_java_reads_trailing_bytes_as_nothing():
    assert inflate(zlib.compress(b"body") + b"more", CompressionType.ZLIB) == b"body"


@pytest.mark.parametrize("kind", [CompressionType.LZ4, CompressionType.ZSTD])
def test_a_missing_library_is_named_with_its_extra(kind: CompressionType, monkeypatch):
    original = builtins.__import__

    def refuse(name, *arguments, **keywords):
        if name.partition(".")[0] in ("lz4", "zstandard"):
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for call in (lambda: compress(b"x", kind), lambda: inflate(b"x", kind)):
        with pytest.raises(ConfigurationError, match=r"rocket-sink\[compression\]"):
            call()
