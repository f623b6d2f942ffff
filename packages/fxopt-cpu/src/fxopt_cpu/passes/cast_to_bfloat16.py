"""``layer(x)`` -> ``layer16(x.to(bfloat16)).to(float32)``, and the casts move away from what lies between two layers.

Three rewrites, of which each is right by itself: a layer gets weights in bfloat16 and casts on both sides; a view, an
activation or attention between casts is computed in bfloat16; a cast of a cast goes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_core import Derived, Refusal
from fxopt_cpu.operators.rounding import lost, rounded
from fxopt_cpu.passes.quantize_linears import REASONS_OF_DEVICES
from fxopt_rewrite import (
    ConvolutionCall,
    Editor,
    GraphIndex,
    LinearCall,
    Obstacle,
    SitePass,
    is_python_number,
    read_convolution,
    read_linear,
    sharing_refusal,
    tensor_facts,
    tensors_refusal,
)
from fxopt_rewrite.toolbox import module_with

WIDE, NARROW = torch.float32, torch.bfloat16

_ATTENTION = "scaled_dot_product_attention"
# What moves values and computes none, and maxima, are the same in either dtype.
_MOVES = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "permute", "t"),
    *("contiguous", "clone", "expand", "narrow", "slice", "select", "alias", "detach", "swapaxes", "movedim", "cat"),
    *("dropout", "relu", "max_pool2d", "repeat", "nn.Identity", "nn.Dropout", "nn.Flatten", "nn.Unflatten", "nn.ReLU"),
    "nn.MaxPool2d",
}
_SPLITS = {"split", "split_with_sizes", "chunk", "unbind", "tensor_split"}  # moves that give several
# Kernels that compute each of these in float32, and round the result; sums of products are sums in float32, too.
_ROUNDED_ONCE = {
    *("gelu", "silu", "sigmoid", "tanh", "leaky_relu", "hardswish", "hardsigmoid", "hardtanh", "relu6", "add", "mul"),
    *("nn.GELU", "nn.SiLU", "nn.Sigmoid", "nn.Tanh", "nn.LeakyReLU", "nn.Hardswish", "nn.Hardsigmoid", "nn.ReLU6"),
    *("nn.Hardtanh", "matmul", "bmm", _ATTENTION),
}
_LARGEST_NUMBER = 1e30  # finfo(float32).min, with which masks are made, is -inf in bfloat16


@dataclass(frozen=True, eq=False)
class LayerSite:
    """A linear layer or convolution.

    Attributes:
        call: the layer.
        casts: the casts of inputs so far, by input.
    """

    call: LinearCall | ConvolutionCall
    casts: dict[Node, Node] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name of the layer."""
        return self.call.label

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The call."""
        return (self.call.node,)


@dataclass(frozen=True, eq=False)
class BetweenSite:
    """An operation whose inputs are all cast from bfloat16: to be computed there; or a cast back.

    Attributes:
        node: the operation, or the item that is taken of what it gives.
        inputs: the casts that it reads.
        splitting: the operation that gives several, if `node` takes one of them.
        splits: those operations in bfloat16 so far.
    """

    node: Node
    inputs: tuple[Node, ...]
    splitting: Node | None = None
    splits: dict[Node, Node] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name of the node."""
        return self.node.name

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The node."""
        return (self.node,)


class CastToBfloat16(SitePass[LayerSite | BetweenSite]):
    """``layer(x)`` -> ``layer16(x.to(bfloat16)).to(float32)``: layers, and what lies between them, in bfloat16.

    Linear layers and convolutions with float32 weights get weights in bfloat16; those stored as (in, out) are turned.
    Casts between two of them go: views, activations, products and ``scaled_dot_product_attention`` between layers are
    computed in bfloat16, too, whose kernels sum in float32 and round once. Everything else stays in float32: residual
    sums, normalisations with their statistics, softmax that the graph calls by itself, embeddings, exponentials,
    writes in place, and masks, whose ``finfo.min`` would be ``-inf``. Inputs and outputs keep their dtypes.

    Args:
        where: glob pattern over full module names; layers with other names are left alone.
        join_linears: whether what lies between two linear layers is computed in bfloat16, too. Otherwise each has casts
            of its own, as operators want it that round their input themselves: those of fxopt-cpu.

    Source:
        The lists of ``torch.autocast``, which casts at each call, weights included; this pass casts once. Kalamkar
        and others, A Study of BFLOAT16 for Deep Learning Training, https://arxiv.org/abs/1905.12322.

    Cost:
        Half the memory of the weights. On processors with instructions for bfloat16 (AVX-512 BF16, AMX), products take
        about half the time, above all packed: `pack-linears`, `pack-convolutions`. It cannot be undone.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).eval()
    >>> model = model.to("meta")  # as on a processor with instructions for bfloat16
    >>> graph_module = CastToBfloat16()(torch.fx.symbolic_trace(model))
    >>> [str(node.target) for node in graph_module.graph.nodes if node.op.startswith("call_")]
    ['to', '0_bfloat16', '1', '2_bfloat16', 'to']
    """

    preserves_computation = False
    promised_sqnr: ClassVar[float | None] = 25.0
    """In dB, on ordinary data: one rounding has about 50, and errors add up over a model's depth."""
    repeats = True
    reasons: ClassVar = REASONS_OF_DEVICES
    arithmetic = (rounded, lost)

    def __init__(self, *, where: str = "*", join_linears: bool = True) -> None:
        self.where = where
        self.join_linears = join_linears

    def match(self, index: GraphIndex) -> Iterator[LayerSite | BetweenSite | Refusal]:
        """Yield the layers; when they are cast, what lies between two of them."""
        casts: dict[Node, Node] = {}
        splits: dict[Node, Node] = {}
        narrow: set[Node] = set()  # casts to float32 of ours, and what is going to end in one
        splitting: set[Node] = set()  # what gives several of these
        for node in index.nodes:
            reads = node.all_input_nodes
            if self._is_cast(node, WIDE):
                if self.join_linears or not isinstance(read_linear(index, reads[0]), LinearCall):
                    narrow.add(node)
            elif self._is_cast(node, NARROW):
                if reads[0] in narrow:
                    yield BetweenSite(node, (reads[0],))
            elif node.target is operator.getitem and reads[0] in splitting:
                narrow.add(node)
                yield BetweenSite(node, tuple(reads[0].all_input_nodes[:1]), reads[0], splits)
            elif self._may_be_narrow(node, narrow, index):
                if index.effects.effect(node).operation in _SPLITS:
                    splitting.add(node)
                else:
                    narrow.add(node)
                    yield BetweenSite(node, tuple(each for each in reads if each in narrow))
            else:
                call = read_linear(index, node, transposed=True) or read_convolution(index, node)
                if isinstance(call, Obstacle):
                    yield Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,))
                elif call is not None and call.weight.tensor.dtype != NARROW:
                    yield LayerSite(call, casts)

    def _is_cast(self, node: object, dtype: torch.dtype) -> bool:
        """Return whether a node is a cast that this pass has put in."""
        if not isinstance(node, Node) or node.op != "call_method" or node.target != "to":
            return False
        return node.args[1:] == (dtype,) and self.transformed(node)

    def _may_be_narrow(self, node: Node, narrow: set[Node], index: GraphIndex) -> bool:
        """Return whether a node can be computed in bfloat16, since all tensors that it reads are to be had there."""
        inputs = set(node.all_input_nodes)
        if not inputs & narrow or node.op not in ("call_module", "call_function", "call_method"):
            return False
        operation = index.effects.effect(node).operation
        if operation not in _MOVES | _ROUNDED_ONCE | _SPLITS or (node.kwargs and node.op != "call_function"):
            return False
        indices = getattr(index.module_of(node), "return_indices", False) or node.kwargs.get("return_indices", False)
        if indices or "dtype" in node.kwargs:
            return False
        numbers = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, float)]
        if any(abs(number) > _LARGEST_NUMBER for number in numbers):
            return False
        if any(_is_written(each, index) for each in (node, *inputs & narrow)):
            return False
        mask = _mask_of(node) if operation == _ATTENTION else None
        if mask is not None:
            return mask not in narrow and inputs - {mask} <= narrow  # in float32: the kernels take it so
        return all(_is_no_float(each, operation) for each in inputs - narrow)

    def check(self, site: LayerSite | BetweenSite, index: GraphIndex) -> Refusal | None:
        """Refuse other dtypes and devices, train mode, and shared, tied or mutated tensors."""
        if isinstance(site, BetweenSite):
            return None
        call = site.call
        problem = self._problem(call)
        if problem is not None:
            return index.refuse(call.label, problem[0], f"layer `{call.label}` {problem[1]}", call.node)
        return tensors_refusal(call, index) or sharing_refusal(call, [call.node], index)

    def _problem(self, call: LinearCall | ConvolutionCall) -> tuple[str, str] | None:
        """Return why a layer stays as it is, as (reason code, predicate)."""
        weight = call.weight.tensor
        if self.where != "*" and not fnmatchcase(call.label, self.where):
            return "filtered", f"does not match where={self.where!r}"
        if call.training:
            return "training", "is in train mode, and weights in bfloat16 lose small updates"
        if weight.dtype != WIDE:
            return "unsupported-dtype", f"is {weight.dtype}; bfloat16 stands in for torch.float32"
        if weight.device.type not in ("cpu", "meta"):
            return "not-on-cpu", f"is on {weight.device}; convert the model there, by `model.bfloat16()`"
        if weight.is_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "no-operators", "would be slower in bfloat16: this processor has no instructions for it"
        return None

    def rewrite(self, site: LayerSite | BetweenSite, edit: Editor) -> None:
        """Cast a layer, or compute an operation in bfloat16."""
        if isinstance(site, LayerSite):
            _rewrite_layer(site, edit)
            return
        casts = {each: edit.current(each) for each in site.inputs}
        if not all(self._is_cast(cast, WIDE) for cast in casts.values()):
            return  # an instrument left out what comes before
        narrow = {each: cast.all_input_nodes[0] for each, cast in casts.items()}
        narrow |= {cast: narrow[each] for each, cast in casts.items()}  # arguments may name either
        if self._is_cast(site.node, NARROW):
            edit.replace(site.node, narrow[site.inputs[0]])
        elif site.splitting is None:
            _end_wide(site.node, _compute_narrow(site.node, site.node, narrow, edit), edit)
        else:
            _take_narrow(site, site.splitting, narrow, edit)
        for unused in (site.splitting, *casts.values()):
            if unused is not None and not unused.users and not edit.is_stale([unused]):
                edit.erase(unused)


