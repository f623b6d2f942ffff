"""What a call may write, and what its result may share memory with, by its target.

A `Rule` describes a function, method or operator; applied to a call, it gives an `Effect`, which names nodes. Rules
follow from the schemas of operators, and from `fxopt_rewrite.ops.tables` where schemas are silent. An unknown target
may write and share everything.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from fxopt_rewrite._torch import has_kernel_for
from fxopt_rewrite.ops import names, tables
from fxopt_rewrite.shapes.kinds import MEMORY_FREE, Kind, Known


@dataclass(frozen=True, slots=True)
class Effect:
    """What one node does.

    Attributes:
        writes: inputs whose memory it may write.
        aliases: inputs with which its result may share memory.
        opaque: whether nothing is known of it: it may also read strides, or write tensors of its module.
        operation: name of what it calls, ``"view"`` or ``"nn.Linear"``; None if that is not torch's.
    """

    writes: tuple[Node, ...] = ()
    aliases: tuple[Node, ...] = ()
    opaque: bool = False
    operation: str | None = None


class Argument(NamedTuple):
    """An argument of a call: its position (None for keyword-only) and name."""

    position: int | None
    name: str


class Switch(NamedTuple):
    """An argument that makes a call write: ``inplace``, ``training``, ``max_norm``, ``out``."""

    argument: Argument  # the switch, off if False or None
    default: object  # its value if it is not given
    writes: tuple[Argument, ...]  # what the call writes if it is on
    aliased: bool  # whether the result is then what was written


@dataclass(frozen=True)
class Rule:
    """What calls of one target do."""

    operation: str | None = None  # its name; None if it is not torch's
    writes: tuple[Argument, ...] = ()  # arguments that it writes
    aliases: tuple[Argument, ...] = ()  # arguments with which its result may share memory
    aliases_all: bool = False  # whether its result may share memory with any argument
    aliases_one: bool = False  # whether it may do so given one operand: ``einsum`` of several gives fresh memory
    opaque: bool = False  # whether it may write and share everything
    containers: bool = False  # whether it takes lists and dicts too, and then passes on what they hold
    switches: tuple[Switch, ...] = ()  # arguments that make it write more

    def apply(self, node: Node, known: Known) -> Effect:
        """Return what a call does."""
        if self.opaque:
            everything = _holding_memory(node.all_input_nodes, known)
            return Effect(everything, everything, True, self.operation)
        writes = [names.argument(node, *argument) for argument in self.writes]
        aliases = [names.argument(node, *argument) for argument in self.aliases]
        for switch in self.switches:
            if _is_on(names.argument(node, *switch.argument), switch.default):
                written = [names.argument(node, *argument) for argument in switch.writes]
                writes += written
                aliases += written if switch.aliased else []
        shared = self.aliases_all or (self.aliases_one and len(names.nodes_in(node.args)) == 1)
        if shared or (self.containers and _may_be_containers(node, self.operation, known)):
            aliases += node.all_input_nodes
        return Effect(_holding_memory(writes, known), _holding_memory(aliases, known), False, self.operation)


OPAQUE = Rule(opaque=True)
_SELF = Argument(0, "self")
_OUT = Argument(None, "out")


def _is_on(value: object, default: object) -> bool:
    value = default if value is names.MISSING else value
    return value is not False and value is not None


def _holding_memory(values: Sequence[object], known: Known) -> tuple[Node, ...]:
    """Return the nodes within the values, each once, except those that hold no memory."""
    nodes = names.nodes_in([*values]) if values else ()
    return tuple(dict.fromkeys(node for node in nodes if known(node) not in MEMORY_FREE))


def _may_be_containers(node: Node, operation: str | None, known: Known) -> bool:
    """Return whether ``a + b`` and the like may join lists instead of adding tensors."""
    # A list or dict holds the very value that is put into it; a tensor copies the elements.
    if operation in {"setitem", "iadd", "imul", "ior"}:
        first = node.args[0] if node.args else None
        return not (isinstance(first, Node) and known(first) is Kind.TENSOR)
    kinds = {known(operand) for operand in node.all_input_nodes}
    if Kind.TENSOR in kinds or any(isinstance(value, float) for value in node.args):
        return False
    # Python adds no number to a list, so this is arithmetic; `[x] * 2`, however, repeats the list.
    is_sum = operation == "add" and (Kind.NUMBER in kinds or any(isinstance(value, int) for value in node.args))
    return not is_sum


def rule_of_function(target: Callable[..., object]) -> Rule:
    """Return the rule for the target of a ``call_function`` node."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return rule_of_operator(target)
    source, name = names.source_of(target)
    rule = _RULES.get(source)
    return OPAQUE if rule is None else rule(name)


