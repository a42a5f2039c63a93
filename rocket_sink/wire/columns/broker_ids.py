"""Brokers' message ids as a column (`wire.ids` has single ones)."""

from __future__ import annotations

import binascii
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.wire.ids import decode_offset_message_id

_FORM: Final = "^([0-9a-fA-F]{32}|[0-9a-fA-F]{56})$"
_DIGITS: Final = 16


def commit_log_offsets(ids: pa.StringArray) -> pa.Int64Array:
    """The last part of each id.

    Raises:
        RemoteProtocolError: one is none.
    """
    is_good = pc.fill_null(pc.match_substring_regex(ids, _FORM), False)
    bad = pc.index(is_good, False).as_py()
    if bad >= 0:
        decode_offset_message_id(str(ids[bad].as_py()))
    digits = "".join(pc.utf8_slice_codeunits(ids, -_DIGITS).to_pylist())
    return pa.array(np.frombuffer(binascii.unhexlify(digits), ">i8").astype(np.int64))