def _mask_of(node: Node) -> Node | None:
    """Return the mask of a call of attention."""
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, Node) else None


def _is_no_float(node: Node, operation: str | None) -> bool:
    """Return whether a value is surely no floating-point tensor: a size, or a mask of booleans."""
    facts = tensor_facts(node)
    if facts is None:
        return bool(is_python_number(node))
    return not facts.dtype.is_floating_point and (facts.dtype is torch.bool or operation in _MOVES)


def _is_written(node: Node, index: GraphIndex) -> bool:
    """Return whether the memory of a value may be written anywhere in the graph."""
    return bool(index.effects.writes(node)) or index.effects.written_between(node, index.nodes[0], index.nodes[-1])


def _rewrite_layer(site: LayerSite, edit: Editor) -> None:
    """Insert a layer in bfloat16 between two casts, and drop the original."""
    call, node = site.call, site.call.node
    full = call.module_name or call.weight.name
    name = edit.add_module(full, f"{full.rpartition('.')[2]}_bfloat16", _layer(call))
    cast = None if _is_written(call.input, edit.index) else site.casts.get(call.input)
    if cast is None:
        cast = edit.undescribed(edit.call_method("to", call.input, NARROW, before=node, like=[node]))
        site.casts[call.input] = cast
    _end_wide(node, edit.call_module(name, cast, before=node, like=[node]), edit)
    refs = {"weight": call.weight, "bias": call.bias}
    edit.derived(
        Derived(
            function="fxopt_cpu.operators.rounding:rounded",
            inputs=tuple((key, None if ref is None else ref.name) for key, ref in refs.items()),
            settings=(("transposed", _is_turned(call)),),
            outputs=tuple(None if ref is None else f"{name}.{key}" for key, ref in refs.items()),
            restore="fxopt_cpu.operators.rounding:lost",
        )
    )
    edit.drop(call, {}, twin=name)


