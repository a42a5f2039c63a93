"""Build a release from a clean clone, check it, and print how it is uploaded.

    python -m tools.release --check    checks all, and keeps nothing
    python -m tools.release            puts the artefacts into dist/, ready for an upload

Two Pythons build the last commit, in environments of their own, with `SOURCE_DATE_EPOCH` of the
commit: both wheels and both source distributions must have the same bytes. On a machine with one
Python this Python builds twice, and the command fails at its end. Then: `twine check --strict`, the
wheel's files against git's, links of the registry's page, the bill of materials against CycloneDX's
schema, and a first message from an installed wheel to a scripted broker.
Nothing here needs a secret, a Spark or a Java; packages come from the registry that pip knows.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tools.sbom import STORED, bill, version
from tools.setup_cfg import ROOT, project

CONSTRAINTS: Final = ROOT / "tools" / "constraints.txt"
PACKAGES: Final = ("rocket_sink", "pyspark_rocketmq")
PLACEHOLDER: Final = "https://example.org/"

_FIRST_MESSAGE: Final = """
import sys
import rocket_sink
from rocket_sink import Message, Producer
from rocket_sink.testing import FakeCluster
assert "site-packages" in rocket_sink.__file__, rocket_sink.__file__
assert not {"pyspark", "pandas"} & set(sys.modules)
with FakeCluster() as cluster:
    with Producer(nameServer=cluster.name_server) as producer:
        print(producer.send(Message("flights", b"from an installed wheel")))
"""
"""A program for the wheel that was installed, outside of the clone."""

_VALIDATE: Final = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read())
sys.exit(str(error) if error else 0)
"""


def wheel_problems(wheel: Path, tracked: Iterable[str]) -> list[str]:
    """Return what is wrong with a wheel: files, the page of a registry, the bill of materials.

    Args:
        tracked: the files below `PACKAGES` that git knows.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        texts = {name: archive.read(name) for name in names if ".dist-info/" in name}
    info = f"rocket_sink-{version()}.dist-info"
    code = {name for name in names if not name.startswith(f"{info}/")}
    problems = [f"the wheel lacks {name}" for name in sorted(set(tracked) - code)]
    problems += [f"the wheel has {name}, which git has not" for name in sorted(code - set(tracked))]
    for name in ("METADATA", "entry_points.txt", "licenses/LICENSE", "licenses/THIRD-PARTY.md"):
        if f"{info}/{name}" not in texts:
            problems.append(f"the wheel lacks {info}/{name}")
    if texts.get(f"{info}/sboms/{STORED.name}", b"").decode("utf-8") != bill():
        problems.append("the wheel's bill of materials is old: python -m tools.sbom")
    page = str(email.message_from_bytes(texts.get(f"{info}/METADATA", b"")).get_payload())
    return problems + page_problems(page)


def page_problems(page: str) -> list[str]:
    """Return what a reader of a registry's page could not follow."""
    targets = re.findall(r"\]\(([^)\s]*)\)", page)
    problems = [f"a link of the page leads nowhere: {target}" for target in targets
                if not target.startswith("https://")]  # fmt: skip
    if not targets:
        problems.append("the page has no link: is the readme empty?")
    if re.search(r"""[ "']\.\[""", page) or "clone" in page:
        problems.append("the page asks for a clone: see the substitutions in pyproject.toml")
    source = project()["urls"]["Source"]
    if not any(target.startswith(f"{source}/raw/v{version()}/") for target in targets):
        problems.append(f"no picture of the page is at {source}")
    return problems


def publication_problems() -> list[str]:
    """Return what keeps this version from being uploaded, besides its artefacts."""
    problems = []
    if project()["urls"]["Source"].startswith(PLACEHOLDER):
        problems.append("setup.cfg names example.org as the public home: put the real address")
    heading = re.search(rf"^## {re.escape(version())} \(?(\S+?)\)?$",
                        (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)  # fmt: skip
    if heading is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        problems.append(f"CHANGELOG.md has no heading '## {version()} (YYYY-MM-DD)'")
    return problems


def digests(folder: Path) -> dict[str, str]:
    """Return {file name: SHA-256} of a folder's files."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def _run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, text=True, capture_output=True
    )
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def _environment(folder: Path, python: str, *packages: str) -> Path:
    """Make a virtual environment; return its Python."""
    if python == sys.executable:
        venv.create(folder, with_pip=True)
    else:
        _run(python, "-m", "venv", folder, cwd=folder.parent)
    interpreter = folder / "bin" / "python"
    _run(interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages,
         cwd=folder.parent)  # fmt: skip
    return interpreter


def _clean_variables(**more: str) -> dict[str, str]:
    """Without what leads Pythons to this tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, **more}


