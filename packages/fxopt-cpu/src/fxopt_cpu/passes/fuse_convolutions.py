"""``activation(conv(pad(x)) + other)`` -> ``packed(x, other)``: one call of oneDNN's operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch.fx import Node

from fxopt_core import Refusal
from fxopt_cpu.layers.epilogue import NONE, Activation
from fxopt_cpu.layers.packed_conv import PackedConv1d, PackedConv2d, Pair, sides_of
from fxopt_cpu.operators.onednn import ALTER_EXTREMES, HIDE_NAN, why_unsupported
from fxopt_cpu.passes.matching import REASONS, parameter_of
from fxopt_cpu.passes.memory_formats import format_of, is_ambiguous, leave_channels_last
from fxopt_cpu.passes.neighbours import Padding, Sum, activation_after, padding_before, sum_after
from fxopt_rewrite import (
    ConvolutionCall,
    Editor,
    GraphIndex,
    Obstacle,
    Piece,
    ReversibleSitePass,
    read_convolution,
    same_sizes,
    sharing_refusal,
    tensor_facts,
    tensors_refusal,
)


@dataclass(frozen=True, eq=False)
class ConvolutionSite:
    """A convolution over one or two dimensions and the operations that are packed with it.

    Attributes:
        call: the convolution.
        padding: the padding before it, or None.
        sum: the addition after it, or None.
        last: the node whose value the packed module computes.
        activation: the activation at the end.
    """

    call: ConvolutionCall
    padding: Padding | None
    sum: Sum | None
    last: Node
    activation: Activation

    @property
    def label(self) -> str:
        """The name of the convolution."""
        return self.call.label

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The calls, in order."""
        padding = [] if self.padding is None else [self.padding.node]
        added = [] if self.sum is None else [self.sum.node]
        return tuple(dict.fromkeys((*padding, self.call.node, *added, self.last)))

    @property
    def input(self) -> Node:
        """Its input, before padding."""
        return self.call.input if self.padding is None else self.padding.input


