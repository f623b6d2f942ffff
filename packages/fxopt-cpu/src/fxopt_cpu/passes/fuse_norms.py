"""``norm(table1[i] + table2[j])`` -> ``embedding_norm(i, j)``, and RMS norms that are written out as one operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_cpu.layers.epilogue import norm_like
from fxopt_cpu.layers.norms import MOST_TABLES, EmbeddingNorm, SumNorm
from fxopt_cpu.passes.layouts import CASTS, operation
from fxopt_cpu.passes.matching import (
    REASONS,
    is_float,
    kernels_refusal,
    norm_tensors,
    parameter_of,
    sole_user,
    take_out,
)
from fxopt_cpu.passes.memory_formats import hidden_strides, shows_strides
from fxopt_rewrite import (
    Editor,
    ElementwiseCall,
    EmbeddingCall,
    GraphIndex,
    LayerNormCall,
    ParameterisedCall,
    Pattern,
    Piece,
    ReversibleSitePass,
    bare_module,
    read_elementwise,
    read_embedding,
    read_layer_norm,
    same_size,
    sharing_refusal,
    tensor_facts,
    tensors_refusal,
)


@dataclass(frozen=True, eq=False)
class NormSite:
    """A sum of embedding rows with its norm, or a norm that is written out.

    Attributes:
        norm: the norm; None where the sum of rows has none.
        tables: the embeddings whose rows are added; none for a norm that is written out.
        last: the node whose value is the result.
        nodes: the calls, in order.
    """

    norm: LayerNormCall | None
    tables: tuple[EmbeddingCall, ...]
    last: Node
    nodes: tuple[Node, ...]

    @property
    def label(self) -> str:
        """The name of the norm, or of the first embedding."""
        return self.tables[0].label if self.norm is None else self.norm.label

    @property
    def calls(self) -> tuple[ParameterisedCall, ...]:
        """The calls with parameters."""
        return (*self.tables, *([] if self.norm is None else [self.norm]))


class FuseNorms(ReversibleSitePass[NormSite]):
    """``norm(table1[i] + table2[j])`` -> ``embedding_norm(i, j)``; ``x * rsqrt(mean(x²) + eps) * w`` -> ``norm(x)``.

    Sums of rows of two tables and more become one `EmbeddingNorm`, with the layer norm or RMS norm of the sum, if
    nothing else reads the values between. RMS norms that are written out, as in Llama and T5, become a `SumNorm`.

    Refused: other dtypes than float32, other devices, train mode, results that are not contiguous and whose strides
    the outputs show, and shared, tied or mutated tensors: embeddings that are tied to the last layer, above all.

    Source:
        Zhang and Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467.

    Cost:
        One call instead of three to six, and no tensors between them. Parameters are unchanged.

    >>> class Norm(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = torch.nn.Parameter(torch.ones(4))
    ...     def forward(self, x):
    ...         return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    >>> from fxopt_rewrite import infer_shapes
    >>> traced = infer_shapes(torch.fx.symbolic_trace(Norm().eval()), torch.ones(2, 4))
    >>> graph_module = FuseNorms()(traced)
    >>> print(graph_module.code.strip())
    def forward(self, x):
        norm = self.norm(x);  x = None
        return norm
    >>> graph_module.get_submodule("norm")
    SumNorm(4, rms, eps=1e-06)
    """

    reasons: ClassVar[Mapping[str, str]] = REASONS

    def match(self, index: GraphIndex) -> Iterator[NormSite | Refusal]:
        """Yield sums of embeddings, and norms that are written out."""
        read: dict[Node, Any] = {}
        hidden = cache(lambda: hidden_strides(index))
        sums = _sums(index)
        for node in index.nodes:
            site = _embeddings(index, node, sums) or _written_out(index, node, read)
            if site is not None:
                message = f"the strides of `{site.label}` are seen, and follow from its input's; the operator's do not"
                shown = shows_strides(site.last, hidden)
                yield index.refuse(site.label, "returned", message, *site.nodes) if shown else site

    def check(self, site: NormSite, index: GraphIndex) -> Refusal | None:
        """Refuse what the operators do not take, and shared, tied or mutated tensors."""
        for call in site.calls:
            for reason, message in _obstacles(site, call, index):
                return index.refuse(site.label, reason, message, *site.nodes)
            refusal = tensors_refusal(call, index) or sharing_refusal(call, site.nodes, index)
            if refusal is not None:
                return refusal
        return kernels_refusal(site.label, index, *site.nodes)

    def rewrite(self, site: NormSite, edit: Editor) -> None:
        """Insert one module with the same parameters, and drop what it replaces."""
        module, norm = _module(site), site.norm
        full = site.calls[0].module_name or site.label
        name = edit.add_module(full, "embeddings" if site.tables else "norm", module.eval())
        inputs = [call.input for call in site.tables or site.calls]
        made = edit.call_module(name, *inputs, before=site.last, like=site.nodes[::-1])
        take_out(edit, site.last, made, site.nodes)
        for place, call in enumerate(site.tables):
            edit.drop(call, {call.weight.key: Piece(f"{name}.table_{place}")}, twin=name)
        if norm is not None:
            edit.drop(norm, {ref.name: Piece(f"{name}.{key}") for key, ref in norm_tensors(norm).items()}, twin=name)


def _obstacles(site: NormSite, call: ParameterisedCall, index: GraphIndex) -> Iterator[tuple[str, str]]:
    for ref in call.tensors:
        if ref.tensor.device.type not in ("cpu", "meta"):
            yield "not-on-cpu", f"`{ref.name}` is on {ref.tensor.device}"
        if ref.tensor.dtype is not torch.float32:
            yield "unsupported-dtype", f"`{ref.name}` is {ref.tensor.dtype}; the operators take torch.float32"
    if call.training:
        yield "training", f"`{call.label}` is in train mode"
    if index.effects.written_between(call.input, call.node, site.last):
        yield "mutated", f"`{call.input.name}` is written in place before `{site.last.name}`"


def _module(site: NormSite) -> EmbeddingNorm | SumNorm:
    norm = site.norm
    settings = {} if norm is None else {"norm": tuple(norm_like(norm))}
    if site.tables:
        entries = tuple(len(call.weight.tensor) for call in site.tables)
        features = site.tables[0].weight.tensor.shape[1]
        padding = tuple(-1 if call.padding_idx is None else call.padding_idx for call in site.tables)
        made: EmbeddingNorm | SumNorm = bare_module(EmbeddingNorm, entries, features, padding=padding, **settings)
        for place, call in enumerate(site.tables):
            made.register_parameter(f"table_{place}", parameter_of(call.weight.tensor))
    else:
        assert norm is not None
        made = bare_module(SumNorm, norm.normalized_shape[0], **settings)
    for key, ref in norm_tensors(norm).items():
        made.register_parameter(key, parameter_of(ref.tensor))
    return made


_Sum = tuple[tuple[EmbeddingCall, ...], tuple[Node, ...]]  # the embeddings that are added, and all its calls


def _embeddings(index: GraphIndex, node: Node, sums: Mapping[Node, _Sum]) -> NormSite | None:
    """Read a sum of embeddings, at its last addition, with the norm after it."""
    tables, way = sums.get(node, ((), ()))
    user = sole_user(node)
    if not 2 <= len(tables) <= MOST_TABLES or user in sums:  # a part of a longer sum
        return None
    features = tables[0].weight.tensor.shape[1]
    norm = None if user is None else read_layer_norm(index, user)
    if isinstance(norm, LayerNormCall) and norm.input is node and norm.normalized_shape == (features,):
        way = *way, norm.node
    else:
        norm = None
    nodes = tuple(sorted(way, key=index.position.__getitem__))
    return NormSite(norm, tables, nodes[-1], nodes)


def _sums(index: GraphIndex) -> dict[Node, _Sum]:
    """Return the values that are embeddings, or sums of some that nothing else reads; of many, a part tells enough."""
    found: dict[Node, _Sum] = {}
    for node in index.nodes:
        call = read_embedding(index, node)
        if isinstance(call, EmbeddingCall):
            ids = tensor_facts(call.input)
            # torch also takes int32, the operator does not.
            if ids is not None and ids.dtype is torch.int64:
                found[node] = (call,), (node,)
            continue
        total = read_elementwise(node)
        if not isinstance(total, ElementwiseCall) or total.operation != "add" or total.inplace or total.alpha != 1:
            continue
        parts = [found[each] for each in (total.left, total.right)
                 if isinstance(each, Node) and each in found and sole_user(each) is node]  # fmt: skip
        if len(parts) == 2:
            # Cut off: one table too many is enough for a refusal, and whole tuples would take quadratic time.
            (one, before), (other, after) = parts
            found[node] = (one + other)[: MOST_TABLES + 1], (*before, *after, node)[: 2 * MOST_TABLES]
    return found


def _rms_norm(x: Tensor, weight: nn.Parameter, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@cache
def _written() -> Pattern:
    return Pattern(_rms_norm, through=CASTS)


def _written_out(index: GraphIndex, node: Node, read: dict[Node, Any]) -> NormSite | None:
    """Read an RMS norm that is written out, at its last call, with casts of float32 to float32 between its calls."""
    for match in _written().matches(index, node, read):
        value, weight = match.values["x"], match.values["weight"]
        facts, is_parameter = tensor_facts(value), isinstance(weight.tensor, nn.Parameter) and weight.tensor.dim() == 1
        casts = [each for each in match.nodes if operation(index, each) in CASTS]
        fits = facts is not None and is_parameter and same_size(facts.shape[-1], len(weight.tensor)) and is_float(value)
        if fits and match.other_reader() is None and all(is_float(each) for each in casts):
            shape, owner = (len(weight.tensor),), weight.name.rpartition(".")[0]
            eps = float(match.values["eps"])
            norm = LayerNormCall(node, value, weight, None, None, owner, False, shape, eps, False)
            return NormSite(norm, (), node, match.nodes)
    return None
