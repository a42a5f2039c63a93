"""Runs tests on other versions of Python, Spark, Delta and RocketMQ; writes docs/compatibility.md.

    python -m tests.versions                 every case: about an hour and a half on two cores
    python -m tests.versions --only NAME...  these (`--list` shows the names)
    python -m tests.versions --page          only make the page again, from the stored results

Each result is stored in docs/compatibility.json at once: after an interruption, `--missing` runs
the remaining cases. The package index knows the versions, this machine knows its Pythons. If pip
refuses a pair, the refusal is the result. Virtual environments are kept in the user's cache
folder, one for each Python.

Exit code 1: a case failed.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import platformdirs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from rocket_sink.cluster import DEFAULT_VERSION
from rocket_sink.commands.common.output import Bar, line
from tests.hosts import tables
from tools.setup_cfg import project

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
LONGEST_S = 3600

ROCKETMQ = (DEFAULT_VERSION, "5.3.3", "4.9.7")
SPARK_TESTS = (
    "tests/integration/test_lanes.py", "tests/integration/test_found_by_spark.py",
    "tests/integration/test_reader_dlq.py", "tests/ledger/test_append.py",
    "tests/ledger/test_fold.py",
)  # fmt: skip
PYTHON_TESTS = ("-m", "not cluster and not spark and not slow", "tests")
BROKER_TESTS = (
    "tests/producer/conformance/test_real_cluster.py",
    "tests/task/test_groups_live.py",
    "tests/integration/test_accounts.py",
    "tests/integration/test_transactional.py",
)


@dataclass(frozen=True)
class Case:
    """Versions that are tried together; `tests` are pytest's arguments."""

    name: str
    python: str
    pyspark: str
    delta: str = ""
    rocketmq: str = ""
    tests: tuple = ()


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases")
    parser.add_argument("--missing", action="store_true", help="those without a stored result")
    parser.add_argument("--list", action="store_true", help="say which cases there are, and end")
    parser.add_argument("--page", action="store_true", help="make the page again, and end")
    args = parser.parse_args(arguments)
    stored = {result["name"]: result for result in json.loads(RESULTS.read_text())}
    if args.page:
        write_page(stored.values())
        return 0
    by_name = {case.name: case for case in cases()}
    if unknown := sorted(set(args.only or ()) - by_name.keys()):
        parser.error(f"unknown cases: {', '.join(unknown)} (--list shows them)")
    chosen = [by_name[name] for name in args.only or by_name]
    if args.missing:
        chosen = [case for case in chosen if case.name not in stored]
    if args.list:
        for case in chosen:
            line(case.name)
        return 0
    all_held = True
    with Bar("versions", len(chosen)) as bar:
        for number, case in enumerate(chosen, 1):
            result = run(case)
            all_held = all_held and result["held"] is not False
            stored[case.name] = result
            order = [
                stored[name]
                for name in (*by_name, *sorted(stored.keys() - by_name))
                if name in stored
            ]
            RESULTS.write_text(json.dumps(order, indent=1) + "\n")
            write_page(order)
            line(f"{case.name}: {_verdict(result)}")
            bar.advance_to(number)
    return 0 if all_held else 1


