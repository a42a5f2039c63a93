"""Body compression as the Java client does it for single messages (CompressionType, Compressor).

zlib streams, LZ4 frames, Zstandard frames. Inflation stops at a cap: a stored body comes from
anybody, and 16 KiB of zlib can hold 16 MiB. lz4 and zstandard are the extra `compression`.
"""

from __future__ import annotations

import enum
import zlib
from typing import Any, Final

from rocket_sink.errors import ConfigurationError, RemoteProtocolError
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.command import DEFAULT_LIMITS

DEFAULT_LEVEL: Final = 5
"""DefaultMQProducer.compressLevel."""
INFLATE_CAP: Final = DEFAULT_LIMITS.body_bytes


class CompressionType(enum.Enum):
    """How a body is compressed; the value is the number in bits 8 to 10 of the system flag."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3

    @classmethod
    def of(cls, name: str) -> CompressionType:
        """By name, whatever case and blanks around it.

        Raises:
            ConfigurationError: no such type.
        """
        try:
            return cls[name.strip().upper()]
        except KeyError:
            raise ConfigurationError(
                f"{name!r} is no compression type; use zlib, lz4 or zstd"
            ) from None

    @classmethod
    def of_sys_flag(cls, sys_flag: int) -> CompressionType:
        """By a message's system flag; 0 means zlib, from the time before there were types.

        Raises:
            RemoteProtocolError: a number without a type.
        """
        number = (sys_flag & SysFlag.COMPRESSION_MASK) >> 8
        try:
            return cls(number or 3)
        except ValueError:
            raise RemoteProtocolError(f"{number} is no compression type") from None

    @property
    def sys_flag(self) -> int:
        """The bits that a message with such a body has, COMPRESSED included."""
        return self.value << 8 | SysFlag.COMPRESSED


def compress(body: bytes, kind: CompressionType, level: int = DEFAULT_LEVEL) -> bytes:
    """The compressed body.

    Raises:
        ConfigurationError: the library for `kind` is not installed.
    """
    if kind is CompressionType.ZLIB:
        return zlib.compress(body, level)
    if kind is CompressionType.LZ4:
        # Java's LZ4FrameOutputStream ignores the level too.
        return bytes(_lz4().compress(body))
    return bytes(_zstd().ZstdCompressor(level=level).compress(body))


def inflate(body: bytes, kind: CompressionType, *, cap: int = INFLATE_CAP) -> bytes:
    """The body before compression.

    Raises:
        RemoteProtocolError: not such a stream, cut short, or more than `cap` bytes.
        ConfigurationError: the library for `kind` is not installed.
    """
    if kind is CompressionType.ZLIB:
        data, complete = _inflate_zlib(body, cap)
    elif kind is CompressionType.LZ4:
        data, complete = _inflate_lz4(body, cap)
    else:
        data, complete = _inflate_zstd(body, cap)
    if len(data) > cap:
        raise RemoteProtocolError(f"a body inflates to more than {cap} bytes")
    if not complete:
        raise RemoteProtocolError(f"a {kind.name} body ends before its stream does")
    return data


# One byte more than the cap is asked for, so that a body of exactly the cap is told from a longer.


def _inflate_zlib(body: bytes, cap: int) -> tuple[bytes, bool]:
    inflater = zlib.decompressobj()
    try:
        return inflater.decompress(body, cap + 1), inflater.eof
    except zlib.error as error:
        raise RemoteProtocolError(f"a ZLIB body cannot be inflated: {error}") from None


def _inflate_lz4(body: bytes, cap: int) -> tuple[bytes, bool]:
    inflater = _lz4().LZ4FrameDecompressor()
    try:
        return inflater.decompress(body, max_length=cap + 1), inflater.eof
    except (RuntimeError, ValueError, EOFError, MemoryError) as error:
        raise RemoteProtocolError(f"an LZ4 body cannot be inflated: {error}") from None


def _inflate_zstd(body: bytes, cap: int) -> tuple[bytes, bool]:
    zstandard = _zstd()
    reader = zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=False)
    try:
        data = reader.read(cap + 1)
        inflater = zstandard.ZstdDecompressor().decompressobj()
        if len(data) <= cap:
            # The reader does not tell a cut stream from a whole one; it is known to be small now.
            inflater.decompress(body)
        return data, inflater.eof
    except (zstandard.ZstdError, MemoryError) as error:
        raise RemoteProtocolError(f"a ZSTD body cannot be inflated: {error}") from None


def _lz4() -> Any:
    try:
        import lz4.frame
    except ImportError:
        raise ConfigurationError(_missing("lz4")) from None
    return lz4.frame


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ConfigurationError(_missing("zstandard")) from None
    return zstandard


def _missing(library: str) -> str:
    return f"{library} is not installed: pip install 'rocket-sink[compression]', or use zlib"
