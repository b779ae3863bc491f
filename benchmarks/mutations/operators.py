"""The mutations of a Python file: each is one small fault, as a replaced piece of its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "argmax": "argmin", "argmin": "argmax"}
NAMES |= {"minimum": "maximum", "maximum": "minimum", "logsumexp": "sum", "cumsum": "clone", "floor": "ceil"}
DROPPED = frozenset(
    {"detach", "clone", "copy", "float", "clamp", "masked_fill", "abs", "exp", "flush", "strip"}
)
SILENT = frozenset({"log", "logger", "logging", "warnings"})  # a lost message is no fault of a contract
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutation:
    """A fault: the bytes ``start`` to ``end`` of a file are replaced by ``text``."""

    file: str  #: relative to the repository
    line: int
    what: str  #: the change, in a few words
    start: int
    end: int
    text: str
    at_import: bool  #: the code runs when the module is imported

    def apply(self, source: bytes) -> bytes:
        """Return the mutated source."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutations_of(file: str, source: bytes) -> list[Mutation]:
    """Return all mutations of a source file, in the order of its lines."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, text, what, inside in _walk(ast.parse(source), inside=False):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        found.append(Mutation(file, node.lineno, what, start, end, text, not inside))
    return sorted(found, key=lambda mutation: (mutation.start, mutation.end, mutation.text))


def _walk(node: ast.AST, inside: bool) -> Iterator[tuple]:
    """Yield (node, its new text, what changed, whether a function is around it) below a node."""
    if isinstance(node, SKIPPED) or _without_effect(node):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.IfExp | ast.If | ast.While) and not _turned_otherwise(node.test):
        test = ast.unparse(ast.UnaryOp(ast.Not(), node.test))
        yield node.test, test, f"`{_short(node.test)}` negated", inside
    for new, what in _changes(node):
        text = new if isinstance(new, str) else ast.unparse(new)
        yield node, text, what or f"`{_short(node)}` -> `{_short(text)}`", inside
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children: list[ast.AST] = list(node.body)  # no decorators, defaults and annotations
        inside = True
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value else []
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _walk(child, inside)


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST | str, str]]:
    """Yield the replacements of one node, each with a description or ""."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators), ""
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _textual(node):
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right), ""
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values), ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value), ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value + 1), ""
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield f"({ast.unparse(node.operand)})", ""
    elif (
        isinstance(node, ast.AugAssign | ast.Continue | ast.Break | ast.Delete)
        or _stores(node)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    ):
        yield "pass", f"`{_short(node)}` removed"
    elif isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
        yield "return None", f"`{_short(node)}` -> `return None`"
    elif isinstance(node, ast.Call):
        yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[tuple[ast.AST | str, str]]:
    """Yield the replacements of a call: another function, swapped arguments, no call."""
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in NAMES:
        new = NAMES[name]
        other = ast.Attribute(node.func.value, new) if isinstance(node.func, ast.Attribute) else ast.Name(new)
        yield ast.Call(other, node.args, node.keywords), ""
    if name in DROPPED and isinstance(node.func, ast.Attribute):
        yield node.func.value, ""
    if len(node.args) >= 2 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
        yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords), ""


def _stores(node: ast.AST) -> bool:
    """Return whether a statement assigns to an attribute or an item."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)


def _without_effect(node: ast.AST) -> bool:
    """Return whether a statement is a log message or a constant such as a docstring."""
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return isinstance(call.func.value, ast.Name) and call.func.value.id in SILENT
    return isinstance(call, ast.Constant)


def _turned_otherwise(test: ast.expr) -> bool:
    """Return whether another mutation negates this condition."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn)
    return isinstance(test, ast.UnaryOp)


def _textual(node: ast.BinOp) -> bool:
    """Return whether an operand is plainly text, or the operation one of types."""
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | None))
        for side in (node.left, node.right)
    )


def _short(node: ast.AST | str) -> str:
    text = " ".join((node if isinstance(node, str) else ast.unparse(node)).split()).replace("|", "\\|")
    return text if len(text) <= 70 else text[:67] + "..."
