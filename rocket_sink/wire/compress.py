"""Body compression of single messages, as in Java's client (CompressionType, Compressor).

The forms are zlib streams, LZ4 frames and Zstandard frames. A Java consumer that cannot inflate a
body loses the message and all later messages of the same pull. So this module writes only what
Java's decompressors accept, and refuses what they refuse. Inflation stops at a cap, because 16 KiB
of zlib can hold 16 MiB. lz4 and zstandard come with the extra `compression`."""

from __future__ import annotations

import enum
import importlib
import zlib
from typing import Any, Final

from rocket_sink.errors import ConfigurationError, RemoteProtocolError, RocketSinkError
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.headers import Limits

DEFAULT_LEVEL: Final = -1
"""The level that stands for the default of the compression type (`_DEFAULT_LEVELS`)."""

_LZ4_MAGIC: Final = bytes.fromhex("04224d18")
_LZ4_INDEPENDENT: Final = 0x20
_LZ4_DICTIONARY: Final = 0x01


class CompressionType(enum.Enum):
    """A form of compression; the value is the number in bits 8 to 10 of the system flag."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3

    @classmethod
    def of_option(cls, value: str) -> CompressionType | None:
        """Return the type of a value of `compressType`; None for "none"."""
        return None if value == "none" else cls[value.removesuffix("-all").upper()]

    @classmethod
    def of_sys_flag(cls, sys_flag: int) -> CompressionType:
        """Return the type in a message's system flag; 0 is zlib, from clients before 4.9.4. Raise
        RemoteProtocolError for an unknown number."""
        number = (sys_flag & SysFlag.COMPRESSION_MASK) >> 8
        try:
            return cls(number or 3)
        except ValueError:
            raise RemoteProtocolError(f"{number} is no compression type") from None

    @property
    def sys_flag(self) -> int:
        """The MessageSysFlag bits of a body with this compression, with COMPRESSED."""
        return self.value << 8 | SysFlag.COMPRESSED


_DEFAULT_LEVELS: Final = {CompressionType.ZLIB: 5, CompressionType.ZSTD: 1}
"""Java's client has level 5 for all types (DefaultMQProducer.compressLevel). Level 5 of zstd takes
twice the CPU of level 1 and saves 1 % of the bytes."""


def compress(body: bytes, kind: CompressionType, level: int = DEFAULT_LEVEL) -> bytes:
    """Return the compressed body. Raise ConfigurationError if the library is not installed."""
    if level == DEFAULT_LEVEL:
        level = _DEFAULT_LEVELS.get(kind, level)
    if kind is CompressionType.ZLIB:
        return zlib.compress(body, level)
    if kind is CompressionType.LZ4:
        # Java reads only independent blocks, and the library links blocks by default. Java writes
        # blocks of 4 MiB, without a level (LZ4FrameOutputStream).
        lz4 = _library("lz4.frame")
        size = lz4.BLOCKSIZE_MAX4MB
        return bytes(lz4.compress(body, block_size=size, block_linked=False))
    return bytes(_library("zstandard").ZstdCompressor(level=level).compress(body))


def compress_body(
    body: bytes, kind: CompressionType | None, level: int, over_bytes: int
) -> tuple[bytes, int]:
    """Return the body to send for a single message, and its MessageSysFlag bits. A body stays as it
    is if `kind` is None, if it is shorter than `over_bytes`, or if compression does not shrink it:
    Java sends the longer form, which may exceed the broker's limit. Raise like `compress`."""
    if kind is None or len(body) < over_bytes:
        return body, 0
    smaller = compress(body, kind, level)
    return (smaller, kind.sys_flag) if len(smaller) < len(body) else (body, 0)


def inflate(body: bytes, kind: CompressionType, *, cap: int = Limits.BODY_BYTES) -> bytes:
    """Return the decompressed body.

    Raises:
        RemoteProtocolError: the stream is malformed, cut short, or longer than `cap` bytes.
        ConfigurationError: the library for `kind` is not installed.
    """
    try:
        # The decompressors read one byte more than the cap, to detect longer bodies.
        data, inflater = _INFLATERS[kind](body, cap + 1)
    except RocketSinkError:
        raise
    except Exception as error:  # The libraries have no common class of errors.
        article = "an" if kind is CompressionType.LZ4 else "a"
        raise RemoteProtocolError(
            f"{article} {kind.name} body cannot be inflated: {error}"
        ) from None
    if len(data) > cap:
        raise RemoteProtocolError(f"a body inflates to more than {cap} bytes")
    if inflater.unused_data and kind is not CompressionType.ZLIB:
        # Clients write one frame. Java tries to decode bytes after it (except with zlib), and may
        # fail. So refuse such bodies.
        count = len(inflater.unused_data)
        raise RemoteProtocolError(f"{count} bytes follow the frame of a {kind.name} body")
    if not inflater.eof:
        raise RemoteProtocolError(f"a {kind.name} body is cut short")
    return data


def _inflate_zlib(body: bytes, most: int) -> tuple[bytes, Any]:
    inflater = zlib.decompressobj()
    return inflater.decompress(body, most), inflater


def _inflate_lz4(body: bytes, most: int) -> tuple[bytes, Any]:
    if len(body) > len(_LZ4_MAGIC) and body.startswith(_LZ4_MAGIC):
        flags = body[len(_LZ4_MAGIC)]
        # LZ4FrameInputStream: "Dependent block stream is unsupported", "Reserved0 field must be 0".
        if not flags & _LZ4_INDEPENDENT or flags & _LZ4_DICTIONARY:
            raise RemoteProtocolError(
                "an LZ4 body has linked blocks or a dictionary, which Java cannot inflate either: "
                "its consumers skip this message"
            )
    inflater = _library("lz4.frame").LZ4FrameDecompressor()
    return inflater.decompress(body, max_length=most), inflater


def _inflate_zstd(body: bytes, most: int) -> tuple[bytes, Any]:
    zstandard = _library("zstandard")
    reader = zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=False)
    data = reader.read(most)
    inflater = zstandard.ZstdDecompressor().decompressobj()
    if len(data) < most:
        # The reader does not report a truncated stream, so inflate again, within the cap.
        inflater.decompress(body)
    return data, inflater


_INFLATERS: Final = {
    CompressionType.ZLIB: _inflate_zlib,
    CompressionType.LZ4: _inflate_lz4,
    CompressionType.ZSTD: _inflate_zstd,
}


def _library(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigurationError(
            f"{module.partition('.')[0]} is not installed: pip install 'rocket-sink[compression]', "
            "or use zlib"
        ) from None
