"""``batch_norm(layer(x))`` -> ``folded(x)``: the site, its legality, its rewrite, for every kind of layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import Derived, Refusal
from fxopt_norm.formulas import (
    TENSORS,
    fold_after,
    fold_before,
    restore_after,
    restore_before,
    scale_and_shift,
    scaled_after,
    scaled_before,
)
from fxopt_norm.written import WrittenBatchNorm, read_written_batch_norm
from fxopt_rewrite import (
    DROPOUTS,
    BatchNormCall,
    ConvolutionCall,
    Editor,
    GraphIndex,
    LinearCall,
    Obstacle,
    SitePass,
    TensorRef,
    input_of,
    mixed_flags_refusal,
    module_with,
    read_batch_norm,
    read_call,
    sharing_refusal,
    tensor_facts,
    tensors_refusal,
    words,
)

Layer = ConvolutionCall | LinearCall

_SHAPE_READS = words("size dim ndimension numel dtype device")
#: Calls that only move or drop values, also of modules, by their names in small letters.
_MOVES = DROPOUTS | words(
    """
    view reshape flatten unflatten unsqueeze squeeze transpose permute t contiguous clone alias detach to _to_copy
    identity alphadropout featurealphadropout
    """
)
#: Why a batch norm cannot be folded, whatever the layer.
NORM_REASONS = {
    "wrong-axis": "The normalisation works on another axis than the one that the layer produces or consumes. "
    "Nothing to do: one layer cannot compute both.",
    "no-statistics": "The normalisation keeps no running statistics, so it always uses those of the batch. "
    "Nothing to do, except to train it with track_running_stats=True.",
}


@dataclass(frozen=True, eq=False)
class FoldSite:
    """A layer and the batch norm after it, or before it.

    Attributes:
        layer: the convolution or linear layer.
        norm: the batch norm.
        norm_first: whether the batch norm comes first.
        rank: required number of dimensions of the value between them.
        rows: a view between them that joins all dimensions but the features, or None.
    """

    layer: Layer
    norm: BatchNormCall
    norm_first: bool
    rank: int
    rows: Node | None = None

    @property
    def first(self) -> Layer | BatchNormCall:
        """The one that runs first."""
        return self.norm if self.norm_first else self.layer

    @property
    def second(self) -> Layer | BatchNormCall:
        """The one that runs second."""
        return self.layer if self.norm_first else self.norm

    @property
    def label(self) -> str:
        """The names of both."""
        return f"{self.first.label} + {self.second.label}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Both calls, in order."""
        return (self.first.node, self.second.node)

    @property
    def settings(self) -> dict[str, Any]:
        """What the arithmetic after a convolution also depends on."""
        layer = self.layer
        return {"transposed": layer.transposed, "groups": layer.groups} if isinstance(layer, ConvolutionCall) else {}

    @cached_property
    def affine(self) -> tuple[Tensor, Tensor]:
        """Scale and shift of the batch norm, both (channels,) and in the widest dtype."""
        norm = self.norm
        refs = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        mean, var, weight, bias = (None if ref is None else ref.tensor.detach() for ref in refs)
        assert mean is not None
        assert var is not None
        return scale_and_shift(mean, var, weight, bias, norm.eps)