@cache
def rule_of_operator(target: OpOverload | OpOverloadPacket) -> Rule:
    """Return the rule for an operator, or for one overload of it."""
    # Where a schema names no shared memory, third-party kernels may return their input all the same.
    trusted = names.qualified_name(target).startswith(("aten::", "prims::"))
    return _joined(names.aten_name(target), names.overloads_of(target), trusted)


@cache
def rule_of_aten(name: str) -> Rule:
    """Return the rule for all overloads of an aten operator."""
    return _joined(name, names.aten_overloads(name), True)


def _joined(name: str | None, overloads: Iterable[OpOverload], trusted: bool) -> Rule:
    writes: dict[Argument, None] = {}
    # Of the other operand of `type_as`, only the dtype counts.
    aliases: dict[Argument, None] = {_SELF: None} if name == "type_as" else {}
    switches: list[Switch] = []
    aliases_all = False
    for overload in overloads:
        returns = any("Tensor" in str(result.type) for result in overload._schema.returns)
        places: dict[str, Argument] = {}
        for place, parameter in enumerate(overload._schema.arguments):
            argument = Argument(None if parameter.kwarg_only else place, parameter.name)
            places[parameter.name] = argument
            if parameter.alias_info is not None:
                aliases.update({argument: None} if returns else {})
                writes.update({argument: None} if parameter.alias_info.is_write else {})
        # `_native_batch_norm_legit` declares its writes; `batch_norm` and `native_batch_norm` do not.
        if places.get("running_mean") not in writes:
            switches += _statistics_switches(name or "", places)
        aliases_all = aliases_all or (returns and _shares_silently(overload, name or "", trusted))
    every = (*dict.fromkeys(switches), Switch(_OUT, None, (_OUT,), True))
    if name in tables.FRESH_OF_SEVERAL:
        return Rule(name, aliases_one=True, switches=every)
    return Rule(name, tuple(writes), tuple(aliases), aliases_all, switches=every)


def _shares_silently(overload: OpOverload, name: str, trusted: bool) -> bool:
    """Return whether an operator may share memory although its schema says nothing of it."""
    if any(argument.alias_info is not None for argument in overload._schema.arguments):
        return False
    tagged = any(torch.Tag.maybe_aliasing_or_mutating in each.tags for each in names.aten_overloads(name))
    if not trusted or name in tables.SILENT_ALIASES or (tagged and name != "batch_norm"):  # for its statistics
        return True
    is_composite = has_kernel_for(names.qualified_name(overload), "CompositeImplicitAutograd")
    private = name.startswith("_") and name not in tables.SAFE_PRIVATE_OPERATORS
    return is_composite and (private or name.startswith(tables.SILENT_PREFIXES) or name.endswith("_backward"))


def _statistics_switches(name: str, places: Mapping[str, Argument], default: object = True) -> list[Switch]:
    """Return what makes a batch norm write its running statistics, which schemas do not tell."""
    flag = places.get("training") or places.get("use_input_stats")
    if "running_mean" not in places or (flag is None and "_stats" not in name):
        return []
    return [Switch(flag or Argument(None, ""), default, (places["running_mean"], places["running_var"]), False)]


