"""``x @ W.T + b`` -> ``round(x) @ (scale * integers).T + b``: linear layers with int8 weights and activations.

The weight is rounded once, by the pass, with one scale for each output channel; the input at each call, with one scale
and zero point for each row, or by ranges from calibration data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import Derived, PassOptionError, Refusal
from fxopt_cpu.layers.quantized_linear import QuantizedLinear, why_unsupported
from fxopt_cpu.operators.rounding import lost, quantized, rounding, static
from fxopt_cpu.passes.calibration import ranges_of
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    LinearCall,
    Obstacle,
    Piece,
    ReversibleSitePass,
    TensorRef,
    bare_module,
    read_linear,
    sharing_refusal,
    tensors_refusal,
)

REASONS_OF_DEVICES = {
    "not-on-cpu": "The layer is on another device, and the pass is for CPUs. Move the model: `model.to('cpu')`.",
    "unsupported-dtype": "The layer has a dtype that the operators do not take. Convert it: `model.float()`.",
    "no-operators": "This build of torch, or this processor, has no operators for the layer. Nothing to do: it runs "
    "as it is.",
}


@dataclass(frozen=True, eq=False)
class LinearSite:
    """A linear layer, with its place among those of the graph.

    Attributes:
        call: the linear layer.
        place: how many linear layers come before it.
        after: how many come after it.
        ends: the least and largest value of each element of its input, (2, in); None where they are not known.
    """

    call: LinearCall
    place: int
    after: int
    ends: Tensor | None = None

    @property
    def label(self) -> str:
        """The name of the layer."""
        return self.call.label

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The call."""
        return (self.call.node,)


