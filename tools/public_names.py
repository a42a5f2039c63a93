"""The public names as they are stored for the next release to be compared with.

    python -m tools.public_names            store the names of today
    python -m tools.public_names --check    exit 1 if a stored name vanished or breaks its callers

`public-api.txt` is Python without bodies, compared by griffe's rules; `public-names.txt` has
options, columns, views, commands, metrics and the like, one a line, of which none may vanish. A
change that breaks users needs a row in the table of deprecations in docs/stability.md, from an
earlier minor version.
Until the first release anything may change: storing the names anew is enough.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import Mock

import click

import rocket_sink
from rocket_sink import cluster, errors, testing
from rocket_sink.cli import cli
from rocket_sink.commands import check
from rocket_sink.commands.common import stream_run
from rocket_sink.ledger.append.delta_rs import create_table
from rocket_sink.ledger.driver.fold import FoldSummary
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.query.live import METRICS, BrokerSums, Standing
from rocket_sink.ledger.report import values
from rocket_sink.ledger.schema import COLUMNS, LEDGER_SCHEMA, SCHEMA_VERSION, VERSION_PROPERTY
from rocket_sink.ledger.tune.suggest import Tuning
from rocket_sink.ledger.upkeep.erase import Erased
from rocket_sink.ledger.upkeep.expire import Expired
from rocket_sink.net import telemetry
from rocket_sink.options import OPTIONS
from rocket_sink.producer.admin.dlq import ResendReport
from rocket_sink.rows.contract import CONTRACT
from rocket_sink.rows.stored_rows import STORED_DDL
from rocket_sink.spark.backfill.backfill import Plan
from rocket_sink.spark.backfill.resend import Resent
from rocket_sink.spark.reading.options import READ_OPTIONS
from rocket_sink.task.totals import WriteSummary
from tools.setup_cfg import ROOT, project

API: Final = ROOT / "tools" / "public-api.txt"
NAMES: Final = ROOT / "tools" / "public-names.txt"
STABILITY: Final = ROOT / "docs" / "stability.md"
VIEWS: Final = (
    "sends", "letters", "pending_letters", "resolutions", "settled", "backfills", "transactions",
    "isolations", "epochs", "attempts",
)  # fmt: skip
"""The views that methods of `Ledger` return."""
JSON: Final = {
    "backfill --dry-run": Plan,
    "backfill": Resent,
    "check findings": check.Finding,
    "dlq resend": ResendReport,
    "ledger erase": Erased,
    "ledger expire": Expired,
    "ledger fold": FoldSummary,
    "report": values.Figures,
    "report verdict": values.Finding,
    "stream": stream_run.Report,
    "tune": Tuning,
}
"""The dataclasses whose fields are the keys of `--json`."""
_NOT_PRINTED: Final = ("series", "tuning")
_PLAIN: Final = (type(None), bool, int, float, str, bytes)


@functools.cache
def public_objects() -> dict[str, Any]:
    """Return {name: class or function} of what docs/reference/api.md and errors.md describe."""
    objects = {name: getattr(rocket_sink, name) for name in rocket_sink.__all__}
    objects |= {name: getattr(testing, name) for name in testing.__all__}
    objects |= {"LocalCluster": cluster.LocalCluster, "WriteSummary": WriteSummary}
    objects |= {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__ and name[0] != "_"
    }
    return {name: objects[name] for name in sorted(objects) if callable(objects[name])}


def _signature(function: Callable[..., Any]) -> str:
    """Return the parameters without types; a default that is no literal becomes `...`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(*args, **kwargs)"
    parameters = [
        each.replace(
            annotation=inspect.Parameter.empty,
            default=each.default
            if each.default is inspect.Parameter.empty or isinstance(each.default, _PLAIN)
            else ...,
        )
        for each in signature.parameters.values()
        if not each.name.startswith("_")
    ]
    text = str(inspect.Signature(parameters)).replace("Ellipsis", "...")
    return re.sub(r"<(\w+)\.(\w+): [^>]*>", "...", text)


