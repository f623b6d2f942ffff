"""``layer(x) * c``, ``/ c``, ``+ c`` and ``- c`` -> ``folded_layer(x)``: constants behind layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import Derived, Refusal
from fxopt_norm.folding import FoldBatchNorm, Layer, flow_refusal
from fxopt_norm.formulas import fold_scale, restore_scale
from fxopt_rewrite import (
    ConvolutionCall,
    Editor,
    ElementwiseCall,
    GraphIndex,
    Obstacle,
    ParameterisedCall,
    SitePass,
    TensorRef,
    mixed_flags_refusal,
    module_with,
    owner_of,
    read_convolution,
    read_elementwise,
    read_linear,
    sharing_refusal,
    tensor_facts,
    tensor_ref,
    tensors_refusal,
    trains,
)


@dataclass(frozen=True, eq=False)
class ScaleSite:
    """A layer, and arithmetic of what it computes with a constant.

    Attributes:
        layer: the convolution or linear layer.
        call: the sum, difference, product or quotient.
        number: the constant, if it is a number, or the numbers of a tensor that no checkpoint holds.
        held: the constant, if it is a tensor, as the weight of a call.
        is_stored: whether checkpoints hold that tensor.
    """

    layer: Layer
    call: ElementwiseCall
    number: float | tuple[float, ...]
    held: ParameterisedCall | None = None
    is_stored: bool = False

    @property
    def label(self) -> str:
        """The names of both."""
        return f"{self.layer.label} + {self.call.label}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Both calls, in order."""
        return (self.layer.node, self.call.node)

    @property
    def constant(self) -> TensorRef | None:
        """The constant, if it is a tensor."""
        return None if self.held is None else self.held.weight

    @property
    def settings(self) -> dict[str, object]:
        """What `fold_scale` is told besides the tensors."""
        call, layer = self.call, self.layer
        swapped = call.right is layer.node
        found: dict[str, object] = {"operation": call.operation, "number": self.number, "swapped": swapped}
        found["alpha"] = call.alpha
        if isinstance(layer, ConvolutionCall):
            found |= {"transposed": layer.transposed, "groups": layer.groups}
        return found

    @property
    def inputs(self) -> dict[str, TensorRef | None]:
        """The tensors, as `fold_scale` calls them."""
        constant = self.constant if self.is_stored else None
        return {"weight": self.layer.weight, "bias": self.layer.bias, "constant": constant}


class _FoldScale(SitePass[ScaleSite]):
    """``layer(x) * c`` -> ``folded_layer(x)``, for a number or a tensor of one value for each output channel.

    It cannot be undone; checkpoints of the original load, and come back.

    Source:
        A layer is linear: ``s * (W x + b) + t = (s * W) x + (s * b + t)``. inductor's freezing folds the same.

    Cost:
        One operation less in each call. A layer without bias gets one from a sum or difference. The new weights are
        computed once, in float64 where the device has it, and rounded once for each operation. The pass is linear in
        the number of nodes.
    """

    repeats = True
    reasons: ClassVar[Mapping[str, str]] = {"wrong-axis": FoldBatchNorm.reasons["wrong-axis"]}
    arithmetic = (fold_scale, restore_scale)

    def read_layer(self, index: GraphIndex, node: Node) -> Layer | Obstacle | None:
        """Read a layer that this pass folds into; None for anything else."""
        raise NotImplementedError

    def match(self, index: GraphIndex) -> Iterator[ScaleSite | Refusal]:
        """Yield arithmetic of a constant with what a layer computes."""
        for node in index.nodes:
            call = read_elementwise(node)
            if isinstance(call, ElementwiseCall):
                swapped = not isinstance(call.left, Node) or call.left.op == "get_attr"
                value, constant = (call.right, call.left) if swapped else (call.left, call.right)
                if isinstance(value, Node) and not (swapped and (call.inplace or call.operation == "div")):
                    layer = self.read_layer(index, value) if _is_constant(constant) else None
                    if layer is not None:
                        yield _site(layer, call, constant, index)

    def check(self, site: ScaleSite, index: GraphIndex) -> Refusal | None:
        """Refuse train mode, other users, other axes and dtypes, shared or tied tensors, and overflow."""
        calls = [site.layer] if site.held is None else [site.layer, site.held]
        readers = (site.layer.node, site.call.node)
        sharing = (
            tensors_refusal(call, index) or sharing_refusal(call, [node], index)
            for call, node in zip(calls, readers, strict=False)
        )
        refusal = (
            _mode_refusal(site, index)
            or flow_refusal(site.label, (site.layer.label, site.call.label), site.nodes, index)
            or _fit_refusal(site, index)
            or next((refusal for refusal in sharing if refusal is not None), None)
            or (mixed_flags_refusal(site.label, calls, index) if _is_parameter(site.constant) else None)
            or _range_refusal(site, index)
        )
        # In a chain, the layer is one that this pass made, which the graph that it was given does not have.
        return None if refusal is None else replace(refusal, nodes=(site.call.label,))

    def rewrite(self, site: ScaleSite, edit: Editor) -> None:
        """Insert one layer with new tensors, and drop the layer and the constant."""
        layer, (first, second) = site.layer, site.nodes
        full = layer.module_name or layer.weight.name
        tensors = dict(zip(("weight", "bias"), _folded(site), strict=False))
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_folded", _module(site, tensors))
        call = edit.call_module(name, layer.input, before=first, like=[second, first])
        edit.replace(second, call)
        edit.replace(first, call)
        edit.derived(
            Derived(
                function="fxopt_norm.formulas:fold_scale",
                inputs=tuple((key, None if ref is None else ref.name) for key, ref in site.inputs.items()),
                settings=tuple(site.settings.items()),
                outputs=tuple(f"{name}.{key}" for key in tensors),
                restore="fxopt_norm.formulas:restore_scale",
            )
        )
        edit.drop(layer, {}, twin=name)
        if site.held is not None:
            edit.drop(site.held, {}, twin=name)


