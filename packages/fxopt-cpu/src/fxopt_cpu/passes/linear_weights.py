"""The weights of `fuse-linears`: in float32, bfloat16 or int8, for which layers, and what checkpoints make of them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fxopt_core import Derived
from fxopt_cpu.library import ISAS, isa
from fxopt_cpu.operators.linear import quantize
from fxopt_cpu.operators.rounding import narrowed, rounding
from fxopt_rewrite import LinearCall

KINDS = ("float32", "bfloat16", "int8")
PROMISED_SQNR = {"bfloat16": 25.0, "int8": 15.0}
"""In dB, on ordinary data: a layer alone has 50 and 40, and rounding errors add up over a model's depth."""
REASONS = {
    "kept": "The pass is told to leave this layer as it is. Change `keep`, `keep_first` or `keep_last`.",
    "no-range": "No call of the calibration reached the layer, or its inputs were not finite. Calibrate with calls "
    "that use it.",
    "too-small": "Quantizing the input of so small a layer takes longer than its product. Lower `min_weights` to "
    "quantize it all the same.",
}
_TAKEN = {
    "float32": (torch.float32,),
    "bfloat16": (torch.float32,),
    "int8": (torch.float32, torch.bfloat16, torch.float16),
}


def left_out(
    name: str, place: int, after: int, where: str, keep: Sequence[str], ends: tuple[int, int]
) -> tuple[str, str] | None:
    """Return by which option a layer is left alone, as (reason code, predicate).

    Args:
        name: of the layer.
        place: how many layers come before it.
        after: how many come after it.
        where: the option.
        keep: the option.
        ends: ``keep_first`` and ``keep_last``.
    """
    if where != "*" and not fnmatchcase(name, where):
        return "filtered", f"does not match where={where!r}"
    pattern = next((each for each in keep if fnmatchcase(name, each)), None)
    if pattern is not None:
        return "kept", f"matches {pattern!r}, one of keep"
    if place < ends[0]:
        return "kept", f"is among the first {ends[0]}, which are kept"
    return ("kept", f"is among the last {ends[1]}, which are kept") if after < ends[1] else None


def unfit(call: LinearCall, kind: str) -> tuple[str, str] | None:
    """Return why a layer cannot have such a weight, as (reason code, predicate)."""
    weight = call.weight.tensor
    if weight.device.type not in ("cpu", "meta"):
        return "not-on-cpu", f"is on {weight.device}; the operators run on the CPU alone"
    if call.training:
        return "training", "is in train mode"
    if weight.dtype not in _TAKEN[kind]:
        taken = ", ".join(map(str, _TAKEN[kind]))
        return "unsupported-dtype", f"is {weight.dtype}; panels in {kind} are made of {taken}"
    if weight.numel() == 0:
        return "unsupported-call", "has a weight of no numbers"
    if kind == "bfloat16" and weight.is_cpu and isa() in ISAS[: ISAS.index("avx512bf16")]:
        return "no-operators", "would be slower in bfloat16: this processor has no instructions for it"
    return None


def is_finite(weight: Tensor) -> bool:
    """Return whether a weight holds no NaN and no infinity."""
    return weight.is_meta or bool(torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all())  # without a copy


def rounded(call: LinearCall, kind: str, ends: Tensor | None) -> dict[str, Tensor]:
    """Return the weight of a call in bfloat16 or int8, with what belongs to it; tensors are none of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        weight = call.weight.tensor
        plain = weight.clone() if weight.is_inference() else weight
        if kind == "bfloat16":
            return {"weight": nn.Parameter(narrowed(plain, transposed=call.transposed), weight.requires_grad)}
        found = {}
        if ends is not None:
            factors = found["rounding"] = rounding(plain, ends, transposed=call.transposed)
            plain = plain / (factors[0].unsqueeze(1) if call.transposed else factors[0])
        found["weight"], found["scale"] = quantize(plain, transposed=call.transposed)
        return found


def derived(call: LinearCall, kind: str, ends: Tensor | None, name: str) -> Derived:
    """Return how a checkpoint of the original becomes the weight of the layer with this name."""
    made = {"bfloat16": "rounding:narrowed", "int8": "linear:quantize"}[kind] if ends is None else "rounding:static"
    return Derived(
        function=f"fxopt_cpu.operators.{made}",
        inputs=(("weight", call.weight.name),),
        settings=(("transposed", call.transposed),),
        outputs=tuple(f"{name}.{key}" for key in (("weight", "scale") if kind == "int8" else ("weight",))),
        restore="fxopt_cpu.operators.rounding:lost",
    )