class QuantizeLinears(ReversibleSitePass[LinearSite]):
    """``x @ W.T + b`` -> ``round(x) @ (scale * integers).T + b``: int8 weights, activations quantized at each call.

    ``W`` (out, in) becomes integers of 8 bits with one scale for each output channel, and no zero point. The input is
    rounded to 8 bits when the layer is called, with one scale and zero point for each row, a token say, so that a
    result depends on its row alone. It may be of float32, bfloat16 or float16, and so is the result; weights stored as
    (in, out) are taken, too. See `QuantizedLinear` for the calls that it takes and for NaN.

    With ``activations="static"``, inputs are rounded by ranges that data have shown (`calibrated`), each element of a
    row by its own: what lies beyond is cut off. An element that is large in all rows, as some are in
    transformers, does not coarsen the others.

    Layers in train mode are refused: there are no derivatives. Merge layers first, so that their input is quantized
    once, and pack afterwards what is left.

    Args:
        activations: ``"dynamic"``, by rows, or ``"static"``.
        where: glob pattern over full module names; layers with other names are left alone.
        keep: glob patterns; layers with such names are left alone.
        keep_first: how many layers are left alone at the beginning, where rounding errors run through the whole model.
        keep_last: how many are left alone at the end: a classifier, say.
        min_weights: the least number of weights of a layer: with fewer, quantizing the input takes longer than the
            product gains.
        keep_originals: whether the former weights are kept beside the new ones, so that the pass can be undone and the
            original ``state_dict`` be had, for four times the memory that the integers take.

    Raises:
        PassOptionError: ``activations`` is something else, or ``keep_first`` or ``keep_last`` is negative.
        PreconditionError: ``activations`` is ``"static"``, and there are no data.
        NotReversibleError: It is to be undone, and ``keep_originals`` is off.

    Source:
        ``torch.ops.quantized.linear_dynamic``, the operator of ``torch.ao.quantization.quantize_dynamic``, which gives
        it one scale for the whole weight and about twice the error. Its kernels come from FBGEMM,
        https://arxiv.org/abs/2101.05615.

    Cost:
        A quarter of the memory of float32 weights in what is saved, and half of it while running: the operator has a
        packed copy. A product takes between a half and a quarter of the time. The pass is linear in the number of
        weights.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU()).eval()
    >>> graph_module = QuantizeLinears(keep_originals=True)(torch.fx.symbolic_trace(model))
    >>> graph_module.get_submodule("0_quantized")
    QuantizedLinear(in_features=256, out_features=512, bias=True)
    """

    preserves_computation = False
    promised_sqnr: ClassVar[float | None] = 15.0
    """In dB, on ordinary data: a layer alone has about 40, and rounding errors add up over a model's depth."""
    reversible = False
    arithmetic = (quantized, static, lost)
    reasons: ClassVar = {
        **REASONS_OF_DEVICES,
        "kept": "The pass is told to leave this layer as it is. Change `keep`, `keep_first` or `keep_last`.",
        "no-range": "No call of the calibration reached the layer, or its inputs were not finite. Calibrate with calls "
        "that use it.",
        "too-small": "Quantizing the input of so small a layer takes longer than its product. Lower `min_weights` to "
        "quantize it all the same.",
        "packed": "The layer is packed already. Quantize first, and pack what is left: "
        "`quantize-linears,pack-linears`.",
    }

    def __init__(
        self,
        *,
        activations: str = "dynamic",
        where: str = "*",
        keep: Sequence[str] = (),
        keep_first: int = 0,
        keep_last: int = 0,
        min_weights: int = 128 * 128,
        keep_originals: bool = False,
    ) -> None:
        if isinstance(keep, str) or min(keep_first, keep_last) < 0:
            found = f"keep={keep!r}, keep_first={keep_first!r}, keep_last={keep_last!r}"
            raise PassOptionError(f"QuantizeLinears takes patterns as keep, and counts from 0 on, not {found}")
        if activations not in ("dynamic", "static"):
            raise PassOptionError(f"QuantizeLinears takes 'dynamic' or 'static' as activations, not {activations!r}")
        self.activations = activations
        self.where = where
        self.keep = tuple(keep)
        self.keep_first, self.keep_last = keep_first, keep_last
        self.min_weights = min_weights
        self.keep_originals = keep_originals
        self.reversible = keep_originals  # type: ignore[misc]  # a fact about this one

    def match(self, index: GraphIndex) -> Iterator[LinearSite | Refusal]:
        """Yield the linear layers."""
        calls: list[LinearCall] = []
        for node in index.nodes:
            if _is_packed(index.module_of(node)):
                yield index.refuse(str(node.target), "packed", f"linear `{node.target}` is packed already", node)
            call = read_linear(index, node, transposed=True)
            if isinstance(call, Obstacle):
                yield Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,))
            elif call is not None:
                calls.append(call)
        ranges: dict[int, Tensor] = {}
        if self.activations == "static":
            ranges = ranges_of(index.graph_module, {id(each.weight.tensor): each.in_features for each in calls})
        for place, call in enumerate(calls):
            yield LinearSite(call, place, len(calls) - 1 - place, ranges.get(id(call.weight.tensor)))

    def check(self, site: LinearSite, index: GraphIndex) -> Refusal | None:
        """Refuse what is not asked for, what cannot be computed or does not pay, and shared or mutated tensors."""
        call = site.call
        problem = self._problem(site)
        if problem is not None:
            return index.refuse(call.label, problem[0], f"linear `{call.label}` {problem[1]}", call.node)
        refusal = tensors_refusal(call, index) or sharing_refusal(call, [call.node], index)
        if refusal is None and not _is_finite(call):
            message = f"`{call.weight.name}` of `{call.label}` holds NaN or infinite values"
            return index.refuse(call.label, "out-of-range", message, call.node)
        return refusal

    def _left_out(self, site: LinearSite) -> tuple[str, str] | None:
        """Return by which option a layer is left alone, as (reason code, predicate)."""
        name = site.label
        if self.where != "*" and not fnmatchcase(name, self.where):
            return "filtered", f"does not match where={self.where!r}"
        pattern = next((each for each in self.keep if fnmatchcase(name, each)), None)
        if pattern is not None:
            return "kept", f"matches {pattern!r}, one of keep"
        if site.place < self.keep_first:
            return "kept", f"is among the first {self.keep_first}, which are kept"
        if site.after < self.keep_last:
            return "kept", f"is among the last {self.keep_last}, which are kept"
        return None

    def _problem(self, site: LinearSite) -> tuple[str, str] | None:
        """Return why a layer is not to be quantized, cannot be, or does not gain by it, as (reason code, predicate)."""
        left_out = self._left_out(site)
        if left_out is not None:
            return left_out
        weight = site.call.weight.tensor
        if site.call.training:
            return "training", "is in train mode, and a quantized layer has no derivatives"
        if weight.numel() < max(self.min_weights, 1):
            return "too-small", f"has {weight.numel()} weights, fewer than min_weights={self.min_weights}"
        if self.activations == "static" and (site.ends is None or not site.ends.isfinite().all()):
            return "no-range", "was not reached by the calls of the calibration, or by numbers that are not finite"
        return why_unsupported(weight.dtype, weight.device)

    def rewrite(self, site: LinearSite, edit: Editor) -> None:
        """Insert the quantized layer, and drop the original."""
        call = site.call
        full = call.module_name or call.weight.name
        module = bare_module(QuantizedLinear, call.in_features, call.out_features, bias=call.bias is not None)
        _fill(module, call, site.ends, keep_original=self.keep_originals)
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_quantized", module.train(call.training))
        edit.replace(call.node, edit.call_module(name, call.input, before=call.node, like=[call.node]))
        edit.derived(
            Derived(
                function=f"fxopt_cpu.operators.rounding:{'quantized' if site.ends is None else 'static'}",
                inputs=(("weight", call.weight.name),),
                settings=(("transposed", call.transposed),),
                outputs=(f"{name}.weight", f"{name}.scale"),
                restore="fxopt_cpu.operators.rounding:lost",
            )
        )
        pieces: dict[str, Piece | None] = {}
        if self.keep_originals:
            pieces[call.weight.key] = Piece(f"{name}.original_weight")
        if call.bias is not None:
            pieces[call.bias.key] = Piece(f"{name}.bias")
        edit.drop(call, pieces, twin=name)


