"""Room for the brokers' logs in a long run: full files go between runs, never during one.

With `fileReservedTime=0` in its configuration a broker deletes a full file of its log in the next
of its rounds, every 10 s, whether or not it has made queues of all that is in it (CommitLog's
deleteExpiredFile does not ask; ReputMessageService goes on at the log's new beginning). A round
that came while it was a little behind took messages that had been acknowledged: runs ended with
92,500 of 100,000, and with 963,880 of 1,000,000. So files are kept, and go when all is counted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from rocket_sink.cluster.conf import CLUSTER_NAME

if TYPE_CHECKING:
    from rocket_sink.cluster.local import LocalCluster

_MOST_BYTES: Final = 8 << 30
_KEPT_BYTES: Final = 1 << 30
_PATIENCE_S: Final = 60.0
"""A round begins every 10 s."""
QUICK_ROUNDS: Final = {"deleteFileBatchMax": "1000", "deleteCommitLogFilesInterval": "10"}
"""For the brokers' configuration: by default a round deletes ten files of 64 MB, 100 ms after each
other, and 8 GB take over a minute."""
_RESERVED_H: Final = "24"


class LogRoom:
    """Deletes the logs of a cluster's brokers when they have become long.

    Args:
        most_bytes: of all brokers' data together; less is left alone.
    """

    def __init__(self, cluster: LocalCluster, *, most_bytes: int = _MOST_BYTES) -> None:
        self._cluster = cluster
        self._most_bytes = most_bytes

    def make(self) -> None:
        """Called between runs; takes some 15 s when there is something to delete.

        Raises:
            ClusterError: a broker does not take the setting.
        """
        if self.taken_bytes() < self._most_bytes:
            return
        kept = min(_KEPT_BYTES, self._most_bytes)
        until_s = time.monotonic() + _PATIENCE_S
        self._reserve("0")
        while self.taken_bytes() > kept and time.monotonic() < until_s:
            time.sleep(0.5)
        self._reserve(_RESERVED_H)

    def taken_bytes(self) -> int:
        """What the brokers' logs take of the disk; their files have holes."""
        taken = 0
        for file in self._cluster.home.glob("**/commitlog/*"):
            try:
                taken += file.stat().st_blocks * 512
            except FileNotFoundError:
                continue
        return taken

    def _reserve(self, hours: str) -> None:
        self._cluster.admin(
            "updateBrokerConfig", "-c", CLUSTER_NAME, "-k", "fileReservedTime", "-v", hours
        )