def _is_turned(call: LinearCall | ConvolutionCall) -> bool:
    """Return whether a linear layer stores its weight as (in, out), which the new one does not."""
    return isinstance(call, LinearCall) and call.transposed


def _layer(call: LinearCall | ConvolutionCall) -> nn.Module:
    """Return the layer with its tensors in bfloat16; frozen ones stay frozen."""
    refs = {"weight": call.weight, **({} if call.bias is None else {"bias": call.bias})}
    with torch.inference_mode(False), torch.no_grad():
        plain = [ref.tensor.clone() if ref.tensor.is_inference() else ref.tensor for ref in refs.values()]
        made = (tensor for tensor in rounded(*plain, transposed=_is_turned(call)) if tensor is not None)
        tensors = {
            key: nn.Parameter(tensor, requires_grad=ref.tensor.requires_grad)
            for (key, ref), tensor in zip(refs.items(), made, strict=True)
        }
    if isinstance(call, ConvolutionCall):
        return call.build(bias=call.bias is not None, tensors=tensors)
    sizes = call.in_features, call.out_features
    return module_with(tensors, nn.Linear, *sizes, bias=call.bias is not None).train(call.training)


def _compute_narrow(node: Node, before: Node, narrow: Mapping[Node, Node], edit: Editor) -> Node:
    """Insert the same call on what its inputs are in bfloat16, and return it."""
    args: Any = map_arg(node.args, lambda each: narrow.get(each, each))
    kwargs: Any = map_arg(node.kwargs, lambda each: narrow.get(each, each))
    like: Any = {"before": before, "like": [node]}
    if node.op == "call_function":
        assert callable(node.target)
        return edit.call_function(node.target, *args, **like, **kwargs)
    call = edit.call_module if node.op == "call_module" else edit.call_method
    return call(str(node.target), *args, **like)


def _end_wide(node: Node, made: Node, edit: Editor) -> None:
    """Replace a value by the same in bfloat16, and a cast."""
    wide = edit.call_method("to", edit.undescribed(made), WIDE, before=node, like=[node])
    edit.replace(node, edit.undescribed(wide))


def _take_narrow(site: BetweenSite, splitting: Node, narrow: Mapping[Node, Node], edit: Editor) -> None:
    """Take an item of several that are computed in bfloat16, once for all of them."""
    several = site.splits.get(splitting)
    if several is None:
        several = site.splits[splitting] = _compute_narrow(splitting, site.node, narrow, edit)
        edit.undescribed(several)
    _end_wide(site.node, _compute_narrow(site.node, site.node, {splitting: several}, edit), edit)
