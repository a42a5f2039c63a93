"""The shape of the package: imports point downwards and in no circle, the core is pure, tasks know
no Spark, private names stay private, a folder can be taken in, importing starts nothing.

Every import counts, wherever it stands: inside functions and under TYPE_CHECKING too.
"""

import ast
import functools
import graphlib
from collections import Counter
from pathlib import Path

import pytest

from tests.python import run_python

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rocket_sink"

# A module may import its own layer and those below it.
LAYERS = ["values", "wire", "routing", "net", "producer", "ledger", "rows", "task", "spark", "top"]
VALUES = {
    "message", "message_rules", "errors", "options", "option_spec", "java", "forks", "owner",
    "plain_files", "private_file", "tables", "text",
}  # fmt: skip
BESIDE = {"cluster", "testing"}
"""Folders that may use everything up to the producer, and are used from the top only."""
FACADE = "rocket_sink"
"""The lazy public names: named for type checkers in TYPE_CHECKING, imported on first use."""

BESIDE_THE_PACKAGE = {"benchmarks", "jobs", "tests"}

PURE = {"wire", "routing"}
IMPURE_MODULES = {
    "asyncio", "concurrent", "logging", "multiprocessing", "py4j", "pyspark", "queue", "random",
    "sched", "secrets", "select", "selectors", "signal", "socket", "socketserver", "ssl",
    "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
IMPURE_CALLS = {"now", "utcnow", "today", "urandom", "getpid", "getenv", "uuid4", "open", "print"}


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def nodes_of(source):
    """Return the nodes of a source. All rules look at all modules, so they share them."""
    return [*ast.walk(ast.parse(source))]


def imports_of(source, module, *, is_package):
    """Return (line, absolute module or module.name) of every import in the source."""
    imports = []
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - 1 if is_package else node.level
                parts = module.split(".")
                base = ".".join([*parts[: len(parts) - up], *([base] if base else [])])
            imports += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return imports


def layer_of(module):
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else FACADE
    if name in VALUES:
        return "values"
    if name in BESIDE or name in LAYERS or name == FACADE:
        return name
    return "top"  # The top is cli, commands and every other module that a user starts.


def may_import(importer, imported):
    if importer in (imported, FACADE):
        return True
    if importer in BESIDE:
        return imported in BESIDE or LAYERS.index(imported) <= LAYERS.index("producer")
    if imported in BESIDE:
        return importer == "top"
    return LAYERS.index(imported) <= LAYERS.index(importer)


def wrong_imports(source, module, is_package, is_wrong):
    """Return the imports whose absolute name `is_wrong`."""
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports_of(source, module, is_package=is_package)
        if is_wrong(name)
    ]


def is_ours(name):
    return name.partition(".")[0] == "rocket_sink"


def upward_imports(source, module, *, is_package=False):
    def is_upward(name):
        if not is_ours(name) or layer_of(name) == FACADE or is_public(name.split(".")):
            return False
        return not may_import(layer_of(module), layer_of(name))

    return wrong_imports(source, module, is_package, is_upward)


def is_public(parts):
    """Return whether an import takes a public name, as `from rocket_sink import Producer` does.

    Only the top may do so; `facade_imports` checks it.
    """
    return len(parts) == 2 and parts[1] not in {path.stem for path in PACKAGE.iterdir()}


def facade_imports(source, module, *, is_package=False):
    """Return uses of the package's public face below the top: they would hide an upward import."""

    def is_facade(name):
        is_face = name == "rocket_sink" or is_public(name.split("."))
        return is_ours(name) and is_face and name != "rocket_sink.__version__"

    is_below = layer_of(module) not in ("top", FACADE)
    return wrong_imports(source, module, is_package, is_facade) if is_below else []


def imports_from(roots, source, module, *, is_package=False):
    """Return the imports from these packages."""
    return wrong_imports(source, module, is_package, lambda n: n.partition(".")[0] in roots)


def impurities(source, module, *, is_package=False):
    wrong = imports_from(IMPURE_MODULES, source, module, is_package=is_package)
    for node in nodes_of(source):
        if isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "attr", getattr(function, "id", None))
            if name in IMPURE_CALLS:
                wrong.append(f"{module}:{node.lineno} calls {name}()")
    return wrong


WITHOUT_SPARK = {"rows", "task"}
MODULES_PER_FOLDER = 16
"""The most modules in one folder, without `__init__.py`."""


spark_imports = functools.partial(imports_from, ("pyspark", "py4j", "delta"))
foreign_imports = functools.partial(imports_from, BESIDE_THE_PACKAGE)
"""Imports of the checkout's other folders, which an installed package does not have."""


