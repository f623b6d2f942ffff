"""The difference of two graph modules: nodes line by line, and tensors by their keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import unified_diff
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from fxopt.commands.graph_data import size_data
from fxopt.reporting import picture
from fxopt_core import iter_nodes
from fxopt_tools.rendering import name_of, text_of

Named = tuple[str, GraphModule]


@dataclass(frozen=True)
class Difference:
    """What differs between two graph modules.

    Attributes:
        names: what they are called.
        sizes: numbers of nodes, modules and parameters of both.
        nodes: a unified difference of their nodes, one a line; empty where they have the same.
        removed: tensors that only the first one has, with dtypes and shapes.
        added: tensors that only the second one has.
        changed: keys that both have, with what is different.
        graphs: both graph modules.
    """

    names: tuple[str, str]
    sizes: tuple[dict[str, int], dict[str, int]]
    nodes: tuple[str, ...]
    removed: dict[str, str]
    added: dict[str, str]
    changed: dict[str, str]
    graphs: tuple[GraphModule, GraphModule] = field(repr=False)

    @property
    def same(self) -> bool:
        """Whether there is none."""
        return not (self.nodes or self.removed or self.added or self.changed)

    def lines(self) -> list[str]:
        """Return it for readers; lines of the first begin with ``-``, those of the second with ``+``."""
        if self.same:
            return [f"{self.names[0]} and {self.names[1]} have the same nodes and the same tensors"]
        one, other = self.sizes
        counts = ", ".join(f"{one[name]} -> {other[name]} {name}" for name in ("nodes", "modules", "parameters"))
        tensors = [f"-{key}: {text}" for key, text in self.removed.items()]
        tensors += [f"+{key}: {text}" for key, text in self.added.items()]
        tensors += [f"!{key}: {text}" for key, text in self.changed.items()]
        return [*self.nodes, *(["@@ tensors @@", *tensors] if tensors else []), counts]

    def picture(self, form: Literal["mermaid", "dot", "svg"]) -> str:
        """Return a picture of the nodes that changed, and of those beside them."""
        seen = picture(self.graphs[1], self.graphs[0])
        if form == "dot":
            return seen.to_dot(1)
        return seen.to_mermaid() if form == "mermaid" else seen.to_svg()

    def data(self) -> dict[str, Any]:
        """Return it for scripts."""
        return {
            "same": self.same,
            "before": {"name": self.names[0], **self.sizes[0]},
            "after": {"name": self.names[1], **self.sizes[1]},
            "nodes_removed": [line[1:] for line in self.nodes[2:] if line.startswith("-")],
            "nodes_added": [line[1:] for line in self.nodes[2:] if line.startswith("+")],
            "tensors_removed": self.removed,
            "tensors_added": self.added,
            "tensors_changed": self.changed,
        }


def difference(before: Named, after: Named) -> Difference:
    """Compare two graph modules, each with its name."""
    names = before[0], after[0]
    one, other = (list(map(_line, iter_nodes(named[1].graph))) for named in (before, after))
    nodes = tuple(unified_diff(one, other, *names, n=1, lineterm=""))
    old, new = before[1].state_dict(), after[1].state_dict()
    changes = {key: _change(old[key], new[key]) for key in old if key in new}
    return Difference(
        names=names,
        sizes=(size_data(before[1]), size_data(after[1])),
        nodes=nodes,
        removed={key: text_of(value) for key, value in old.items() if key not in new},
        added={key: text_of(value) for key, value in new.items() if key not in old},
        changed={key: change for key, change in changes.items() if change},
        graphs=(before[1], after[1]),
    )


def _line(node: Node) -> str:
    arguments = [*map(text_of, node.args), *(f"{key}={text_of(value)}" for key, value in node.kwargs.items())]
    return f"{node.name} = {node.op} {name_of(node.target)}({', '.join(arguments)})"


def _change(old: torch.Tensor, new: torch.Tensor) -> str:
    """Return what differs between two tensors, or an empty text."""
    if text_of(old) != text_of(new):
        return f"{text_of(old)} -> {text_of(new)}"
    return "" if torch.equal(old, new) else "other values"
