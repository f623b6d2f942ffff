"""``activation(conv(pad(x)) + other)`` -> ``packed(x, other)``: one call of oneDNN's operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_cpu.layers.epilogue import NONE, Activation
from fxopt_cpu.layers.packed_conv import PackedConv1d, PackedConv2d, Pair, sides_of
from fxopt_cpu.layers.quantized_conv import QuantizedConv1d, QuantizedConv2d
from fxopt_cpu.library import isa
from fxopt_cpu.operators.linear import quantize
from fxopt_cpu.operators.onednn import ALTER_EXTREMES, HIDE_NAN, why_unsupported
from fxopt_cpu.operators.rounding import lost, static
from fxopt_cpu.passes import low_precision
from fxopt_cpu.passes.matching import REASONS, kernels_refusal, parameter_of
from fxopt_cpu.passes.memory_formats import follows_images, format_of, is_ambiguous, leave_channels_last
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
class ConvolutionSite(low_precision.LayerSite):
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
    def nodes(self) -> tuple[Node, ...]:
        """The calls, in order."""
        parts = (self.padding, self.call, self.sum)
        return tuple(dict.fromkeys((*(part.node for part in parts if part is not None), self.last)))

    @property
    def input(self) -> Node:
        """Its input, before padding."""
        return self.call.input if self.padding is None else self.padding.input


class FuseConvolutions(low_precision.Options, ReversibleSitePass[ConvolutionSite]):
    """``activation(conv2d(pad(x)) + other)`` -> ``packed(x, other)``: one call of oneDNN's operator.

    Zero padding, the addition of a value of the same shape, and an activation (those of `FuseLinears`) are included if
    nothing else reads the values between them; after a sum, the operator only takes ReLU. In convolutions, oneDNN's
    ReLU, hardtanh and hardsigmoid turn NaN into a number, which the record notes at each site. Parameters are
    unchanged: `PackedConv2d` packs a copy when it first runs.

    oneDNN computes convolutions channels last, and converts other images before and after each one. So a convolution
    leaves its result channels last where every reader computes the same from it: other convolutions, operations on
    images and sums of their values. One whose result is returned or viewed keeps the original strides, if they are
    known (`infer_shapes`).

    Convolutions over one dimension, where a graph has three or more, become `PackedConv1d`, for plans.

    With ``weights="int8"``, weights are rounded, with one scale for each channel of the result, and inputs at each
    call: the pass approximates, by no more than `promised_sqnr`. Each image is rounded with its own scale, so that it
    changes no result of another image; or, with ``activations="static"``, each channel has a range taken from data
    (`calibrated`). Convolutions in one group of channels become `QuantizedConv2d` or `QuantizedConv1d`.

    Refused: other dtypes and devices, processors without the operators, for int8 those without VNNI, static ranges
    from fewer than 512 places in images, and shared, tied and mutated tensors.

    Args:
        weights: ``"float32"`` or ``"int8"``.
        activations: ``"dynamic"``, by images, or ``"static"``; for int8.
        where: glob pattern over full module names; layers with other names are left alone.
        keep: glob patterns; layers with such names are left alone.
        keep_first: how many convolutions are left alone at the beginning.
        keep_last: how many are left alone at the end.
        min_weights: the least number of weights of a layer in int8: with fewer, rounding the image takes longer than
            the product gains.
        min_channels: the least number of input channels of a layer in int8: fewer, as in photographs, take longer
            to gather than to multiply.
        keep_originals: whether to keep the original weights beside those in int8, so that the pass can be undone and
            the original ``state_dict`` restored.
        keep_nan: whether activations for which oneDNN hides NaN, and hardswish, which differs above 1e37, stay torch's
            own calls.

    Raises:
        PassOptionError: ``weights`` or ``activations`` is something else, or a count is negative.
        PreconditionError: ``activations`` is ``"static"``, and there are no data.
        NotReversibleError: The pass is to be undone, but weights were rounded and ``keep_originals`` is off.

    Source:
        ``torch.ops.mkldnn._convolution_pointwise``, which inductor calls on CPUs, too: oneDNN applies the
        element-wise operation before it writes the result. Integers: Jacob et al., Quantization and Training of Neural
        Networks for Efficient Integer-Arithmetic-Only Inference, https://arxiv.org/abs/1712.05877.

    Cost:
        One call instead of several, and no tensors between them. Calls outside a plan keep a packed copy of the
        weight besides the parameter. In a plan and in int8, the packed weight takes the place of the plain one; in
        int8 it takes a quarter of its memory.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(3, 8, 3), nn.ReLU6()).eval()
    >>> graph_module = FuseConvolutions()(torch.fx.symbolic_trace(model))
    >>> print(graph_module.code.strip())
    def forward(self, input):
        input_1 = input
        _1_packed = getattr(self, "1_packed")(input_1);  input_1 = None
        return _1_packed
    >>> graph_module.get_submodule("1_packed")
    PackedConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), activation=hardtanh(0, 6))
    """

    reasons: ClassVar[Mapping[str, str]] = {
        **REASONS,
        "other-convolution": "Only plain convolutions are packed: over two dimensions, or at least three over one, "
        "since fewer gain too little in a plan. Nothing to do: plans or torch compute the others.",
        "padding-mode": "The convolution pads by reflection, replication or circularly, and the operators pad with "
        "zeros. Nothing to do: one operator cannot do both.",
        "not-in-int8": "In int8, only convolutions with one group of channels are computed. Nothing to do: the "
        "pipelines pack the others in float32.",
        **low_precision.REASONS,
    }
    kinds: ClassVar = {"float32": (torch.float32, torch.bfloat16), "int8": (torch.float32,)}
    arithmetic = (quantize, static, lost)

    def __init__(
        self,
        *,
        weights: str = "float32",
        activations: str = "dynamic",
        where: str = "*",
        keep: Sequence[str] = (),
        keep_first: int = 0,
        keep_last: int = 0,
        min_weights: int = 64 * 128,
        min_channels: int = 16,
        keep_originals: bool = False,
        keep_nan: bool = False,
    ) -> None:
        super().__init__(
            weights=weights, activations=activations, where=where, keep=keep, keep_first=keep_first,
            keep_last=keep_last, min_weights=min_weights, keep_originals=keep_originals,
        )  # fmt: skip
        self.min_channels, self.keep_nan = min_channels, keep_nan

    def match(self, index: GraphIndex) -> Iterator[ConvolutionSite | Refusal]:
        """Yield the convolutions over one and two dimensions."""
        taken: set[Node] = set()  # sums
        sites: list[ConvolutionSite | Refusal] = []
        calls = {node: call for node in index.nodes if (call := read_convolution(index, node)) is not None}
        plain = [call for call in calls.values() if isinstance(call, ConvolutionCall) and not call.transposed]
        packed = [each for each in index.modules.values() if isinstance(each, PackedConv2d)]  # by a pass before
        lines = sum(call.dims == 1 for call in plain) + sum(each.dims == 1 for each in packed)
        for node, call in reversed(calls.items()):  # of two convolutions, the later one takes their sum
            if isinstance(call, Obstacle):
                sites.append(Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,)))
            elif not call.transposed and (call.dims == 2 or (call.dims == 1 and lines >= FEWEST_LINES)):
                site = self._site(call, index, taken)
                if site.sum is not None:
                    taken.add(site.sum.node)
                sites.append(site)
            else:
                found = f"{'transposed' if call.transposed else 'plain'}, over {call.dims} dimension(s)"
                expected = f"a plain one over 2, or one of {FEWEST_LINES} or more plain ones over 1"
                message = f"convolution `{call.label}` is {found}; expected {expected}"
                sites.append(index.refuse(call.label, "other-convolution", message, node))
        sites.reverse()
        given = self.given_to(index, [each.call for each in sites if isinstance(each, ConvolutionSite)])
        for each in sites:
            yield replace(each, **next(given)) if isinstance(each, ConvolutionSite) else each

    def check(self, site: ConvolutionSite, index: GraphIndex) -> Refusal | None:
        """Refuse what oneDNN cannot compute, other padding than zeros, and shared, tied or mutated tensors."""
        call, problem = site.call, self._problem(site)
        if problem is not None:
            return index.refuse(call.label, problem[0], f"convolution `{call.label}` {problem[1]}", call.node)
        refusal = tensors_refusal(call, index) or sharing_refusal(call, [call.node], index)
        return refusal or (kernels_refusal(call.label, index, call.node) if self.weights == "int8" else None)

    def _problem(self, site: ConvolutionSite) -> tuple[str, str] | None:
        """Return why a layer is left alone, as (reason code, predicate)."""
        call, weight = site.call, site.call.weight.tensor
        if site.left_out is not None:
            return site.left_out
        if call.padding_mode != "zeros":
            return "padding-mode", f"has padding_mode={call.padding_mode!r}; oneDNN only pads with zeros"
        unsupported = why_unsupported(weight.dtype, weight.device)
        if unsupported is not None or self.weights != "int8":
            return unsupported
        if call.groups != 1:
            return "not-in-int8", f"has {call.groups} groups, expected 1"
        if call.in_channels < self.min_channels:
            return "too-small", f"has {call.in_channels} input channels, fewer than min_channels={self.min_channels}"
        if weight.numel() > MOST_DEPTH * call.out_channels:
            return "not-in-int8", f"sums {weight[0].numel()} products, and 32 bits hold {MOST_DEPTH}"
        if weight.is_cpu and isa() in low_precision.SLOW_IN_INT8:
            return "no-operators", "would be slower in int8: this processor has no instructions for it (VNNI)"
        return self.unfit(call, site.ends, site.rows)

    def rewrite(self, site: ConvolutionSite, edit: Editor) -> None:
        """Insert one module with the same parameters, and drop what it replaces."""
        # In int8, one of fxopt's operators computes the activation, and keeps NaN.
        if site.activation.name in HIDE_NAN and self.weights != "int8":
            edit.note(f"oneDNN's {site.activation.name} turns NaN into a number")
        call, nodes, is_int8 = site.call, site.nodes, self.weights == "int8"
        module = _packed(site, is_int8)
        given = {"weight": None if is_int8 else call.weight, "bias": call.bias}
        refs = {key: ref for key, ref in given.items() if ref is not None}
        for key, ref in refs.items():
            module.register_parameter(key, parameter_of(ref.tensor))
        if is_int8:
            ends = site.ends  # with zero, so that padding has a number
            ends = None if ends is None else torch.stack((ends[0].clamp_max(0), ends[1].clamp_min(0)))
            self.put_rounded(module, call, ends)
        full = call.module_name or call.weight.name
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_packed", module.train(call.training))
        inputs = [site.input] if site.sum is None else [site.input, site.sum.other]
        # At the sum, if there is one: the other value may be computed after the convolution.
        before = nodes[0] if site.sum is None else site.sum.node
        edit.replace(nodes[-1], edit.call_module(name, *inputs, before=before, like=nodes[::-1]))
        for node in reversed(nodes[:-1]):
            edit.erase(node)
        pieces = {ref.name: Piece(f"{name}.{key}") for key, ref in refs.items()}
        if is_int8:
            pieces |= self.record(edit, call, name)
        edit.drop(call, pieces, twin=name)
        for node in nodes:
            if node is not call.node and node.op == "call_module":
                edit.drop_unused(node)

    def settle(self, edit: Editor) -> None:
        """Let results stay channels last where every reader, after all rewrites, takes them so."""
        # After all rewrites, because packed layers decide; a pass before them could only insert conversions.
        graph_module = edit.index.graph_module
        if any(isinstance(module, PackedConv2d) for module in graph_module.modules()):
            index = GraphIndex(graph_module)
            # In the order of the graph: `follows_images` reads how the inputs are described.
            for node in sorted(leave_channels_last(index)):
                edit.restrided(node, "channels_last" if follows_images(index, node) else None)

    def _site(self, call: ConvolutionCall, index: GraphIndex, taken: Set[Node]) -> ConvolutionSite:
        """Return a convolution with all that can be packed with it, but for sums that are ``taken``."""
        padding = padding_before(index, call.input) if isinstance(call.padding, tuple) else None
        if padding is not None and call.dims == 1 and any(padding.sides[0]):  # of channels
            padding = None
        if padding is not None and index.effects.written_between(padding.node, padding.node, call.node):
            padding = None
        last, activation = self._activation_after(index, call.node)
        found = None if activation != NONE else sum_after(index, call.node)
        if found is not None and call.dims == 1 and format_of(found.other) != "contiguous":
            found = None  # the strides of the sum may be those of the other value
        if found is None or found.node in taken or not _fits(call, padding, found, index):
            return ConvolutionSite(call, padding, None, last, activation)
        last, activation = self._activation_after(index, found.node)
        if activation.name not in ("none", "relu"):
            last, activation = found.node, NONE
        return ConvolutionSite(call, padding, found, last, activation)

    def _activation_after(self, index: GraphIndex, node: Node) -> tuple[Node, Activation]:
        last, activation = activation_after(index, node)
        alters = self.keep_nan and self.weights != "int8" and activation.name in ALTER_EXTREMES
        return (node, NONE) if alters else (last, activation)


def _format(site: ConvolutionSite) -> str:
    """Return the memory format of a site's result, whatever its input has become; "preserve" where it is not known."""
    facts = tensor_facts(site.last)
    alike = facts is not None and is_ambiguous(facts)  # then the input decides
    given, found = format_of(site.input), format_of(site.input if alike else site.last)
    # In eager mode, one image may be contiguous where two are channels last: the input decides at each call.
    varies = given == found == "channels_last" and facts is not None and not isinstance(facts.shape[0], int)
    return "preserve" if varies else found or "preserve"


