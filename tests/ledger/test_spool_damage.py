"""Damaged spool files: no mutant of thousands gives a row that was not written.

The judge is the original table: reading a mutant returns equal rows, or raises a typed error.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from rocket_sink.errors import DamagedSpoolError, LedgerError
from rocket_sink.ledger.records import in_flight_rows, replaced
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.ledger.transport import stream
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.transport.stream import _SEAL_SIZE, _state, read_batches

from .values import accounts, context, letter, sends, write_spool

LOCAL = fs.LocalFileSystem()
MUTANTS = 1500


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("original")
    writer = SpoolWriter(str(root), context())
    writer.append(sends(context(), 3), letter(context(), tags="a", keys=[["k1", "k2"]]))
    writer.append(letter(context(), properties=[[("a", "1")]]), accounts(context(), acked=3))
    sealed = writer.seal()
    assert sealed is not None
    return Path(sealed).read_bytes()


def read(path: Path) -> list[pa.RecordBatch]:
    return list(read_batches(str(path), LOCAL))


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return a mutant of the data; sometimes it is equal to the original."""
    changed = bytearray(data)
    at = rng.randrange(len(data))
    length = rng.choice((1, 2, 4, 8, 64, 512))
    match rng.randrange(7):
        case 0:
            changed[at] ^= 1 << rng.randrange(8)
        case 1:
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        case 2:
            changed[at : at + length] = rng.randbytes(length)
        case 3:
            del changed[at : at + length]
        case 4:
            changed[at:at] = rng.randbytes(length)
        case 5:
            other = rng.randrange(len(data))
            changed[at : at + length] = data[other : other + length]
        case 6:
            changed[at : at + length] = bytes(min(length, len(data) - at))
    return bytes(changed)


def test_of_many_mutants_none_gives_other_rows(original, tmp_path):
    path = tmp_path / "mutant.arrow"
    path.write_bytes(original)
    written = read(path)
    ends = Counter[str]()
    for seed in range(MUTANTS):
        rng = random.Random(seed)
        data = mutated(original, rng)
        path.write_bytes(data)
        is_sealed = bool(_state(pa.BufferReader(data)))
        try:
            batches = read(path)
        except LedgerError as error:
            assert str(path) in str(error)
            ends[type(error).__name__] += 1
            continue
        pa.Table.from_batches(batches, LEDGER_SCHEMA).to_pylist()
        if is_sealed:
            assert [b.to_pylist() for b in batches] == [b.to_pylist() for b in written], seed
            ends["equal"] += 1
        else:  # A mutant with a damaged end counts as cut.
            assert all(a.equals(b) for a, b in zip(batches, written, strict=False)), seed
            ends["cut"] += 1
    # A change of bytes that no reader looks at, such as padding, raises no error.
    assert ends["DamagedSpoolError"] > 0.6 * MUTANTS, ends
    assert ends["LedgerError"] == 0, ends


def test_damage_before_the_last_batch_of_a_cut_file_is_no_cut(original, tmp_path):
    *before, last, _ = batches_cut(original)
    path = tmp_path / "killed.arrow"
    path.write_bytes(original)
    written = pa.Table.from_batches(read(path))
    cut = b"".join(before) + last + b"\xff"
    lost = 0
    for at in range(0, len(cut), 61):
        changed = bytearray(cut)
        changed[at] ^= 0x10
        path.write_bytes(changed)
        if at >= len(cut) - len(last):  # A power cut may leave the last batch's blocks unwritten.
            continue
        try:
            batches = read(path)
        except DamagedSpoolError:
            lost += 1
        else:
            assert pa.Table.from_batches(batches).equals(written), at
    assert lost > 0.5 * len(range(0, len(cut) - len(last), 61))


def test_the_last_whole_batch_of_a_cut_file_has_the_bytes_that_the_cut_one_names(
    original, tmp_path
):
    """A power cut may write the blocks of a file in any order."""
    *before, last, _ = batches_cut(original)
    path = tmp_path / "killed.arrow"
    whole = b"".join(before)
    cut = whole + last[: len(last) - 100]
    path.write_bytes(cut)
    written = read(path)
    header = 8 + int.from_bytes(before[-1][4:8], "little")
    for at in range(len(whole) - len(before[-1]) + header, len(whole), 7):
        path.write_bytes(cut[:at] + bytes([cut[at] ^ 0x10]) + cut[at + 1 :])
        with pytest.raises(DamagedSpoolError):
            read(path)
    assert len(written) == len(before) - 1


def test_marks_in_a_body_cost_a_cut_file_one_reading(tmp_path, monkeypatch):
    writer = SpoolWriter(str(tmp_path), context())
    writer.append(sends(context(), 2), letter(context(), b"\xff\xff\xff\xffRS1" * (1 << 16)))
    [path] = (tmp_path / "_spool").rglob("*.open")
    size = path.stat().st_size - 100
    os.truncate(path, size)
    sizes, read_summed = list[int](), stream._Summed.read
    monkeypatch.setattr(
        stream._Summed, "read", lambda self, n: (sizes.append(n), read_summed(self, n))[1]
    )
    assert [batch.num_rows for batch in read(path)] == [2]
    assert sum(sizes) < 1.1 * size