def cases():
    """Return the cases: for the newest patch of each Spark what pip accepts with it, and tests with
    every Delta that accepts it; then every Python; then every RocketMQ."""
    here = "{}.{}".format(*sys.version_info)
    pair = (version("pyspark"), version("delta-spark"))
    deltas = [delta for delta in _index("delta-spark") if delta in our_range("delta-spark")]
    accepted = {delta: _accepted_by(delta) for delta in deltas}
    sparks = _newest_patches(_index("pyspark"))
    fitting = _newest_patches(
        [
            spark
            for spark in _index("pyspark")
            if spark in our_range("pyspark")
            and any(spark in specifier for specifier in accepted.values())
        ]
    )
    pairs = _sorted({*sparks, *fitting})
    chosen = [Case(f"pip-spark-{spark}", here, spark) for spark in pairs]
    chosen += [Case(f"there-spark-{spark}", here, spark) for spark in sparks]
    chosen += [
        Case(f"spark-{spark}-delta-{delta}", here, spark, delta, DEFAULT_VERSION, SPARK_TESTS)
        for spark in fitting
        for delta, sparks_of_delta in accepted.items()
        if spark in sparks_of_delta
    ]
    chosen += [
        Case(f"python-{python}", python, *pair, DEFAULT_VERSION, PYTHON_TESTS)
        for python in pythons()
    ]
    chosen += [
        Case(f"rocketmq-{release}", here, *pair, release, BROKER_TESTS) for release in ROCKETMQ
    ]
    return chosen


def _index(package):
    """Return the releases from 4.0 on that the package index has."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = re.search(r"Available versions: (.*)", shown)
    assert versions is not None, shown
    released = [version.strip() for version in versions[1].split(",")]
    return _sorted(version for version in released if Version(version) >= Version("4.0"))


def _sorted(versions):
    return sorted(versions, key=Version)


def our_range(package):
    """Return the versions of a package that setup.cfg accepts: those of the core, else of an extra.

    The metadata of an editable installation may be older than setup.cfg.
    """
    metadata = project()
    texts = chain(metadata["dependencies"], *metadata["optional-dependencies"].values())
    return next(wish.specifier for wish in map(Requirement, texts) if wish.name == package)


def _accepted_by(delta):
    """Return the Sparks that a release of Delta accepts by its own metadata."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        subprocess.run([*command, f"delta-spark=={delta}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            name = next(file for file in archive.namelist() if file.endswith(".dist-info/METADATA"))
            lines = archive.read(name).decode().splitlines()
    wanted = (Requirement(text[15:]) for text in lines if text.startswith("Requires-Dist: "))
    return next(requirement.specifier for requirement in wanted if requirement.name == "pyspark")


def _newest_patches(versions):
    minors = {Version(version).release[:2]: version for version in _sorted(versions)}
    return list(minors.values())


def pythons():
    """Return the Pythons of this machine from 3.10 on, by minor version."""
    found = {}
    places = [Path("/usr/bin"), Path("/usr/local/bin"), Path(sys.executable).resolve().parent]
    places += sorted(Path.home().glob(".pyenv/versions/3.*/bin"))
    for place in places:
        for python in sorted(place.glob("python3.[0-9]*")):
            minor = python.name.removeprefix("python")
            if re.fullmatch(r"3\.\d+", minor) and Version(minor) >= Version("3.10"):
                found.setdefault(minor, python)
    return dict(sorted(found.items(), key=lambda item: Version(item[0])))


def run(case):
    """Install the case's versions and run its tests; if it has none, only ask pip."""
    if case.name.startswith("there-"):
        return _beside(case)
    if not case.tests:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            wanted = (".[spark]", f"pyspark=={case.pyspark}")
            options = ["--dry-run", "--ignore-installed", "--report", str(report)]
            if refusal := _pip(sys.executable, [*options, *wanted]):
                return _result(case, None, 0, refusal)
            installed = json.loads(report.read_text())["install"]
            packages = (package["metadata"] for package in installed)
            versions = {
                canonicalize_name(metadata["name"]): metadata["version"] for metadata in packages
            }
        return _result(replace(case, delta=versions["delta-spark"]), True, 0, "")
    python = _environment(case.python)
    # The tests over Connect and of pipelines have these requirements.
    spark = f"pyspark[connect,pipelines]=={case.pyspark}"
    failed = _pip(python, ["-e", ".[test]", spark, f"delta-spark=={case.delta}"])
    if failed:
        return _result(case, False, 0, failed)
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *case.tests]
    # Spark finds the data source by itself if it is on the path, like an installed wheel.
    environment = {
        **os.environ, "ROCKET_SINK_TEST_ROCKETMQ": case.rocketmq, "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    code, text = _logged(case, command, environment)
    passed = re.search(r"(\d+) passed", text)
    failures = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)))
    note = "" if code == 0 else ", ".join(failures) or f"exit code {code}"
    return _result(case, code == 0, int(passed[1]) if passed else 0, note)


