"""A run: start the needed brokers, session and peers, then run all cases in turn."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from benchmarks import readers
from benchmarks.figures import Subject
from benchmarks.lanes.cases import (
    COMPRESSED_BYTES,
    DELAYED,
    NOOPS,
    LaneCase,
    lane_cases,
    single_cases,
)
from benchmarks.lanes.runs import LaneRun, SparkBench
from benchmarks.log_room import QUICK_ROUNDS, LogRoom
from benchmarks.peers import cases as peers_cases
from benchmarks.peers import grpc, kafka
from benchmarks.peers.cases import PeerCase
from benchmarks.peers.java import java_launcher
from benchmarks.processes import ProcessRun, Starter, our_launcher
from benchmarks.results import RUNS, Results
from benchmarks.rows import Load, RowFiles
from benchmarks.stored import StoredCount
from rocket_sink.cluster.local import LocalCluster
from rocket_sink.errors import RocketSinkError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Say = Callable[[str], None]
Session = Callable[[tuple[str, ...]], AbstractContextManager["SparkSession"]]
"""Starts Spark, with further packages."""

TOPIC: Final = "benchmark"
"""The topic of the run's own brokers."""
_QUEUES: Final = 4
_SINGLE_SHARE: Final = 0.3
"""The share of the rows that is sent where each row is a message by itself."""
_DELIVERED_AFTER_S: Final = 12.0
"""Longer than the delay of delayed messages."""
_EPOCHS: Final = 40
"""The number of epochs in a case of small epochs."""
_FAILED_IN_A_ROW: Final = 3
T = TypeVar("T")


