"""``q(x), k(x), v(x)`` -> ``narrow(merged(x), -1, ...)``: linear layers that share their inputs become one.

With weights of shapes (q, d), (k, d) and (v, d), the merged weight is their concatenation of shape (q + k + v, d), and
each result is a slice of one product. Whether that is faster depends on the machine: `bench` measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import torch
from torch import nn
from torch.fx import Node

from fxopt_core import PassOptionError, Refusal
from fxopt_linear.near_misses import Layer, NearMisses, opaque_refusals
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    LinearCall,
    Obstacle,
    Piece,
    ReversibleSitePass,
    input_of,
    module_with,
    read_linear,
    sharing_refusal,
    tensors_refusal,
)


@dataclass(frozen=True, eq=False)
class LinearGroup:
    """Linear layers that are always called on the same inputs.

    Attributes:
        layers: the first call of each layer.
        rows: one row for each input, with the calls on it in order.
        copied: the calls whose results need their own memory.
    """

    layers: list[LinearCall]
    rows: list[tuple[LinearCall, ...]]
    copied: frozenset[Node]

    def taken(self) -> Iterator[LinearCall]:
        """Yield the layers and drop each, so that its memory is free before the next one is copied."""
        self.rows.clear()
        self.layers.reverse()  # popping the first item of a list moves all others
        while self.layers:
            yield self.layers.pop()

    @property
    def label(self) -> str:
        """The names of the layers, as in ``attention: q + k + v``."""
        parent, names = self.names
        return f"{parent}: {' + '.join(names)}" if parent else " + ".join(names)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All calls."""
        return tuple([call.node for row in self.rows for call in row])

    @cached_property
    def names(self) -> tuple[str, list[str]]:
        """The full name of the module that contains all layers, and their names in it."""
        return _names(self.layers)


