"""Graphs as plain data to draw: names, labels, arguments as text, places in the model's source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt_core import iter_nodes, tag_of
from fxopt_report.node_text import name_of, text_of, without_addresses
from fxopt_rewrite import Unresolved

Category = Literal["input", "tensor", "module", "function", "output"]
_CATEGORIES: Mapping[str, Category] = {
    "placeholder": "input",
    "get_attr": "tensor",
    "call_module": "module",
    "output": "output",
}
_LONGEST = 400


@dataclass(frozen=True)
class DrawnNode:
    """A node as data to draw.

    Attributes:
        name: its name in the graph.
        op: its operation, as torch.fx calls it.
        category: what it is drawn as.
        label: what it does, in a word: "Linear", "add", "input".
        target: what it calls or reads, in full.
        arguments: its arguments as text, with ``%name`` for nodes.
        outline: the same without the names of nodes: equal where only the inputs differ.
        inputs: names of the nodes that it reads, each once.
        value: dtype and shape of its value, "" where they are unknown.
        module: class and settings of the module that it calls, or "".
        trace: the stack trace of where it comes from in the model, or "".
        scope: the path of the module that it belongs to, as ``"encoder.layer.0"``; "" for the model itself.
    """

    name: str
    op: str
    category: Category
    label: str
    target: str
    arguments: str
    outline: str
    inputs: tuple[str, ...]
    value: str = ""
    module: str = ""
    trace: str = ""
    scope: str = ""

    @property
    def caption(self) -> str:
        """What sets it apart from others of its label: the path of a module or tensor, or its name."""
        return self.target if self.op in ("call_module", "get_attr") else self.name

    @property
    def identity(self) -> tuple[str, ...]:
        """What is equal for nodes that do the same, on whatever inputs."""
        return self.name, self.op, self.target, self.outline, self.module


@dataclass(frozen=True)
class DrawnGraph:
    """A graph as data to draw.

    Attributes:
        nodes: its nodes by name, in order.
    """

    nodes: Mapping[str, DrawnNode]

    @staticmethod
    def of(graph_module: GraphModule) -> DrawnGraph:
        """Return the graph of a graph module as data.

        >>> import torch
        >>> [node.label for node in DrawnGraph.of(torch.fx.symbolic_trace(torch.nn.ReLU())).nodes.values()]
        ['input', 'relu', 'output']
        """
        return drawn(drafts_of(graph_module), Modules(graph_module))

    def kinds(self) -> Counter[str]:
        """Return how many operations of each kind there are: layers by class, functions by name.

        >>> import torch
        >>> DrawnGraph.of(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))).kinds()
        Counter({'Linear': 1, 'ReLU': 1})
        """
        return Counter(node.label for node in self.nodes.values() if node.category in ("module", "function"))

    def edges(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs of a node that is read and one that reads it."""
        for node in self.nodes.values():
            yield from ((source, node.name) for source in node.inputs)


@dataclass(eq=False)
class Draft:
    """A node while passes are taken back: it may come to read other nodes."""

    name: str
    op: str
    target: Any
    arguments: tuple[Any, Mapping[str, Any]] = ((), MappingProxyType({}))  # with a `Slot` for each node
    reads: list[Slot] = field(default_factory=list)  # the slots among its arguments, nested ones too, in order
    meta: Mapping[str, Any] = field(default_factory=dict)
    number: int | None = None  # under which records refer to it

    def slot(self, read: Draft) -> Slot:
        """Return a new place where it reads another node."""
        self.reads.append(Slot(read))
        return self.reads[-1]


@dataclass(eq=False)
class Slot:
    """A place among arguments where a node is read."""

    read: Draft

    def __repr__(self) -> str:
        """Return the node as text has it."""
        return f"%{self.read.name}"