class FoldScaleInConv(_FoldScale):
    """``conv(x) * c`` -> ``folded_conv(x)``, also for ``+``, ``-`` and ``/``, over 1, 2 or 3 dimensions.

    The constant is a number, or a parameter or buffer of one value, or of one for each output channel: (C, 1, 1) or
    (1, C, 1, 1) behind a 2d convolution. The values of a buffer that is not persistent, as captures have plain
    attributes, are noted in the ledger. ``c - conv(x)`` is folded, too. Refused if something else reads the result of
    the convolution, in train mode, where dtypes would be promoted, and for shared or tied tensors.

    >>> class Halved(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv = nn.Conv2d(3, 8, 3)
    ...     def forward(self, x):
    ...         return self.conv(x) * 0.5
    >>> graph_module = FoldScaleInConv()(torch.fx.symbolic_trace(Halved().eval()))
    >>> [name for name, _ in graph_module.named_children()]
    ['conv_folded']
    """

    def read_layer(self, index: GraphIndex, node: Node) -> Layer | Obstacle | None:
        """Read a convolution."""
        return read_convolution(index, node)


class FoldScaleInLinear(_FoldScale):
    """``linear(x) * c`` -> ``folded_linear(x)``, also for ``+``, ``-`` and ``/``.

    The constant is a number, or a parameter or buffer of one value, or of one for each feature: (out_features,).
    ``c - linear(x)`` is folded, too. Refused as in `FoldScaleInConv`.

    >>> class Halved(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.query = nn.Linear(4, 8)
    ...     def forward(self, x):
    ...         return self.query(x) * 0.5
    >>> graph_module = FoldScaleInLinear()(torch.fx.symbolic_trace(Halved().eval()))
    >>> [name for name, _ in graph_module.named_children()]
    ['query_folded']
    """

    def read_layer(self, index: GraphIndex, node: Node) -> Layer | Obstacle | None:
        """Read a linear layer."""
        return read_linear(index, node)


def _is_constant(value: object) -> bool:
    return type(value) in (int, float) or (isinstance(value, Node) and value.op == "get_attr")


def _is_parameter(ref: TensorRef | None) -> bool:
    return ref is not None and isinstance(ref.tensor, nn.Parameter)


def _site(layer: Layer | Obstacle, call: ElementwiseCall, constant: object, index: GraphIndex) -> ScaleSite | Refusal:
    node = call.node
    if isinstance(layer, Obstacle):
        return Refusal(layer.site, layer.reason, f"{layer.message}; node `{node.name}` stays", (node.name,))
    if isinstance(constant, int | float):
        return ScaleSite(layer, call, float(constant))
    assert isinstance(constant, Node)
    ref = tensor_ref(index, node, constant, "constant", parameter=False)
    if isinstance(ref, Obstacle):
        return Refusal(ref.site, ref.reason, f"{ref.message}; it is not folded", (node.name,))
    assert ref is not None
    owner = owner_of(ref.name)
    held = ParameterisedCall(node, layer.node, ref, None, None, owner, trains(index, node, owner))
    module = index.modules.get(owner)
    if module is None or ref.key not in module._non_persistent_buffers_set or ref.tensor.is_meta:
        return ScaleSite(layer, call, 0.0, held, is_stored=True)
    numbers = tuple(ref.tensor.detach().double().flatten().tolist())
    return ScaleSite(layer, call, numbers[0] if len(numbers) == 1 else numbers, held)


def _mode_refusal(site: ScaleSite, index: GraphIndex) -> Refusal | None:
    if site.layer.training or (site.held is not None and site.held.training):
        message = (
            f"`{site.layer.label}` is in train mode, where weights that are folded would be trained in another way"
        )
        return index.refuse(site.label, "training", message, *site.nodes)
    if site.call.rounding_mode is not None:
        message = f"node `{site.call.label}` rounds its quotient"
        return index.refuse(site.label, "rounding-mode", message, *site.nodes)
    return None


