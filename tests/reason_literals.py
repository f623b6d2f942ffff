"""Which reason codes the sources hand out, read from their syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_PLACES = {"refuse": 1, "Refusal": 1, "Obstacle": 1}


class UnreadableCodeError(Exception):
    """A reason code is given in a way that this reader does not follow."""


def codes_used(paths: Iterable[Path]) -> set[str]:
    """Return the reason codes that calls of ``refuse``, ``Refusal`` and ``Obstacle`` in these files are given.

    Followed are literals, conditions, names assigned in the same function, and functions of these files that return
    codes, alone or in a tuple. A parameter, or an attribute ``reason``, only hands on what was given elsewhere.

    Raises:
        UnreadableCodeError: a code is given in another way.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    functions = {path: {n.name: n for n in ast.walk(tree) if isinstance(n, Function)} for path, tree in trees.items()}
    everywhere = {name: (path, function) for path, mine in functions.items() for name, function in mine.items()}
    found: set[str] = set()
    for path, mine in functions.items():
        known = everywhere | {name: (path, function) for name, function in mine.items()}
        for function in mine.values():
            for call in (node for node in _own_nodes(function) if isinstance(node, ast.Call)):
                given = _reason_given(call)
                if given is not None:
                    found |= _Reader(path, function, known).codes(given)
    return found


def _own_nodes(function: ast.AST) -> list[ast.AST]:
    """Return the nodes of a function, without the functions in it."""
    found: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, Function):
            waiting += ast.iter_child_nodes(node)
    return found


def _name(expression: ast.expr) -> str:
    return expression.attr if isinstance(expression, ast.Attribute) else str(getattr(expression, "id", ""))


def _reason_given(call: ast.Call) -> ast.expr | None:
    """Return the argument that is the reason, where a call gives one."""
    place = _PLACES.get(_name(call.func))
    if place is None:
        return None
    named = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
    return named[0] if named else call.args[place] if len(call.args) > place else None


class _Reader:
    """Follows expressions in one function to the codes that they may stand for."""

    def __init__(self, path: Path, function: Function, known: dict[str, tuple[Path, Function]]) -> None:
        self.path = path
        self.function = function
        self.known = known

    def codes(self, value: ast.expr, place: int | None = None) -> set[str]:
        """Return the codes that an expression may be; with a place, those that an item of it may be."""
        match value:
            case ast.Constant(value=None) | ast.Attribute(attr="reason"):
                return set()
            case ast.Constant(value=str(code)) if place is None:
                return {code}
            case ast.IfExp(body=body, orelse=orelse):
                return self.codes(body, place) | self.codes(orelse, place)
            case ast.Tuple(elts=items) if place is not None:
                return self.codes(items[place])
            case ast.Subscript(value=ast.Name() as name, slice=ast.Constant(value=int(item))):
                return self.codes(name, item)
            case ast.Name(id=name):
                return self._assigned(name, place)
            case ast.Call(func=called) if _name(called) in self.known:
                return self._returned(*self.known[_name(called)], place)
        raise UnreadableCodeError(f"{self.path}, line {value.lineno}: cannot follow `{ast.unparse(value)}`")

    def _returned(self, path: Path, function: Function, place: int | None) -> set[str]:
        """Return the codes that a function returns, or has at a place of the tuples that it returns."""
        reader = _Reader(path, function, self.known)
        returned = (node.value for node in _own_nodes(function) if isinstance(node, ast.Return))
        return {code for value in returned if value is not None for code in reader.codes(value, place)}

    def _assigned(self, name: str, place: int | None) -> set[str]:
        """Return the codes that a name refers to; none for a parameter."""
        found: list[set[str]] = []
        for node in _own_nodes(self.function):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Name) and target.id == name:
                    found.append(self.codes(node.value, place))  # type: ignore[attr-defined]  # of an assignment
                elif isinstance(target, ast.Tuple) and name in (names := list(map(_name, target.elts))):
                    found.append(self.codes(node.value, names.index(name)))  # type: ignore[attr-defined]  # the same
            if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple) and isinstance(node.iter, ast.Tuple):
                names = list(map(_name, node.target.elts))
                if name in names:
                    found += [self.codes(row, names.index(name)) for row in node.iter.elts]
        parameters = [each.arg for each in self.function.args.args]
        if not found and name not in parameters:
            raise UnreadableCodeError(f"{self.path}: nothing is assigned to `{name}` in `{self.function.name}`")
        return set().union(*found)
