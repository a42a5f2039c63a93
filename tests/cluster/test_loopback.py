"""Classes that bind all interfaces are changed to bind loopback, on a class that javac has made."""

import base64
import hashlib
import zipfile
import zlib
from pathlib import Path

import pytest

from rocket_sink.cluster.loopback import _ADDRESS, _ConstantPool, on_loopback, write_loopback_jar

CLASS = zlib.decompress(base64.b85decode(
    "c-n=K$xZ@66h-fY9-u)4WYAUtheg8%7w#}7>Iy>Qf`r7K1>Iq8BDDOKiEbp(#1GI<GBLhtd!feRB{ihpx%XDp^V`D{fJ5"
    "vX2qCOPi9>}(NDjq9RL8>YRnI#^r|S{4qk%i{jtOC_+*Sc9UcD+WIt+s8)2`!H>pZol-I3#+*!Iks&kaNom!>NO#j2Ov23C"
    ">Ok%}XYwJ$*}Z#Hmy95i;^p4az->JelK)R#7SX|qnqS<UaF8XM~{nLOo~v#IT{dVW2TnT>LT5EA@?BIh@MziN%3iq3Sw+Jh"
    "e={*$_5;@E_O^(TlDHu$S$ss7MF*yLS`SCS`{CFsrvBG|%q&`v|~Wm+KvUEBoy0*XODi?A<`J|cQyE)ly8kP>zR#AFMJBqU"
    "O~M?$&$#O-1);PTALib*b=QI^PkKzIk=ootf"
))  # fmt: skip
"""`class B`, by `javac -g:none --release 8`, with methods that return new InetSocketAddress(p), one
with (p.length() + 1), one with ("h", 1), and n + 1234567890123L, which takes two constants."""
CHANGED = "089acb4d9c0db07758ef353d510c89e7628b55b1c37074ba9167c836678e713b"
"""SHA-256 of the changed class. Java has run it: the first two addresses are on 127.0.0.1."""


def test_addresses_that_are_made_of_a_port_are_changed_and_no_others():
    changed = on_loopback(CLASS)
    assert changed is not None and b"io/netty/util/internal/SocketUtils" in changed
    assert hashlib.sha256(changed).hexdigest() == CHANGED
    pool = _ConstantPool(CLASS)
    address, constructor = pool.class_index(_ADDRESS), pool.method(_ADDRESS, "<init>", "(I)V")
    new, call = b"\xbb" + address + b"\x59", b"\xb7" + constructor
    # The longest code that computes a port, with a byte that ends lines.
    assert new + 16 * b"\n" + call not in on_loopback(CLASS + new + 16 * b"\n" + call)
    assert new + 17 * b"\n" + call in on_loopback(CLASS + new + 17 * b"\n" + call)
    assert on_loopback(CLASS.replace(b"(I)V", b"(J)V")) is None
    assert on_loopback(CLASS.replace(b"java/net/Inet", b"java/lang/Ine")) is None


@pytest.mark.parametrize("read_only", [0, 1, 2])
def test_the_jar_is_written_once_beside_the_others(read_only, tmp_path, monkeypatch):
    """A new time of the file would make class data archives useless."""
    cache, home = tmp_path / "cache", tmp_path / "home"
    closed = [cache, home][:read_only]
    write = Path.write_bytes

    def write_bytes(path, data):
        if path.parent in closed:
            raise PermissionError(13, "Permission denied")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    cache.mkdir()
    home.mkdir()
    jars = [cache / f"{name}.jar" for name in ("rocketmq-remoting-5.5.0", "rocketmq-common-5.5.0")]
    for jar in jars:
        with zipfile.ZipFile(jar, "w") as archive:
            archive.writestr("a/B.class", CLASS)
            archive.writestr("a/C.class", CLASS.replace(b"(I)V", b"(J)V"))
            archive.writestr("a/B.txt", CLASS)
    if read_only == 2:
        with pytest.raises(PermissionError):
            write_loopback_jar(jars, home)
        return
    path = write_loopback_jar(jars, home)
    assert path == (home if read_only else cache) / "loopback.jar"
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["a/B.class"]
        assert hashlib.sha256(archive.read("a/B.class")).hexdigest() == CHANGED
    before = path.stat()
    assert write_loopback_jar(jars, home) == path and path.stat().st_ino == before.st_ino
    path.write_bytes(b"damaged")
    assert write_loopback_jar(jars, home).read_bytes() != b"damaged"
    assert sorted(p.name for p in path.parent.iterdir() if p not in jars) == ["loopback.jar"]


TWICE = (5, 6)
SIZES = {1: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4,
         15: 3, 16: 2, 17: 4, 18: 4}  # fmt: skip
"""{tag: bytes after it}, by section 4.4 of the specification of the Java virtual machine; an empty
text has two."""


@pytest.mark.parametrize("tag", SIZES)
def test_each_kind_of_constant_is_passed(tag):
    """Put the constant before those of the class, whose indices the code names."""
    count = int.from_bytes(CLASS[8:10], "big") + 1 + (tag in TWICE)
    own = bytes([tag]) + bytes(SIZES[tag])
    pool = _ConstantPool(CLASS[:8] + count.to_bytes(2, "big") + own + CLASS[10:])
    assert pool.end == _ConstantPool(CLASS).end + len(own) and len(pool) == count
    first = 2 + (tag in TWICE)
    assert pool.constant(tag, own[1:]) == b"\0\1"
    assert {*pool._indices.values()} >= {b"\0\1", first.to_bytes(2, "big")} and len(pool) == count