class MergeLinears(ReversibleSitePass[LinearGroup]):
    """``q(x), k(x), v(x)`` -> ``narrow(merged(x), -1, ...)``: linear layers that share their inputs become one.

    Sizes may differ, as in grouped-query attention; weights may be stored transposed, as in ``Conv1D`` of GPT-2,
    ``torch.addmm`` and ``x @ weight``. In eval mode, layers without bias are merged with others, with zeros as their
    bias; in train mode they form separate groups. Layers that are called several times are merged if all of them are
    called on the same inputs. A layer that is refused does not keep the rest of its group from being merged. Results
    that need their own memory (they are viewed across rows, written in place, or returned) are copied. Undoing slices
    the original parameters out of the merged ones; it refuses if the zeros have been trained into something else.

    Args:
        min_group: the least number of layers in a group.
        where: glob pattern over full module names; layers with other names are left alone.
        share_storage: whether the original Parameters become views of the merged ones, so that a model that still
            holds them takes no extra memory. Their values are unchanged, but pickles of single layers grow,
            ``share_memory`` is lost, and autograd misses an in-place edit between forward and backward.

    Raises:
        PassOptionError: ``min_group`` is less than 2.

    Source:
        A product with stacked matrices is the stack of the products: ``x @ [A; B].T == [x @ A.T, x @ B.T]``. Some
        models are written with such "packed" or "fused" query, key and value projections.

    Cost:
        As many multiplications as before, in one call instead of several, and zeros for missing biases; whether that
        is faster depends on the machine. The pass copies one weight at a time and frees the original. It is linear in
        the number of nodes.

    >>> class Attention(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.q, self.k = torch.nn.Linear(4, 8), torch.nn.Linear(4, 2)
    ...     def forward(self, x):
    ...         return self.q(x).sum() + self.k(x).sum()
    >>> graph_module = MergeLinears()(torch.fx.symbolic_trace(Attention().eval()))
    >>> print(graph_module.code.strip())
    def forward(self, x):
        q_k_merged = self.q_k_merged(x);  x = None
        narrow = torch.narrow(q_k_merged, -1, 0, 8)
        narrow_1 = torch.narrow(q_k_merged, -1, 8, 2);  q_k_merged = None
        sum_1 = narrow.sum();  narrow = None
        sum_2 = narrow_1.sum();  narrow_1 = None
        add = sum_1 + sum_2;  sum_1 = sum_2 = None
        return add
    >>> graph_module.q_k_merged
    Linear(in_features=4, out_features=10, bias=True)
    """

    reasons: ClassVar[Mapping[str, str]] = {
        "opaque-call": "The graph calls, as one node, a module or operator that contains the layers. Capture the "
        "model with torch.export.",
        "mixed-mode": "Some of the modules are in train mode and some in eval mode. Call eval() or train() on all.",
        "group-too-small": "Fewer linear layers share this input than `min_group` requires. Lower `min_group` if it is "
        "above 2; the message says what keeps other layers out.",
    }

    def __init__(self, *, min_group: int = 2, where: str = "*", share_storage: bool = False) -> None:
        if min_group < 2:
            raise PassOptionError(f"min_group is {min_group}, expected at least 2: a single layer is not a group")
        self.min_group = min_group
        self.where = where
        self.share_storage = share_storage

    def match(self, index: GraphIndex) -> Iterator[LinearGroup | Refusal]:
        """Yield the groups of layers that share their inputs, and refusals of layers that cannot be in one."""
        runs, obstacles = _runs(index)
        for obstacle, node in obstacles:
            yield Refusal(obstacle.site, obstacle.reason, f"{obstacle.message}; it stays as it is", (node.name,))
        yield from opaque_refusals(index)
        together: dict[frozenset[int], list[Layer]] = {}
        near_misses = NearMisses(runs, self.min_group)
        for layer in _layers(runs):
            refusal = self._refusal(layer, index)
            near_misses.add(layer, refusal)
            if refusal is not None:
                yield refusal
            else:
                together.setdefault(layer.runs, []).append(layer)
        for layers in together.values():
            for group in _alike(layers):
                if len(group) < self.min_group:
                    yield near_misses.refusal(group, layers, index)
                    continue
                yield _site(group, runs, index)

    def _refusal(self, layer: Layer, index: GraphIndex) -> Refusal | None:
        """Return why a layer cannot be in any group."""
        call, nodes = layer.first, [call.node for call in layer.calls]
        if self.where != "*" and not fnmatchcase(call.label, self.where):
            message = f"linear `{call.label}` does not match where={self.where!r}"
            return index.refuse(call.label, "filtered", message, *nodes)
        return tensors_refusal(call, index) or sharing_refusal(call, nodes, index)

    def rewrite(self, site: LinearGroup, edit: Editor) -> None:
        """Insert the merged layer, replace the results by its slices, and drop the originals."""
        biased, merged = any(call.bias is not None for call in site.layers), _unfilled(site.layers)
        parent, names = site.names
        label = "_".join([*(names if len(names) <= 4 else (names[0], "to", names[-1])), "merged"])
        name = edit.add_module(f"{parent}.{label}" if parent else label, label, merged)
        regions = _regions(site.layers)
        _rewrite_rows(site, name, regions, edit)
        for call in site.taken():
            rows = regions[id(call.weight.tensor)]
            _fill(merged, call, *rows)
            region = ((0, *rows),)
            # An (in, out) weight goes into an `nn.Linear` too: a merged `Conv1D` would be tied to transformers.
            weight = Piece(f"{name}.weight", region, transposed=call.transposed)
            pieces: dict[str, Piece | None] = {call.weight.name: weight}
            if call.bias is not None:
                pieces[call.bias.name] = Piece(f"{name}.bias", region)
            elif biased:
                # Zeros stand for the missing bias; an undo checks that they still are zeros.
                edit.neutral(Piece(f"{name}.bias", region))
            edit.drop(call, pieces, twin=name)  # first: it records the strides of the originals
            if self.share_storage:
                _share(call, merged, *rows)


