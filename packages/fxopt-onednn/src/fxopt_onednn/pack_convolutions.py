"""``activation(conv2d(pad(x)) + other)`` -> ``packed(x, other)``: one call of oneDNN's operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn
from torch.fx import Node

from fxopt_core import (
    ConvolutionCall,
    Editor,
    GraphIndex,
    Obstacle,
    Piece,
    Refusal,
    ReversibleSitePass,
    TensorRef,
    read_convolution,
    same_size,
    sharing_refusal,
    tensor_facts,
    tensors_refusal,
)
from fxopt_onednn.activations import NONE, Activation
from fxopt_onednn.dropping import drop_unused
from fxopt_onednn.following import Padding, Sum, activation_behind, padding_before, sum_behind
from fxopt_onednn.operators import against_operators
from fxopt_onednn.packed_conv import PackedConv2d, Pair
from fxopt_onednn.packing import as_parameter
from fxopt_onednn.regions import Layouts


@dataclass(frozen=True, eq=False)
class ConvolutionSite:
    """A convolution over two dimensions with what goes along.

    Attributes:
        call: the convolution.
        padding: the padding before it, or None.
        sum: the addition behind it, or None.
        last: the node whose value is computed.
        activation: what is applied at the end.
        channels_last: whether the images that it reads lie channels last.
    """

    call: ConvolutionCall
    padding: Padding | None
    sum: Sum | None
    last: Node
    activation: Activation
    channels_last: bool = False

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
        """What is convolved, before padding."""
        return self.call.input if self.padding is None else self.padding.input


class PackConvolutions(ReversibleSitePass[ConvolutionSite]):
    """``activation(conv2d(pad(x)) + other)`` -> ``packed(x, other)``: one call of oneDNN's operator.

    Padding with zeros, the addition of a value of the same shape and one of ReLU, ReLU6, hardtanh, hardswish,
    hardsigmoid, SiLU, sigmoid, tanh, GELU and LeakyReLU go along, where nothing else reads what lies between. Behind a
    sum, the operator takes ReLU alone. Parameters stay what they are; `PackedConv2d` packs a copy when it first runs.
    Refused are other dtypes and devices, processors without the operators, and what is shared, tied or written.

    Source:
        ``torch.ops.mkldnn._convolution_pointwise``, which inductor calls for CPUs as well: oneDNN applies what follows
        a layer to each element before it is written.

    Cost:
        One call in place of several, and no tensor between them. The packed copy of the weight is held beside the
        parameter from the first call on.

    >>> import torch
    >>> model = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(3, 8, 3), nn.ReLU6()).eval()
    >>> PackConvolutions()(torch.fx.symbolic_trace(model)).get_submodule("1_packed")
    PackedConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), activation=hardtanh(0.0, 6.0))
    """

    def match(self, index: GraphIndex) -> Iterator[ConvolutionSite | Refusal]:
        """Yield the convolutions over two dimensions."""
        taken: dict[Node, ConvolutionSite] = {}
        sites: list[ConvolutionSite | Refusal] = []
        for node in index.nodes:
            call = read_convolution(index, node)
            if isinstance(call, Obstacle) and _is_mine(index, node):
                sites.append(Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,)))
            elif isinstance(call, ConvolutionCall) and call.dims == 2 and not call.transposed:
                site = _site(call, index)
                if site.sum is not None and site.sum.node in taken:  # of two summands, the later one takes the sum
                    sites[sites.index(taken[site.sum.node])] = _site(taken[site.sum.node].call, index, alone=True)
                if site.sum is not None:
                    taken[site.sum.node] = site
                sites.append(site)
        layouts = Layouts(index, moving=True)
        for each in _without_overwriting_what_is_read_later(sites, index):
            last = isinstance(each, ConvolutionSite) and layouts.lies_last(each.call.node)
            yield replace(each, channels_last=True) if isinstance(each, ConvolutionSite) and last else each

    def check(self, site: ConvolutionSite, index: GraphIndex) -> Refusal | None:
        """Refuse what the operators do not take, and what is shared, tied, mutated or padded with other values."""
        call, weight = site.call, site.call.weight.tensor
        against = against_operators(weight.dtype, weight.device)
        if against is not None:
            return index.refuse(site.label, against[0], f"convolution `{site.label}` {against[1]}", call.node)
        if call.padding_mode != "zeros":
            message = f"convolution `{site.label}` pads by {call.padding_mode}, and the operators pad with zeros"
            return index.refuse(site.label, "padding-mode", message, call.node)
        return tensors_refusal(call, index) or sharing_refusal(call, [call.node], index)

    def rewrite(self, site: ConvolutionSite, edit: Editor) -> None:
        """Put in one module with the same parameters, and take out what it stands for."""
        call = site.call
        full = call.module_name or call.weight.name
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_packed", _packed(site))
        arguments = (site.input,) if site.sum is None else (site.input, site.sum.other)
        place = site.nodes[0] if site.sum is None else site.sum.node
        packed = edit.call_module(name, *arguments, before=place, like=site.nodes[::-1])
        *between, last = site.nodes
        edit.replace(last, packed)
        for node in reversed(between):
            edit.erase(node)
        pieces: dict[str, Piece | None] = {ref.key: Piece(f"{name}.{key}") for key, ref in _tensors(call)}
        edit.drop(call, pieces, twin=name)
        for node in site.nodes:
            if node is not call.node and node.op == "call_module":
                drop_unused(edit, str(node.target))


def _is_mine(index: GraphIndex, node: Node) -> bool:
    """Return whether what cannot be read is, by its class or name, a convolution over two dimensions."""
    module = index.module_of(node)
    if module is not None:
        return isinstance(module, nn.Conv2d)
    return "conv2d" in str(getattr(node.target, "__name__", ""))


def _without_overwriting_what_is_read_later(
    sites: list[ConvolutionSite | Refusal], index: GraphIndex
) -> Iterator[ConvolutionSite | Refusal]:
    """Yield sites: those that run where their sum does read later than before what another one might write over."""
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


def _site(call: ConvolutionCall, index: GraphIndex, *, alone: bool = False) -> ConvolutionSite:
    """Return a convolution with all that can go along; without a sum, if it is to leave that alone."""
    padding = padding_before(index, call.input) if isinstance(call.padding, tuple) else None
    if padding is not None and index.effects.written_between(padding.node, padding.node, call.node):
        padding = None
    last, activation = activation_behind(index, call.node)
    found = None if alone or activation != NONE else sum_behind(index, call.node)
    if found is None or not _fits(call, padding, found, index):
        return ConvolutionSite(call, padding, None, last, activation)
    last, activation = activation_behind(index, found.node)
    if activation.name not in ("none", "relu"):
        last, activation = found.node, NONE
    return ConvolutionSite(call, padding, found, last, activation)


def _fits(call: ConvolutionCall, padding: Padding | None, found: Sum, index: GraphIndex) -> bool:
    """Return whether a convolution may be computed where its result is added, to a value of the same shape."""
    first, value = (call.node, call.input) if padding is None else (padding.node, padding.input)
    if index.effects.written_between(value, first, found.node):
        return False
    mine, other = tensor_facts(call.node, call.weight.tensor), tensor_facts(found.other, call.weight.tensor)
    if mine is None or other is None or mine.rank != other.rank:
        return False
    return all(same_size(one, another) for one, another in zip(mine.shape, other.shape, strict=True))


def _tensors(call: ConvolutionCall) -> list[tuple[str, TensorRef]]:
    return [(key, ref) for key, ref in (("weight", call.weight), ("bias", call.bias)) if ref is not None]


def _packed(site: ConvolutionSite) -> PackedConv2d:
    """Return the module for a site, with the parameters of the convolution."""
    call, kernel = site.call, site.call.weight.tensor.shape[2:]
    own = _padding_of(call)
    outer = ((0, 0), (0, 0)) if site.padding is None else site.padding.sides
    rows, columns = ((a[0] + b[0], a[1] + b[1]) for a, b in zip(own, outer, strict=True))
    module = PackedConv2d(
        call.in_channels,
        call.out_channels,
        (kernel[0], kernel[1]),
        stride=(call.stride[0], call.stride[1]),
        padding=(rows, columns),
        dilation=(call.dilation[0], call.dilation[1]),
        groups=call.groups,
        bias=call.bias is not None,
        activation=site.activation,
        channels_last=site.channels_last,
        adds=site.sum is not None,
        overwrites=site.sum is not None and site.sum.last and site.sum.other is not site.input,
        device="meta",
    )
    for key, ref in _tensors(call):
        module.register_parameter(key, as_parameter(ref))
    return module.train(call.training)


def _padding_of(call: ConvolutionCall) -> tuple[Pair, Pair]:
    """Return a convolution's own padding, one pair for rows and one for columns."""
    if isinstance(call.padding, tuple):
        return (call.padding[0], call.padding[0]), (call.padding[1], call.padding[1])
    if call.padding == "valid":
        return (0, 0), (0, 0)
    totals = [d * (k - 1) for d, k in zip(call.dilation, call.weight.tensor.shape[2:], strict=True)]
    rows, columns = ((total // 2, total - total // 2) for total in totals)
    return rows, columns
