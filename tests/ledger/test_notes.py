"""Small files: a reader sees the complete text of one writer, with concurrent writers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import fs

from rocket_sink.ledger.notes import write_bytes

LOCAL = fs.LocalFileSystem()
WRITERS = 8
ROUNDS = 20


@pytest.mark.parametrize("replace", [True, False])
def test_writers_at_once_never_show_half_a_file(tmp_path: Path, replace: bool) -> None:
    start = threading.Barrier(WRITERS)

    def write(writer: int) -> list[tuple[bool, bytes]]:
        seen = []
        for number in range(ROUNDS):
            path = tmp_path / f"{number}.json"
            start.wait(timeout=60)
            mine = write_bytes(
                LOCAL, str(path), bytes([65 + writer]) * 100_000, is_local=True, replace=replace
            )
            seen.append((mine, path.read_bytes()))
        return seen

    with ThreadPoolExecutor(WRITERS) as threads:
        found = list(threads.map(write, range(WRITERS)))
    for number in range(ROUNDS):
        results = [of_writer[number] for of_writer in found]
        assert all(len(data) == 100_000 and len(set(data)) == 1 for _, data in results)
        assert sum(mine for mine, _ in results) == (WRITERS if replace else 1)
        if not replace:
            assert len({data for _, data in results}) == 1
    assert len(list(tmp_path.iterdir())) == ROUNDS
