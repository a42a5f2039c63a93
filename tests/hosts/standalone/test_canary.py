"""The search for credentials finds them in each encoding."""

import base64
import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.hosts.standalone.canary import search

KEY = "canary0123456789abcdef"


def _found(folder, **controls):
    result = search([folder], {"the key": KEY}, controls=controls, since_s=0)
    return sorted({text.partition(": ")[0] for text in result["broken"]})


@pytest.mark.parametrize("before", ["", "a", "ab", "abc"])
def test_in_base64(before, tmp_path):
    (tmp_path / "log").write_bytes(base64.b64encode(f"{before}{KEY} and more".encode()))
    assert _found(tmp_path) == [f"{tmp_path}/log has the key"]


@pytest.mark.parametrize(
    "data",
    [
        f"x{KEY}y".encode(),
        KEY.encode("utf-16"),
        KEY.encode().hex().encode(),
        KEY.encode().hex().upper().encode(),
        gzip.compress(KEY.encode()),
        pa.Codec("zstd").compress(KEY.encode(), asbytes=True),
    ],
    ids=["plain", "utf-16", "hex", "HEX", "gzip", "zstd"],
)
def test_in_other_forms(data, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "log").write_bytes(data)
    assert _found(tmp_path) == [f"{tmp_path}/deep/log has the key"]


@pytest.mark.parametrize("value", [KEY, KEY.encode(), [KEY], {"remark": f"for {KEY}"}])
def test_in_parquet(value, tmp_path):
    table = pa.table({"column": [None, value]})
    pq.write_table(table, tmp_path / "part-0.parquet", compression="zstd")
    assert _found(tmp_path, part="None") == [f"{tmp_path}/part-0.parquet has the key"]


def test_a_search_that_sees_nothing_is_told(tmp_path):
    (tmp_path / "log").write_text("a topic")
    assert not _found(tmp_path, log="a topic")
    assert _found(tmp_path, log="another") == ["no file of log has 'another'"]