class Modules:
    """Class and settings of the modules of a graph by their full names: of those that it has, and of added ones."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._known: dict[str, str] = {}

    def add(self, name: str, description: str) -> None:
        """Add a module that was there once."""
        self._known[name] = description

    def describe(self, name: str) -> str:
        """Return ``"Linear(in_features=4, ...)"``; "" for what is not known."""
        if name not in self._known:
            self._known[name] = self._describe(name)
        return self._known[name]

    def _describe(self, name: str) -> str:
        try:
            module = self._graph_module.get_submodule(name)
        except AttributeError:
            return ""
        return f"{type(module).__name__}({_extra(module)})"


def drafts_of(graph_module: GraphModule) -> list[Draft]:
    """Return the nodes of a graph as drafts, in order."""
    found: dict[Node, Draft] = {}
    for node in iter_nodes(graph_module.graph):
        draft = Draft(node.name, node.op, node.target, meta=node.meta, number=tag_of(node).id)

        def slot(item: Node, draft: Draft = draft) -> Any:
            return draft.slot(found[item])

        arguments: Any = map_arg((node.args, node.kwargs), slot)
        draft.arguments = arguments
        found[node] = draft
    return list(found.values())


def drawn(drafts: Iterable[Draft], modules: Modules) -> DrawnGraph:
    """Return finished nodes for drafts."""
    return DrawnGraph({draft.name: _drawn_node(draft, modules) for draft in drafts})


def _drawn_node(draft: Draft, modules: Modules) -> DrawnNode:
    target = _target(draft.target)
    module = modules.describe(target) if draft.op == "call_module" else ""
    return DrawnNode(
        name=draft.name,
        op=draft.op,
        category=_CATEGORIES.get(draft.op, "function"),
        label=_label(draft.op, target, module),
        target=target,
        arguments=_cut(_arguments(draft)),
        outline=_outline(draft),
        inputs=tuple(dict.fromkeys(slot.read.name for slot in draft.reads)),
        value=_value(draft.meta),
        module=_cut(module),
        trace=str(draft.meta.get("stack_trace") or ""),
        scope=_scope(draft, target),
    )


def _scope(draft: Draft, target: str) -> str:
    """Return the path of the innermost module that the node runs in: for a call of a layer, of the one around it."""
    stack: Any = draft.meta.get("nn_module_stack")
    paths = [str(entry[0]) for entry in stack.values()] if isinstance(stack, dict) else []
    paths = [path for path in paths if not path.startswith("_empty_nn_module_stack")]  # torch's, of guards
    if draft.op != "call_module":
        return paths[-1] if paths else ""
    around = [path for path in paths if path != target]
    return around[-1] if around else target.rpartition(".")[0]


def _label(op: str, target: str, module: str) -> str:
    if op in ("placeholder", "output"):
        return "input" if op == "placeholder" else "output"
    if op == "get_attr":
        return target.rpartition(".")[2]
    if op == "call_module":
        return module.partition("(")[0] or "module"
    parts = target.split(".")
    overloaded = len(parts) > 2 and parts[0] != "torch"  # namespace, name, overload
    return parts[-2] if overloaded else parts[-1]


def _target(target: object) -> str:
    if isinstance(target, Unresolved):
        return target.name.replace(":", ".").removeprefix("torch.ops.")
    return name_of(target)


def _arguments(draft: Draft) -> str:
    args, kwargs = draft.arguments
    texts = [text_of(arg) for arg in args]
    return ", ".join([*texts, *(f"{key}={text_of(value)}" for key, value in kwargs.items())])


def _outline(draft: Draft) -> str:
    """Return the arguments with one and the same name for all nodes."""
    kept = [slot.read for slot in draft.reads]
    for slot in draft.reads:
        slot.read = _ANY
    text = _arguments(draft)
    for slot, read in zip(draft.reads, kept, strict=True):
        slot.read = read
    return text


_ANY = Draft("", "", "")


def _value(meta: Mapping[str, Any]) -> str:
    for key in ("val", "tensor_meta"):
        value: Any = meta.get(key)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            sizes = ", ".join(map(str, value.shape))
            return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    return ""


def _extra(module: nn.Module) -> str:
    if isinstance(module, GraphModule):
        return ""
    try:
        return without_addresses(" ".join(module.extra_repr().split()))
    except Exception:  # foreign code: a picture does not need it
        return "..."


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
