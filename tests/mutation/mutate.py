"""Small changes to a module's source that a good test must notice.

``mutants(source)`` finds every place where one of the changes below applies, and returns one mutant
per change:

=================  ==================================================================================
comparison         ``<`` to ``<=`` and ``>=``, ``==`` to ``!=``, ``in`` to ``not in``, ``is`` to
``is not``, ...
arithmetic         ``+`` and ``-`` swapped, ``*`` and ``/`` swapped, ``//`` to ``*``, ``%`` to
``*``, ``**`` to ``*``
logic              ``and`` and ``or`` swapped, ``not`` removed, a plain condition negated
constant           a number one larger, ``True`` and ``False`` swapped; defaults of parameters and
fields included
sign               a leading minus removed
min_max            ``min`` and ``max`` swapped, also as methods and as ``argmin``, ``maximum`` and the like
dropped            a statement removed: a call for its effect, an update in place, ``continue``
=================  ==================================================================================

Code whose mutants say nothing about the tests is left out: docstrings, annotations, decorators,
assertions, and the text of errors and messages.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
_OPPOSITES = (
    ("min", "max"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("minimum", "maximum"),
    ("clamp_min", "clamp_max"),
)
_MIN_MAX = {a: b for pair in _OPPOSITES for a, b in (pair, pair[::-1])}
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript)
_SAYS_SOMETHING = frozenset({"debug", "info", "warning", "warn", "error", "log", "print", "say"})


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    kind: str
    line: int
    source: str
    removed: str
    added: str

    def diff(self, original: str, path: str) -> str:
        """Return the change as a unified diff."""
        lines = difflib.unified_diff(
            original.splitlines(), self.source.splitlines(), path, path, n=1, lineterm=""
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Change:
    """A node of the tree and the text that replaces it."""

    kind: str
    node: ast.expr | ast.stmt
    text: str


def mutants(source: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of the source."""
    changes = _changes(ast.parse(source), inside_init=False)
    in_order = sorted(changes, key=lambda change: (change.node.lineno, change.node.col_offset))
    return [_apply(source, change) for change in in_order]


def _apply(source: str, change: _Change) -> Mutant:
    node = change.node
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.splitlines(keepends=True)
    # the tree counts columns in bytes of UTF-8
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    touched = "".join(lines[node.lineno - 1 : node.end_lineno])
    replaced = before + change.text + after
    text = "".join([*lines[: node.lineno - 1], replaced, *lines[node.end_lineno :]])
    return Mutant(change.kind, node.lineno, text, _on_one_line(touched), _on_one_line(replaced))


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _changes(node: ast.AST, inside_init: bool) -> Iterator[_Change]:
    """Yield the changes of a node and of all nodes below it."""
    if _is_left_out(node):
        return
    if isinstance(node, ast.FunctionDef):
        inside_init = node.name in ("__init__", "__post_init__")
    if isinstance(node, ast.stmt):
        yield from _of_statement(node, inside_init)
    elif isinstance(node, ast.expr):
        yield from _of_expression(node)
        if _is_negative_number(node):
            return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child, inside_init)


def _is_left_out(node: ast.AST) -> bool:
    """Report whether nothing below this node is mutated: assertions, errors, messages, docstrings,
    f-strings.
    """
    if isinstance(node, ast.keyword):
        return node.arg == "strict"  # of zip: an assertion that the lengths are equal
    if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _called_name(node.value) in _SAYS_SOMETHING
    return False


def _of_statement(node: ast.stmt, inside_init: bool) -> Iterator[_Change]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call or isinstance(node, ast.Continue | ast.Delete):
        yield _Change("dropped", node, "pass")
    elif isinstance(node, ast.AugAssign):
        yield _Change("dropped", node, "pass")
        if type(node.op) in _ARITHMETIC and not _is_text(node.value):
            swapped = ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)
            yield _Change("arithmetic", node, ast.unparse(swapped))
    elif isinstance(node, ast.Assign):
        # without an assignment of its constructor an object is broken at once: nothing to learn
        is_update = isinstance(node.targets[0], ast.Subscript | ast.Attribute)
        if is_update and not inside_init:
            yield _Change("dropped", node, "pass")
    elif isinstance(node, ast.If | ast.While):
        yield from _negated(node.test)


def _of_expression(node: ast.expr) -> Iterator[_Change]:
    if isinstance(node, ast.Compare):
        yield from _of_comparison(node)
    elif isinstance(node, ast.BinOp):
        yield from _of_arithmetic(node)
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _Change("logic", node, ast.unparse(ast.BoolOp(swapped, node.values)))
    elif isinstance(node, ast.UnaryOp):
        yield from _of_unary(node)
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.IfExp):
        yield from _negated(node.test)


def _of_comparison(node: ast.Compare) -> Iterator[_Change]:
    for place, operator in enumerate(node.ops):
        for other in _COMPARISONS[type(operator)]:
            operators = [*node.ops[:place], other(), *node.ops[place + 1 :]]
            yield _Change(
                "comparison", node, ast.unparse(ast.Compare(node.left, operators, node.comparators))
            )


def _of_arithmetic(node: ast.BinOp) -> Iterator[_Change]:
    if type(node.op) not in _ARITHMETIC or _is_text(node.left) or _is_text(node.right):
        return
    text = ast.unparse(ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right))
    # a product binds less tightly than a power
    yield _Change("arithmetic", node, f"({text})" if isinstance(node.op, ast.Pow) else text)


def _of_unary(node: ast.UnaryOp) -> Iterator[_Change]:
    if isinstance(node.op, ast.Not):
        yield _Change("logic", node, _in_parentheses(node.operand))
    elif _is_negative_number(node):
        yield _Change("constant", node, repr(1 + ast.literal_eval(node)))
    elif isinstance(node.op, ast.USub):
        yield _Change("sign", node, _in_parentheses(node.operand))


def _of_constant(node: ast.Constant) -> Iterator[_Change]:
    if isinstance(node.value, bool):
        yield _Change("constant", node, repr(not node.value))
    elif isinstance(node.value, int | float):
        yield _Change("constant", node, repr(node.value + 1))


def _of_call(node: ast.Call) -> Iterator[_Change]:
    opposite = _MIN_MAX.get(_called_name(node) or "")
    if opposite is None:
        return
    if isinstance(node.func, ast.Name):
        yield _Change("min_max", node.func, opposite)
    elif isinstance(node.func, ast.Attribute):
        yield _Change("min_max", node.func, ast.unparse(ast.Attribute(node.func.value, opposite, ast.Load())))


def _negated(test: ast.expr) -> Iterator[_Change]:
    """Negate a condition that none of the other changes would turn around."""
    if isinstance(test, _ATOMS) and not isinstance(test, ast.Constant):
        yield _Change("logic", test, f"not {ast.unparse(test)}")


def _in_parentheses(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, _ATOMS) else f"({text})"


def _is_negative_number(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
        and isinstance(node.operand.value, int | float)
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _called_name(node: Any) -> str | None:
    """Return the last part of the name that a call calls."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else None
