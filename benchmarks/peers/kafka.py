"""Spark's Kafka sink to a Kafka broker, with the same rows.

The broker is a single KRaft node on loopback with its log in a scratch folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from benchmarks.figures import Case, Figures
from benchmarks.lanes.runs import SparkBench, run_batch, run_stream, spark_figures
from benchmarks.measure import cpu_s
from benchmarks.peers.jars import resolve_modules
from benchmarks.ports import free_port
from benchmarks.rows import RowFiles
from rocket_sink.cluster.guard import Guard
from rocket_sink.cluster.jars import Progress
from rocket_sink.errors import ClusterError
from rocket_sink.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

GROUP: Final = "Kafka"
KAFKA_VERSION: Final = "3.9.1"
TOPIC: Final = "benchmark"
_READY_S: Final = 60.0
_PARTITIONS: Final = 8
_SETTINGS: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={folder}/log
num.partitions={partitions}
offsets.topic.replication.factor=1
auto.create.topics.enable=true
log.segment.bytes=67108864
log.retention.bytes=268435456
log.retention.check.interval.ms=10000
"""


def spark_package(spark_version: str, tell: Progress) -> str:
    """Spark's Kafka sink, for Spark's own --packages.

    Raises:
        ClusterError: it, or a dependency, is not in the registry, so that Spark would not start.
    """
    package = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{spark_version}"
    resolve_modules(f"spark-kafka-{spark_version}", [package], tell=tell)
    return package


class KafkaBroker:
    """A context manager; its process ends with this one even if that is killed.

    Raises ClusterError on entry: Kafka cannot be fetched, or does not start.
    """

    def __init__(self, folder: Path, tell: Progress) -> None:
        self._folder = folder
        self._tell = tell
        self._guard = Guard()
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def __enter__(self) -> KafkaBroker:
        jars = resolve_modules(
            f"kafka-{KAFKA_VERSION}", [f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}"],
            tell=self._tell,
        )  # fmt: skip
        self._folder.mkdir(parents=True)
        port, controller = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        settings = self._folder / "server.properties"
        settings.write_text(
            _SETTINGS.format(
                port=port, controller=controller, folder=self._folder, partitions=_PARTITIONS
            ),
            encoding="utf-8",
        )
        environ = {**os.environ, "CLASSPATH": os.pathsep.join(map(str, jars))}
        java = [str(find_java().executable), "-Xmx512m", "-XX:+UseSerialGC"]
        self._format([*java, "kafka.tools.StorageTool", "format"], settings, environ)
        try:
            with (self._folder / "console.log").open("wb") as console:
                self._process = subprocess.Popen(
                    [*java, "kafka.Kafka", str(settings)], env=environ, stdout=console,
                    stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, **self._guard.join(),
                )  # fmt: skip
            self._wait(port)
        except BaseException:
            self._guard.close()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._guard.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def cpu_s(self) -> float:
        """Return the broker's CPU seconds so far."""
        assert self._process is not None
        return cpu_s(psutil.Process(self._process.pid))

    def _format(self, command: list[str], settings: Path, environ: dict[str, str]) -> None:
        identity = str(uuid.uuid4())[:22]
        done = subprocess.run(
            [*command, "-t", identity, "-c", str(settings)], env=environ, capture_output=True,
            text=True, timeout=_READY_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise ClusterError(f"Kafka's storage tool failed: {(done.stdout + done.stderr)[-800:]}")

    def _wait(self, port: int) -> None:
        deadline_s = time.monotonic() + _READY_S
        while time.monotonic() < deadline_s:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        log = (self._folder / "console.log").read_text(errors="replace")
        raise ClusterError(f"Kafka {KAFKA_VERSION} did not start: {log[-800:]}")


def case_name(*, stream: bool, body_bytes: int) -> str:
    """A case's name."""
    return f"Spark's Kafka sink, {'stream' if stream else 'batch'} {body_bytes} B"


class KafkaRun:
    """A `Subject`: the same rows through Spark's Kafka sink, key and value."""

    def __init__(
        self, bench: SparkBench, kafka: KafkaBroker, rows: RowFiles, *, stream: bool
    ) -> None:
        body = rows.load.body_bytes
        self.case = Case(case_name(stream=stream, body_bytes=body), GROUP, (), body_bytes=body)
        self._bench = bench
        self._kafka = kafka
        self._rows = rows
        self._stream = stream

    def warm_up(self) -> None:
        self._run(warm_up=True)

    def run(self) -> Figures:
        return self._run(warm_up=False)

    def _run(self, *, warm_up: bool) -> Figures:
        options = {"kafka.bootstrap.servers": self._kafka.address, "topic": TOPIC}
        meter = self._bench.meter(self._kafka.cpu_s)
        if self._stream:
            frame = _as_kafka(self._rows.stream(0, warm_up=warm_up))
            writer = frame.writeStream.format("kafka").options(**options)
            measurement = run_stream(meter, writer, self._bench.scratch("checkpoint"))
        else:
            frame = _as_kafka(self._rows.frame(0, warm_up=warm_up))
            write: Any = frame.write.format("kafka").options(**options).save
            measurement = run_batch(meter, write, frame.count())
        return spark_figures(self.case.name, *measurement)


def _as_kafka(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("body AS value", "cast(keys AS binary) AS key")
