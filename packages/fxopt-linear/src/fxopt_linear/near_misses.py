"""Why linear layers are not in a group: others on their input differ, or calls hide their layers from the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite import GraphIndex, LinearCall, read_call

FUSED = frozenset({"multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"})
"""Operations that contain linear layers: attention as one call, and torch's fast path in eval mode."""
_REMEDY = "capture the model with torch.export to see them"


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer and all its calls.

    Attributes:
        calls: its calls, in order.
        runs: the runs that they belong to: a run is all calls on one value between in-place writes to it.
    """

    calls: tuple[LinearCall, ...]
    runs: frozenset[int]

    @property
    def first(self) -> LinearCall:
        """Its first call."""
        return self.calls[0]


class NearMisses:
    """Explains why layers that share an input with others are in no group of at least ``min_group``."""

    def __init__(self, runs: Sequence[Sequence[LinearCall]], min_group: int) -> None:
        self._runs = runs
        self._min_group = min_group
        self._layers: dict[int, tuple[Layer, Refusal | None]] = {}  # by the id of each call
        self._places = {id(call): place for place, run in enumerate(runs) for call in run}
        values = [run[0].input for run in runs]
        seen: set[Node] = set()
        self._written = {v for v in values if v in seen or seen.add(v)}  # type: ignore[func-returns-value]  # set.add

    def add(self, layer: Layer, refusal: Refusal | None) -> None:
        """Add a layer, and its refusal, if there is one."""
        for call in layer.calls:
            self._layers[id(call)] = (layer, refusal)

    def refusal(self, group: Sequence[Layer], others: Sequence[Layer], index: GraphIndex) -> Refusal:
        """Return the refusal of a group that is too small; ``others`` are called on exactly the same inputs."""
        reason, because = self._reason(group, others)
        names = ", ".join(f"`{layer.first.label}`" for layer in group)
        expected = f"{len(group)} of the {self._min_group} layers that a group needs"
        nodes = [call.node for layer in group for call in layer.calls]
        return index.refuse(group[0].first.label, reason, f"linear {names}: {expected}, since {because}", *nodes)

    def _reason(self, group: Sequence[Layer], others: Sequence[Layer]) -> tuple[str, str]:
        first = group[0]
        outside = [layer for layer in others if layer not in group]
        if outside:
            likely = (layer for layer in outside if (layer.first.bias is None) == (first.first.bias is None))
            return _difference(first.first, next(likely, outside[0]).first)
        neighbour, refusal = self._neighbour(group)
        if neighbour is not None and refusal is not None:
            return "group-too-small", f"`{neighbour.first.label}` on the same input is refused ({refusal.reason})"
        if neighbour is not None:
            return self._elsewhere(first, neighbour)
        if any(call.input in self._written for call in first.calls):
            return "mutated", f"`{first.first.input.name}` is written in place between it and the others"
        return "group-too-small", "no other layer is called on the same inputs"

    def _neighbour(self, group: Sequence[Layer]) -> tuple[Layer | None, Refusal | None]:
        """Return another layer that shares an input with a group, and its refusal, if there is one."""
        for place in group[0].runs:
            for call in self._runs[place]:  # the group has few calls
                layer, refusal = self._layers.get(id(call), (None, None))
                if layer is not None and layer not in group:
                    return layer, refusal
        return None, None

    def _elsewhere(self, one: Layer, other: Layer) -> tuple[str, str]:
        """Return a reason code, and where only one of two layers is called on a value."""
        for here, there, reason in ((one, other, "shared-module"), (other, one, "group-too-small")):
            call = next((call for call in here.calls if self._places[id(call)] not in there.runs), None)
            if call is None:
                continue
            if call.input in self._written and any(call.input is each.input for each in there.calls):
                break
            called = f"`{here.first.label}` is also called at node `{call.node.name}`, and `{there.first.label}` is not"
            return reason, called
        return "mutated", f"their input is written in place between `{one.first.label}` and `{other.first.label}`"


def _difference(one: LinearCall, other: LinearCall) -> tuple[str, str]:
    """Return how two layers that share their inputs differ, as a reason code and a clause."""
    a, b = one.weight.tensor, other.weight.tensor
    if a.dtype != b.dtype or a.device != b.device:
        found = f"`{one.label}` is {a.dtype} on {a.device}, and `{other.label}` {b.dtype} on {b.device}"
        return "dtype-mismatch", found
    if one.training != other.training:
        trains, not_so = (one, other) if one.training else (other, one)
        return "mixed-mode", f"`{trains.label}` is in train mode and `{not_so.label}` in eval mode"
    if a.requires_grad != b.requires_grad:
        frozen, trains = (other, one) if a.requires_grad else (one, other)
        return "mixed-requires-grad", f"`{frozen.label}` is frozen and `{trains.label}` is trainable"
    if one.in_features != other.in_features:
        found = f"`{one.label}` takes {one.in_features} features and `{other.label}` {other.in_features}"
        return "size-mismatch", found
    if one.bias is not None and other.bias is not None:
        a, b = one.bias.tensor, other.bias.tensor
        if a.requires_grad != b.requires_grad:
            frozen, trains = (other, one) if a.requires_grad else (one, other)
            return "mixed-requires-grad", f"the bias of `{frozen.label}` is frozen and that of `{trains.label}` is not"
        found = f"that of `{one.label}` is {a.dtype} on {a.device}, that of `{other.label}` {b.dtype} on {b.device}"
        return "dtype-mismatch", f"their biases differ: {found}"
    biased, unbiased = (one, other) if other.bias is None else (other, one)  # in eval mode these would be merged
    found = f"`{biased.label}` has a bias and `{unbiased.label}` has none"
    return "training", f"{found}, and the zeros in its place would be trained"


def opaque_refusals(index: GraphIndex) -> Iterator[Refusal]:
    """Yield a refusal for each call of a module or operation with several linear layers inside.

    ``nn.MultiheadAttention`` counts with its projections, only the last of which is a layer.
    """
    counts: dict[int, int] = {}
    for node in index.nodes:
        module = index.module_of(node)
        if module is not None and module._modules and not isinstance(module, nn.Linear):  # adapters count as layers
            if id(module) not in counts:
                counts[id(module)] = sum(map(_projections, module.modules()))
            if counts[id(module)] > 1:
                name, kind, count = str(node.target), type(module).__name__, counts[id(module)]
                message = f"module `{name}` ({kind}) is a single call with {count} linear layers inside; {_REMEDY}"
                yield index.refuse(name, "opaque-call", message, node)
        elif module is None and (operation := read_call(node)) is not None and operation.name in FUSED:
            message = f"node `{node.name}` has linear layers inside of {operation.name}; {_REMEDY}"
            yield index.refuse(_owner(node), "opaque-call", message, node)


def _projections(module: nn.Module) -> int:
    """Return the number of linear layers that a module itself is, without its children."""
    if isinstance(module, nn.MultiheadAttention):
        return 1 if module._qkv_same_embed_dim else 3
    return int(isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")


def _owner(node: Node) -> str:
    """Return the name of the module that owns the first weight of a call, or else that of the node."""
    weights = (str(value.target) for value in node.all_input_nodes if value.op == "get_attr")
    return next((name.rpartition(".")[0] for name in weights if "." in name), node.name)
