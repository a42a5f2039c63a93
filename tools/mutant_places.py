"""The places at which a small mistake can be planted in a Python source, and the changed sources.

The mistakes are those that `mutmut` knows of `True` and `False`, comparisons, `and` and `or`,
`not`, keywords and methods of text, and these: another number; two arguments of one form change
places; an argument with a name, a side of `and` or `or`, an element of a tuple, a factor of a unit
(1000, 60, 1024) or a statement is gone; an `if` never holds; `except` takes every error.

Texts stay as they are, because tests compare the parts of a text that matter. Assertions,
annotations and decorators stay as well: nothing depends on them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

Operator = Callable[[Any], Iterable[cst.CSTNode]]
_UNITS: Final = frozenset({60, 1000, 1024, 3600, 86_400, 1_000_000, 1_000_000_000})


class Place(NamedTuple):
    """A node of a source, and the nodes that an operator may put in its place.

    Attributes:
        line: the first line of the node.
        statement_line: the first line of its statement.
    """

    line: int
    statement_line: int
    operator: str
    node: cst.CSTNode
    others: Sequence[cst.CSTNode]


class Source:
    """A parsed source and the places in it."""

    def __init__(self, text: str) -> None:
        wrapper = MetadataWrapper(cst.parse_module(text))
        self.text = text
        self._module = wrapper.module
        positions = wrapper.resolve(PositionProvider)
        self.places = [
            Place(
                positions[node].start.line, positions[statement].start.line, operator.__name__,
                node, others,
            )
            for node, statement in _nodes(self._module, self._module)
            for kind, operator in OPERATORS
            if isinstance(node, kind) and (others := [*operator(node)])
        ]  # fmt: skip

    def changed(self, place: Place, other: cst.CSTNode) -> str:
        """Return the text with `other` in that place."""
        changed = self._module.deep_replace(place.node, other)
        assert isinstance(changed, cst.Module)
        return changed.code


def difference(path: str, before: str, after: str) -> list[str]:
    """Return the lines of a unified diff, without its head."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), path, path, "", "", 1, "")
    return [line for line in lines if not line.startswith(("---", "+++"))]


def _nodes(node: cst.CSTNode, statement: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """Yield (node, its statement) of what may be changed."""
    if isinstance(node, cst.Annotation | cst.Assert | cst.Decorator | cst.ImportFrom):
        return
    if isinstance(node, cst.Arg) and getattr(node.keyword, "value", "") == "strict":
        return  # `zip(..., strict=True)` is an assertion.
    if isinstance(node, cst.If) and getattr(node.test, "value", "") == "TYPE_CHECKING":
        return
    if isinstance(node, cst.BaseStatement | cst.SimpleStatementLine | cst.ExceptHandler):
        statement = node
    yield node, statement
    for child in node.children:
        yield from _nodes(child, statement)


def deleted_statement(node: cst.SimpleStatementLine) -> Iterator[cst.CSTNode]:
    """Delete a call, a change of an attribute or an item, a `raise`, or a jump."""
    (statement, *more) = node.body
    is_call = isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Call)
    is_change = isinstance(statement, cst.Assign) and not isinstance(
        statement.targets[0].target, cst.Name | cst.Tuple
    )
    jumps = cst.Raise | cst.Break | cst.Continue | cst.Del | cst.AugAssign
    if not more and (is_call or is_change or isinstance(statement, jumps)):
        yield node.with_changes(body=[cst.Pass()])


def swapped_arguments(node: cst.Call) -> Iterator[cst.CSTNode]:
    """Let two neighbouring arguments of one form (names, numbers, ...) change places."""
    for place, (first, second) in enumerate(zip(node.args, node.args[1:], strict=False)):
        of_one_form = type(first.value) is type(second.value)
        if of_one_form and not (first.keyword or second.keyword or first.star or second.star):
            values = first.with_changes(value=second.value), second.with_changes(value=first.value)
            yield node.with_changes(args=[*node.args[:place], *values, *node.args[place + 2 :]])


def dropped_argument(node: cst.Call) -> Iterator[cst.CSTNode]:
    """Leave out an argument with a name: a default takes its place."""
    for place, argument in enumerate(node.args):
        if argument.keyword is not None and argument.keyword.value != "strict":
            yield node.with_changes(args=[*node.args[:place], *node.args[place + 1 :]])


def dropped_operand(node: cst.BooleanOperation) -> Iterator[cst.CSTNode]:
    yield from (node.left, node.right)


def dropped_element(node: cst.Tuple | cst.List | cst.Set) -> Iterator[cst.CSTNode]:
    for place in range(len(node.elements)) if len(node.elements) > 2 else ():
        yield node.with_changes(elements=[*node.elements[:place], *node.elements[place + 1 :]])


def ignored_condition(node: cst.If) -> Iterator[cst.CSTNode]:
    yield node.with_changes(test=cst.Name("False"))


def other_number(node: cst.Integer | cst.Float) -> Iterator[cst.CSTNode]:
    """Add 1 to a digit; give a larger number a zero more."""
    value = node.evaluated_value
    yield node.with_changes(value=repr(value + 1 if value < 10 else value * 10))


def widened_exception(node: cst.ExceptHandler) -> Iterator[cst.CSTNode]:
    if node.type is not None and not (
        isinstance(node.type, cst.Name) and node.type.value.endswith("Exception")
    ):
        yield node.with_changes(type=cst.Name("Exception"))


def dropped_unit(node: cst.BinaryOperation) -> Iterator[cst.CSTNode]:
    if isinstance(node.operator, cst.Multiply | cst.Divide | cst.FloorDivide):
        for unit, other in ((node.right, node.left), (node.left, node.right)):
            if isinstance(unit, cst.Integer | cst.Float) and unit.evaluated_value in _UNITS:
                yield other


_UNUSED: Final = frozenset((
    mutators.operator_string, mutators.operator_assignment, mutators.operator_lambda,
    mutators.operator_dict_arguments, mutators.operator_arg_removal, mutators.operator_number,
))  # fmt: skip
"""Operators whose mistakes every test of the line sees, that of texts, and that of numbers, which
makes 30,001 of 30,000: nobody has to see that."""
OPERATORS: Final[Sequence[tuple[Any, Operator]]] = [
    *(pair for pair in mutators.mutation_operators if pair[1] not in _UNUSED),
    (cst.SimpleStatementLine, deleted_statement),
    (cst.Call, swapped_arguments),
    (cst.Call, dropped_argument),
    (cst.Integer | cst.Float, other_number),
    (cst.BooleanOperation, dropped_operand),
    (cst.Tuple | cst.List | cst.Set, dropped_element),
    (cst.If, ignored_condition),
    (cst.ExceptHandler, widened_exception),
    (cst.BinaryOperation, dropped_unit),
]
