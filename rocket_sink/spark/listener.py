"""Folds the spool into the ledger while queries run, and notes the epochs that Spark calls done.

One listener per session, one background thread for all its ledgers. Events come late and those of a
shutdown may never come, so a fold takes everything that is finished and `Ledger.sync` stays the
sure way. The thread is a daemon: at the driver's end what is left waits in the spool.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.forks import ForkLock
from rocket_sink.ledger.fold import fold
from rocket_sink.ledger.place import Place, locate
from rocket_sink.ledger.records import RunContext, confirmed_row
from rocket_sink.ledger.spool import SpoolWriter
from rocket_sink.ledger.spool_files import new_name
from rocket_sink.ledger.table import first_line
from rocket_sink.options import SinkOptions
from rocket_sink.spark.host import active_session, is_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryListener

_ATTRIBUTE: Final = "_rocket_sink_folders"
_LOG: Final = logging.getLogger(__name__)
_LOCK: Final = ForkLock()


def install_fold(options: SinkOptions, session: SparkSession | None = None) -> Folder | None:
    """Fold this ledger whenever a query of the session makes progress; once per session.

    None where there is nothing to fold or nobody to listen: no ledger, no session, Connect.
    """
    session = session or active_session()
    if not options.ledger or not is_classic(session):
        return None
    assert session is not None
    # The context is the one object that all wrappers of a session share.
    with _LOCK:
        folders = session.sparkContext.__dict__.setdefault(_ATTRIBUTE, {})
        key = session._jsparkSession.hashCode()
        folder: Folder | None = folders.get(key)
        if folder is None:
            folder = folders[key] = Folder(session)
            session.streams.addListener(_listener(folder))
    folder.add(locate(options.ledger), options.fold_interval_ms / 1000)
    return folder


class Folder:
    """Folds ledgers in the background, each no more often than its interval."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._intervals: dict[Place, float] = {}
        self._queries: dict[tuple[Place, str], bool] = {}
        self._wake = threading.Condition()
        self._events: list[Any] = []
        self._urgent = False
        self._thread: threading.Thread | None = None

    def add(self, place: Place, interval_s: float) -> None:
        """Fold this ledger too; the shortest interval asked for counts."""
        with self._wake:
            self._intervals[place] = min(interval_s, self._intervals.get(place, interval_s))

    def progressed(self, progress: Any) -> None:
        """A query finished an epoch."""
        self._notify([progress], urgent=False)

    def ended(self) -> None:
        """A query ended: its last rows should not wait."""
        self._notify([], urgent=True)

    def _notify(self, events: list[Any], *, urgent: bool) -> None:
        with self._wake:
            self._events += events
            self._urgent |= urgent
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rocket-sink-fold", daemon=True
                )
                self._thread.start()
            self._wake.notify()

    def _run(self) -> None:
        folded: dict[Place, float] = {}
        while True:
            with self._wake:
                while not (self._events or self._urgent):
                    self._wake.wait()
                events, self._events = self._events, []
                urgent, self._urgent = self._urgent, False
                places = dict(self._intervals)
            for place, interval_s in places.items():
                self._confirm(place, events)
                now = time.monotonic()
                if urgent or now - folded.get(place, -interval_s) >= interval_s:
                    self._fold(place)
                    folded[place] = time.monotonic()

    def _fold(self, place: Place) -> None:
        try:
            fold(self._session, place, wait_s=0)
        except Exception as error:
            # The rows are safe in the spool; the next fold takes them. At a driver's end the
            # session goes away under the fold, which is nobody's trouble.
            if self._session.sparkContext._jsc is not None:
                _LOG.warning("the ledger %s is not folded yet: %s", place.uri, first_line(error))

    def _confirm(self, place: Place, events: list[Any]) -> None:
        """Note which epochs are done, for queries that write to this ledger."""
        for progress in events:
            ctx = RunContext(
                str(progress.id), str(progress.runId), int(progress.batchId), lane="foreach"
            )
            if progress.numInputRows and self._writes_to(place, ctx):
                with contextlib.suppress(Exception):
                    spool = SpoolWriter(place, ctx)
                    row = confirmed_row(
                        ctx,
                        num_input_rows=progress.numInputRows,
                        duration_ms=float(progress.batchDuration),
                    )
                    spool.append(row)
                    spool.seal()

    def _writes_to(self, place: Place, ctx: RunContext) -> bool:
        """Whether tasks of the query have spooled here; other queries make events too."""
        key = (place, ctx.query_id)
        if not self._queries.get(key):
            folder = f"{place.spool}/{new_name(ctx).split('/')[0]}"
            with contextlib.suppress(Exception):
                info = place.filesystem().get_file_info(folder)
                self._queries[key] = info.type.name == "Directory"
        return self._queries.get(key, False)


def _listener(folder: Folder) -> StreamingQueryListener:
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class FoldListener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802 (Spark's names)
            pass

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            folder.progressed(event.progress)

        def onQueryIdle(self, event: Any) -> None:  # noqa: N802
            pass

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            folder.ended()

    return FoldListener()