def _fit_refusal(site: ScaleSite, index: GraphIndex) -> Refusal | None:
    """Refuse constants that promote, that are broadcast along other dimensions, or that no checkpoint holds."""
    weight, ref = site.layer.weight.tensor, site.constant
    if not weight.is_floating_point():
        message = f"the weight of `{site.layer.label}` is {weight.dtype}, which is no floating dtype"
        return index.refuse(site.label, "dtype-mismatch", message, *site.nodes)
    if ref is None:
        return None
    owner = index.modules.get(owner_of(ref.name))
    if owner is not None and ref.key in owner._non_persistent_buffers_set and site.is_stored:
        message = f"`{ref.name}` is on the meta device and not persistent, so that no checkpoint will bring its values"
        return index.refuse(site.label, "not-a-parameter", message, *site.nodes)
    if (ref.tensor.dtype, ref.tensor.device) != (weight.dtype, weight.device):
        found, expected = (f"{tensor.dtype} on {tensor.device}" for tensor in (ref.tensor, weight))
        message = f"`{ref.name}` is {found}, but the weight of `{site.layer.label}` is {expected}"
        return index.refuse(site.label, "dtype-mismatch", message, *site.nodes)
    return _axis_refusal(site, ref, index)


def _axis_refusal(site: ScaleSite, ref: TensorRef, index: GraphIndex) -> Refusal | None:
    layer, shape = site.layer, tuple(ref.tensor.shape)
    axis, features = (layer.dims + 1, layer.out_channels) if isinstance(layer, ConvolutionCall) else (1, None)
    features = features if features is not None else layer.weight.tensor.shape[0]
    others = [size for place, size in enumerate(reversed(shape), start=1) if place != axis]
    if any(size != 1 for size in others) or (len(shape) >= axis and shape[-axis] not in (1, features)):
        message = f"`{ref.name}` has shape {shape}, expected one value or {features} along the dimension of the outputs"
        return index.refuse(site.label, "wrong-axis", f"{message} of `{layer.label}`", *site.nodes)
    if len(shape) <= axis:
        return None
    facts = tensor_facts(layer.node, layer.weight.tensor)
    if facts is None:
        message = f"it is unknown whether `{layer.label}` gives {len(shape)} dimensions, as `{ref.name}` has"
        return index.refuse(site.label, "shape-unknown", f"{message}; call infer_shapes first", *site.nodes)
    if facts.rank < len(shape):
        message = f"`{ref.name}` has {len(shape)} dimensions, and the result of `{layer.label}` {facts.rank}"
        return index.refuse(site.label, "wrong-axis", message, *site.nodes)
    return None


def _range_refusal(site: ScaleSite, index: GraphIndex) -> Refusal | None:
    """Refuse overflow, and numbers that cannot be taken out of the weights again."""
    weight, call, lost = site.layer.weight.tensor, site.call, False
    limits = torch.finfo(weight.dtype)
    if not site.is_stored and call.operation in ("mul", "div"):
        numbers = site.number if isinstance(site.number, tuple) else (site.number,)
        sizes = [size for each in map(abs, numbers) for size in (each, 1.0 / each if each else 0.0)]
        lost = not all(limits.tiny <= size <= limits.max for size in sizes)
    lost = lost or (call.operation in ("add", "sub") and not limits.tiny <= abs(call.alpha) <= limits.max)
    if weight.is_meta or (not lost and all(bool(tensor.isfinite().all()) for tensor in _folded(site))):
        return None
    message = f"the weights of `{site.layer.label}` cannot take node `{call.label}` in {weight.dtype}"
    return index.refuse(site.label, "out-of-range", message, *site.nodes)


def _folded(site: ScaleSite) -> tuple[Tensor, ...]:
    """Return the new weight, and the new bias where there is one."""
    tensors = {key: None if ref is None else ref.tensor for key, ref in site.inputs.items()}
    with torch.no_grad():
        return fold_scale(**tensors, **site.settings)  # type: ignore[arg-type]  # settings are of several types


def _module(site: ScaleSite, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the folded layer; frozen tensors stay frozen."""
    layer = site.layer
    own = layer.bias or (site.constant if _is_parameter(site.constant) else None)
    flags = {"weight": layer.weight.tensor.requires_grad, "bias": own is not None and own.tensor.requires_grad}
    parameters = {key: nn.Parameter(tensor, requires_grad=flags[key]) for key, tensor in tensors.items()}
    if isinstance(layer, ConvolutionCall):
        return layer.build(bias="bias" in parameters, tensors=parameters)
    sizes = (layer.in_features, layer.out_features)
    return module_with(parameters, nn.Linear, *sizes, bias="bias" in parameters).train(layer.training)
