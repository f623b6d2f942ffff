"""Whether merging pays: a group's products are measured apart and merged, in the shapes, dtype and place of the site.

Merged, one product has all rows of the weights, and its results are slices; apart, each layer has its own. The weights
of the measurement are random, and those apart are rows of the merged one: it takes the memory of one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.nn import functional

from fxopt_core import (
    GraphIndex,
    LinearCall,
    Refusal,
    Speedup,
    measured_speedup,
    tensor_facts,
)
from fxopt_core.ledger import ledger_of

_DRAWN = 1 << 20  # random numbers; they are repeated beyond, so that no more memory is taken than they fill


@dataclass(frozen=True)
class Regime:
    """What a measurement depends on.

    Attributes:
        shapes: those of the inputs, one for each product.
        sizes: the output features of the layers, and for each whether it has a bias and is stored transposed.
        copies: for each product, which of its results are copied.
        dtype: that of weights and inputs.
        device: where they are.
        threads: of torch, on the CPU.
    """

    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, bool, bool], ...]
    copies: tuple[tuple[bool, ...], ...]
    dtype: torch.dtype
    device: torch.device
    threads: int

    def __str__(self) -> str:
        """Return it in words."""
        shapes = " and ".join(str(shape) for shape in dict.fromkeys(self.shapes))
        sizes = " + ".join(str(size) for size, _, _ in self.sizes)
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}" if self.device.type == "cpu" else ""
        return f"{shapes} to {sizes}, {str(self.dtype).removeprefix('torch.')} on {self.device}{threads}"


class Gate:
    """Measures groups of one graph; each regime once.

    Args:
        index: of the graph.
        signature: of the pass: what it refused on this graph before is not measured again.
    """

    def __init__(self, index: GraphIndex, signature: str) -> None:
        self._index = index
        self._measured: dict[Regime, Speedup] = {}
        records = [record for record in ledger_of(index.graph_module).records if record.signature == signature]
        refusals = (refusal for record in records for refusal in record.refusals)
        self._refused = {(each.site, each.nodes): each for each in refusals if each.reason == "no-measured-benefit"}

    def judge(self, label: str, rows: Sequence[Sequence[LinearCall]], copied: frozenset[Node]) -> Refusal | str:
        """Return why a group is left alone, or what was measured of one that pays.

        Args:
            label: its name.
            rows: its calls, one row for each input.
            copied: those whose results are copied once merged.
        """
        nodes = [call.node for row in rows for call in row]
        regime = _regime(rows, copied)
        if regime is None:
            message = f"`{label}` cannot be measured, since the shape of `{rows[0][0].input.name}` is not known"
            return self._index.refuse(label, "shape-unknown", message, *nodes)
        known = self._refused.get((label, tuple(node.name for node in nodes)))
        if known is not None and known.message.endswith(_place(regime)):
            return known
        if regime not in self._measured:
            self._measured[regime] = measured_speedup(*_ways(regime), regime.device)
        found = self._measured[regime]
        if found.verdict == "faster":
            return f"{found}{_place(regime)}"
        message = f"merging `{label}` is {_WORDS[found.verdict]} ({found}){_place(regime)}"
        return self._index.refuse(label, "no-measured-benefit", message, *nodes)


_WORDS = {"slower": "slower", "within noise": "no faster beyond noise"}


def _place(regime: Regime) -> str:
    return f" at {regime}"


def _regime(rows: Sequence[Sequence[LinearCall]], copied: frozenset[Node]) -> Regime | None:
    """Return what a measurement of a group depends on; None where a size is not known."""
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
            device = facts.device  # a model whose weights are to come
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
    """Return a size; of a symbolic one, that of the example which the graph was captured with."""
    if not isinstance(size, SymInt):
        return int(size)
    hint = size.node.hint if size.node.has_hint() else None
    return hint if isinstance(hint, int) else None


def _ways(regime: Regime) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what computes the products of a group apart, and what computes them merged."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        number = math.prod(shape)
        few = torch.randn(min(number, _DRAWN), generator=generator, device="cpu").to(regime.device, regime.dtype)
        return few.repeat(max(1, -(-number // _DRAWN)))[:number].view(shape)

    total, features = sum(size for size, _, _ in regime.sizes), regime.shapes[0][-1]
    inputs, weight = [drawn(*shape) for shape in regime.shapes], drawn(total, features)
    bias = drawn(total) if any(biased for _, biased, _ in regime.sizes) else None
    layers: list[tuple[Tensor, Tensor | None]] = []
    starts: list[int] = []
    start = 0
    for size, biased, transposed in regime.sizes:
        rows = weight.narrow(0, start, size)
        own = rows.t().contiguous().t() if transposed else rows
        own_bias = None if bias is None else bias.narrow(0, start, size)
        if own_bias is not None and not biased:
            own_bias.zero_()  # they stand in
        layers.append((own, own_bias if biased else None))
        starts.append(start)
        start += size

    def apart() -> object:
        return [functional.linear(x, own, own_bias) for x in inputs for own, own_bias in layers]

    def merged() -> object:
        found = []
        for x, copies in zip(inputs, regime.copies, strict=True):
            product = functional.linear(x, weight, bias)
            for begin, (size, _, _), copies_it in zip(starts, regime.sizes, copies, strict=True):
                part = product.narrow(-1, begin, size)
                found.append(part.clone(memory_format=torch.contiguous_format) if copies_it else part)
        return found

    return apart, merged