class FoldBatchNorm(SitePass[FoldSite]):
    """``batch_norm(layer(x))`` -> ``folded(x)``, for batch norm with running statistics. Subclasses choose the layers.

    It cannot be undone.

    Source:
        Ioffe and Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167, section 3.1: with its running
        statistics, batch norm is an affine map of each channel.

    Cost:
        One operation fewer in each call. The tensors of the batch norm go, and a layer without bias gets one. The new
        weights are computed once, in float64 where the device has it, else in float32, one layer at a time. The pass is
        linear in the number of nodes.
    """

    # A linear layer may have one batch norm before it and one after it.
    repeats = True
    reasons: ClassVar[Mapping[str, str]] = {
        **NORM_REASONS,
        "not-adjacent": "Between the two is a call that only moves or drops values (a view, dropout, identity). Call "
        "one right after the other, if possible.",
    }
    arithmetic = (fold_after, fold_before, restore_after, restore_before)
    norm_may_come_first: ClassVar[bool] = False

    def read_layer(self, index: GraphIndex, node: Node) -> Layer | Obstacle | None:
        """Read a layer that this pass folds into; None for anything else."""
        raise NotImplementedError

    def match(self, index: GraphIndex) -> Iterator[FoldSite | Refusal]:
        """Yield pairs of a layer and a batch norm."""
        for node in index.nodes:
            norm: BatchNormCall | Obstacle | None = read_batch_norm(index, node)
            written = read_written_batch_norm(index, node) if norm is None else None
            value, norm = (None if norm is None else input_of(node), norm) if written is None else written
            if norm is None or value is None:
                continue
            layer = self.read_layer(index, value)
            if layer is not None:
                yield _site(layer, norm, False, node)
            elif (origin := _moved(value, index)) is not None:
                layer = self.read_layer(index, origin)
                if layer is not None and written is None and _is_on_rows(layer, norm, value):
                    yield _site(layer, norm, False, node, value)
                elif layer is not None:
                    site, other = (each.site if isinstance(each, Obstacle) else each.label for each in (layer, norm))
                    message = (
                        f"`{value.name}` is between layer `{site}` and batch norm `{other}`, so they are not folded"
                    )
                    yield index.refuse(f"{site} + {other}", "not-adjacent", message, origin, value, node)
            if self.norm_may_come_first and written is None:
                for user in node.users:
                    layer = self.read_layer(index, user)
                    if layer is not None and input_of(user) is node:
                        yield _site(layer, norm, True, node)

    def check(self, site: FoldSite, index: GraphIndex) -> Refusal | None:
        """Refuse train mode, other users, wrong shapes, shared or tied tensors, mixed flags and overflow."""
        return (
            mode_refusal(site, index)
            or _flow_refusal(site, index)
            or shape_refusal(site, index)
            or tensors_refusal(site.layer, index)
            or tensors_refusal(site.norm, index)
            or sharing_refusal(site.layer, [site.layer.node], index)
            or sharing_refusal(site.norm, [*_parts(site.norm), site.norm.node], index)
            or mixed_flags_refusal(site.label, [site.layer, site.norm], index)
            # Last, since it computes the weights of the folded layer.
            or _range_refusal(site, index)
        )

    def rewrite(self, site: FoldSite, edit: Editor) -> None:
        """Insert one layer with new tensors, and drop layer and batch norm."""
        layer, norm, first, second = site.layer, site.norm, site.first.node, site.second.node
        full = layer.module_name or layer.weight.name
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_folded", _folded(site))
        # The new node takes the described shape of the first: that of the layer where a view lies between.
        like = [second, first] if site.rows is None else [first, second]
        call = edit.call_module(name, site.first.input, before=first, like=like)
        # ``norm(y.flatten(0, 1)).reshape_as(y)``: the folded layer gives that shape at once. Other readers of the rows
        # get a view of its result.
        for user in [*second.users] if site.rows is not None else ():
            if _restores_shape(user, of=first) and input_of(user) is second:
                edit.replace(user, call)
        edit.replace(second, call if site.rows is None else site.rows)
        for part in reversed(_parts(norm)):
            edit.erase(part)
        # Nodes that read the shape of the value between them read it from one of the same shape.
        edit.replace(first, site.first.input if site.norm_first else call)
        if site.rows is not None and not site.rows.users:
            edit.erase(site.rows)
        edit.derived(_derivation(site, name))
        edit.drop(layer, {}, twin=name)
        edit.drop(norm, {}, twin=name)


def _site(
    layer: Layer | Obstacle, norm: BatchNormCall | Obstacle, norm_first: bool, node: Node, rows: Node | None = None
) -> FoldSite | Refusal:
    if isinstance(layer, Obstacle):
        return Refusal(layer.site, layer.reason, f"{layer.message}; the batch norm `{node.name}` stays", (node.name,))
    if isinstance(norm, Obstacle):
        return Refusal(norm.site, norm.reason, f"{norm.message}; it stays as it is", (node.name,))
    return FoldSite(layer, norm, norm_first, 2 if isinstance(layer, LinearCall) else layer.dims + 2, rows)


def _is_on_rows(layer: Layer | Obstacle, norm: BatchNormCall | Obstacle, value: Node) -> bool:
    """Return whether a batch norm has the features of a linear layer, and one view is between them."""
    if not isinstance(layer, LinearCall) or not isinstance(norm, BatchNormCall) or input_of(value) is not layer.node:
        return False
    mean, call = norm.running_mean, read_call(value)
    fits = mean is not None and tuple(mean.tensor.shape) == (layer.out_features,)
    return fits and call is not None and call.name in ("view", "reshape", "flatten")


def _restores_shape(node: Node, of: Node) -> bool:
    """Return whether a call gives its value the shape of another one."""
    call = read_call(node)
    return call is not None and call.name in ("view_as", "reshape_as") and call.arguments.get("other") is of