def private_names(source):
    """Return a module's private names: of functions, classes, attributes, slots and constants."""
    names = set()
    for node in nodes_of(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            names |= set(ast.literal_eval(node.value))
    return {name for name in names if is_private(name)}


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name != "_" and name.isidentifier()


FOREIGN = {"_jvm", "_jsc", "_jsparkSession", "_asdict", "_replace", "_fields"}
"""Private names of py4j, pyspark and named tuples, which are not ours."""


def private_uses(source, module, elsewhere):
    """Return uses of private names that other modules of the package define."""
    own, wrong = private_names(source), []
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rocket_sink"):
            wrong += [
                f"{module}:{node.lineno} imports {alias.name}"
                for alias in node.names
                if is_private(alias.name)
            ]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_self and node.attr in elsewhere - own - FOREIGN:
                wrong.append(f"{module}:{node.lineno} uses {node.attr} of another module's object")
    return wrong


def circle(graph):
    """Return the modules of an import circle; the first is also the last."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def import_graph(sources, packages=frozenset()):
    """Return {module: its imports from the package}, also those in functions and TYPE_CHECKING."""
    graph = {}
    for module, source in sources.items():
        used = set()
        for _, name in imports_of(source, module, is_package=module in packages):
            for target in (name, name.rpartition(".")[0]):
                if target in sources:
                    used.add(target)
                    break
        graph[module] = used - {module}
    return graph


def crowded(paths):
    """Return the folders with more modules than MODULES_PER_FOLDER."""
    count = Counter(path.parent for path in paths if path.name != "__init__.py")
    return [f"{folder}: {n} modules" for folder, n in count.items() if n > MODULES_PER_FOLDER]


@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        (upward_imports, None), (facade_imports, None), (foreign_imports, None),
        (impurities, PURE), (spark_imports, WITHOUT_SPARK),
    ],
    ids=["downwards", "not from the top", "in the package", "pure", "without Spark"],
)  # fmt: skip
def test_imports(rule, layers):
    wrong = []
    for module, path in MODULES.items():
        if layers is None or layer_of(module) in layers:
            wrong += rule(path.read_text(), module, is_package=path.name == "__init__.py")
    assert wrong == []


def test_no_import_circles():
    """The facade is left out: it names everything for type checkers."""
    sources = {m: path.read_text() for m, path in MODULES.items() if m != FACADE}
    packages = frozenset(m for m, path in MODULES.items() if path.name == "__init__.py")
    assert circle(import_graph(sources, packages)) == []


def test_private_names_stay_in_their_module():
    sources = {module: path.read_text() for module, path in MODULES.items()}
    private = set().union(*map(private_names, sources.values()))
    assert [w for m, source in sources.items() for w in private_uses(source, m, private)] == []


def test_a_folder_can_be_taken_in():
    assert crowded(list(MODULES.values())) == []


IDLE_IMPORT = """
import socket, subprocess, sys, threading

def refuse(*args, **kwargs):
    raise AssertionError("at import")

threading.Thread.start = refuse
subprocess.Popen.__init__ = refuse
socket.socket.connect = refuse
import rocket_sink
heavy = {"pyspark", "pyarrow", "numpy", "delta", "tenacity"} & set(sys.modules)
assert not heavy, heavy
for name in sys.argv[1:]:
    __import__(name)
assert threading.active_count() == 1, threading.enumerate()
"""


def test_importing_starts_no_thread_no_process_and_no_connection():
    """The package itself also loads nothing heavy; then follow all modules up to the producer."""
    quiet = [m for m in MODULES if layer_of(m) in ("values", "wire", "routing", "net", "producer")]
    run_python("-c", IDLE_IMPORT, *quiet, environ={"PATH": ""})


PLANTED = [
    *((upward_imports, *planted) for planted in (
        ("wire.x", "from rocket_sink.routing import hashing"),
        ("wire.x", "from rocket_sink import routing"),
        ("wire.x", "from ..routing import hashing"),
        ("routing.x", "def f():\n    import rocket_sink.producer.engine"),
        ("net.x", "if TYPE_CHECKING:\n    from rocket_sink.producer import engine"),
        ("producer.x", "from rocket_sink.testing import broker"),
        ("testing.x", "from rocket_sink.spark import task"),
        ("errors", "from rocket_sink.wire import codes"),
        ("spark.x", "from rocket_sink.commands import base"),
    )),
    (facade_imports, "wire.x", "from rocket_sink import Producer"),
    (facade_imports, "wire.x", "import rocket_sink"),
    *((foreign_imports, "commands.x", source) for source in (
        "import benchmarks", "from benchmarks.rows import body_of",
        "def f():\n    from tests import x",
    )),
    *((impurities, "wire.x", source) for source in (
        "import time", "from time import monotonic", "def f():\n    import random",
        "import socket as s", "from datetime import datetime\ndatetime.now()",
        "import os\nos.urandom(4)", "open('x')", "import concurrent.futures",
    )),
    *((spark_imports, "task.x", source) for source in (
        "import pyspark", "def f():\n    from pyspark.sql import Row", "from delta import tables",
        "if TYPE_CHECKING:\n    from pyspark.sql import DataFrame",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "module", "source"), PLANTED)
def test_planted_faults_are_found(rule, module, source):
    assert rule(source, f"rocket_sink.{module}")


def test_planted_circles_are_found():
    sources = {
        "rocket_sink.wire.a": "from rocket_sink.wire import b",
        "rocket_sink.wire.b": "def f():\n    from rocket_sink.wire.c import x",
        "rocket_sink.wire.c": "if TYPE_CHECKING:\n    from .a import y",
        "rocket_sink.wire.d": "import rocket_sink.wire.a",
    }
    abc = {"rocket_sink.wire.a", "rocket_sink.wire.b", "rocket_sink.wire.c"}
    assert set(circle(import_graph(sources))) == abc


def test_planted_uses_of_private_names_are_found():
    assert private_names("class A:\n    __slots__ = ('_x',)\n    def _f(self): ...") == {"_x", "_f"}
    assert private_uses("other._f()", "m", {"_f"})
    assert private_uses("from rocket_sink.wire.a import _f", "m", set())
    assert not private_uses("self._f()", "m", {"_f"})
    assert not private_uses("session._jvm", "m", {"_f"})
    assert not private_uses("class A:\n    def _f(self): ...\nother._f()", "m", {"_f"})


def test_downward_imports_are_not():
    modules = "numpy", "rocket_sink.wire.route", "rocket_sink.errors"
    source = "\n".join([*(f"import {name}" for name in modules), "from . import hashing"])
    for rule in (upward_imports, facade_imports, impurities):
        assert rule(source, "rocket_sink.routing.x") == []