def test_lack_of_memory_is_no_damage(original, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    path = tmp_path / "file.arrow"
    path.write_bytes(original)
    for lacking in ("_ledger_rows", "_Summed.read"):
        with monkeypatch.context() as full:
            full.setattr(f"rocket_sink.ledger.transport.stream.{lacking}", fail)
            with pytest.raises(LedgerError, match="cannot be read: MemoryError") as caught:
                read(path)
        assert not isinstance(caught.value, DamagedSpoolError)


NO_TEXT = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xff")]
)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("kind", pa.array(["sent"]), "kind"), ("kind", pa.array([None], pa.string()), "kind"),
     ("topic", NO_TEXT, "UTF8")],
)  # fmt: skip
def test_values_that_no_task_writes(tmp_path, name, value, says):
    """The checksums are right, because the writer itself had no valid value."""
    path = write_spool(str(tmp_path), context(), replaced(sends(context()), {name: value}))
    with pytest.raises(DamagedSpoolError, match=says):
        read(Path(path or ""))


def batches_cut(data: bytes) -> list[bytes]:
    """Cut the file into its parts: the schema, the batches, the seal."""
    file = pa.BufferReader(data)
    parts, start = [], 0
    while start < len(data) - _SEAL_SIZE:
        pa.ipc.read_message(file)
        parts.append(data[start : file.tell()])
        start = file.tell()
    return [*parts, data[start:]]


@pytest.mark.parametrize(
    "order",
    [[0, 2, 3, 4, 5], [0, 1, 3, 2, 4, 5], [0, 1, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5],
     [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 5]],
)  # fmt: skip
def test_batches_that_are_missing_doubled_or_out_of_place(original, tmp_path, order):
    parts = batches_cut(original)
    assert b"".join(parts) == original
    path = tmp_path / "mixed.arrow"
    path.write_bytes(b"".join(parts[index] for index in order))
    with pytest.raises(DamagedSpoolError, match=str(path)):
        read(path)


def test_slices_are_read_as_they_were_written(tmp_path):
    writer = SpoolWriter(str(tmp_path), context())
    rows = sends(context(), 20)
    letters, *_ = (
        pa.Table.from_batches([letter(context(), keys=[["k"] * n]) for n in range(20)])
        .combine_chunks()
        .to_batches()
    )
    for start in range(0, 20, 7):
        writer.append(rows.slice(start, 5), letters.slice(start, 5))
    batches = read(Path(writer.seal() or ""))
    expected = [b.slice(s, 5) for s in range(0, 20, 7) for b in (rows, letters)]
    assert [b.to_pylist() for b in batches] == [b.to_pylist() for b in expected]


class BrokenStore:
    """A store whose connection breaks while a file is read."""

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name

    def open_input_file(self, name: str) -> contextlib.AbstractContextManager[BrokenStore]:
        return contextlib.nullcontext(self)

    def size(self) -> int:
        return 1000

    def read(self, *_: int) -> bytes:
        raise OSError("connection reset")

    read_at = read


@pytest.mark.parametrize("type_name", ["s3", "local"])
def test_a_storage_that_cannot_be_read_is_no_damage(type_name):
    with pytest.raises(LedgerError, match="connection reset") as caught:
        list(read_batches("bucket/file.arrow", BrokenStore(type_name)))
    assert not isinstance(caught.value, DamagedSpoolError)


def test_a_spool_file_in_a_dead_letters_body_is_no_part_of_the_file(original, tmp_path):
    """The batches behind a cut in such a body are whole, and the rows before it must go in."""
    writer = SpoolWriter(str(tmp_path), context())
    writer.append(sends(context(), 2), letter(context(), original * 2))
    [path] = (tmp_path / "_spool").rglob("*.open")
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(original) + len(original) // 2])
    assert [batch.num_rows for batch in read(path)] == [2]


def test_requests_in_flight_of_a_complete_attempt_are_not_taken_in(tmp_path):
    """Only an attempt that died leaves requests without an answer."""
    ctx = context()
    flight = in_flight_rows([1, 2], ctx, topic="t", message_count=[3, 4], body_bytes=[1, 1])
    for complete, expected in ((True, ["acked"]), (False, ["in_flight", "in_flight", "acked"])):
        account = accounts(ctx, complete=complete, acked=7)
        batches = read(Path(write_spool(str(tmp_path), ctx, flight, sends(ctx, 1), account) or ""))
        outcomes = [value for batch in batches for value in batch["outcome"].to_pylist()]
        assert outcomes == [*expected, None]
