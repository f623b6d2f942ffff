"""``conv1(x) + conv2(x) + x`` -> ``merged_conv(x)``: parallel convolutions that are summed become one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import Derived, Refusal
from fxopt_norm.folding import NORM_REASONS, FoldSite, mode_refusal, other_user, shape_refusal
from fxopt_norm.formulas import TENSORS, merge_branches, restore_branches
from fxopt_rewrite import (
    BatchNormCall,
    ConvolutionCall,
    Editor,
    ElementwiseCall,
    GraphIndex,
    Obstacle,
    SitePass,
    TensorRef,
    input_of,
    mixed_flags_refusal,
    read_batch_norm,
    read_convolution,
    read_elementwise,
    same_sizes,
    sharing_refusal,
    tensor_facts,
    tensors_refusal,
)


@dataclass(frozen=True, eq=False)
class Branch:
    """``norm(conv(x))``, ``conv(x)``, ``norm(x)`` or ``x`` itself."""

    conv: ConvolutionCall | None
    norm: BatchNormCall | None

    @property
    def calls(self) -> tuple[ConvolutionCall | BatchNormCall, ...]:
        """The layers in order."""
        return tuple(call for call in (self.conv, self.norm) if call is not None)


@dataclass(frozen=True, eq=False)
class BranchSite:
    """Branches of one value and the additions that sum them.

    Attributes:
        source: the value.
        branches: what is summed.
        nodes: the layers and the additions, in order; the last one is the sum.
    """

    source: Node
    branches: tuple[Branch, ...]
    nodes: tuple[Node, ...]

    @property
    def label(self) -> str:
        """The names of the branches."""
        return " + ".join(each.calls[0].label if each.calls else self.source.name for each in self.branches)

    @cached_property
    def home(self) -> ConvolutionCall:
        """The convolution with the largest kernel, whose settings the merged one gets."""
        return max((each.conv for each in self.branches if each.conv), key=lambda conv: prod(_kernel(conv)))

    @property
    def calls(self) -> list[ConvolutionCall | BatchNormCall]:
        """All layers."""
        return [call for each in self.branches for call in each.calls]

    @property
    def eps(self) -> tuple[float | None, ...]:
        """What each branch's batch norm adds to its variance; None for a branch without one."""
        return tuple(None if each.norm is None else each.norm.eps for each in self.branches)

    @property
    def tensors(self) -> dict[str, TensorRef | None]:
        """The tensors by the parameters of `merge_branches`."""
        found: dict[str, TensorRef | None] = {}
        for place, (conv, norm) in enumerate((each.conv, each.norm) for each in self.branches):
            refs: list[TensorRef | None] = [None, None] if conv is None else [conv.weight, conv.bias]
            refs += [] if norm is None else [norm.running_mean, norm.running_var, norm.weight, norm.bias]
            found |= {f"{key}_{place}": ref for key, ref in zip_longest(TENSORS, refs)}
        return found

    def merged(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the merged convolution."""
        with torch.no_grad():
            tensors = {key: None if ref is None else ref.tensor for key, ref in self.tensors.items()}
            return merge_branches(eps=self.eps, **tensors)


@dataclass(eq=False)
class _Sum:
    """Terms, the additions that sum them, and the values that every term may be a branch of."""

    terms: list[Node]
    adds: list[Node]
    sources: set[Node]


class MergeParallelConvolutions(SitePass[BranchSite]):
    """``bn1(conv1(x)) + bn2(conv2(x)) + bn3(x)`` -> ``merged_conv(x)``: parallel convolutions that are summed.

    Re-parameterises RepVGG, MobileOne and RepViT. With ``s = weight / sqrt(var + eps)`` and ``t = bias - s * mean`` of
    each branch's batch norm (1 and 0 without one), the new weight is the sum of ``s * W``, smaller kernels padded with
    zeros to the largest, and the new bias the sum of ``s * b + t``. A branch without convolution has the identity as
    its kernel: one at the centre, from each channel to itself.

    All branches need the stride, groups and channels of the convolution with the largest kernel, its dilation where
    the kernel has more than one element, and kernels with the same centre: padding
    ``dilation * (kernel - 1) / 2`` apart. Refused in training mode, if something else reads a branch, and
    for shared, tied or partly frozen tensors. It cannot be undone; checkpoints can be loaded and saved.
    Where branches give infinities of opposite signs, so that their sum is NaN, the merged one may give an infinity.

    Source:
        Ding et al., RepVGG, https://arxiv.org/abs/2101.03697, section 3.3.

    Cost:
        One convolution with the largest of the kernels instead of all branches and additions. The new weights are
        summed in float64 where the device has it, else in float32, and rounded once. The pass is linear in the number
        of nodes.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.large, self.small = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
    ...         self.norm = nn.BatchNorm2d(4)
    ...     def forward(self, x):
    ...         return self.large(x) + self.norm(self.small(x)) + x
    >>> graph_module = MergeParallelConvolutions()(torch.fx.symbolic_trace(Block().eval()))
    >>> print(graph_module.code.strip())
    def forward(self, x):
        large_merged = self.large_merged(x);  x = None
        return large_merged
    >>> graph_module.large_merged
    Conv2d(4, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    repeats = True
    reasons: ClassVar[Mapping[str, str]] = {
        **NORM_REASONS,
        "unlike-branches": "The summed branches differ in stride, groups, channels, dilation or padding, or in the "
        "order of their results in memory, or none has a kernel that covers the others. Nothing to do: no single "
        "convolution computes their sum.",
    }
    arithmetic = (merge_branches, restore_branches)

    def match(self, index: GraphIndex) -> Iterator[BranchSite | Refusal]:
        """Yield sums of branches of one value, at least one of them with a convolution."""
        for total in _sums(index).values():
            if len(total.terms) > 1 and (site := _site(total, index)) is not None:
                yield site

    def check(self, site: BranchSite, index: GraphIndex) -> Refusal | None:
        """Refuse branches that no one convolution computes, train mode, other users, and tensors used elsewhere."""
        if index.in_train_mode:
            message = f"the branches `{site.label}` train, each with weights of its own"
            return index.refuse(site.label, "training", message, *site.nodes)
        refusal = _flow_refusal(site, index) or _alignment_refusal(site, index)
        for branch in site.branches if refusal is None else ():
            if branch.norm is not None:
                # A batch norm without a convolution has to fit the channels that the others produce.
                fold = FoldSite(branch.conv or site.home, branch.norm, False, site.home.dims + 2)
                refusal = refusal or mode_refusal(fold, index) or shape_refusal(fold, index)
            for call in branch.calls:
                refusal = refusal or tensors_refusal(call, index) or sharing_refusal(call, [call.node], index)
        refusal = refusal or mixed_flags_refusal(site.label, site.calls, index)
        weight = site.home.weight.tensor
        if refusal is not None or weight.is_meta:
            return refusal
        if all(bool(each.isfinite().all()) for each in site.merged() if each is not None):
            return None
        message = f"merging `{site.label}` gives weights not finite in {weight.dtype}"
        return index.refuse(site.label, "out-of-range", message, *site.nodes)

    def rewrite(self, site: BranchSite, edit: Editor) -> None:
        """Insert one convolution with new tensors, and drop the branches."""
        home, (weight, bias) = site.home, site.merged()
        tensors = {"weight": nn.Parameter(weight, requires_grad=home.weight.tensor.requires_grad)}
        if bias is not None:
            trains = any(call.bias.tensor.requires_grad for call in site.calls if call.bias)
            tensors["bias"] = nn.Parameter(bias, requires_grad=trains)
        full = home.module_name or home.weight.name
        merged = home.build(bias=bias is not None, tensors=tensors)
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_merged", merged)
        nodes = site.nodes[::-1]
        call = edit.call_module(name, site.source, before=nodes[-1], like=nodes)
        for node in nodes:
            edit.replace(node, call)  # what reads the shape of a branch reads that of the sum
        edit.derived(
            Derived(
                function="fxopt_norm.formulas:merge_branches",
                inputs=tuple((key, None if ref is None else ref.name) for key, ref in site.tensors.items()),
                settings=(("eps", site.eps),),
                outputs=(f"{name}.weight", None if bias is None else f"{name}.bias"),
                restore="fxopt_norm.formulas:restore_branches",
            )
        )
        for layer in site.calls:
            edit.drop(layer, {}, twin=name)


def _sums(index: GraphIndex) -> dict[Node, _Sum]:
    """Return the largest sums whose terms may be branches of one value, by the addition that ends each."""
    found: dict[Node, _Sum] = {}
    for node in index.nodes:
        call = read_elementwise(node)
        if not isinstance(call, ElementwiseCall) or call.operation != "add" or call.left is call.right:
            continue
        values = [each for each in (call.left, call.right) if isinstance(each, Node)]
        # Python's ``sum`` begins with ``0 + x``.
        if call.alpha != 1 or (len(values) == 1 and 0 not in (call.left, call.right)):
            continue
        parts = []
        for value in values:
            # A sum that something else reads has to stay, and is a term of the larger one.
            inner = value in found and other_user(value, node) is None
            parts.append(found[value] if inner else _Sum([value], [], _sources(value, index)))
        # The shorter list joins the longer one, or long sums would take quadratic time.
        rest, total = sorted([parts[0], parts[-1]], key=lambda each: len(each.terms))
        if total.sources & rest.sources:
            if rest is not total:
                total.terms.extend(rest.terms)
                total.adds.extend(rest.adds)
                total.sources &= rest.sources
            total.adds.append(node)
            for value in values:
                if found.get(value) in parts:
                    del found[value]
            found[node] = total
    return found


def _sources(value: Node, index: GraphIndex) -> set[Node]:
    """Return the values that a value may be a branch of: itself, and the inputs of its batch norm and convolution."""
    found = {value}
    if read_batch_norm(index, value) is not None and (below := input_of(value)) is not None:
        found.add(below)
        value = below
    if _convolution(value, index) is not None and (below := input_of(value)) is not None:
        found.add(below)
    return found


def _convolution(node: Node, index: GraphIndex) -> ConvolutionCall | Obstacle | None:
    call = read_convolution(index, node)
    # Complex weights would lose their imaginary part: sums are computed in float64.
    if isinstance(call, ConvolutionCall) and (call.transposed or call.weight.tensor.is_complex()):
        return None
    return call


def _site(total: _Sum, index: GraphIndex) -> BranchSite | Refusal | None:
    for source in sorted(total.sources, key=index.position.__getitem__, reverse=True):
        branches, nodes = [], [*total.adds]
        for term in total.terms:
            value, norm, conv = term, None, None
            if value is not source and (norm := read_batch_norm(index, value)) is not None:
                nodes.append(value)
                value = input_of(value) or value
            if value is not source:
                nodes.append(value)
                conv = _convolution(value, index)
            for each in (conv, norm):
                if isinstance(each, Obstacle):
                    message = f"{each.message}; the sum `{total.adds[-1].name}`, of which it is a branch, stays"
                    return Refusal(each.site, each.reason, message, (term.name,))
            assert not isinstance(conv, Obstacle)
            assert not isinstance(norm, Obstacle)
            branches.append(Branch(conv, norm))
        # ``conv(x) + x`` is one call with its residual already, and can be undone.
        if any(branch.conv for branch in branches) and sum(bool(branch.calls) for branch in branches) > 1:
            return BranchSite(source, tuple(branches), tuple(sorted(nodes, key=index.position.__getitem__)))
    return None


def _flow_refusal(site: BranchSite, index: GraphIndex) -> Refusal | None:
    """Refuse branches that something else reads, and a value that is written before the last branch reads it."""
    *inner, total = site.nodes
    members = set(site.nodes)
    for node in inner:
        reader = next(user for user in node.users if user in members)
        if (other := other_user(node, reader)) is not None:
            message = f"the branch that node `{node.name}` computes is also used at node `{other.name}`"
            return index.refuse(site.label, "several-users", message, *site.nodes)
    # An addition may write the input, ``x.add_(conv1(x)).add_(conv2(x))``; written_between leaves its ends out.
    writes = (read_elementwise(node) for node in site.nodes if site.source in node.all_input_nodes)
    added = any(isinstance(call, ElementwiseCall) and call.inplace and call.left is site.source for call in writes)
    if added or index.effects.written_between(site.source, inner[0], total):
        message = f"`{site.source.name}`, the input of the branches, is written in place before all of them are summed"
        return index.refuse(site.label, "mutated", message, *site.nodes)
    return None


def _kernel(conv: ConvolutionCall) -> tuple[int, ...]:
    return tuple(conv.weight.tensor.shape[2:])


def _reach(conv: ConvolutionCall) -> tuple[int, ...] | None:
    """Return how far a convolution reads beyond each edge and its opposite, less its kernel; None if one-sided."""
    spans = [dilation * (size - 1) for dilation, size in zip(conv.dilation, _kernel(conv), strict=True)]
    # For an odd total, torch pads one side by one more than the other.
    if conv.padding == "same":
        return None if any(span % 2 for span in spans) else (0,) * conv.dims
    padding = (0,) * conv.dims if isinstance(conv.padding, str) else conv.padding
    return tuple(2 * each - span for each, span in zip(padding, spans, strict=True))


def _alignment_refusal(site: BranchSite, index: GraphIndex) -> Refusal | None:
    """Refuse branches whose sum is not a convolution, and say in what they differ."""
    home, size = site.home, _kernel(site.home)
    weight, kind = home.weight.tensor, (home.groups, home.in_channels, home.out_channels)
    plain = (0,) * home.dims
    for branch in site.branches:
        conv = branch.conv
        if conv is None:
            label = branch.norm.label if branch.norm else site.source.name
            same = {
                "stride": home.stride == (1,) * home.dims,
                "channels": home.in_channels == home.out_channels,
                "padding": _reach(home) == plain,
                "kernel": all(each % 2 for each in size),
            }
        else:
            label, kernel, own = conv.label, _kernel(conv), conv.weight.tensor
            if (own.dtype, own.device) != (weight.dtype, weight.device):
                found, expected = (f"{each.dtype} on {each.device}" for each in (own, weight))
                message = f"the weight of `{label}` is {found}, and that of `{home.label}` {expected}"
                return index.refuse(site.label, "dtype-mismatch", message, *site.nodes)
            # Without padding, its mode does not matter.
            pads_alike = conv.padding in ("valid", plain) or conv.padding_mode == home.padding_mode
            dilations = zip(kernel, conv.dilation, home.dilation, strict=True)
            # A kernel that covers both of two others would have zeros where neither has taps: infinity times 0 is NaN.
            same = {
                "stride": conv.stride == home.stride,
                "groups or channels": (conv.groups, conv.in_channels, conv.out_channels) == kind,
                "dilation": all(each == 1 or mine == other for each, mine, other in dilations),
                "padding": conv is home or (pads_alike and _reach(conv) == _reach(home) is not None),
                "kernel": all(each <= most and not (most - each) % 2 for each, most in zip(kernel, size, strict=True)),
            }
        differing = next((what for what, agrees in same.items() if not agrees), None)
        if differing is not None:
            message = f"`{label}` and `{home.label}` do not fit together in their {differing}"
            return index.refuse(site.label, "unlike-branches", message, *site.nodes)
    ends = [facts and facts.stride for facts in map(tensor_facts, (site.nodes[-1], home.node))]
    if ends[0] and ends[1] and not same_sizes(ends[0], ends[1]):
        message = f"the sum `{site.nodes[-1].name}` lies in memory in another order than `{home.label}` writes"
        return index.refuse(site.label, "unlike-branches", message, *site.nodes)
    return None
