"""Whether merging pays: times a group's products, separate and merged, with the site's shapes, dtype and device.

The weights are random. Those of the separate layers are rows of the merged one, so that a measurement takes the memory
of one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.nn import functional

from fxopt_core import Refusal
from fxopt_core.toolbox import ledger_of
from fxopt_rewrite import GraphIndex, LinearCall, Speedup, measured_speedup, tensor_facts

_DRAWN = 1 << 20  # at most this many random numbers, which are repeated: drawing more takes long


@dataclass(frozen=True)
class Regime:
    """The conditions of a measurement.

    Attributes:
        shapes: the shapes of the inputs, one for each product.
        sizes: for each layer, its output features, whether it has a bias, and whether its weight is transposed.
        copies: for each product, which of its results are copied.
        dtype: the dtype of weights and inputs.
        device: their device.
        threads: the number of torch's threads on a CPU, else 0.
    """

    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, bool, bool], ...]
    copies: tuple[tuple[bool, ...], ...]
    dtype: torch.dtype
    device: torch.device
    threads: int

    def __str__(self) -> str:
        """Return the conditions in words."""
        shapes = " and ".join(str(shape) for shape in dict.fromkeys(self.shapes))
        sizes = " + ".join(str(size) for size, _, _ in self.sizes)
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}" if self.device.type == "cpu" else ""
        return f"{shapes} to {sizes}, {str(self.dtype).removeprefix('torch.')} on {self.device}{threads}"


class Gate:
    """Measures the groups of a graph, each regime once.

    Args:
        index: facts about the graph.
        signature: the signature of the pass; groups that it has refused on this graph are not measured again.
    """

    def __init__(self, index: GraphIndex, signature: str) -> None:
        self._index = index
        self._measured: dict[Regime, Speedup] = {}
        records = [record for record in ledger_of(index.graph_module).records if record.signature == signature]
        refusals = (refusal for record in records for refusal in record.refusals)
        self._refused = {(each.site, each.nodes): each for each in refusals if each.reason == "no-measured-benefit"}

    def judge(self, label: str, rows: Sequence[Sequence[LinearCall]], copied: frozenset[Node]) -> Refusal | str:
        """Return the refusal of a group, or its measurement in words if merging pays.

        Args:
            label: the name of the group.
            rows: its calls, one row for each input.
            copied: the calls whose results have to be copied after merging.
        """
        nodes = [call.node for row in rows for call in row]
        regime = _regime(rows, copied)
        if regime is None:
            message = f"`{label}` cannot be measured, since the shape of `{rows[0][0].input.name}` is unknown"
            return self._index.refuse(label, "shape-unknown", message, *nodes)
        known = self._refused.get((label, tuple(node.name for node in nodes)))
        if known is not None and known.message.endswith(f" at {regime}"):
            return known
        if regime not in self._measured:
            self._measured[regime] = measured_speedup(*_ways(regime), regime.device)
        found = self._measured[regime]
        if found.verdict == "faster":
            return f"{found} at {regime}"
        slower = "slower" if found.verdict == "slower" else "no faster beyond noise"
        message = f"merging `{label}` is {slower} ({found}) at {regime}"
        return self._index.refuse(label, "no-measured-benefit", message, *nodes)


def _regime(rows: Sequence[Sequence[LinearCall]], copied: frozenset[Node]) -> Regime | None:
    """Return the conditions of measuring a group; None if a size is unknown."""
    weight = rows[0][0].weight.tensor
    shapes = []
    device = weight.device
    for row in rows:
        facts = tensor_facts(row[0].input, like=weight)
        sizes = () if facts is None else tuple(map(_size, facts.shape))
        if facts is None or None in sizes:
            return None
        shapes.append(tuple(size for size in sizes if size is not None))
        if device.type == "meta" and facts.device is not None:
            device = facts.device  # the weights of the model are loaded later
    if device.type == "meta":
        return None
    layers = {id(call.weight.tensor): call for row in rows for call in row}.values()
    return Regime(
        tuple(shapes),
        tuple((call.out_features, call.bias is not None, call.transposed) for call in layers),
        tuple(tuple(call.node in copied for call in row) for row in rows),
        weight.dtype,
        device,
        torch.get_num_threads() if device.type == "cpu" else 0,
    )


def _size(size: int | SymInt) -> int | None:
    """Return a size; for a symbolic one, that of the example input."""
    if not isinstance(size, SymInt):
        return int(size)
    hint = size.node.hint if size.node.has_hint() else None
    return hint if isinstance(hint, int) else None


def _ways(regime: Regime) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that compute the products of a group, separate and merged."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        number = math.prod(shape)
        few = torch.randn(min(number, _DRAWN), generator=generator, device="cpu").to(regime.device, regime.dtype)
        return few.repeat(max(1, -(-number // _DRAWN)))[:number].view(shape)

    total, features = sum(size for size, _, _ in regime.sizes), regime.shapes[0][-1]
    inputs, weight = [drawn(*shape) for shape in regime.shapes], drawn(total, features)
    bias = drawn(total) if any(biased for _, biased, _ in regime.sizes) else None
    layers: list[tuple[Tensor, Tensor | None]] = []
    starts = list(accumulate((size for size, _, _ in regime.sizes), initial=0))
    for start, (size, biased, transposed) in zip(starts, regime.sizes, strict=False):
        rows = weight.narrow(0, start, size)
        own = rows.t().contiguous().t() if transposed else rows
        own_bias = None if bias is None else bias.narrow(0, start, size)
        if own_bias is not None and not biased:
            own_bias.zero_()  # as the merged layer has it
        layers.append((own, own_bias if biased else None))

    def separate() -> object:
        return [functional.linear(x, own, own_bias) for x in inputs for own, own_bias in layers]

    def merged() -> object:
        found = []
        for x, copies in zip(inputs, regime.copies, strict=True):
            product = functional.linear(x, weight, bias)
            for begin, (size, _, _), copies_it in zip(starts, regime.sizes, copies, strict=False):
                part = product.narrow(-1, begin, size)
                found.append(part.clone(memory_format=torch.contiguous_format) if copies_it else part)
        return found

    return separate, merged