def _runs(index: GraphIndex) -> tuple[list[list[LinearCall]], list[tuple[Obstacle, Node]]]:
    """Return the calls of linear layers by run, and the unreadable ones among those that share an input."""
    on_value: dict[Node, list[LinearCall | Obstacle]] = {}
    # Nodes by the id of a call, since an Obstacle does not have its node.
    nodes: dict[int, Node] = {}
    for node in index.nodes:
        call = read_linear(index, node, transposed=True)
        value = None if call is None else input_of(node)
        if call is not None and value is not None:
            on_value.setdefault(value, []).append(call)
            nodes[id(call)] = node
    runs: list[list[LinearCall]] = []
    for value, calls in on_value.items():
        starts, previous = True, nodes[id(calls[0])]
        for call in calls:
            # Unreadable layers (with hooks, say) are assumed not to write their input, as no linear layer does.
            node = nodes[id(call)]
            starts = starts or index.effects.written_between(value, previous, node)
            previous = node
            if isinstance(call, LinearCall):
                if starts:
                    runs.append([])
                runs[-1].append(call)
                starts = False
    several = (calls for calls in on_value.values() if len(calls) > 1)
    return runs, [(call, nodes[id(call)]) for calls in several for call in calls if isinstance(call, Obstacle)]


def _layers(runs: Sequence[Sequence[LinearCall]]) -> Iterator[Layer]:
    """Yield the layers that share an input with others.

    The same weight with another bias is another layer, and so is a function that reads the weight of a module.
    """
    calls: dict[tuple[object, ...], list[LinearCall]] = {}
    places: dict[tuple[object, ...], list[int]] = {}
    on_value: dict[Node, set[tuple[object, ...]]] = {}
    for place, run in enumerate(runs):
        for call in run:
            bias = 0 if call.bias is None else id(call.bias.tensor)
            key: tuple[object, ...] = (id(call.weight.tensor), bias, id(call.module), call.transposed)
            calls.setdefault(key, []).append(call)
            places.setdefault(key, []).append(place)
            on_value.setdefault(call.input, set()).add(key)
    for key, mine in calls.items():
        if any(len(on_value[call.input]) > 1 for call in mine):
            yield Layer(tuple(mine), frozenset(places[key]))


def _kind(call: LinearCall) -> tuple[object, ...]:
    """Return what the layers of a group have in common besides their bias."""
    weight = call.weight.tensor
    return (weight.dtype, weight.device, weight.requires_grad, call.in_features, call.training)


def _bias_kind(call: LinearCall) -> tuple[object, ...] | None:
    """Return what the biases of a group have in common; None for a layer without bias."""
    bias = None if call.bias is None else call.bias.tensor
    return None if bias is None else (bias.dtype, bias.device, bias.requires_grad)


