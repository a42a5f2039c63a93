"""Deleting the brokers' commit-log files between runs.

With `fileReservedTime=0` a broker deletes full files every 10 s even if their messages are not
dispatched to consume queues yet (CommitLog.deleteExpiredFile; ReputMessageService goes on at the
log's new beginning), so acknowledged messages disappear: runs ended with 92,500 of 100,000, and
with 963,880 of 1,000,000. So files are deleted after counting only.
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
QUICK_ROUNDS: Final = {
    "deleteFileBatchMax": "1000",
    "deleteCommitLogFilesInterval": "10",
    "transactionOpMsgMaxSize": "4096",
    "transactionTimeOut": "60000",
}
"""For the brokers' configuration. By default ten files of 64 MB are deleted at a time, 100 ms
apart, so that 8 GB take over a minute. Local clusters note each end of a half message by a message
of its own; 300,000 commits outrun that, brokers ask back for what is committed, and an epoch of a
minute takes twenty. transactionTimeOut: as docs/guarantees/transactional.md says."""
_RESERVED_H: Final = "24"


class LogRoom:
    """Deletes the logs of a cluster's brokers above a size.

    Args:
        most_bytes: of all brokers' data together.
    """

    def __init__(self, cluster: LocalCluster, *, most_bytes: int = _MOST_BYTES) -> None:
        self._cluster = cluster
        self._most_bytes = most_bytes

    def make(self) -> None:
        """Called between runs; takes some 15 s if files are deleted.

        Raises:
            ClusterError: a broker refuses the setting.
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
        """Disk use of the brokers' logs, whose files have holes."""
        used_bytes = 0
        for file in self._cluster.home.glob("**/commitlog/*"):
            try:
                used_bytes += file.stat().st_blocks * 512
            except FileNotFoundError:
                continue
        return used_bytes

    def _reserve(self, hours: str) -> None:
        self._cluster.admin(
            "updateBrokerConfig", "-c", CLUSTER_NAME, "-k", "fileReservedTime", "-v", hours
        )
