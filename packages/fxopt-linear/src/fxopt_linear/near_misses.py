"""Why linear layers are not in a group: others on their input differ, or calls hide their layers from the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from fxopt_core import Refusal
from fxopt_rewrite import GraphIndex, LinearCall, read_call

#: Operations that contain linear layers: attention as one call, and torch's fast path in eval mode.
FUSED = frozenset({"multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"})
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
        self._runs_of = Counter(run[0].input for run in runs)

    def add(self, layer: Layer, refusal: Refusal | None) -> None:
        """Add a layer, and its refusal, if there is one."""
        self._layers.update((id(call), (layer, refusal)) for call in layer.calls)

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
        for call in (call for place in first.runs for call in self._runs[place]):  # the group has few calls
            layer, refusal = self._layers.get(id(call), (None, None))
            if layer is not None and layer not in group:
                name = layer.first.label
                if refusal is not None:
                    return "group-too-small", f"`{name}` on the same input is refused ({refusal.reason})"
                for place in sorted(first.runs - layer.runs):
                    node = next(each.node for each in self._runs[place] if self._layers[id(each)][0] is first)
                    found = f"`{first.first.label}` is also called at node `{node.name}`, and `{name}` is not"
                    return "shared-module", found
                return "group-too-small", f"`{name}` is also called on other inputs"
        value = first.first.input
        if self._runs_of[value] > 1:
            return "mutated", f"`{value.name}` is written in place between it and the others"
        return "group-too-small", f"no other layer is called on `{value.name}`"


def _difference(one: LinearCall, other: LinearCall) -> tuple[str, str]:
    """Return how two layers that share their inputs differ, as a reason code and a clause."""
    # A layer without bias has fewer traits, but the one that says so comes before those that it lacks.
    found = zip(_traits(one), _traits(other), strict=False)
    reason, mine, its = next((reason, mine, its) for (reason, mine), (_, its) in found if mine != its)
    return reason, f"`{one.label}` {mine}, and `{other.label}` {its}"


def _traits(call: LinearCall) -> Iterator[tuple[str, str]]:
    """Yield what the layers of a group have in common, with the reason if they do not."""
    weight, bias = call.weight.tensor, call.bias
    yield "dtype-mismatch", f"is {weight.dtype} on {weight.device}"
    yield "mixed-mode", f"is in {'train' if call.training else 'eval'} mode"
    yield "mixed-requires-grad", f"is {'trainable' if weight.requires_grad else 'frozen'}"
    yield "size-mismatch", f"takes inputs of size {call.in_features}"
    # In eval mode, layers without bias are merged with others.
    yield "training", "has no bias, and zeros in its place would be trained" if bias is None else "has a bias"
    if bias is not None:
        yield "mixed-requires-grad", f"has a {'trainable' if bias.tensor.requires_grad else 'frozen'} bias"
        yield "dtype-mismatch", f"has a bias of {bias.tensor.dtype} on {bias.tensor.device}"


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
            yield index.refuse(node.name, "opaque-call", message, node)


def _projections(module: nn.Module) -> int:
    """Return the number of linear layers that a module itself is, without its children."""
    if isinstance(module, nn.MultiheadAttention):
        return 1 if module._qkv_same_embed_dim else 3
    # transformers' Conv1D, by its name, as importing transformers takes longer than a pass.
    return int(isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
