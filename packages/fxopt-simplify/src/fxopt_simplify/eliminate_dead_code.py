"""``y = f(x)`` without a reader -> nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import ClassVar

from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite import Editor, GraphIndex, ReversibleSitePass
from fxopt_simplify.purity import CallSite, Purity


class EliminateDeadCode(ReversibleSitePass[CallSite]):
    """``y = f(x)`` without a reader -> nothing.

    Calls that also write, check or draw random numbers stay, and so do inputs of the graph. A layer with weights is
    refused if this is its only call: without a call, its weights would have to go too, and an undo could not bring
    back their values.

    Source:
        ``torch.fx.Graph.eliminate_dead_code``, which removes whatever is not known to be impure.

    Cost:
        One call fewer for each site.

    >>> import torch
    >>> graph_module = torch.fx.symbolic_trace(lambda x: (x + 1, x.sum().sqrt())[0])
    >>> print(EliminateDeadCode()(graph_module).code.strip())
    def forward(self, x):
        add = x + 1;  x = None
        return add
    """

    reasons: ClassVar[Mapping[str, str]] = {
        "holds-weights": "Nothing reads the layer's result, but removing its only call would remove its weights, which "
        "an undo could not bring back. Delete the layer from the model, if it is not needed.",
    }

    def match(self, index: GraphIndex) -> Iterator[CallSite | Refusal]:
        """Yield the calls that nothing needs, the last first."""
        purity = Purity(index)
        dead: set[Node] = set()
        for node in reversed(index.nodes):
            if not dead.issuperset(node.users):
                continue
            if node.op == "get_attr":
                if any(other is not node and other not in dead for other in index.attribute_nodes(str(node.target))):
                    dead.add(node)  # another node reads its tensor, which stays
                    yield CallSite(node)
            elif purity.is_pure(node):
                refusal = _holds_weights(index, node, dead)
                if refusal is not None:
                    yield refusal
                else:
                    dead.add(node)
                    yield CallSite(node)

    def rewrite(self, site: CallSite, edit: Editor) -> None:
        """Erase the call, and drop its module if that holds nothing and is not called elsewhere."""
        node = site.node
        module = edit.index.module_of(node)
        edit.erase(node)
        if module is not None and len(edit.index.module_names(module)) == 1 and not _tensors(module):
            # Another node may still call it: one that stays, or one whose turn comes later.
            with suppress(ValueError):
                edit.drop_module(str(node.target), {})


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _holds_weights(index: GraphIndex, node: Node, dead: set[Node]) -> Refusal | None:
    module = index.module_of(node)
    tensors = [] if module is None else _tensors(module)
    if all(any(reader is not node and reader not in dead for reader in index.readers(tensor)) for tensor in tensors):
        return None
    message = f"nothing reads the result of layer `{node.target}` at node `{node.name}`, its only call"
    return index.refuse(str(node.target), "holds-weights", message, node)
