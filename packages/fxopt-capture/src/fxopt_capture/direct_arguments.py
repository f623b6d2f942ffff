"""Which calls of a captured graph need no second look: one compiled function for each way in which arguments are given.

`InputBinding` and `InputGuards` say what is wrong with a call, which takes a loop over all that may be wrong. A call
with which nothing is wrong is recognised by one expression: the arguments are plain tensors, of these dtypes and sizes.
The expression is written from the same data; what it does not recognise goes to those two, which may still accept it.
"""

from __future__ import annotations

import ast
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree

from .dtype_kinds import dtypes_of

Recognize = Callable[[Sequence[Any], Mapping[str, Any], Any], "tuple[Any, ...] | None"]
"""Takes positional arguments, keyword arguments and the guards; returns the graph's inputs, flat, or None."""

_PLAIN = (bool, int, float, str, NoneType)


class _NotPlain(Exception):
    """Calls of this kind are left to `InputBinding` and `InputGuards`."""


def compiled(binding: Any, guards: Any, in_spec: Any, positional: int, keywords: tuple[str, ...]) -> Recognize | None:
    """Return the function that recognises calls with this many positional arguments and these by name.

    Args:
        binding: the `InputBinding`.
        guards: the `InputGuards`.
        in_spec: how the graph's inputs nest, as torch's pytrees say it.
        positional: how many arguments are given by position.
        keywords: the names of the others, in the order of the call.
    """
    try:
        return _Writer(binding, guards).function(in_spec, positional, keywords)
    except _NotPlain:
        return None


class _Writer:
    """Writes one function: its lines, the tests of its last line, and the values that it refers to by name."""

    def __init__(self, binding: Any, guards: Any) -> None:
        self.form, self.nestings, self.names = binding.form, binding.nestings, binding.names
        self.guards = guards
        self.lines: list[str] = []
        self.tests: list[str] = []
        self.namespace: dict[str, Any] = {**SYMPY_INTERP, "Tensor": torch.Tensor}
        self.leaves: list[str] = []

    def function(self, in_spec: Any, positional: int, keywords: tuple[str, ...]) -> Recognize:
        given = self._unpacked(positional, keywords)
        for name, value, spec in self._inputs(given, in_spec):
            if name in self.nestings and not _agree(self.nestings[name], spec):
                raise _NotPlain
            self._flatten(value, spec)
        if len(self.leaves) != len(self.guards.specs):
            raise _NotPlain
        self._return_early_unless(self.tests)
        self.tests = []
        shapes = [self._test_leaf(leaf, spec) for leaf, spec in zip(self.leaves, self.guards.specs, strict=True)]
        self.tests += [self._condition(condition.code, shapes) for condition in self.guards.conditions]
        return self._compiled()

    def _unpacked(self, positional: int, keywords: tuple[str, ...]) -> dict[str, str]:
        """Write the lines that give each argument a variable; return the variables by the arguments' names."""
        names = [parameter.name for parameter in self.form.parameters if parameter.positional]
        given = [*names[:positional], *keywords]
        if positional > len(names) or len(set(given)) < len(given):
            raise _NotPlain
        variables = [f"value_{index}" for index in range(len(given))]
        for values, source in ((variables[:positional], "args"), (variables[positional:], "kwargs.values()")):
            if values:
                self.lines.append(f"{', '.join(values)}, = {source}")
        return dict(zip(given, variables, strict=True))

    def _inputs(self, given: dict[str, str], in_spec: Any) -> list[tuple[str, str, Any]]:
        """Test what is no input; return name, variable and nesting of each input in the graph's order."""
        if not _is_call_by_name(in_spec):
            raise _NotPlain
        named = {name: given.pop(name) for name in self.form.inputs if name in given}
        if len(named) < len(self.form.inputs):
            raise _NotPlain
        self._test_fixed(given)
        self._test_rest(given)
        names = list(in_spec.child(1).context)
        for name in names:
            if name not in named and name in self.form.fixed:  # an input of the graph that has one value only
                named[name] = self._constant(self.form.fixed[name])
        if tuple(names) != self.names or named.keys() != set(names):  # checked in one order, given in another
            raise _NotPlain
        return [(name, named[name], spec) for name, spec in zip(names, in_spec.child(1).children(), strict=True)]

    def _test_fixed(self, given: dict[str, str]) -> None:
        """Test what is baked in, where it is given; it has to be what is meant where it is not."""
        defaults = {parameter.name: parameter.default for parameter in self.form.parameters}
        for name, baked in self.form.fixed.items():
            implied, value = name in self.form.implied, given.pop(name, None)
            if value is not None:
                repeats = self._equals(value, baked)
                self.tests.append(f"({value} is None or {repeats})" if implied else repeats)
            elif not implied and not _same(defaults.get(name), baked):
                raise _NotPlain

    def _test_rest(self, given: dict[str, str]) -> None:
        """Test that arguments which the graph does not use are None or their defaults."""
        defaults = {parameter.name: parameter.default for parameter in self.form.parameters}
        for name, value in given.items():
            if type(default := defaults.get(name)) in _PLAIN:
                self.tests.append(f"({value} is None or {self._equals(value, default)})")
            else:
                self.tests.append(f"{value} is None")

    def _equals(self, value: str, constant: object) -> str:
        """Return the test for a constant; only for types of which equal values cannot be told apart."""
        if type(constant) not in _PLAIN:
            raise _NotPlain
        if constant is None or isinstance(constant, bool):
            return f"{value} is {constant}"
        return f"(type({value}) is {type(constant).__name__} and {value} == {self._constant(constant)})"

    def _constant(self, value: object) -> str:
        name = f"constant_{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def _flatten(self, value: str, spec: Any) -> None:
        """Write the lines that take a container apart; note the variables of the leaves."""
        if spec.is_leaf():
            self.leaves.append(value)
            return
        self._return_early_unless([*self.tests, f"type({value}) is {self._constant(_class_of(spec))}"])
        self.tests = []
        entries = [f"{value}_{index}" for index in range(spec.num_children)]
        source = self._entries(value, spec)
        if entries:
            self.lines.append(f"{', '.join(entries)}, = {source}")
        for entry, child in zip(entries, spec.children(), strict=True):
            self._flatten(entry, child)

    def _entries(self, value: str, spec: Any) -> str:
        """Test that a container has the entries that it had at capture; return the expression for them."""
        count = f"{spec.num_children}"
        if spec.type in (list, tuple):
            self._return_early_unless([f"len({value}) == {count}"])
            return value
        if spec.type is dict:
            self._return_early_unless([f"[*{value}] == {self._constant(list(spec.context))}"])
            return f"{value}.values()"
        if spec.type not in pytree.SUPPORTED_NODES:
            raise _NotPlain
        flatten, context = self._constant(pytree.SUPPORTED_NODES[spec.type].flatten_fn), self._constant(spec.context)
        self.lines.append(f"{value}_entries, {value}_context = {flatten}({value})")
        self._return_early_unless([f"len({value}_entries) == {count}", f"{value}_context == {context}"])
        return f"{value}_entries"

    def _return_early_unless(self, tests: Sequence[str]) -> None:
        if tests:
            self.lines.append(f"if not ({' and '.join(tests)}): return None")

    def _test_leaf(self, leaf: str, spec: Any) -> str:
        """Test one input as its specification says; return the variable of its shape."""
        if spec.kind is None:
            self.tests.append(self._equals(leaf, spec.value))
            return ""
        shape = f"shape_{len(self.lines)}"
        self.lines += [f"if type({leaf}) is not Tensor: return None", f"{shape} = {leaf}.shape"]
        self.tests += [f"len({shape}) == {len(spec.sizes)}", self._dtype_test(f"{leaf}.dtype", spec)]
        self.tests += [f"{shape}[{dim}] == {size}" for dim, size in enumerate(spec.sizes) if size is not None]
        return shape

    def _dtype_test(self, dtype: str, spec: Any) -> str:
        kind = self._constant(dtypes_of(spec.kind))
        if spec.dtype is None:
            return f"{dtype} in {kind}"
        if spec.dtype not in dtypes_of(spec.kind):
            raise _NotPlain
        same = f"{dtype} is {self._constant(spec.dtype)}"
        return f"({same} or {dtype} is guards.module_dtype and {dtype} in {kind})" if spec.follows else same

    def _condition(self, code: str, shapes: Sequence[str]) -> str:
        tree = ast.parse(code, mode="eval")
        return f"({ast.unparse(_Sizes(self.leaves, shapes).visit(tree.body))})"

    def _compiled(self) -> Recognize:
        result = f"({''.join(f'{leaf}, ' for leaf in self.leaves)})"
        test = " and ".join(self.tests) or "True"
        end = ["try:", f"    return {result} if {test} else None", "except ZeroDivisionError:", "    return None"]
        source = "\n    ".join(["def recognized(args, kwargs, guards):", *self.lines, *end])
        exec(compile(source, "<arguments of a captured module>", "exec"), self.namespace)
        function: Recognize = self.namespace["recognized"]
        return function