def _parts(norm: BatchNormCall) -> tuple[Node, ...]:
    """Return all calls but the last of a batch norm that is written out."""
    return norm.parts if isinstance(norm, WrittenBatchNorm) else ()


def _moved(value: Node, index: GraphIndex) -> Node | None:
    """Return what a view, copy or dropout moves; None for other calls."""
    name = index.effects.effect(value).operation or ""
    return input_of(value) if name.removeprefix("nn.").lower() in _MOVES else None


def mode_refusal(site: FoldSite, index: GraphIndex) -> Refusal | None:
    """Refuse a batch norm that normalises with the statistics of the batch."""
    norm = site.norm
    if norm.running_mean is None or norm.running_var is None:  # functional calls of such a norm have training=True
        message = f"batch norm `{norm.label}` has no running statistics and normalises with those of the batch"
        return index.refuse(site.label, "no-statistics", message, *site.nodes)
    if norm.training:
        message = f"batch norm `{norm.label}` is in train mode and normalises with the statistics of the batch"
        return index.refuse(site.label, "training", message, *site.nodes)
    return None


def _flow_refusal(site: FoldSite, index: GraphIndex) -> Refusal | None:
    """Refuse a first call whose result anything but the second one reads or writes."""
    parts, first = _parts(site.norm), site.first.node
    second = parts[-1] if parts else site.second.node  # in a batch norm that is written out, the product reads it
    for value, reader in ((first, site.rows or second), (site.rows or first, second)):
        other = other_user(value, reader)
        if other is not None:
            message = f"the result of `{site.first.label}` is also used at node `{other.name}`, where it would change"
            return index.refuse(site.label, "several-users", message, first, second)
    if index.effects.written_between(first, first, second):
        message = f"the result of `{site.first.label}` is written in place before `{site.second.label}` reads it"
        return index.refuse(site.label, "mutated", message, first, second)
    return None


def other_user(value: Node, reader: Node) -> Node | None:
    """Return a node other than a reader that reads more than shape, dtype or device: folding keeps these."""
    return next((user for user in value.users if user is not reader and not _reads_shape(user, value)), None)


def _reads_shape(node: Node, value: Node) -> bool:
    call, only_shape = read_call(node), input_of(node) is not value and _restores_shape(node, of=value)
    return only_shape or (call is not None and call.name in _SHAPE_READS)


def shape_refusal(site: FoldSite, index: GraphIndex) -> Refusal | None:
    """Refuse a batch norm over another dimension than the layer's features, and a value of unknown rank."""
    layer, norm, between = site.layer, site.norm, f"the value between `{site.first.label}` and `{site.second.label}`"
    weight = layer.weight.tensor
    facts = tensor_facts(site.rows or site.first.node, weight) or tensor_facts(site.second.node, weight)
    if facts is not None and facts.rank != site.rank:
        message = f"`{norm.label}` normalises dimension 1, which holds the features of `{layer.label}` only if"
        message = f"{message} {between} has {site.rank} dimensions; it has {facts.rank}"
        return index.refuse(site.label, "wrong-axis", message, *site.nodes)
    refusal = _fit_refusal(site, index)
    # An ``nn.BatchNorm2d`` takes values of one rank only, which then need no description.
    if refusal is not None or facts is not None or norm.ranks == (site.rank,):
        return refusal
    message = f"it is unknown whether {between} has {site.rank} dimensions; call infer_shapes first"
    return index.refuse(site.label, "shape-unknown", message, *site.nodes)


def _fit_refusal(site: FoldSite, index: GraphIndex) -> Refusal | None:
    """Refuse a batch norm whose tensors do not match those of the layer."""
    layer, weight = site.layer, site.layer.weight.tensor
    features = _layer_features(layer, inputs=site.norm_first)
    for factor in site.norm.factors if isinstance(site.norm, WrittenBatchNorm) else ():
        shape, whole = tuple(factor.shape), (1, features, *(1,) * (site.rank - 2))
        if shape not in (whole, whole[1:]):
            message = f"`{site.norm.label}` multiplies or adds a tensor of shape {shape}, expected {whole}"
            return index.refuse(site.label, "wrong-axis", message, *site.nodes)
        if factor.dtype != weight.dtype:
            message = f"`{site.norm.label}` computes in {factor.dtype}, and `{layer.label}` in {weight.dtype}"
            return index.refuse(site.label, "dtype-mismatch", message, *site.nodes)
    for ref in site.norm.tensors:
        if ref is site.norm.counter:
            continue
        if tuple(ref.tensor.shape) != (features,):
            message = f"`{ref.name}` has shape {tuple(ref.tensor.shape)}, but `{layer.label}` needs ({features},)"
            return index.refuse(site.label, "size-mismatch", message, *site.nodes)
        if not _agrees(ref.tensor, weight):
            found, expected = (f"{tensor.dtype} on {tensor.device}" for tensor in (ref.tensor, weight))
            message = f"`{ref.name}` is {found}, but the weight of `{layer.label}` is {expected}"
            return index.refuse(site.label, "dtype-mismatch", message, *site.nodes)
    return None


