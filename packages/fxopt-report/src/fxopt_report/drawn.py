"""Graphs as plain data to draw: names, labels, arguments as text, places in the model's source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxopt_core import iter_nodes
from fxopt_report.frames import Frame, model_frame
from fxopt_report.markup import printable
from fxopt_report.node_text import target_text, text_of, without_addresses
from fxopt_rewrite import tensor_facts

Category = Literal["input", "tensor", "module", "function", "output"]
_CATEGORIES: Mapping[str, Category] = {
    "placeholder": "input",
    "get_attr": "tensor",
    "call_module": "module",
    "output": "output",
}
_LONGEST = 400
#: Stands for every node in outlines, so that calls that differ only in their inputs have the same one.
_ANY = Graph().placeholder("any")


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
        frame: the line of the model that it comes from, or None.
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
    frame: Frame | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a constant: it reads nothing, and is drawn right above what reads it."""
        return not self.inputs and self.category not in ("input", "output")

    @property
    def lines(self) -> tuple[str, str]:
        """The two lines in its box: its label, and its path or name, or "" where that would repeat the first."""
        caption = self.target if self.op in ("call_module", "get_attr") else self.name
        return _end(self.label, 32), "" if caption == self.label else _end(caption, 34)

    @property
    def width(self) -> float:
        """The width of its box."""
        label, caption = self.lines
        # Pixels: margins, and 8.4 for a character of the label (12.5 px, bold), 6.75 for one of the caption (11 px).
        return round(max(84.0, 39 + 8.4 * len(label), 23 + 6.75 * len(caption)), 1)

    @property
    def identity(self) -> tuple[str, ...]:
        """A key that is equal for nodes that do the same on any inputs."""
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
        return drawn(graph_module.graph, module_texts(graph_module))

    def edges(self) -> Iterator[tuple[str, str]]:
        """Return the pairs of a node that is read and one that reads it."""
        return ((source, node.name) for node in self.nodes.values() for source in node.inputs)


def module_texts(graph_module: GraphModule) -> dict[str, str]:
    """Return class and settings of each module, such as ``"Linear(in_features=4, ...)"``, by its full name."""
    modules = graph_module.named_modules(remove_duplicate=False)
    return {name: f"{type(module).__name__}({_extra(module)})" for name, module in modules}


def drawn(graph: Graph, modules: Mapping[str, str]) -> DrawnGraph:
    """Return a graph as data to draw, with the texts of its modules by name."""
    return DrawnGraph({node.name: _drawn_node(node, modules) for node in iter_nodes(graph)})


def _drawn_node(node: Node, modules: Mapping[str, str]) -> DrawnNode:
    target = target_text(node.target)
    module = modules.get(target, "") if node.op == "call_module" else ""
    outline: Any = map_arg((node.args, node.kwargs), lambda read: _ANY)
    return DrawnNode(
        name=node.name,
        op=node.op,
        category=_CATEGORIES.get(node.op, "function"),
        label=_label(node, module),
        target=target,
        arguments=_cut(_arguments(node.args, node.kwargs)),
        outline=_arguments(*outline),
        inputs=tuple(read.name for read in node.all_input_nodes),
        value=_value(node),
        module=_cut(module),
        frame=model_frame(str(node.meta.get("stack_trace") or "")),
    )


def _label(node: Node, module: str) -> str:
    if node.op in ("placeholder", "output"):
        return "input" if node.op == "placeholder" else "output"
    if node.op == "call_module":
        return module.partition("(")[0] or "module"
    target: Any = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(target, "__name__", target)).rpartition(".")[2]


def _arguments(args: Iterable[object], kwargs: Mapping[str, object]) -> str:
    texts = [text_of(arg) for arg in args]
    return ", ".join([*texts, *(f"{key}={text_of(value)}" for key, value in kwargs.items())])


def _value(node: Node) -> str:
    facts = tensor_facts(node)
    return "" if facts is None else f"{str(facts.dtype).removeprefix('torch.')}[{', '.join(map(str, facts.shape))}]"


def _extra(module: nn.Module) -> str:
    if isinstance(module, GraphModule):
        return ""
    try:
        return without_addresses(" ".join(module.extra_repr().split()))
    except Exception:  # foreign code: a picture does not need it
        return "..."


def _end(text: str, longest: int) -> str:
    """Return the end of a text, which says more than its beginning."""
    text = printable(text)
    return text if len(text) <= longest else f"…{text[1 - longest :]}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
