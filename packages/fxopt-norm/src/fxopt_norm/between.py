"""Batch norms that are nearly behind a layer: what stands between only moves or drops values."""

from __future__ import annotations

from torch.fx import Node

from fxopt_core import GraphIndex, Obstacle, ParameterisedCall, Refusal, input_of

_VIEWS = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "permute", "t"}
_COPIES = {"contiguous", "clone", "alias", "detach", "to", "_to_copy"}
_DROPOUTS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
    *("nn.Dropout", "nn.Dropout1d", "nn.Dropout2d", "nn.Dropout3d", "nn.AlphaDropout", "nn.FeatureAlphaDropout"),
}
_MOVES = frozenset(_VIEWS | _COPIES | _DROPOUTS | {"nn.Flatten", "nn.Unflatten", "nn.Identity"})
_MOST = 8  # a longer chain of moves is nobody's near miss


def behind(value: Node, index: GraphIndex) -> Node:
    """Return what a value was before it was only moved, copied or passed through dropout; most often, itself."""
    for _ in range(_MOST):
        before = input_of(value)
        if before is None or index.effects.effect(value).operation not in _MOVES:
            break
        value = before
    return value


def not_adjacent(
    layer: ParameterisedCall | Obstacle,
    norm: ParameterisedCall | Obstacle,
    nodes: tuple[Node, Node, Node],
    index: GraphIndex,
) -> Refusal:
    """Return the refusal of a batch norm on a value that is not quite what a layer computes.

    Args:
        layer: the layer.
        norm: the batch norm.
        nodes: the call of the layer, what the batch norm reads, and its call.
        index: facts about the graph module.
    """
    site, other = (call.site if isinstance(call, Obstacle) else call.label for call in (layer, norm))
    between = f"`{nodes[1].name}` stands between layer `{site}` and batch norm `{other}`"
    return index.refuse(f"{site} + {other}", "not-adjacent", f"{between}, and nothing is folded across it", *nodes)