def _agrees(tensor: Tensor, weight: Tensor) -> bool:
    """Return whether a batch norm's tensor matches a weight; half-precision weights may have float32 statistics."""
    wide = weight.dtype in (torch.float16, torch.bfloat16) and tensor.dtype == torch.float32
    return tensor.device == weight.device and (wide or tensor.dtype == weight.dtype) and weight.is_floating_point()


def _layer_features(layer: Layer, *, inputs: bool) -> int:
    """Return how many features a layer takes or produces."""
    if isinstance(layer, LinearCall):
        return layer.in_features if inputs else layer.out_features
    return layer.in_channels if inputs else layer.out_channels


def _range_refusal(site: FoldSite, index: GraphIndex) -> Refusal | None:
    """Refuse overflow: a variance near zero, say, gives weights too large for half precision."""
    weight = site.layer.weight.tensor
    # Not kept until the rewrite, or the new weights of all sites would be in memory at once.
    if weight.is_meta or _surely_finite(site) or all(bool(new.isfinite().all()) for new in _new_tensors(site)):
        return None
    message = f"folding `{site.first.label}` and `{site.second.label}` gives weights not finite in {weight.dtype}"
    return index.refuse(site.label, "out-of-range", message, *site.nodes)


def _surely_finite(site: FoldSite) -> bool:
    """Return whether a bound proves that the new tensors are finite, in a tenth of the time that computing them takes.

    Each element of the new weight is at most ``max |w| * max |s|``, and of the new bias ``max |b| * max |s| + max |t|``
    or, with the norm first, ``n * max |w| * max |t| + max |b|`` for rows of n elements.
    """
    weight, bias, affine = site.layer.weight.tensor, _data(site.layer.bias), site.affine
    if not weight.numel():  # and the new bias may not be finite
        return False
    given = (weight, *affine, *([] if bias is None else [bias]))
    own, scale, shift, *added = (max(abs(float(part)) for part in torch.aminmax(each.detach())) for each in given)
    bound = own * (scale + weight[0].numel() * shift) + shift + (scale + 1) * sum(added)
    return bound < torch.finfo(weight.dtype).max  # False for NaN


def _new_tensors(site: FoldSite) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the folded layer."""
    own = (site.layer.weight.tensor, _data(site.layer.bias), *site.affine)
    with torch.no_grad():
        return scaled_before(*own) if site.norm_first else scaled_after(*own, **site.settings)


def _folded(site: FoldSite) -> nn.Module:
    """Return the folded layer; frozen tensors stay frozen."""
    layer = site.layer
    weight, bias = _new_tensors(site)
    trains = any(ref.tensor.requires_grad for ref in (layer.bias, site.norm.bias) if ref is not None)
    tensors = {
        "weight": nn.Parameter(weight, requires_grad=layer.weight.tensor.requires_grad),
        "bias": nn.Parameter(bias, requires_grad=trains),
    }
    if isinstance(layer, LinearCall):
        return module_with(tensors, nn.Linear, layer.in_features, layer.out_features).train(layer.training)
    return layer.build(bias=True, tensors=tensors)


def _data(ref: TensorRef | None) -> Tensor | None:
    return None if ref is None else ref.tensor


def _derivation(site: FoldSite, name: str) -> Derived:
    """Return how the new tensors are computed from the original ones."""
    layer, norm = site.layer, site.norm
    refs = (layer.weight, layer.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    place = "before" if site.norm_first else "after"
    return Derived(
        function=f"fxopt_norm.formulas:fold_{place}",
        inputs=tuple((key, None if ref is None else ref.name) for key, ref in zip(TENSORS, refs, strict=True)),
        settings=(("eps", norm.eps), *site.settings.items()),
        outputs=(f"{name}.weight", f"{name}.bias"),
        restore=f"fxopt_norm.formulas:restore_{place}",
    )