def _beside(case):
    """Install into an environment that has this Spark; compare its files, and run the lanes."""
    folder = _cache() / f"spark-{case.pyspark}"
    python = folder / "bin" / "python"
    subprocess.run([str(pythons()[case.python]), "-m", "venv", "--clear", str(folder)], check=True)
    spark = [f"pyspark=={case.pyspark}", "pyarrow", "pandas"]
    if failed := _pip(python, ["--no-compile", *spark]):
        return _result(case, None, 0, failed)
    before = _sums(folder)
    if failed := _pip(python, ["--no-compile", ".[fast]"]):
        return _result(case, None, 0, failed)
    after = _sums(folder)
    if changed := sorted(str(path) for path in before if after.get(path) != before[path]):
        return _result(case, False, 0, f"pip changes {len(changed)} files: {changed[0]}")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": str(python)}
    with tempfile.TemporaryDirectory() as data:
        command = [str(python), "-m", "tests.versions.lanes", data]
        code, text = _logged(case, command, environ)
    lanes = text.count("rows sent, and in the ledger")
    return _result(case, code == 0, lanes, "" if code == 0 else f"exit code {code}")


def _logged(case, command, environ):
    """Run a command; return its exit code (-1: it did not end in time) and its output, which stays
    in a log."""
    log = _cache() / f"{case.name}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environ, stdout=file, stderr=file, timeout=LONGEST_S
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    return code, log.read_text(errors="replace")


def _sums(folder):
    """Return the hashes of the files of an environment, without byte code."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _cache():
    folder = platformdirs.user_cache_path("rocket-sink") / "versions"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _environment(minor):
    folder = _cache() / f"python-{minor}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([str(pythons()[minor]), "-m", "venv", str(folder)], check=True)
    return python


def _pip(python, arguments):
    """Run `pip install`; return its failure in one line, or an empty text."""
    # -I: with this tree on PYTHONPATH pip would take its egg-info for an installed rocket-sink.
    command = [str(python), "-I", "-m", "pip", "install", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = [text.strip() for text in (done.stdout + done.stderr).splitlines()]
    # The first conflict in pip's output is that of the newest release.
    conflicts = [text for text in lines if " depends on pyspark" in text]
    by_package = {text.partition(" ")[0]: text for text in reversed(conflicts)}
    return "; ".join(by_package.values()) or lines[-1]


def _result(case, held, passed, note):
    """Return the stored form of a result; `held` is None if pip refuses the pair."""
    at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    result = asdict(case) | {"held": held, "passed": passed, "note": note, "at": at}
    del result["tests"]
    return result


def _verdict(result):
    if result["held"] is None:
        return f"pip refuses: {result['note']}"
    if not result["passed"] and result["held"]:
        return "pip takes it"
    if result["held"]:
        return f"held ({result['passed']} tests)"
    return f"failed: {result['note']}"


def write_page(results):
    """Write the tables of the page, one for each kind of cases."""
    parts = dict.fromkeys(("pip", "there", "spark", "python", "rocketmq"), _TABLE)
    for result in results:
        versions = [result[name] for name in ("python", "pyspark", "delta", "rocketmq")]
        cells = [*versions, _verdict(result), result["at"]]
        parts[result["name"].partition("-")[0]] += f"| {' | '.join(cells)} |\n"
    tables.write_parts(PAGE, parts)


_TABLE = """| Python | pyspark | delta-spark | RocketMQ | result | date |
|---|---|---|---|---|---|
"""


if __name__ == "__main__":
    sys.exit(main())
