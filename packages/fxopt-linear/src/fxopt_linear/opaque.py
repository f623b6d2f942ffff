"""Calls that run linear layers out of sight of the graph, so that nobody wonders why those are not merged."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import Node

from fxopt_core import GraphIndex, Refusal

FUSED = frozenset({"multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"})
"""Operations that project with weights of their own: attention as one call, and torch's fast path in eval mode."""
_REMEDY = "capture the model by torch.export to see them"


def opaque_refusals(index: GraphIndex) -> Iterator[Refusal]:
    """Yield a refusal for each module that is called as a whole and holds several linear layers, and each fused call.

    ``nn.MultiheadAttention`` counts with its projections, of which only the last is a layer.
    """
    counts: dict[int, int] = {}
    for node in index.nodes:
        module = index.module_of(node)
        if module is not None and module._modules and not isinstance(module, nn.Linear):  # adapters are read as layers
            if id(module) not in counts:
                counts[id(module)] = sum(map(_projections, module.modules()))
            if counts[id(module)] > 1:
                name, kind, count = str(node.target), type(module).__name__, counts[id(module)]
                message = f"module `{name}` ({kind}) is called as a whole, with {count} linear layers in it; {_REMEDY}"
                yield index.refuse(name, "opaque-call", message, node)
        elif _operation(node) in FUSED:
            message = f"node `{node.name}` runs linear layers inside of one {_operation(node)}; {_REMEDY}"
            yield index.refuse(_owner(node), "opaque-call", message, node)


def _projections(module: nn.Module) -> int:
    """Return how many linear layers a module itself is, not counting its children."""
    if isinstance(module, nn.MultiheadAttention):
        return 1 if module._qkv_same_embed_dim else 3
    return int(isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")


def _operation(node: Node) -> str | None:
    packet = getattr(node.target, "overloadpacket", node.target) if node.op == "call_function" else None
    return getattr(packet, "__name__", None)


def _owner(node: Node) -> str:
    """Return the name of the module that the first weight of a call is in; the node's own where that is unknown."""
    weights = (str(value.target) for value in node.all_input_nodes if value.op == "get_attr")
    return next((name.rpartition(".")[0] for name in weights if "." in name), node.name)