class _Sizes(ast.NodeTransformer):
    """Puts variables in the place of inputs and their sizes: ``shape_1[0]`` for ``i[1].size()[0]``."""

    def __init__(self, leaves: Sequence[str], shapes: Sequence[str]) -> None:
        self.leaves, self.shapes = leaves, shapes

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace ``i[1].size()``."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "size" and not node.args and not node.keywords:
            index = _index(node.func.value)
            if index is not None and self.shapes[index]:
                return ast.Name(self.shapes[index], ast.Load())
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Replace ``i[1]``."""
        index = _index(node)
        return self.generic_visit(node) if index is None else ast.Name(self.leaves[index], ast.Load())


def _index(node: ast.AST) -> int | None:
    """Return k for ``i[k]``."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name) or node.value.id != "i":
        return None
    return node.slice.value if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int) else None


def _is_call_by_name(in_spec: Any) -> bool:
    """Whether a graph takes all of its inputs by name."""
    return (
        isinstance(in_spec, pytree.TreeSpec)
        and in_spec.type is tuple
        and [child.type for child in in_spec.children()] == [tuple, dict]
        and in_spec.child(0).num_children == 0
    )


def _class_of(spec: Any) -> type:
    """Return the class of a container; torch's pytrees know named tuples under the function that makes such classes."""
    kind: type = spec.context if spec.type is namedtuple else spec.type
    return kind


def _agree(nesting: Any, spec: Any) -> bool:
    """Whether the nesting that `InputBinding` checks is the one that the graph has."""
    if nesting.kind is None or spec.is_leaf():
        return nesting.kind is None and spec.is_leaf()
    return (
        nesting.kind is _class_of(spec)
        and nesting.context == spec.context
        and len(nesting.entries) == spec.num_children
        and all(map(_agree, nesting.entries, spec.children()))
    )


def _same(value: object, baked: object) -> bool:
    return type(baked) in _PLAIN and type(value) is type(baked) and value == baked