def _alike(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Return groups of layers of the same kind; in eval mode, those without bias join others."""
    kinds: dict[tuple[object, ...], dict[object, list[Layer]]] = {}
    for layer in layers:
        kinds.setdefault(_kind(layer.first), {}).setdefault(_bias_kind(layer.first), []).append(layer)
    for parts in kinds.values():
        unbiased = parts.get(None, [])
        # In train mode, zeros in place of a missing bias would be trained.
        if unbiased and len(parts) > 1 and not unbiased[0].first.training:
            del parts[None]
            next(iter(parts.values())).extend(unbiased)
    return [group for parts in kinds.values() for group in parts.values()]


def _site(group: Sequence[Layer], runs: Sequence[Sequence[LinearCall]], index: GraphIndex) -> LinearGroup:
    """Return the site of a group, in the order in which its layers are called."""
    group = sorted(group, key=lambda layer: index.position[layer.first.node])
    mine = {id(call) for layer in group for call in layer.calls}
    rows = [tuple(call for call in runs[place] if id(call) in mine) for place in sorted(group[0].runs)]
    copied = (call.node for row in rows for call in row if index.effects.needs_own_memory(call.node))
    return LinearGroup([layer.first for layer in group], rows, frozenset(copied))


def _names(calls: Sequence[LinearCall]) -> tuple[str, list[str]]:
    """Return the full name of the module that contains all layers, and their names in it."""
    owners = [call.module_name for call in calls]
    # Calls of functions have no module; their weights have names.
    full = owners if len(set(owners)) == len(owners) and "" not in owners else [call.weight.name for call in calls]
    paths = [name.split(".") for name in full]
    depth = 0
    while all(len(path) > depth + 1 and path[depth] == paths[0][depth] for path in paths):
        depth += 1
    return ".".join(paths[0][:depth]), ["_".join(path[depth:]) for path in paths]


def _regions(calls: Sequence[LinearCall]) -> dict[int, tuple[int, int]]:
    """Return, for each weight by id, where its rows start in the merged one, and their number."""
    sizes = [call.out_features for call in calls]
    starts = accumulate(sizes, initial=0)
    # starts ends with the total, which belongs to no layer.
    return {id(call.weight.tensor): (start, size) for call, start, size in zip(calls, starts, sizes, strict=False)}


def _rewrite_rows(site: LinearGroup, name: str, regions: dict[int, tuple[int, int]], edit: Editor) -> None:
    for row in site.rows:  # in a function of its own: a row in a local variable would keep the weights of its calls
        _rewrite_row(row, name, regions, site.copied, edit)


def _rewrite_row(
    row: Sequence[LinearCall], name: str, regions: dict[int, tuple[int, int]], copied: frozenset[Node], edit: Editor
) -> None:
    """Replace the calls on one value by slices of one product, copied where they need their own memory."""
    first, nodes = row[0].node, [call.node for call in row]
    width = sum(size for _, size in regions.values())
    # Product and slices come before the first call: results may be read before the calls of the other layers.
    merged = edit.call_module(name, row[0].input, before=first, like=nodes, last_dim=width)
    results = []
    for call in row:
        node, region = call.node, regions[id(call.weight.tensor)]
        result = edit.call_function(torch.narrow, merged, -1, *region, before=first, like=[node])
        edit.restrided(result, merged)
        if node in copied:
            form = torch.contiguous_format
            result = edit.call_function(torch.clone, result, memory_format=form, before=first, like=[node])
        results.append(result)
    for node, result in zip(nodes, results, strict=True):
        edit.replace(node, result)


def _unfilled(calls: Sequence[LinearCall]) -> nn.Linear:
    """Return the merged layer with an uninitialised weight, the layers along dimension 0, and zeros as bias."""
    weight, biases = calls[0].weight.tensor, [call.bias.tensor for call in calls if call.bias is not None]
    total = sum(call.out_features for call in calls)
    # Without torch's random initialisation, which would take longer than everything else.
    made = weight.detach().new_empty(total, calls[0].in_features)
    merged = {"weight": nn.Parameter(made, weight.requires_grad)}
    if biases:
        trains = any(bias.requires_grad for bias in biases)
        merged["bias"] = nn.Parameter(biases[0].detach().new_zeros(total), trains)
    return module_with(merged, nn.Linear, calls[0].in_features, total, bias=bool(biases)).train(calls[0].training)


def _fill(merged: nn.Linear, call: LinearCall, start: int, size: int) -> None:
    """Write the values of a layer into its rows of the merged one."""
    merged.weight.detach().narrow(0, start, size).copy_(call.matrix)
    if call.bias is not None:
        merged.bias.detach().narrow(0, start, size).copy_(call.bias.tensor.detach())


def _share(call: LinearCall, merged: nn.Linear, start: int, size: int) -> None:
    """Turn the original Parameters into views of the merged ones, for code that still holds them."""
    for original, now in ((call.weight, merged.weight), (call.bias, merged.bias)):
        if original is not None:
            part = now.detach().narrow(0, start, size)
            original.tensor.data = part.t() if call.transposed and original is call.weight else part
