"""The mutants of a module: every small change to its syntax tree that a test should notice.

What is changed: comparisons at their limits, conditions, operators, numbers, texts, truth values, what is returned;
what is left out: statements, `with` blocks, handlers of exceptions, arguments by name, parts of a condition. What is
left alone: annotations, docstrings, members of enums, and the pieces of messages.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import NamedTuple, TypeVar

_LONGEST_PIECE = 100
_N = TypeVar("_N", bound=ast.AST)

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NEGATED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


class Change(NamedTuple):
    """One change. `before` and `after` are the piece of code around it.

    `function` is the outermost function that it is in; empty for what takes effect on import: constants of the module
    and of classes, the defaults of functions, and whatever is decorated.
    """

    module: str
    function: str
    line: int
    before: str
    after: str


class Mutant(NamedTuple):
    """The module with one change."""

    change: Change
    code: CodeType


class _Place(NamedTuple):
    """Where a node hangs in the tree."""

    parent: ast.AST
    field: str
    position: int | None
    node: ast.AST

    def put(self, node: ast.AST) -> None:
        if self.position is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.position] = node


class _Scope(NamedTuple):
    """The function around a place, if any."""

    name: str
    returns_bool: bool
    assigned: Counter[str]


_OUTSIDE = _Scope("", False, Counter())


def mutants_of(source: str, module: str, filename: str = "<mutant>") -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    for place, above, scope in _places(tree, [], _OUTSIDE):
        node = place.node
        for changed in _alternatives(place, scope):
            piece = _piece_around(node, above)
            before = _text(piece)
            place.put(ast.copy_location(changed, node))
            ast.fix_missing_locations(tree)
            # The node itself may be the whole piece.
            after = _text(changed if piece is node else piece)
            code = compile(tree, filename, "exec", dont_inherit=True)
            place.put(node)
            line = next(outer.lineno for outer in [node, *reversed(above)] if hasattr(outer, "lineno"))
            yield Mutant(Change(module, scope.name, line, before, after), code)


def _places(node: ast.AST, above: list[ast.AST], outer: _Scope) -> Iterator[tuple[_Place, list[ast.AST], _Scope]]:
    """Every node below `node`, with those above it, except what is left alone."""
    inner = _scope_of(node, above, outer)
    above = [*above, node]
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(node, ast.Call):
            continue
        # The defaults of a function are part of what is around it.
        scope = outer if field == "args" and isinstance(node, _FUNCTIONS) else inner
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                yield _Place(node, field, index if isinstance(value, list) else None, child), above, scope
                yield from _places(child, above, scope)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.pattern():
            return True
        case ast.ClassDef(bases=[ast.Name(id="Enum" | "StrEnum")]):
            return True
    return False


def _scope_of(node: ast.AST, above: list[ast.AST], outer: _Scope) -> _Scope:
    if not isinstance(node, _FUNCTIONS) or node.decorator_list or outer.name:
        return outer  # what is inside of a function belongs to it
    classes = [outer.name for outer in above if isinstance(outer, ast.ClassDef)]
    stored = (name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
    returns_bool = isinstance(node.returns, ast.Name) and node.returns.id == "bool"
    return _Scope(".".join([*classes, node.name]), returns_bool, Counter(stored))


def _alternatives(place: _Place, scope: _Scope) -> Iterator[ast.AST]:
    node = place.node
    match node:
        case ast.Constant():
            yield from _constants(node, in_function=bool(scope.name))
        case ast.Compare():
            yield from _comparisons(node)
        case ast.BoolOp(op=op, values=values):
            yield _with(node, lambda new: setattr(new, "op", ast.Or() if isinstance(op, ast.And) else ast.And()))
            for left_out in range(len(values)):
                rest = values[:left_out] + values[left_out + 1 :]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op=op, values=rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            yield ast.BinOp(left=left, op=_ARITHMETIC[type(op)](), right=right)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.comprehension(ifs=[_, *_]):
            yield _with(node, lambda new: new.ifs.clear())
        case ast.Call(keywords=keywords):
            for number in range(len(keywords)):
                yield _with(node, lambda new, number=number: new.keywords.pop(number))  # type: ignore[misc]
        case ast.stmt():
            yield from _statements(node, scope)
        case ast.ExceptHandler(body=body) if not isinstance(body[0], ast.Raise):
            yield _with(node, lambda new: setattr(new, "body", [ast.Raise()]))


def _statements(node: ast.stmt, scope: _Scope) -> Iterator[ast.AST]:
    match node:
        case ast.If(test=test) | ast.While(test=test):
            if not (isinstance(test, ast.Constant | ast.UnaryOp) or _is_negated_by_its_operator(test)):
                yield _with(node, lambda new: setattr(new, "test", ast.UnaryOp(op=ast.Not(), operand=test)))
        case ast.With(body=body) | ast.AsyncWith(body=body):
            yield ast.If(test=ast.Constant(True), body=body, orelse=[])
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case ast.Return(value=None) | ast.Delete() | ast.Raise() | ast.Expr():
            yield ast.Pass()
        case ast.Return(value=ast.Constant()):
            return  # changed as a constant
        case ast.Return(value=ast.expr() as value) if scope.returns_bool and _is_negated_by_its_operator(value):
            return  # changed as a comparison
        case ast.Return(value=ast.expr() as value):
            yield ast.Return(ast.UnaryOp(op=ast.Not(), operand=value) if scope.returns_bool else ast.Constant(None))
        case ast.AugAssign(target=target, op=op, value=value):
            yield ast.Pass()
            yield ast.Assign(targets=[target], value=value, type_comment=None)
            if type(op) in _ARITHMETIC:
                yield ast.AugAssign(target=target, op=_ARITHMETIC[type(op)](), value=value)
        case ast.Assign(targets=[target]) if scope.name:
            names = [name.id for name in ast.walk(target) if isinstance(name, ast.Name)]
            if isinstance(target, ast.Attribute | ast.Subscript) or any(scope.assigned[name] > 1 for name in names):
                yield ast.Pass()


def _is_negated_by_its_operator(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], _NEGATED)


def _comparisons(node: ast.Compare) -> Iterator[ast.AST]:
    for number, op in enumerate(node.ops):
        yield _with(node, lambda new, number=number, op=op: new.ops.__setitem__(number, _COMPARISONS[type(op)]()))  # type: ignore[misc]


def _constants(node: ast.Constant, *, in_function: bool) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
        yield ast.Constant(value - 1)
    elif isinstance(value, float):
        yield ast.Constant(value * 2 if value else 1.0)
        yield ast.Constant(value / 2 if value else -1.0)
    elif isinstance(value, str) and in_function:
        yield ast.Constant(value + "?")


def _with(node: _N, change: Callable[[_N], object]) -> _N:
    """A copy of the node, changed. Its children are the same objects."""
    new = copy.copy(node)
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(new, field, list(value))
    change(new)
    return new


def _piece_around(node: ast.AST, above: list[ast.AST]) -> ast.AST:
    """The largest piece of code around the node that fits into a line, but no more than its statement."""
    piece = node
    for outer in reversed(above):
        if isinstance(piece, ast.stmt | ast.ExceptHandler) or len(_text(outer)) > _LONGEST_PIECE:
            break
        piece = outer
    return piece


def _text(node: ast.AST) -> str:
    """The code of a node in one line; of a block, its head."""
    lines = ast.unparse(node).splitlines() or [""]
    if isinstance(node, _FUNCTIONS):
        return next(line for line in lines if line.startswith(("def ", "async def ")))
    if isinstance(node, ast.ExceptHandler):
        return " ".join(line.strip() for line in lines[:2])
    return lines[0] if isinstance(node, ast.stmt) else " ".join(line.strip() for line in lines)