@cache
def rule_of_functional(name: str) -> Rule:
    """Return the rule for a Python function of ``torch.nn.functional``."""
    if name not in tables.FRESH_FUNCTIONALS | tables.DROPOUTS:
        return OPAQUE
    parameters = list(inspect.signature(getattr(torch.nn.functional, name)).parameters)
    places = {parameter: Argument(place, parameter) for place, parameter in enumerate(parameters)}
    first = Argument(0, parameters[0])
    switches: list[Switch] = []
    if "inplace" in places:
        switches.append(Switch(places["inplace"], False, (first,), True))
    if "out" in places:
        switches.append(Switch(places["out"], None, (places["out"],), True))
    if "max_norm" in places:
        switches.append(Switch(places["max_norm"], None, (places["weight"], first), False))
    switches += _statistics_switches(name, places, default=name == "instance_norm")
    return Rule(name, aliases=(first,) if name in tables.DROPOUTS else (), switches=tuple(switches))


_JOINING = frozenset({"add", "mul", "or_", "concat", "iadd", "imul", "ior", "iconcat", "setitem"})
_READING = (tables.ARITHMETIC - _JOINING) | tables.words(
    "contains countOf index indexOf is_ is_not length_hint not_ truth"
)


def _rule_among(fresh: Container[str], shared: Container[str], prefix: str, name: str) -> Rule:
    """Return the rule for a function that is in one of two tables, by whether its result may share memory."""
    if name in fresh or name in shared:
        return Rule(prefix + name, aliases_all=name in shared)
    return OPAQUE


@cache
def _rule_of_operator(name: str) -> Rule:
    first = Argument(0, "a")
    if name in tables.INPLACE_OPERATORS | {"setitem", "delitem"}:
        kept = () if name in {"setitem", "delitem"} else (first,)
        return Rule(name, writes=(first,), aliases=kept, containers=name in _JOINING)
    if name in {"getitem", "pos"}:
        return Rule(name, aliases=(first,))
    if name in _JOINING:
        return Rule(name, containers=True)
    return Rule(name) if name in _READING else OPAQUE


@cache
def rule_of_method(name: str) -> Rule:
    """Return the rule for a method, assumed to be Tensor's if Tensor has one of this name."""
    if name.startswith("__") and name.endswith("__"):
        return _rule_of_dunder(name)
    if name in tables.PURE_METHODS:
        return Rule(name)
    if name in tables.ALIASING_METHODS:
        return Rule(name, aliases=(_SELF,))
    if name == "set_":
        return Rule(name, writes=(_SELF,), aliases_all=True)
    return rule_of_aten(name) if names.method_overloads(name) else OPAQUE


def _rule_of_dunder(name: str) -> Rule:
    if name in tables.PURE_METHODS:
        return Rule(name)
    if not hasattr(torch.Tensor, name) and not hasattr(operator, name):
        return OPAQUE
    plain = name.strip("_")
    # `__radd__` is `add`, but the r of `rshift` belongs to the name.
    reflected = plain[1:] if plain.startswith("r") and plain != "rshift" else plain
    return _rule_of_operator({"and": "and_", "or": "or_", "div": "truediv"}.get(reflected, reflected))


_RULES: Mapping[str, Callable[[str], Rule]] = {
    "operator": _rule_of_operator,
    "math": Rule,
    "builtins": partial(_rule_among, tables.PURE_BUILTINS, tables.COLLECTING_BUILTINS | {"getattr"}, "builtins."),
    "functional": rule_of_functional,
    "method": rule_of_method,
    "aten": rule_of_aten,
    "torch": partial(_rule_among, tables.PURE_TORCH_FUNCTIONS, tables.ALIASING_TORCH_FUNCTIONS, ""),
}


def rule_of_getattr(name: object) -> Rule:
    """Return the rule for reading an attribute."""
    if name in tables.PURE_ATTRIBUTES:
        return Rule("builtins.getattr")
    # Named for `needs_own_memory`, which knows what these do to strides. Any other attribute that may share memory
    # counts as revealing them.
    known = name in ("T", "mT", "H", "mH", "data", "real")
    return Rule(str(name) if known else "builtins.getattr", aliases_all=True)
