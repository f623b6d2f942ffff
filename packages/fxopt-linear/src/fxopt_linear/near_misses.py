"""Layers that are in no group: why those on their input could not be merged with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from fxopt_core import GraphIndex, LinearCall, Refusal


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer with all its calls.

    Attributes:
        calls: its calls, in order.
        runs: the runs that they belong to. A run is all calls on one value until that is written in place.
    """

    calls: tuple[LinearCall, ...]
    runs: frozenset[int]

    @property
    def first(self) -> LinearCall:
        """Its first call."""
        return self.calls[0]


class NearMisses:
    """Tells why layers that share an input with others have too few to be merged with.

    Args:
        runs: the calls of all layers, by run.
        min_group: how many layers a group needs.
    """

    def __init__(self, runs: Sequence[Sequence[LinearCall]], min_group: int) -> None:
        self._runs = runs
        self._min_group = min_group
        self._layers: dict[int, tuple[Layer, Refusal | None]] = {}  # by the id of each call
        self._places = {id(call): place for place, run in enumerate(runs) for call in run}
        values = [run[0].input for run in runs]
        seen: set[Node] = set()
        self._written = {v for v in values if v in seen or seen.add(v)}  # type: ignore[func-returns-value]  # set.add

    def add(self, layer: Layer, refusal: Refusal | None) -> None:
        """Note a layer, and why it has to be left alone, if so."""
        for call in layer.calls:
            self._layers[id(call)] = (layer, refusal)

    def refusal(self, group: Sequence[Layer], others: Sequence[Layer], index: GraphIndex) -> Refusal:
        """Return the refusal of layers that are too few; the others are called on just the same inputs."""
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
            return "group-too-small", f"`{neighbour.first.label}` on the same input is left alone ({refusal.reason})"
        if neighbour is not None:
            return self._elsewhere(first, neighbour)
        if any(call.input in self._written for call in first.calls):
            return "mutated", f"`{first.first.input.name}` is written in place between it and the others"
        return "group-too-small", "no other layer is called on just the same inputs"

    def _neighbour(self, group: Sequence[Layer]) -> tuple[Layer | None, Refusal | None]:
        """Return another layer that shares an input with a group, and why it is left alone, if so."""
        for place in group[0].runs:
            for call in self._runs[place]:  # those of the group are few
                layer, refusal = self._layers.get(id(call), (None, None))
                if layer is not None and layer not in group:
                    return layer, refusal
        return None, None

    def _elsewhere(self, one: Layer, other: Layer) -> tuple[str, str]:
        """Return a reason and where one of two layers is called on a value that the other one is not called on."""
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
    """Return in what two layers that share their inputs differ, as a reason and a clause."""
    a, b = one.weight.tensor, other.weight.tensor
    if a.dtype != b.dtype or a.device != b.device:
        return (
            "dtype-mismatch",
            f"`{one.label}` is {a.dtype} on {a.device}, and `{other.label}` {b.dtype} on {b.device}",
        )
    if one.training != other.training:
        trains, not_so = (one, other) if one.training else (other, one)
        return "mixed-mode", f"`{trains.label}` is in train mode and `{not_so.label}` in eval mode"
    if a.requires_grad != b.requires_grad:
        frozen, trains = (other, one) if a.requires_grad else (one, other)
        return "mixed-requires-grad", f"`{frozen.label}` is frozen and `{trains.label}` is trainable"
    if one.in_features != other.in_features:
        return (
            "size-mismatch",
            f"`{one.label}` takes {one.in_features} features and `{other.label}` {other.in_features}",
        )
    if one.bias is not None and other.bias is not None:
        a, b = one.bias.tensor, other.bias.tensor
        if a.requires_grad != b.requires_grad:
            frozen, trains = (other, one) if a.requires_grad else (one, other)
            return "mixed-requires-grad", f"the bias of `{frozen.label}` is frozen and that of `{trains.label}` is not"
        found = f"that of `{one.label}` is {a.dtype} on {a.device}, that of `{other.label}` {b.dtype} on {b.device}"
        return "dtype-mismatch", f"their biases differ: {found}"
    biased, unbiased = (one, other) if other.bias is None else (other, one)  # in eval mode these would be merged
    found = f"`{biased.label}` has a bias and `{unbiased.label}` has none"
    return "training", f"{found}, and zeros that stand in for it would be trained"