def _members(kind: type) -> Iterator[str]:
    """Yield a line for each public attribute and method of a class and of its private bases."""
    public = list(public_objects().values())
    own = [kind] + [
        base
        for base in kind.__mro__[1:]
        if base.__module__.startswith("rocket_sink") and base not in public
    ]
    if issubclass(kind, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in kind)
    elif "__init__" in {name for base in own for name in vars(base)}:
        yield f"def __init__{_signature(kind.__init__)}: ..."
    names = {name for base in own for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    for name in sorted(names):
        if name.startswith("_") or (issubclass(kind, enum.Enum) and name in kind.__members__):
            continue
        value = inspect.getattr_static(kind, name, None)
        function = getattr(value, "__func__", value)
        if isinstance(value, classmethod | staticmethod):
            yield f"@{type(value).__name__}"
        if inspect.isroutine(function):
            yield f"def {name}{_signature(function)}: ..."
        else:
            yield f"{name} = ..."


def api() -> str:
    """Return the public classes and functions as Python without bodies."""
    lines = []
    for name, value in public_objects().items():
        if not inspect.isclass(value):
            lines.append(f"def {name}{_signature(value)}: ...")
            continue
        bases = [base.__name__ for base in value.__bases__ if base.__name__ in public_objects()]
        lines.append(f"class {name}({', '.join(bases)}):")
        lines += [f"    {line}" for line in _members(value)] or ["    ..."]
    return "\n".join(lines) + "\n"


def _commands(command: click.Command, words: str) -> Iterator[str]:
    yield f"command {words}"
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from (f"command {words} {flag}" for flag in parameter.opts)
        else:
            yield f"command {words} {parameter.name}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _commands(below, f"{words} {name}")


def _views() -> Iterator[str]:
    """Yield the public columns of the ledger's views, as an empty ledger has them."""
    with tempfile.TemporaryDirectory() as folder:
        place = resolve_path(folder)
        create_table(place, LEDGER_SCHEMA, {VERSION_PROPERTY: str(SCHEMA_VERSION)})
        ledger = open_quick(folder)
        assert ledger is not None
        for view in VIEWS:
            columns = ledger.query(f"SELECT * FROM {view}").column_names  # noqa: S608
            yield from (f"view {view} {name}" for name in columns if name[0] != "_")


def _keys(kind: type, words: str) -> Iterator[str]:
    """Yield a dataclass's fields, and those of dataclasses that its annotations name."""
    scope = vars(sys.modules[kind.__module__])
    for field in dataclasses.fields(kind):
        if field.name not in _NOT_PRINTED:
            yield f"json {words} {field.name}"
            for name in re.findall(r"\w+", str(field.type)):
                if dataclasses.is_dataclass(scope.get(name)):
                    yield from _keys(scope[name], f"{words} {field.name}")


def _attributes() -> Iterator[str]:
    """Yield the attributes of the metrics' values, for figures that have each kind of value."""
    single: Any = Counter({1: 1})
    figures: Any = SimpleNamespace(
        rows=Counter(), duplicates_possible=0, standing=Standing({"data": 1}, 0),
        brokers={"broker-a": BrokerSums(failures=single, isolations=single)},
    )  # fmt: skip
    for metric in METRICS:
        for _, attributes in metric.values(figures):
            yield from (f"metric {metric.name} by {name}" for name in attributes)
    meter = Mock()
    client = telemetry.ClientMetrics(SimpleNamespace(get_meter=lambda _: meter))
    error: Any = errors.RocketSinkError("any")
    client.record("topic", 1, 0.1, address="127.0.0.1:10911", result=None, error=error)
    recorded = meter.create_histogram().record.call_args.args[1]
    yield from (f"metric {telemetry.DURATION} by {name}" for name in recorded)
    recorded = meter.create_counter().add.call_args.args[1]
    yield from (f"metric {telemetry.SENT} by {name}" for name in recorded)


def names() -> list[str]:
    """Return options, columns, views, commands, keys, error codes, metrics and extras, one a
    line."""
    lines = []
    for option in OPTIONS:
        default = str(option.default) if isinstance(option.default, _PLAIN) else "..."
        lines.append(f"option {option.name} = {default}")
        lines += [f"option {option.name} also {alias}" for alias in option.aliases]
        lines += [f"option {option.name} takes {choice}" for choice in option.choices]
    lines += [f"read option {option.name}" for option in READ_OPTIONS]
    for column in CONTRACT:
        lines.append(f"column {column.name}" + (f" also {column.alias}" if column.alias else ""))
    lines += [f"read column {part}" for part in re.split(r", (?=[a-z_]+ [A-Z])", STORED_DDL)]
    lines += [f"ledger column {column.name} {column.sql_type}" for column in COLUMNS]
    lines += _views()
    lines += _commands(cli, "rocket-sink")
    for words, kind in JSON.items():
        lines += _keys(kind, words)
    lines += [
        f"error {value.code} {name}"
        for name, value in public_objects().items()
        if inspect.isclass(value) and issubclass(value, errors.RocketSinkError)
    ]
    lines += [f"metric {metric.name} {metric.unit}" for metric in METRICS]
    lines += [f"metric {telemetry.DURATION} s", f"metric {telemetry.SENT} {{message}}"]
    lines += _attributes()
    lines += [f"extra {extra}" for extra in project()["optional-dependencies"]]
    return sorted(set(lines))


def breaks(old_api: str, new_api: str, old_names: list[str], new_names: list[str]) -> list[str]:
    """Return what breaks users between two states, each as `name: what happened`."""
    import griffe

    with tempfile.TemporaryDirectory() as folder:
        states = []
        for state, text in (("old", old_api), ("new", new_api)):
            path = Path(folder, state, "api.py")
            path.parent.mkdir()
            path.write_text(text, encoding="utf-8")
            states.append(griffe.load(
                "api", search_paths=[path.parent], try_relative_path=False, allow_inspection=False
            ))  # fmt: skip
        broken = [
            f"{each.obj.path.removeprefix('api.')}: {each.kind.value}"
            for each in griffe.find_breaking_changes(*states)
        ]
    gone = sorted(set(old_names) - set(new_names))
    return sorted({*broken, *(f"{name}: it vanished" for name in gone)})


def deprecated(page: str, version: str) -> set[str]:
    """Return the names that may go in `version`: the table of docs/stability.md names them, with
    an earlier minor version that deprecated them."""
    now = tuple(int(part) for part in version.split(".")[:2])
    rows = re.findall(r"^\| `([^`]+)` \| (\d+)\.(\d+)", page, re.MULTILINE)
    return {name for name, major, minor in rows if (int(major), int(minor)) < now}


def new_breaks() -> list[str]:
    """Return what breaks users since the stored state, without what was deprecated before."""
    may_go = deprecated(STABILITY.read_text("utf-8"), rocket_sink.__version__)
    stored = NAMES.read_text("utf-8").splitlines()
    broken = breaks(API.read_text("utf-8"), api(), stored, names())
    return [line for line in broken if line.partition(": ")[0] not in may_go]


def nothing_is_released() -> bool:
    """Tell whether CHANGELOG.md has no version with a date."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    return not re.search(r"^## \d[\d.]* \(?\d{4}-", text, re.MULTILINE)


def main(arguments: list[str]) -> int:
    broken = new_breaks() if API.exists() else []
    if broken and ("--check" in arguments or not nothing_is_released()):
        sys.stderr.write("\n".join([*broken, "deprecate these first: docs/stability.md", ""]))
        return 1
    if "--check" not in arguments:
        API.write_text(api(), encoding="utf-8")
        NAMES.write_text("\n".join(names()) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
