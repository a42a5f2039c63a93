"""How the tests' JVMs run: one compiler, one collecting thread, classes from an archive (CDS).

    python -m tests.jvms      makes the archives that this machine does not have yet

The optimising compiler pays off over hours, not over the minutes of a test. Half of the CPU time
of a Spark driver's start goes into reading and verifying classes: 22 s without an archive, 13 s
with one. `.ci/install` makes them, which takes less time than one run saves. Tests pass without
archives, too. A JVM ignores an archive that was made by another Java or of other jars.
"""

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from platformdirs import user_cache_path

from rocket_sink.cluster import conf
from rocket_sink.cluster.jars import DEFAULT_VERSION, only_one
from rocket_sink.errors import ClusterError
from rocket_sink.java import find_java

SPARK = "spark"
BROKER = "broker"

_QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def archive(kind):
    """Return the path of the archive of `SPARK` or `BROKER`, which may not exist yet."""
    spec = find_spec("pyspark")
    assert spec and spec.origin
    jars = Path(spec.origin).parent / "jars"
    try:
        java = (find_java().home / "release").read_text()
    except (ClusterError, OSError):
        java = ""
    made_of = f"{java}{jars} {jars.stat().st_mtime_ns} {DEFAULT_VERSION}"
    key = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    return user_cache_path("rocket-sink") / "class-archives" / f"{kind}-{key}.jsa"


def java_options(kind):
    """Return the Java options of a Spark driver or executor, or of a RocketMQ process."""
    path = archive(kind)
    if not path.exists():
        return _QUICK
    # Log lines of the archive on standard output would break the JSON that a command prints.
    return (*_QUICK, f"-XX:SharedArchiveFile={path}", "-Xlog:cds*=off")


SMALL_PLANS = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.databricks.delta.snapshotPartitions": "1",
}
"""Spark settings for plans over a few rows, which adaptive plans would reach with more work."""


def submit_words(*more, conf=None):
    """Return arguments of spark-submit. `more` are further Java options.

    Whole-stage code generation pays off over millions of rows, too.
    """
    # With one compiler the JVM makes its code cache small, and prints a warning on standard output
    # when it is full. Small default heaps collect garbage four times a second, and a full
    # collection follows when classes are loaded.
    sizes = ("-XX:ReservedCodeCacheSize=240m", "-Xmn400m", "-XX:MetaspaceSize=256m")
    options = {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        # Delta's VACUUM lists files by this number of tasks, 10,000 by default.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
        **(conf or {}),
    }
    settings = [word for name, value in options.items() for word in ("--conf", f"{name}={value}")]
    return ["--driver-java-options", " ".join((*java_options(SPARK), *sizes, *more)), *settings]


def submit_args(*more, conf=None):
    """Return PYSPARK_SUBMIT_ARGS for drivers."""
    return shlex.join([*submit_words(*more, conf=conf), "pyspark-shell"])


@functools.cache
def fetch_packages():
    """Let one JVM fetch Delta into Ivy's cache.

    On a new machine several JVMs would write into the cache at once, and the hosts that tests make
    reach no registry.
    """
    with only_one(user_cache_path("rocket-sink") / "packages.lock", print):
        group, name, release = delta_package().split(":")
        if not any(Path.home().glob(f".ivy2*/jars/{group}_{name}-{release}.jar")):
            session = "from rocket_sink.spark.session import build_session as b; b().stop()"
            subprocess.run([sys.executable, "-c", session], check=True, timeout=1200)


def delta_package():
    """Return the Maven coordinate of Delta: a release of Delta has a jar for each Spark version."""
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    builder = configure_spark_with_delta_pip(SparkSession.builder)
    return str(builder._options["spark.jars.packages"])


_SLACK = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(29, 20_000_000, 0, 0, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def calm(command):
    """Return the command with a timer slack of 20 ms on Linux (`prctl(2)`, PR_SET_TIMERSLACK).

    Threads of a broker look for work up to a thousand times a second each. An idle broker takes 7 %
    of a core, and 4 % with the slack. A stored message becomes readable up to 20 ms later.
    """
    if sys.platform != "linux":
        return command
    return [sys.executable, "-S", "-E", "-c", _SLACK, *command]


@contextmanager
def quick_brokers(*more):
    """Start all clusters of this process with quick brokers. `more` are further Java options."""
    command = conf.jvm_command

    def quick(*args, **options):
        *start, main_class = command(*args, **options)
        return calm([*start, *java_options(BROKER), *more, main_class])

    with mock.patch.object(conf, "jvm_command", quick):
        yield


def main():
    """Make the archives that are missing; one that cannot be made does not hold up the other.

    Returns: how many cannot be made.
    """
    failed = 0
    for kind, make in ((BROKER, _make_of_broker), (SPARK, _make_of_spark)):
        path = archive(kind)
        with only_one(path.with_suffix(".lock"), print), tempfile.TemporaryDirectory() as folder:
            archive_made = Path(folder, "made.jsa")
            if not path.exists():
                try:
                    make(archive_made)
                except (OSError, subprocess.SubprocessError) as error:
                    print(f"{path.name} cannot be made: {error}")
                    failed += 1
            if archive_made.exists():
                # A JVM may look for the archive meanwhile, so a complete file appears at once.
                shutil.copyfile(archive_made, path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
                _remove_old(path)
    return failed


def _remove_old(path):
    """Remove all archives of a kind but the newest four: each environment makes one of 200 MB."""
    kind, _, _ = path.stem.partition("-")
    for old in sorted(path.parent.glob(f"{kind}-*.jsa"), key=lambda p: p.stat().st_mtime)[:-4]:
        old.unlink(missing_ok=True)


def _make_of_broker(made):
    """Make the archive of a broker by jcmd, because a broker takes long to end by itself.

    A JRE lacks jcmd; then no archive is made.
    """
    from rocket_sink import Message, Producer
    from rocket_sink.cluster import LocalCluster

    jcmd = find_java().home / "bin" / "jcmd"
    if not jcmd.exists():
        return
    with quick_brokers("-XX:+RecordDynamicDumpInfo"), LocalCluster(brokers=1) as cluster:
        with Producer(**cluster.client_options()) as producer:
            producer.send(Message("some", b"body"))
        pid = str(cluster.brokers[0].pid)
        subprocess.run([jcmd, pid, "VM.cds", "dynamic_dump", made], check=True)


def _make_of_spark(made):
    """Make the archive of Spark at the end of a JVM that ran the statements of tests."""
    subprocess.run(
        [sys.executable, "-m", "tests.integration.typical"],
        cwd=Path(__file__).parents[1], check=True, timeout=1800, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": submit_args(f"-XX:ArchiveClassesAtExit={made}")},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
