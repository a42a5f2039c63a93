"""Copies of RocketMQ's classes that bind loopback instead of all interfaces.

The setting `bindAddress` exists from 5.0 on, and only for the ports that serve clients. In every
version a broker binds its replication port by `new InetSocketAddress(port)`, on all interfaces, and
anybody who reaches the port gets the whole commit log without a password. Before 5.0 all ports are
bound so. No setting changes that: with `duplicationEnable` there is no replication port, but
consumers get no messages.

The copies come first on the class path. Where the original code makes an `InetSocketAddress(port)`,
a copy calls Netty's `SocketUtils.socketAddress("127.0.0.1", port)`. Both expressions have the same
length in bytes, so nothing else in a class moves."""

from __future__ import annotations

import io
import re
import struct
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rocket_sink.cluster.conf import LOOPBACK

_JARS = re.compile(r"rocketmq-(remoting|store)-\d.*\.jar")
_ADDRESS = "java/net/InetSocketAddress"

_UTF8, _CLASS, _STRING, _METHOD, _NAME_AND_TYPE = 1, 7, 8, 10, 12
_SIZES = {3: 5, 4: 5, 5: 9, 6: 9, 7: 3, 8: 3, 9: 5, 10: 5, 11: 5, 12: 5, 15: 4, 16: 3, 17: 5, 18: 5}
"""{tag of a constant: its size in bytes}; a constant with the tag `_UTF8` contains its length."""

_TWO_PLACES = (5, 6)
"""Tags of 64-bit numbers, which take two indices."""

_POOL_START = 10
_NEW, _DUP, _INVOKE_SPECIAL, _INVOKE_STATIC, _LOAD_CONSTANT, _NOP = (
    b"\xbb", b"\x59", b"\xb7", b"\xb8", b"\x13", b"\x00",
)  # fmt: skip


def write_loopback_jar(jars: Sequence[Path], home: Path) -> Path:
    """Write a jar with changed copies of all classes of `jars` that bind all interfaces; return it.
    The jar is put beside the others, or into `home` if the cache is read-only: a JVM uses a class
    data archive (CDS) only with the class path for which it was made, so all clusters should have
    the same class path."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as copies:
        for jar in jars:
            if not _JARS.fullmatch(jar.name):
                continue
            with zipfile.ZipFile(jar) as archive:
                for name in archive.namelist():
                    if name.endswith(".class") and (copy := on_loopback(archive.read(name))):
                        # `ZipInfo` has a fixed date by default, so equal classes give equal bytes.
                        copies.writestr(zipfile.ZipInfo(name), copy)
    try:
        return _write(jars[0].parent, content.getvalue())
    except PermissionError:
        return _write(home, content.getvalue())


def _write(folder: Path, content: bytes) -> Path:
    path = folder / "loopback.jar"
    # Do not write an equal file again: its new time would make CDS archives useless.
    if not path.is_file() or path.read_bytes() != content:
        part = folder / f"loopback-{uuid.uuid4().hex}.part"
        part.write_bytes(content)
        part.replace(path)
    return path


def on_loopback(data: bytes) -> bytes | None:
    """Return the class file changed to bind loopback; None if it binds no wildcard address."""
    if _ADDRESS.encode() not in data:
        return None
    pool = _ConstantPool(data)
    original = len(pool)
    address, constructor = pool.class_index(_ADDRESS), pool.method(_ADDRESS, "<init>", "(I)V")
    if len(pool) > original:
        return None
    host = pool.constant(_STRING, pool.text(LOOPBACK))
    factory = pool.method(
        "io/netty/util/internal/SocketUtils", "socketAddress", f"(Ljava/lang/String;I)L{_ADDRESS};"
    )
    old = re.escape(_NEW + address + _DUP), re.escape(_INVOKE_SPECIAL + constructor)
    # The bytes between the two calls compute the port.
    code = re.sub(
        old[0] + b"(.{1,16}?)" + old[1],
        lambda port: _LOAD_CONSTANT + host + _NOP + port[1] + _INVOKE_STATIC + factory,
        data[pool.end :],
        flags=re.DOTALL,
    )
    return data[: _POOL_START - 2] + pool.to_bytes() + code


class _ConstantPool:
    """The constants of a class file. Methods return an index as its two bytes."""

    def __init__(self, data: bytes) -> None:
        (self._count,) = struct.unpack_from(">H", data, _POOL_START - 2)
        self._indices: dict[bytes, bytes] = {}
        self.end = _POOL_START
        """The offset of the first byte after the constants in `data`."""
        index = 1
        while index < self._count:
            tag = data[self.end]
            if tag == _UTF8:
                size = 3 + struct.unpack_from(">H", data, self.end + 1)[0]
            else:
                size = _SIZES[tag]
            self._indices[data[self.end : self.end + size]] = struct.pack(">H", index)
            self.end += size
            index += 2 if tag in _TWO_PLACES else 1
        self._content = bytearray(data[_POOL_START : self.end])

    def __len__(self) -> int:
        return int(self._count)

    def text(self, value: str) -> bytes:
        content = value.encode()
        return self.constant(_UTF8, struct.pack(">H", len(content)), content)

    def class_index(self, name: str) -> bytes:
        return self.constant(_CLASS, self.text(name))

    def method(self, owner: str, name: str, signature: str) -> bytes:
        kind = self.constant(_NAME_AND_TYPE, self.text(name), self.text(signature))
        return self.constant(_METHOD, self.class_index(owner), kind)

    def constant(self, tag: int, *parts: bytes) -> bytes:
        """Return a constant's index; add the constant if it is missing."""
        raw = bytes([tag]) + b"".join(parts)
        if raw not in self._indices:
            self._indices[raw] = struct.pack(">H", self._count)
            self._content += raw
            self._count += 1
        return self._indices[raw]

    def to_bytes(self) -> bytes:
        """Return the count and all constants in the form of a class file."""
        return struct.pack(">H", self._count) + self._content
