"""The ways to bring the package to executors that lack it (docs/deploy/executors.md).

spark-submit runs `jobs/stream.py` from a driver's host on two workers. Spark's processes there find
neither the repository nor an installed rocket-sink, only the files that the way brings.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyspark
from platformdirs import user_cache_path

from tests.crash import ledger_log
from tests.crash.files import write_rows
from tests.hosts.bed import DISK, Bed
from tests.hosts.standalone.place import CONF, SHARED, SPARK_HOME, Standalone, spark_environ
from tests.java_client import read_with_java
from tests.jvms import delta_package

_MADE = user_cache_path("rocket-sink") / "ship"
"""A wheel and an archive of an environment, made outside of worlds because they need a network."""
_ENVIRONMENT = _MADE / "pyenv"
_ARCHIVE = _MADE / "pyenv.tar.gz"
_OTHERS = str(Path(pyspark.__file__).parents[1])
"""The folder of the dependencies, without rocket-sink: Python reads files for editable installs in
no folder that is added to a path."""
_LANES = {"foreach": (), "datasource": (), "foreachBatch": (), "batch": ("--batch",)}
_FILES, _ROWS = 6, 100
_WORDS = ("--format", "parquet", "--schema", "body STRING", "--select", "body")


@dataclass(frozen=True)
class Way:
    """A way in which executors get the package.

    Attributes:
        python: the interpreter of driver and executors.
        arguments: arguments of spark-submit.
        driver: the driver's interpreter if it differs.
    """

    title: str
    python: str
    arguments: Sequence[str] = ()
    driver: str = ""


_HERE = SHARED / "here"
"""The working folder of spark-submit, which has the link that the page describes."""
_BARE, _ZIP = SHARED / "bare", SHARED / "rocket_sink.zip"
_INSTALLED = str(DISK / "installed" / "bin" / "python")
WAYS = (
    Way("zip, by `--py-files`", f"{_BARE}/bin/python", ("--py-files", str(_ZIP))),
    Way("wheel, installed on every host", _INSTALLED),
    Way("environment of venv-pack, by `--archives`",
        "./environment/bin/python", ("--archives", f"{_ARCHIVE}#environment")),
)  # fmt: skip


def prepare():
    """Make a wheel and an archive of an environment with all dependencies, as the page says.

    Python runs with `-I`: otherwise pip would find packages on PYTHONPATH and install nothing.
    """
    shutil.rmtree(_MADE, ignore_errors=True)
    _MADE.mkdir(parents=True)
    _run(sys.executable, "-I", "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", _MADE, ".")
    _run(sys.executable, "-m", "venv", _ENVIRONMENT)
    pip = (_ENVIRONMENT / "bin" / "python", "-I", "-m", "pip", "install", "-q")
    _run(
        *pip, f"rocket-sink @ {_wheel().as_uri()}", f"pyspark=={pyspark.__version__}", "pandas",
        "venv-pack",
    )  # fmt: skip
    pack = _ENVIRONMENT / "bin" / "venv-pack"
    _run(pack, "-q", "-p", _ENVIRONMENT, "-o", _ARCHIVE, "--compress-level", "1")


def play(say):
    """Play each way and lane. Return a row for each, the first for no way at all."""
    results = []
    with Bed() as bed, closing(Standalone(bed, say, imports="")) as at:
        _bare(_BARE)
        _HERE.mkdir()
        (_HERE / "environment").symlink_to(_ENVIRONMENT)
        shutil.copy(_wheel(), _ZIP)
        for host in (*at.workers, at.drivers[0]):
            _install(host)
        for number, way in enumerate((_NOTHING, *WAYS)):
            say(way.title)
            for lane in _LANES if way in WAYS else ("foreach",):
                results.append(_stream(at, way, lane, number))
                say(f"  {results[-1]}")
    results[0]["broken"] = [] if "No module named 'rocket_sink" in results[0]["error"] else [
        "executors found a package that nobody brought: the other cases say nothing"
    ]  # fmt: skip
    return {f"{row['way']}: {row['lane']}": row for row in results}


_NOTHING = Way("nothing: the driver alone has it", f"{_BARE}/bin/python", driver=sys.executable)


def _stream(at, way, lane, number):
    topic = f"ship-{number}-{lane}"
    folder = SHARED / topic
    with at.admin() as tool:
        tool.create_topic(topic, queues=4)
    bodies = _write(folder / "source")
    conf = {
        **CONF, "spark.driver.host": at.drivers[0].address,
        "spark.driver.bindAddress": at.drivers[0].address,
        # Tasks wait for both executors, so that both hosts get some.
        "spark.cores.max": "6", "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        "spark.task.maxFailures": "2",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }  # fmt: skip
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", at.url]
    command += ["--packages", delta_package()]
    command += way.arguments
    for name, value in conf.items():
        command += ["--conf", f"{name}={value}"]
    words = list(_LANES[lane]) or [
        "--lane", lane, "--checkpoint", str(folder / "checkpoint"), "--trigger", "available-now",
    ]  # fmt: skip
    command += [
        str(Path("jobs/stream.py").resolve()), *_WORDS, "--path", str(folder / "source"), *words,
        "-n", at.name_server, "-t", topic, "-l", str(folder / "ledger"),
        "-O", "sendMsgTimeout=60s", "-O", "connectTimeoutMs=20s",
        # Tasks take some seconds: the first executor would run all quick tasks.
        "-O", "requestMaxMessages=10", "-O", "maxMessagesPerSecond=120", "-O", "rateTasks=6",
    ]  # fmt: skip
    environ = {
        **spark_environ(at.drivers[0]), "PYSPARK_PYTHON": way.python,
        "PYSPARK_DRIVER_PYTHON": way.driver or way.python,
    }  # fmt: skip
    done = subprocess.run(
        [*at.drivers[0].prefix(), "env", "-C", str(_HERE), *command], env=environ,
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    for worker in at.workers:
        # An unpacked environment takes two gigabytes, and disks are in memory.
        shutil.rmtree(worker.disk / "work", ignore_errors=True)
    # spark-submit puts a Python job's standard error into standard output.
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "rror" in line]
    missing = [line for line in lines if "No module named" in line]
    error = (
        (missing or lines[-1:] or [f"exit code {done.returncode}"])[0] if done.returncode else ""
    )
    read = [message.body for message in read_with_java(at.name_server, topic)]
    workers = {
        row["worker"].rpartition(":")[0]
        for row in ledger_log.rows_of(folder / "ledger", "send", ("worker",))
    }
    broken = []
    if sorted(read) != sorted(bodies):
        broken.append(f"{len(bodies)} rows, {len(read)} messages")
    if workers != {host.name for host in at.workers}:
        broken.append(f"sent by {', '.join(sorted(workers)) or 'nobody'}")
    if error:
        broken.append(error)
    return {
        "way": way.title, "lane": lane, "rows": len(bodies), "stored": len(read),
        "hosts": len(workers), "error": error, "broken": broken,
    }  # fmt: skip


def _write(source):
    source.mkdir(parents=True)
    for file in range(_FILES):
        filler = [os.urandom(64) for _ in range(_ROWS)]
        path = source / f"{file}.parquet"
        write_rows(path, [str(file)] * _ROWS, range(_ROWS), file, filler=filler)
    return [f"{file}:{number}".encode() for file in range(_FILES) for number in range(_ROWS)]


def _wheel():
    (wheel,) = _MADE.glob("rocket_sink-*.whl")
    return wheel


def _bare(folder):
    """Make a Python with the dependencies and without rocket-sink."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "others.pth").write_text(f"{_OTHERS}\n")


def _install(host):
    """Make a Python on this host, into which its owner has installed the wheel."""
    home = str(DISK / "installed")
    host.run([sys.executable, "-m", "venv", home], timeout_s=300)
    host.run(
        [_INSTALLED, "-I", "-m", "pip", "install", "-q", "--no-index", "--no-deps", str(_wheel())],
        timeout_s=300,
    )
    code = f"import site; open(site.getsitepackages()[0] + '/others.pth', 'w').write({_OTHERS!r})"
    host.run([_INSTALLED, "-c", code])


def _run(*command):
    subprocess.run([str(word) for word in command], check=True)