@dataclass(frozen=True)
class RunningCluster:
    """A cluster that the run did not start, so its CPU and its disks are out of reach."""

    name_server: str

    def cpu_s(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Plan:
    """The cases to measure: fewer `rows` if bodies exceed `most_bytes`; `lanes` may be empty.

    With a `name_server` the cases send to the `topic` of that cluster. Without a `name_server` they
    send to brokers that the run starts."""

    rows: int
    repeat: int
    brokers: int
    bodies: tuple[int, ...]
    orderings: tuple[str, ...]
    keys: tuple[int, ...]
    lanes: tuple[str, ...] = ()
    without_ledger: bool = False
    ceiling: bool = False
    java_batches: bool = False
    kafka: bool = False
    peers: bool = False
    singles: bool = False
    readers: bool = False
    most_bytes: int = 1 << 30
    name_server: str = ""
    topic: str = TOPIC

    @property
    def spark(self) -> bool:
        """Spark is needed."""
        return bool(self.lanes) or self.kafka or self.singles or self.readers

    def load(self, body_bytes: int) -> Load:
        """The rows of one body size."""
        keys = self.keys if any(ordering != "none" for ordering in self.orderings) else ()
        return Load.capped(self.rows, body_bytes, keys, self.most_bytes)

    def against(self, body_bytes: int) -> tuple[str, ...]:
        """Cases that lanes are compared with, besides their twin."""
        return (
            f"ceiling {body_bytes} B",
            peers_cases.java_batches_title(body_bytes),
            kafka.case_name(stream=True, body_bytes=body_bytes),
            kafka.case_name(stream=False, body_bytes=body_bytes),
        )

    def lane_cases(self) -> list[LaneCase]:
        """The lanes' cases, in order."""
        return lane_cases(
            (*self.lanes, *NOOPS) if self.lanes else (), self.orderings, self.keys, self.bodies,
            peers=self.against, without_ledger=self.without_ledger,
        )  # fmt: skip

    def single_cases(self) -> list[LaneCase]:
        """The lanes' cases with rows that share no batch, and with small epochs."""
        return single_cases(_java_beside) if self.singles else []

    def single_load(self, made: LaneCase) -> Load:
        """The rows of such a case."""
        epoch_rows = made.kind.epoch_rows
        if epoch_rows:
            return Load(_EPOCHS * epoch_rows, made.case.body_bytes, (), epoch_rows)
        rows = int(self.rows * _SINGLE_SHARE)
        return Load.capped(rows, made.case.body_bytes, (), self.most_bytes)


def _java_beside(kind: str, body_bytes: int) -> tuple[str, ...]:
    """The Java client's case beside a lane's."""
    return (peers_cases.java_delayed_title(body_bytes),) if kind == DELAYED.title else ()


def run_plan(plan: Plan, results: Results, say: Say, session: Session) -> None:
    """Run every case `plan.repeat` times, in turn, after warm-ups.

    Raises:
        RocketSinkError: the cluster or Spark does not start. Missing peers are in `absent`, failed
            cases in `failed`.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        cluster: LocalCluster | RunningCluster = RunningCluster(plan.name_server)
        room = None
        if not plan.name_server:
            say("starting RocketMQ")
            cluster = stack.enter_context(LocalCluster(plan.brokers, broker_config=QUICK_ROUNDS))
            cluster.create_topic(plan.topic, _QUEUES)
            room = LogRoom(cluster)
        subjects = list(_Subjects(plan, cluster, folder, stack, results, say).make(session))
        results.cases = [subject.case for subject in subjects]
        measure(subjects, plan.repeat, results, say, room)


def measure(
    subjects: Sequence[Subject], repeat: int, results: Results, say: Say, room: LogRoom | None
) -> None:
    """Run all cases in turn, several times, after warm-ups. The run's own brokers have a `room`.

    A case that fails is added to `results.failed` and not run again.

    Raises:
        Exception: of the last of three consecutive failed cases.
    """
    attempts = _Attempts(results, say)
    results.planned[RUNS] = repeat * len(subjects)
    for subject in subjects:
        say(f"{subject.case.name}: warming up")
        if room is not None:
            room.make()
        attempts.of(subject.case.name, subject.warm_up)
    for number in range(repeat):
        for subject in subjects:
            if room is not None:
                room.make()
            figures = attempts.of(subject.case.name, subject.run)
            if figures is not None:
                results.add(RUNS, figures)
                say(f"{figures.case} ({number + 1}/{repeat}): {figures.per_s:,.0f} msg/s")


class _Attempts:
    def __init__(self, results: Results, say: Say) -> None:
        self._failed = results.failed
        self._say = say
        self._in_a_row = 0

    def of(self, name: str, step: Callable[[], T]) -> T | None:
        """The step's value; None when the case fails, or has failed before."""
        if name in self._failed:
            return None
        try:
            value = step()
        except Exception as error:  # errors of Spark and py4j have no common base class with ours
            if _was_stopped(error):
                raise
            self._failed[name] = reason_of(error)
            self._say(f"{name} failed: {self._failed[name]}")
            self._in_a_row += 1
            if self._in_a_row == _FAILED_IN_A_ROW:
                raise
            return None
        self._in_a_row = 0
        return value


def _was_stopped(error: BaseException | None) -> bool:
    """The error is a consequence of a signal."""
    while error is not None:
        if not isinstance(error, Exception):
            return True
        error = error.__context__
    return False


def reason_of(error: Exception) -> str:
    """The error in one line, for `absent`."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    missing = next((line.strip(" :\t") for line in others if line.endswith(": not found")), "")
    return f"{first} ({missing})" if missing else first


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="rocket-sink-benchmark-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Subjects:
    def __init__(
        self, plan: Plan, cluster: LocalCluster | RunningCluster, folder: Path, stack: ExitStack,
        results: Results, say: Say,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._cluster = cluster
        self._folder = folder
        self._stack = stack
        self._absent = results.absent
        self._say = say
        self._launchers: dict[str, Starter] = {peers_cases.OURS: our_launcher()}
        self._count = StoredCount(cluster.name_server, plan.topic)

    def make(self, session: Session) -> Iterator[Subject]:
        """Yield the subjects, first those that need no Spark."""
        self._find_peers()
        for case in self._peer_cases():
            yield self._process(case)
        self._topics = readers.topics(self._plan.rows) if self._plan.readers else []
        for topic in self._topics:
            yield from self._readers(topic)
        if self._plan.spark:
            yield from self._spark_subjects(session)

    def _find_peers(self) -> None:
        plan, cluster = self._plan, self._cluster
        if isinstance(cluster, RunningCluster):
            return
        if plan.peers or plan.java_batches or plan.singles:
            self._try(peers_cases.JAVA, lambda: java_launcher(
                cluster.java, cluster.classpath, self._folder))  # fmt: skip
        if plan.readers:
            self._try(readers.JAVA, lambda: java_launcher(
                cluster.java, cluster.classpath, self._folder, "JavaPull"))  # fmt: skip
        if plan.peers:
            self._try(peers_cases.GRPC, lambda: grpc.GrpcLauncher(
                cluster, self._folder / "proxy", self._say))  # fmt: skip

    def _try(self, who: str, make: Callable[[], Starter]) -> None:
        try:
            self._launchers[who] = make()
        except RocketSinkError as error:
            self._note_absent(who, error)

    def _note_absent(self, who: str, error: Exception) -> None:
        self._absent[who] = reason_of(error)
        self._say(f"{who} is absent: {self._absent[who]}")

    def _peer_cases(self) -> Iterator[PeerCase]:
        plan = self._plan
        for body in plan.bodies:
            if plan.ceiling or plan.peers:
                yield peers_cases.ceiling(body)
                for ordering in plan.orderings:
                    for keys in (0,) if ordering == "none" else plan.keys:
                        yield peers_cases.engine(body, ordering, keys)
                        yield peers_cases.engine(body, ordering, keys, ledger=True)
            if plan.peers:
                yield from peers_cases.peer_cases(body, frozenset(self._launchers))
            elif plan.java_batches and peers_cases.JAVA in self._launchers:
                yield peers_cases.java_batches(body)
            if plan.singles:
                others = frozenset(self._launchers)
                yield from peers_cases.single_cases(body, others, peers=plan.peers)

        if plan.singles and peers_cases.JAVA in self._launchers:
            yield peers_cases.java_delayed(COMPRESSED_BYTES)

    def _process(self, made: PeerCase) -> ProcessRun:
        arguments = {
            "nameServer": self._cluster.name_server,
            "topic": self._plan.topic,
            **made.arguments,
        }
        rows = self._plan.load(made.case.body_bytes).rows
        return ProcessRun(
            made.case, self._launchers[made.who], arguments,
            messages=max(100, int(rows * made.share)), brokers_s=self._cluster.cpu_s,
            count=self._count if made.stores else None,
            delivered_after_s=_DELIVERED_AFTER_S if made.delayed else 0.0,
        )  # fmt: skip

    def _spark_subjects(self, session: Session) -> Iterator[Subject]:
        spark = self._spark(session)
        bench = SparkBench(spark, self._cluster, self._plan.topic, self._folder)
        self._say("writing rows")
        for topic in self._topics:
            yield from readers.spark_subjects(topic, bench)
        files = {
            body: RowFiles(spark, self._plan.load(body), self._folder / f"rows-{body}")
            for body in (self._plan.bodies if self._plan.lanes or self._kafka else ())
        }
        for lane_case in self._plan.lane_cases():
            yield LaneRun(bench, lane_case, files[lane_case.case.body_bytes])
        singles: dict[Load, RowFiles] = {}
        for lane_case in self._plan.single_cases():
            load = self._plan.single_load(lane_case)
            if load not in singles:
                path = self._folder / f"single-rows-{len(singles)}"
                singles[load] = RowFiles(spark, load, path)
            yield LaneRun(bench, lane_case, singles[load])
        if self._kafka is not None:
            for rows in files.values():
                yield kafka.KafkaRun(bench, self._kafka, rows, stream=True)
                yield kafka.KafkaRun(bench, self._kafka, rows, stream=False)

    def _readers(self, topic: readers.Topic) -> Iterator[Subject]:
        """Fill the topic, and yield its readers without Spark."""
        cluster = self._cluster
        assert isinstance(cluster, LocalCluster)
        self._say(f"filling {topic.name}")
        cluster.create_topic(topic.name, _QUEUES)
        readers.fill(topic, our_launcher(), cluster.name_server)
        starters: dict[str, Starter] = {readers.TASKS: readers.task_launcher()}
        if readers.JAVA in self._launchers:
            starters[readers.JAVA] = self._launchers[readers.JAVA]
        yield from readers.process_subjects(topic, starters, cluster.name_server, cluster.cpu_s)

    def _spark(self, session: Session) -> SparkSession:
        """A session; with Spark's Kafka sink and a Kafka broker if available."""
        self._kafka: kafka.KafkaBroker | None = None
        packages: tuple[str, ...] = ()
        if self._plan.kafka:
            import pyspark

            try:
                packages = (kafka.spark_package(pyspark.__version__, self._say),)
                self._kafka = self._stack.enter_context(
                    kafka.KafkaBroker(self._folder / "kafka", self._say)
                )
            except RocketSinkError as error:
                packages = ()
                self._note_absent(kafka.GROUP, error)
        self._say("starting Spark")
        return self._stack.enter_context(session(packages))