class FuseConvolutions(ReversibleSitePass[ConvolutionSite]):
    """``activation(conv2d(pad(x)) + other)`` -> ``packed(x, other)``: one call of oneDNN's operator.

    Zero padding, the addition of a value of the same shape, and an activation (those of `FuseLinears`) are included if
    nothing else reads the values between them; after a sum, the operator only takes ReLU. In a convolution, oneDNN's
    ReLU, hardtanh and hardsigmoid make a number of NaN, which the record notes at each site. Parameters are unchanged:
    `PackedConv2d` packs a copy when it first runs.

    oneDNN computes convolutions channels last, and converts other images before and after each one. So a convolution
    leaves its result channels last where every reader computes the same from it: other convolutions, operations on
    images and sums of their values. One whose result is returned or viewed gives the strides of before, if they are
    known (`infer_shapes`).

    Convolutions over one dimension, where a graph has three or more, become `PackedConv1d`, for plans.

    Refused: other dtypes and devices, processors without the operators, and shared, tied and mutated tensors.

    Args:
        keep_nan: whether these, and hardswish, whose results above 1e37 differ, stay calls of torch's own.

    Source:
        ``torch.ops.mkldnn._convolution_pointwise``, which inductor calls on CPUs, too: oneDNN applies the
        element-wise operation before it writes the result.

    Cost:
        One call instead of several, and no tensors between them. From the first call on, the module holds a packed
        copy of the weight besides the parameter.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(3, 8, 3), nn.ReLU6()).eval()
    >>> FuseConvolutions()(torch.fx.symbolic_trace(model)).get_submodule("1_packed")
    PackedConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), activation=hardtanh(0, 6))
    """

    reasons: ClassVar[Mapping[str, str]] = {
        **REASONS,
        "other-convolution": "Only plain convolutions over two dimensions are packed, and three or more over one: "
        "fewer gain too little in a plan. Nothing to do: plans or torch compute the others.",
        "padding-mode": "The convolution pads by reflection, replication or around the edge, and the operators pad "
        "with zeros. Nothing to do: one operator cannot do both.",
    }

    def __init__(self, *, keep_nan: bool = False) -> None:
        self.keep_nan = keep_nan

    def match(self, index: GraphIndex) -> Iterator[ConvolutionSite | Refusal]:
        """Yield the convolutions over one and two dimensions."""
        taken: dict[Node, tuple[int, ConvolutionCall]] = {}  # sums, and the site and call that each went to
        sites: list[ConvolutionSite | Refusal] = []
        calls = {node: call for node in index.nodes if (call := read_convolution(index, node)) is not None}
        plain = [call for call in calls.values() if isinstance(call, ConvolutionCall) and not call.transposed]
        lines = sum(call.dims == 1 for call in plain)
        for node, call in calls.items():
            if isinstance(call, Obstacle):
                sites.append(Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,)))
            elif call.dims == 1 and not call.transposed and lines < FEWEST_LINES:
                message = f"convolution `{call.label}` is one of {lines} over one dimension; expected {FEWEST_LINES}"
                sites.append(index.refuse(call.label, "other-convolution", message, node))
            elif call.dims in _LAYERS and not call.transposed:
                site = self._site(call, index)
                if site.sum is not None:
                    former = taken.get(site.sum.node)
                    if former is not None:  # of two convolutions, the later one takes it
                        sites[former[0]] = self._site(former[1], index, alone=True)
                    taken[site.sum.node] = len(sites), call
                sites.append(site)
            else:
                kind, plural = "transposed" if call.transposed else "plain", "s" * (call.dims > 1)
                found = f"convolution `{call.label}` is {kind}, over {call.dims} dimension{plural}"
                message = f"{found}; expected a plain one over 1 or 2"
                sites.append(index.refuse(call.label, "other-convolution", message, node))
        yield from _without_early_overwrites(sites, index)

    def check(self, site: ConvolutionSite, index: GraphIndex) -> Refusal | None:
        """Refuse what oneDNN cannot compute, other padding than zeros, and shared, tied or mutated tensors."""
        call = site.call
        if call.padding_mode != "zeros":
            message = f"convolution `{site.label}` has padding_mode={call.padding_mode!r}; oneDNN only pads with zeros"
            return index.refuse(site.label, "padding-mode", message, call.node)
        unsupported = why_unsupported(call.weight.tensor.dtype, call.weight.tensor.device)
        if unsupported is not None:
            return index.refuse(call.label, unsupported[0], f"convolution `{call.label}` {unsupported[1]}", call.node)
        return tensors_refusal(call, index) or sharing_refusal(call, [call.node], index)

    def rewrite(self, site: ConvolutionSite, edit: Editor) -> None:
        """Insert one module with the same parameters, and drop what it replaces."""
        if site.activation.name in HIDE_NAN:
            edit.note(f"oneDNN's {site.activation.name} makes a number of NaN")
        call, nodes, module = site.call, site.nodes, _packed(site)
        refs = {key: ref for key, ref in (("weight", call.weight), ("bias", call.bias)) if ref is not None}
        for key, ref in refs.items():
            module.register_parameter(key, parameter_of(ref.tensor))
        full = call.module_name or call.weight.name
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_packed", module.train(call.training))
        inputs = [site.input] if site.sum is None else [site.input, site.sum.other]
        before = nodes[0] if site.sum is None else site.sum.node
        edit.replace(nodes[-1], edit.call_module(name, *inputs, before=before, like=nodes[::-1]))
        for node in reversed(nodes[:-1]):
            edit.erase(node)
        edit.drop(call, {ref.name: Piece(f"{name}.{key}") for key, ref in refs.items()}, twin=name)
        for node in nodes:
            if node is not call.node and node.op == "call_module":
                edit.drop_unused(node)

    def settle(self, edit: Editor) -> None:
        """Let results stay channels last where every reader, as it is now, may have them so."""
        graph_module = edit.index.graph_module
        if any(isinstance(module, PackedConv2d) for module in graph_module.modules()):
            for node in leave_channels_last(GraphIndex(graph_module)):
                edit.undescribed(node)

    def _site(self, call: ConvolutionCall, index: GraphIndex, *, alone: bool = False) -> ConvolutionSite:
        """Return a convolution with all that can be packed with it; ``alone``, without a sum."""
        padding = padding_before(index, call.input) if isinstance(call.padding, tuple) else None
        if padding is not None and call.dims == 1 and any(padding.sides[0]):  # of channels
            padding = None
        if padding is not None and index.effects.written_between(padding.node, padding.node, call.node):
            padding = None
        last, activation = self._activation_after(index, call.node)
        found = None if alone or activation != NONE else sum_after(index, call.node)
        if found is not None and call.dims == 1 and format_of(found.other) != "contiguous":
            found = None  # the strides of the sum may be those of the other value
        if found is None or not _fits(call, padding, found, index):
            return ConvolutionSite(call, padding, None, last, activation)
        last, activation = self._activation_after(index, found.node)
        if activation.name not in ("none", "relu"):
            last, activation = found.node, NONE
        return ConvolutionSite(call, padding, found, last, activation)

    def _activation_after(self, index: GraphIndex, node: Node) -> tuple[Node, Activation]:
        last, activation = activation_after(index, node)
        return (node, NONE) if self.keep_nan and activation.name in ALTER_EXTREMES else (last, activation)