def _fits(call: ConvolutionCall, padding: Padding | None, found: Sum, index: GraphIndex) -> bool:
    """Return whether a convolution may run at its sum instead, and the other value has the same shape."""
    first, value = (call.node, call.input) if padding is None else (padding.node, padding.input)
    if index.effects.written_between(value, first, found.node):
        return False
    mine, other = tensor_facts(call.node, call.weight.tensor), tensor_facts(found.other, call.weight.tensor)
    return mine is not None and other is not None and same_sizes(mine.shape, other.shape)


def _packed(site: ConvolutionSite, is_int8: bool) -> PackedConv2d:
    """Return the packed module of a site, without its parameters."""
    call, kernel = site.call, sides_of(site.call.weight.tensor.shape[2:])
    own = _padding_of(call)
    outer = ((0, 0), (0, 0)) if site.padding is None else site.padding.sides
    rows, columns = ((a[0] + b[0], a[1] + b[1]) for a, b in zip(own, outer, strict=True))
    settings: dict[str, Any] = {
        "stride": sides_of(call.stride), "padding": (rows, columns), "dilation": sides_of(call.dilation),
        "groups": call.groups, "bias": call.bias is not None, "activation": tuple(site.activation),
        "memory_format": _format(site) if call.dims == 2 else "preserve",
    }  # fmt: skip
    if is_int8:
        settings["rounding"] = site.ends is not None
    layers = (QuantizedConv1d, QuantizedConv2d) if is_int8 else (PackedConv1d, PackedConv2d)
    return layers[call.dims - 1](call.in_channels, call.out_channels, kernel, device="meta", **settings)


def _padding_of(call: ConvolutionCall) -> tuple[Pair, Pair]:
    """Return a convolution's own padding, a pair for rows and a pair for columns."""
    if isinstance(call.padding, tuple):
        high, wide = sides_of(call.padding, 0)
        return (high, high), (wide, wide)
    if call.padding == "valid":
        return (0, 0), (0, 0)
    # "same": if the number of zeros is odd, torch puts one more after than before.
    totals = sides_of([d * (k - 1) for d, k in zip(call.dilation, call.weight.tensor.shape[2:], strict=True)], 0)
    rows, columns = ((total // 2, total - total // 2) for total in totals)
    return rows, columns


# Fewer stay as they are: `generate` of Whisper reads the strides of its two by their names.
FEWEST_LINES = 3
MOST_DEPTH = 65536  # as in csrc/kernels.h