def build(pythons: Sequence[str], work: Path) -> Path:
    """Build by each Python, compare, and return the folder of the first one's artefacts."""
    stamp = _run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    folders = []
    for number, python in enumerate(pythons):
        clone, out = work / f"clone{number}", work / f"dist{number}"
        _run("git", "clone", "-q", ROOT, clone, cwd=work)
        builder = _environment(work / f"builder{number}", python, "build", "-c", str(CONSTRAINTS))
        variables = _clean_variables(SOURCE_DATE_EPOCH=stamp, PIP_CONSTRAINT=str(CONSTRAINTS))
        _run(builder, "-m", "build", "-o", out, cwd=clone, env=variables)
        _say(f"built by Python {_run(builder, '-V', cwd=work).split()[1]}")
        folders.append(out)
    sums = [digests(folder) for folder in folders]
    if any(one != sums[0] for one in sums):
        raise SystemExit(f"failed: the builds have different bytes: {sums}")
    for name, digest in sums[0].items():
        _say(f"{digest}  {name} (the same {len(sums)} times)")
    return folders[0]


def check(folder: Path, work: Path) -> None:
    """Judge artefacts by twine, git's list of files, CycloneDX's schema, and a first message."""
    judges = ("twine", "cyclonedx-python-lib[json-validation]", "-c", str(CONSTRAINTS))
    tools = _environment(work / "tools", sys.executable, *judges)
    artefacts = sorted(folder.iterdir())
    _run(tools, "-m", "twine", "check", "--strict", *artefacts, cwd=work)
    _run(tools, "-c", _VALIDATE, STORED, cwd=work)
    (wheel,) = folder.glob("*.whl")
    tracked = _run("git", "ls-files", *PACKAGES, cwd=ROOT).split()
    problems = wheel_problems(wheel, tracked)
    if problems:
        raise SystemExit("\n".join(["failed:", *problems]))
    _say("twine, the wheel's files, its page and its bill of materials are in order")
    user = _environment(work / "user", sys.executable, str(wheel))
    _say(_run(user, "-c", _FIRST_MESSAGE, cwd=work, env=_clean_variables()).strip())
    _say(_run(user.parent / "rocket-sink", "--version", cwd=work, env=_clean_variables()).strip())


def other_python() -> list[str]:
    """Return Debian's Python, where it is another than this one and has a venv of its own."""
    path = Path("/usr/bin/python3")
    if not path.exists() or path.resolve() == Path(sys.executable).resolve():
        return []
    can = subprocess.run([path, "-c", "import ensurepip"], capture_output=True).returncode == 0
    return [str(path)] if can else []


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="keep nothing, and upload nothing")
    parser.add_argument("--python", action="append", metavar="PATH",
                        help="a Python that builds, too (default: Debian's)")  # fmt: skip
    chosen = parser.parse_args(arguments)
    if _run("git", "status", "--porcelain", cwd=ROOT):
        _say("note: what is not committed is not built")
    pythons = [sys.executable, *(chosen.python or other_python())]
    is_alone = len({Path(python).resolve() for python in pythons}) < 2
    if is_alone:
        pythons = [sys.executable] * 2
        sys.stderr.write("before an upload: no second Python builds; name one by --python\n")
    with tempfile.TemporaryDirectory(prefix="rocket-sink-release-") as name:
        work = Path(name)
        built = build(pythons, work)
        check(built, work)
        problems = publication_problems()
        for problem in problems:
            _say(f"before an upload: {problem}")
        if is_alone or (problems and not chosen.check):
            return 1
        if chosen.check:
            return 0
        shutil.copytree(built, ROOT / "dist", dirs_exist_ok=True)
    _say(f"upload: git tag v{version()} && python -m twine upload dist/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