def _format(site: ConvolutionSite) -> str:
    """Return the memory format of a site's result, whatever its input has become; "preserve" where it is not known."""
    facts = tensor_facts(site.last)
    alike = facts is not None and is_ambiguous(facts)  # then the input decides
    return format_of(site.input if alike else site.last) or "preserve"


def _without_early_overwrites(
    sites: list[ConvolutionSite | Refusal], index: GraphIndex
) -> Iterator[ConvolutionSite | Refusal]:
    """Yield sites; those whose result would overwrite a value that a site moved to its sum reads later do not."""
    moved: dict[Node, int] = {}
    for site in sites:
        if isinstance(site, ConvolutionSite) and site.sum is not None:
            moved.update((node, index.position[site.sum.node]) for node in site.nodes if node is not site.sum.node)
    for site in sites:
        if isinstance(site, ConvolutionSite) and site.sum is not None and site.sum.last:
            here, readers = index.position[site.sum.node], (user for user in site.sum.other.users if user in moved)
            if any(moved[reader] > here for reader in readers):
                site = replace(site, sum=replace(site.sum, last=False))
        yield site


def _fits(call: ConvolutionCall, padding: Padding | None, found: Sum, index: GraphIndex) -> bool:
    """Return whether a convolution may run at its sum instead, and the other value has the same shape."""
    first, value = (call.node, call.input) if padding is None else (padding.node, padding.input)
    if index.effects.written_between(value, first, found.node):
        return False
    mine, other = tensor_facts(call.node, call.weight.tensor), tensor_facts(found.other, call.weight.tensor)
    return mine is not None and other is not None and same_sizes(mine.shape, other.shape)


def _packed(site: ConvolutionSite) -> PackedConv2d:
    """Return the packed module of a site, without its parameters."""
    call, kernel = site.call, sides_of(site.call.weight.tensor.shape[2:])
    own = _padding_of(call)
    outer = ((0, 0), (0, 0)) if site.padding is None else site.padding.sides
    rows, columns = ((a[0] + b[0], a[1] + b[1]) for a, b in zip(own, outer, strict=True))
    return _LAYERS[call.dims](
        call.in_channels,
        call.out_channels,
        kernel,
        stride=sides_of(call.stride),
        padding=(rows, columns),
        dilation=sides_of(call.dilation),
        groups=call.groups,
        bias=call.bias is not None,
        activation=tuple(site.activation),
        memory_format=_format(site) if call.dims == 2 else "preserve",
        adds=site.sum is not None,
        overwrites=call.dims == 2 and site.sum is not None and site.sum.last and site.sum.other is not site.input,
        device="meta",
    )


def _padding_of(call: ConvolutionCall) -> tuple[Pair, Pair]:
    """Return a convolution's own padding, a pair for rows and a pair for columns."""
    if isinstance(call.padding, tuple):
        high, wide = sides_of(call.padding, 0)
        return (high, high), (wide, wide)
    if call.padding == "valid":
        return (0, 0), (0, 0)
    totals = sides_of([d * (k - 1) for d, k in zip(call.dilation, call.weight.tensor.shape[2:], strict=True)], 0)
    rows, columns = ((total // 2, total - total // 2) for total in totals)
    return rows, columns


# Fewer keep their names, as Whisper's, whose strides `generate` reads.
FEWEST_LINES = 3
_LAYERS: Mapping[int, type[PackedConv2d]] = {1: PackedConv1d, 2: PackedConv2d}
