"""Compression types, and inflation that stops at a limit."""

import random
import sys
import zlib

import lz4.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import ConfigurationError, RemoteProtocolError
from rocket_sink.wire.compress import CompressionType, compress, compress_body, inflate

KINDS = list(CompressionType)


@pytest.mark.parametrize("kind", KINDS)
@given(body=st.binary(max_size=2000), repeat=st.integers(1, 20))
def test_c33_round_trips(kind, body, repeat):
    data = compress(body * repeat, kind)
    assert inflate(data, kind) == body * repeat
    assert inflate(data, kind, cap=len(body) * repeat) == body * repeat


@pytest.mark.parametrize(
    ("flag", "kind"), [(0x1, "ZLIB"), (0x101, "LZ4"), (0x201, "ZSTD"), (0x301, "ZLIB")]
)
def test_c33_flags(flag, kind):
    assert CompressionType.of_sys_flag(flag) is CompressionType[kind]
    if flag != 0x1:
        assert CompressionType[kind].sys_flag == flag
    with pytest.raises(RemoteProtocolError):
        CompressionType.of_sys_flag(0x401)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_broken_streams_are_refused(kind):
    data = compress(bytes(range(256)) * 8, kind)
    for cut in (1, len(data) // 2, len(data)):
        with pytest.raises(RemoteProtocolError):
            inflate(data[:-cut], kind)
    with pytest.raises(RemoteProtocolError):
        inflate(b"\xff" * 40, kind)


def test_java_reads_trailing_bytes_as_nothing():
    assert inflate(zlib.compress(b"body") + b"more", CompressionType.ZLIB) == b"body"


@pytest.mark.parametrize(
    ("kind", "module"), [(CompressionType.LZ4, "lz4.frame"), (CompressionType.ZSTD, "zstandard")]
)
def test_a_missing_library_is_named_with_its_extra(kind, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    for call in (lambda: compress(b"x", kind), lambda: inflate(b"x", kind)):
        name = module.partition(".")[0]
        with pytest.raises(ConfigurationError, match=rf"^{name} is .*rocket-sink\[compression\]"):
            call()


def test_lz4_blocks_do_not_depend_on_each_other():
    """Java says "Dependent block stream is unsupported"; conformance tests read with Java."""
    for size in (10, 65_536, 65_537, 5 << 20):
        assert compress(bytes(size), CompressionType.LZ4)[4] & 0x20
    linked = bytes(lz4.frame.compress(bytes(65_537), block_linked=True))
    with pytest.raises(RemoteProtocolError, match="linked blocks"):
        inflate(linked, CompressionType.LZ4)


@pytest.mark.parametrize("kind", [CompressionType.LZ4, CompressionType.ZSTD])
def test_nothing_may_follow_a_frame(kind):
    """Java fails on the rest, or appends it if it is a frame: the first is never read alone."""
    frame = compress(b"body", kind)
    for behind in (b"more", frame):
        with pytest.raises(RemoteProtocolError, match="bytes follow"):
            inflate(frame + behind, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_does_not_shrink_stays_as_it_is(kind):
    noise = random.Random(1).randbytes(70_000)
    assert compress_body(noise, kind, 5, 4096) == (noise, 0)
    body, sys_flag = compress_body(noise * 2, kind, 5, 4096)
    # The noise comes twice: only a window of more than 64 KiB sees the repetition.
    assert (sys_flag != 0) == (len(body) < 140_000)
    body, sys_flag = compress_body(bytes(4096), kind, 5, 4096)
    assert (inflate(body, kind), sys_flag) == (bytes(4096), kind.sys_flag)
    assert compress_body(bytes(4095), kind, 5, 4096) == (bytes(4095), 0)
    assert compress_body(bytes(4096), None, 5, 0) == (bytes(4096), 0)