def _is_packed(module: nn.Module | None) -> bool:
    """Return whether a module is a packed linear layer of fxopt-cpu, which need not be installed."""
    family = sys.modules.get("fxopt_cpu.layers.packed_linear")
    return family is not None and type(module) is family.PackedLinear


def _is_finite(call: LinearCall) -> bool:
    weight = call.weight.tensor.detach()
    return weight.is_meta or bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all())  # without a copy


def _fill(module: QuantizedLinear, call: LinearCall, ends: Tensor | None, *, keep_original: bool) -> None:
    """Give a quantized layer the tensors that a call comes to.

    What was made in inference mode is copied: it has no version, so that changes would go unnoticed.
    """
    with torch.inference_mode(False), torch.no_grad():
        weight = call.weight.tensor
        plain = weight.clone() if weight.is_inference() else weight
        if ends is not None:
            factors = rounding(plain, ends, transposed=call.transposed)
            module.register_buffer("rounding", factors)
            plain = plain / (factors[0].unsqueeze(1) if call.transposed else factors[0])
        module.weight, module.scale = quantized(plain, transposed=call.transposed)
        module.bias = None if call.bias is None else _parameter(call.bias)
        if keep_original:
            module.original_weight = _parameter(call.weight)


def _parameter(ref: TensorRef) -> nn.Parameter:
    """Return the parameter of a call, or a copy of one that was made in inference mode."""
    assert isinstance(ref.tensor, nn.Parameter)  # the reader of linear layers accepts nothing else
    if not ref.tensor.is_inference():
        return ref.tensor
    return nn.Parameter(ref.tensor.clone(), requires_grad=ref.tensor.requires_grad)
