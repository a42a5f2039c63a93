"""The tables of docs/reference, made from the code that they are about.

    python docs/reference_tables.py            write them into their pages, between the marks
    python docs/reference_tables.py --check    exit 1 when one is not what the code says (a test)

Commands and classes need none of this: sphinx-click and autodoc read the code while the site is
built.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
PACKAGE: Final = HERE.parent / "rocket_sink"
sys.path.insert(0, str(HERE.parent))

from rocket_sink import errors  # noqa: E402
from rocket_sink.commands.options import default_text  # noqa: E402
from rocket_sink.errors import Isolate, SendError  # noqa: E402
from rocket_sink.ledger.query.live import METRICS  # noqa: E402
from rocket_sink.ledger.schema import COLUMNS  # noqa: E402
from rocket_sink.rows import contract  # noqa: E402
from rocket_sink.rows.stored_rows import STORED_DDL  # noqa: E402
from rocket_sink.spark.reading.options import READ_OPTIONS  # noqa: E402
from tools.marked import with_marked, with_options  # noqa: E402

MEANING: Final = {
    "body": "the message body; required",
    "topic": "the topic, unless the option `topic` is set",
    "tags": "one tag, for filters at the broker",
    "keys": "index keys",
    "sharding_key": "chooses the queue; order holds per key",
    "properties": "user properties",
    "delay_level": "later delivery, level 1 to 18; one of the three",
    "priority": "0 and up; a topic of the type PRIORITY gives the highest first (from 5.4 on)",
    "lite_topic": "lite topic in a topic of the type LITE; its rows keep to a queue (from 5.5 on)",
    "delay_ms": "later delivery, so many milliseconds after storing (brokers from 5.0 on)",
    "delivery_timestamp": "later delivery, at this time or ms since 1970 (brokers from 5.0 on)",
    "queue_id": "with `broker_name`: this very queue",
    "broker_name": "with `queue_id`: this very queue",
    "flag": "32-bit user flag",
    "wait_store": "wait for the broker's flush and replication",
    "message_id": "the client message id (`UNIQ_KEY`); made when absent",
    "event_time": "the property `__event_time_ms`",
    "traceparent": "the user property of that name",
    "tracestate": "the user property of that name",
    "order_by": "order of a key's rows inside a task",
}
"""What each column of the row contract becomes."""


def table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(names)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def contract_table() -> str:
    """The columns of a row."""
    rows = [
        (
            f"`{one.name}`" + (f", `{one.alias}`" if one.alias else ""),
            ", ".join(f"`{kind}`" for kind in one.kinds) or "any that can be sorted",
            MEANING[one.name],
        )
        for one in contract.CONTRACT
    ]
    return table(("column", "types", "becomes"), rows)


def stored_table() -> str:
    """The columns of what is read."""
    rows = [tuple(f"`{part}`" for part in one.split(" ", 1)) for one in _fields(STORED_DDL)]
    return table(("column", "type"), rows)


def _fields(ddl: str) -> list[str]:
    return re.split(r", (?=[a-z_]+ [A-Z])", ddl)


def read_table() -> str:
    """The options of spark.read."""
    rows = [(f"`{one.name}`", default_text(one), _cell(one.help)) for one in READ_OPTIONS]
    return table(("option", "default", "what it is"), rows)


def ledger_table() -> str:
    """The ledger's columns."""
    rows = [
        (
            f"`{one.name}`", one.sql_type.lower(),
            "all" if len(one.kinds) > 6 else ", ".join(one.kinds), _cell(one.comment),
        )
        for one in COLUMNS
    ]  # fmt: skip
    return table(("column", "type", "kinds", "what it says"), rows)


def _classes(
    base: type[errors.RocketSinkError] = errors.RocketSinkError,
) -> Iterator[type[errors.RocketSinkError]]:
    yield base
    order = list(vars(errors))
    public = [one for one in base.__subclasses__() if one.__module__ == errors.__name__]
    for one in sorted(public, key=lambda one: order.index(one.__name__)):
        yield from _classes(one)


def _first_line(one: type) -> str:
    return _cell((one.__doc__ or "").split("\n\n")[0])


def _error_names(one: type[errors.RocketSinkError]) -> str:
    return f"`{one.code}` `{one.__name__}`"


def error_table() -> str:
    """Errors that are no failed send."""
    rows = [
        (_error_names(one), _first_line(one))
        for one in _classes()
        if not issubclass(one, SendError)
    ]
    return table(("code, class", "what it is"), rows)


