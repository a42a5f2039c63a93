"""OpenLineage events of a driver's runs: START, then COMPLETE or FAIL with the rows stored.

OpenLineage's own client (extra `lineage`) sends the events to the address in its environment
variables. Without the client or the variables nothing is sent. A background thread sends, so a
collector that is down costs one warning per event. The data source's processes live for one call
and wait for the collector; there a collector that is down also costs some seconds."""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.forks import ForkLock
from rocket_sink.ledger.path import first_line
from rocket_sink.message_rules import with_namespace
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.process_end import finish_at_end
from rocket_sink.text import counted

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_LOG: Final = log.logger(__name__)
_LAST_S: Final = 10.0
"""Longest wait for a collector at the end of the driver, or of a process for one call of Spark."""
_SILENT_S: Final = 0.5
"""Longest wait of such a process if the process that started the run has waited in vain."""
_lock: Final = ForkLock()
_runs: Final[dict[str, Run]] = {}
emitters: Final[list[_Emitter]] = []


@dataclass
class Run:
    """A started run. Spark pickles a run between the processes that plan and commit a write."""

    job: str
    is_stream: bool
    dataset: tuple[str, str] | None
    fields: list[tuple[str, str]]
    error: str = ""
    is_collector_silent: bool = False
    """Whether `flush` has waited for the collector in vain."""


def is_on() -> bool:
    """Return whether the client is installed, and the environment has its address."""
    is_set = any(name.startswith("OPENLINEAGE_") for name in os.environ)
    return is_set and importlib.util.find_spec("openlineage") is not None


def start(
    options: SinkOptions, run: str, query: str, schema: StructType, *, is_stream: bool = True
) -> Run | None:
    """Send START, once per run. Return the run; None if no events are sent."""
    if run in _runs or not is_on():
        return _runs.get(run)
    topic = with_namespace(options.namespace, options.topic) if options.topic else ""
    dataset = (f"rocketmq://{options.name_servers[0]}", topic) if topic else None
    fields = [(field.name, field.dataType.simpleString()) for field in schema.fields]
    _runs[run] = Run(options.app_id or f"rocket_sink.{query}", is_stream, dataset, fields)
    _emit("START", run, _runs[run], {})
    return _runs[run]


def note_error(run: str, error: str) -> None:
    """Note that a run has failed, so that `end` sends FAIL."""
    if run in _runs:
        _runs[run].error = error


def end(run: str, counts: Mapping[str, int], error: str = "") -> None:
    """Send COMPLETE or FAIL of a run that has started, with the rows that are stored."""
    if (state := _runs.pop(run, None)) is not None:
        state.error = state.error or error
        _emit("FAIL" if state.error else "COMPLETE", run, state, counts)


def end_elsewhere(run: str, state: Run | None, counts: Mapping[str, int], error: str = "") -> None:
    """Send COMPLETE or FAIL (with an `error`) of a run that another process has started, and wait
    for the collector. `state` is the run, from `start`."""
    if state is not None:
        _runs[run] = state
        end(run, counts, error)
        flush(state)


def flush(state: Run | None) -> None:
    """Wait for the collector, because Spark ends this process soon and without notice. Note in the
    run whether the wait was in vain, so that the next process waits less."""
    if state is not None:
        for emitter in emitters:
            emitter.finish(_SILENT_S if state.is_collector_silent else _LAST_S)
            state.is_collector_silent = emitter.events.unfinished_tasks > 0


def _emit(kind: str, run: str, state: Run, counts: Mapping[str, int]) -> None:
    with _lock:
        if not emitters:
            emitters.append(_Emitter())
    emitters[0].events.put((kind, run, state, datetime.now(timezone.utc).isoformat(), counts))


def _event(kind: str, run: str, state: Run, at: str, counts: Mapping[str, int]) -> Any:
    from openlineage.client import event_v2 as ol
    from openlineage.client import facet_v2 as facets

    from rocket_sink import __version__

    outputs = []
    if state.dataset is not None:
        fields = [facets.schema_dataset.SchemaDatasetFacetFields(*field) for field in state.fields]
        rows = counts.get("acked", 0) + counts.get("degraded", 0) if counts else None
        statistics = facets.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            rows
        )
        outputs.append(
            ol.OutputDataset(
                *state.dataset,
                facets={"schema": facets.schema_dataset.SchemaDatasetFacet(fields=fields)},
                outputFacets={"outputStatistics": statistics} if counts else {},
            )
        )
    processing = "STREAMING" if state.is_stream else "BATCH"
    job_type = facets.job_type_job.JobTypeJobFacet(processing, "SPARK", "QUERY")
    namespace = os.environ.get("OPENLINEAGE_NAMESPACE", "default")
    failure = facets.error_message_run.ErrorMessageRunFacet(state.error, "PYTHON")
    return ol.RunEvent(
        eventType=ol.RunState[kind],
        eventTime=at,
        run=ol.Run(run, {"errorMessage": failure} if kind == "FAIL" else {}),
        job=ol.Job(namespace, state.job, {"jobType": job_type}),
        outputs=outputs,
        producer=f"pkg:pypi/rocket-sink@{__version__}",
    )


class _Emitter:
    """The thread that sends events, in their order."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.of_pid = os.getpid()
        threading.Thread(target=self._run, name="rocket-sink-lineage", daemon=True).start()
        finish_at_end(self)

    def finish(self, wait_s: float = _LAST_S) -> None:
        """Wait for the collector to take all events; warn of events that it did not take."""
        until_s = time.monotonic() + wait_s
        while self.events.unfinished_tasks and time.monotonic() < until_s:
            time.sleep(0.02)
        if missing := self.events.unfinished_tasks:
            _LOG.warning(
                "OpenLineage: %s not taken within %g s: look whether the collector runs",
                counted(missing, "event", "is", "are"), wait_s,
            )  # fmt: skip

    def _run(self) -> None:
        client = None
        while True:
            kind, run, *rest = self.events.get()
            try:
                from openlineage.client import OpenLineageClient

                client = client or OpenLineageClient()
                client.emit(_event(kind, run, *rest))
            except Exception as error:  # an error of the client, its transport, or the collector
                _LOG.warning("OpenLineage: no %s of the run %s: %s", kind, run, first_line(error))
            finally:
                self.events.task_done()
