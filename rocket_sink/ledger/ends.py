"""Which epochs somebody has begun to end: small files beside the ledger, one per open epoch.

    <ledger>/_transactions/q-<query>/<epoch>.json

Whoever commits the half messages of an epoch holds the ledger's lock and writes the file before the
first request, and removes it when the ledger says that the epoch is ended. Where the file is there
already, an earlier one may have committed some of them: brokers commit as often as they are asked.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Final

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.lock import ledger_lock
from rocket_sink.ledger.place import Place, path_part
from rocket_sink.ledger.small_file import write_bytes

_LOCK: Final = "transactions.lock"


@contextlib.contextmanager
def ends_lock(place: Place, wait_s: float) -> Iterator[bool]:
    """Be the only one that ends epochs of the ledger; False when another one is, all the time."""
    with ledger_lock(place, wait_s, name=_LOCK) as lock:
        yield lock is not None


class EndMark:
    """The file of one epoch."""

    def __init__(self, place: Place, query_id: str, epoch: int) -> None:
        self._place = place
        self._folder = f"{place.root}/_transactions/q-{path_part(query_id)}"
        self._path = f"{self._folder}/{epoch}.json"

    def begin(self) -> bool:
        """Note durably that the epoch is about to be ended; False: it was noted before.

        Raises:
            LedgerError: the ledger's folder cannot be written.
        """
        filesystem = self._place.filesystem()
        note = json.dumps({"at_ms": time.time_ns() // 1_000_000}).encode()
        try:
            filesystem.create_dir(self._folder, recursive=True)
            return write_bytes(
                filesystem, self._path, note, is_local=self._place.is_local, replace=False
            )
        except OSError as error:
            raise LedgerError(
                f"cannot note at {self._path} that half messages are about to be committed: "
                f"{error}. delivery=transactional needs a ledger folder that the driver can write "
                "to",
                path=self._path,
            ) from error

    def remove(self) -> None:
        """The ledger has the end; a file that stays only costs a question later."""
        with contextlib.suppress(OSError):
            self._place.filesystem().delete_file(self._path)