def send_error_table() -> str:
    """Failed sends, with what follows."""
    rows = []
    for one in _classes(SendError):
        assert issubclass(one, SendError)
        isolates = {Isolate.NOTHING: "no", Isolate.TOPIC: "the topic there", Isolate.BROKER: "yes"}
        rows.append((
            _error_names(one), _first_line(one), one.outcome.value,
            ", ".join(map(str, one.response_codes)),
            "stops at once" if one.fatal else "yes" if one.retriable else "no",
            isolates[one.isolates],
        ))  # fmt: skip
    return table(
        ("code, class", "what it is", "outcome", "answer", "tried again", "avoids the broker"), rows
    )


def data_table() -> str:
    """Codes of rows and messages that no broker would take, with what the errors say."""
    said: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if " MessageError(" in text:
            for code, words in _refusals(ast.parse(text), _numbers(path)):
                said.setdefault(code, []).append(_cell(words))
    rows = [(f"`{code}`", " / ".join(dict.fromkeys(said[code]))) for code in sorted(said)]
    return table(("code", "the error says"), rows)


def _numbers(path: Path) -> dict[str, int]:
    """The limits that a module of the package knows by name."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    known = vars(importlib.import_module(name))
    return {name: value for name, value in known.items() if type(value) is int}


def _refusals(module: ast.Module, numbers: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(code, text) of each MessageError that the module makes."""
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in _calls(function, "MessageError"):
            texts = list(_texts(call.args[0], function, numbers))
            assert texts, f"what does this say: {ast.unparse(call)}"
            yield from itertools.product(_codes(call, function, module), texts)


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def _codes(call: ast.Call, function: ast.FunctionDef, module: ast.Module) -> set[str]:
    """A constant; or, of a function that is told the code, what its module tells it."""
    (code,) = (keyword.value for keyword in call.keywords if keyword.arg == "code")
    if isinstance(code, ast.Constant):
        return {str(code.value)}
    told = [keyword.value for one in _calls(module, function.name) for keyword in one.keywords]
    values = [*function.args.defaults, *told]
    return {str(value.value) for value in values if isinstance(value, ast.Constant)}


def _texts(node: ast.expr, function: ast.FunctionDef, numbers: Mapping[str, int]) -> Iterator[str]:
    """A text; of a variable, each one that the function gives it."""
    if isinstance(node, ast.Constant) and node.value:
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(_part(part, function, numbers) for part in node.values)
    elif isinstance(node, ast.Name):
        for one in ast.walk(function):
            if isinstance(one, ast.Assign) and _is_name(one.targets[0], node.id):
                yield from _texts(one.value, function, numbers)


def _part(node: ast.expr, function: ast.FunctionDef, numbers: Mapping[str, int]) -> str:
    """A part of an f-string; a value that only a run knows is "…"."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.FormattedValue)
    if isinstance(node.value, ast.Name):
        if node.value.id in numbers:
            return str(numbers[node.value.id])
        return ", or ".join(_texts(node.value, function, numbers)) or "…"
    return "…"


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def metrics_table() -> str:
    """What OpenTelemetry is told."""
    rows = [
        (
            f"`{one.name}`", "counter" if one.is_counter else "gauge", one.unit or "-",
            _cell(one.text),
        )
        for one in METRICS
    ]  # fmt: skip
    return table(("metric", "kind", "unit", "what it says"), rows)


TABLES: Final[dict[str, dict[str, Any]]] = {
    "reference/columns.md": {"columns": contract_table, "stored": stored_table},
    "reference/options.md": {"reading": read_table},
    "reference/errors.md": {
        "errors": error_table, "send-errors": send_error_table, "data": data_table,
    },
    "reference/ledger-schema.md": {"ledger": ledger_table},
    "operate/metrics.md": {"metrics": metrics_table},
}  # fmt: skip


def with_tables(page: str, text: str) -> str:
    """The page with its tables as the code has them now."""
    for name, made in TABLES[page].items():
        start = f"<!-- {name}: made by `python docs/reference_tables.py` -->"
        text = with_marked(text, start, f"<!-- /{name} -->", made())
    if page == "reference/options.md":
        text = with_options(text)
    return text


def main(arguments: list[str]) -> int:
    stale = 0
    for page in TABLES:
        path = HERE / page
        text = path.read_text(encoding="utf-8")
        made = with_tables(page, text)
        stale |= made != text
        if "--check" not in arguments:
            path.write_text(made, encoding="utf-8")
    return int(stale and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
