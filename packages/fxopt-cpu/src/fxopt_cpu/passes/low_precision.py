"""Weights in bfloat16 and int8: the options that passes share, the layers that get them, and how they are rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxopt_core import Derived, PassOptionError
from fxopt_cpu.layers.packed_layer import PackedLayer
from fxopt_cpu.library import ISAS, isa
from fxopt_cpu.operators.linear import quantize
from fxopt_cpu.operators.rounding import narrowed, rounding
from fxopt_cpu.passes.calibration import ranges_of
from fxopt_cpu.passes.matching import parameter_of
from fxopt_rewrite import ConvolutionCall, Editor, GraphIndex, LinearCall, Piece

Pieces = dict[str, Piece]
#: In dB, on ordinary data: a single layer has 50 and 40, and rounding errors add up over a model's depth.
PROMISED_SQNR = {"bfloat16": 25.0, "int8": 15.0}
#: Instruction sets without VNNI, which multiply images in float32 faster: by Winograd's products above all.
SLOW_IN_INT8 = ("portable", "avx2", "avx512")
#: From which static ranges hold for other inputs: on sentences, MiniLM has 8.8 dB by 53 rows, 14.3 by 113, 19.9 by 289,
#: 22.7 by 441, and 22.8 with dynamic ones.
FEWEST_ROWS = 512
REASONS = {
    "kept": "An option of the pass excludes this layer. Change `keep`, `keep_first` or `keep_last`.",
    "no-range": "Calibration calls gave the layer no inputs, too few for ranges that hold for others, or some that are "
    "not finite. Calibrate with more calls that use it; the pipelines round its inputs at each call.",
    "too-small": "Quantizing the input of so small a layer takes longer than its product. Lower `min_weights`, or "
    "`min_channels` of `fuse-convolutions`, to quantize it anyway.",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerSite:
    """A layer that a pass packs, with what the options give it.

    Attributes:
        call: the layer.
        left_out: which option leaves it alone, as (reason code, predicate); None if none does.
        ends: the least and largest value of each element or channel of its input, (2, in); None where not known.
        rows: how many rows, or places in images, they were taken from.
    """

    call: LinearCall | ConvolutionCall
    left_out: tuple[str, str] | None = None
    ends: Tensor | None = None
    rows: int = 0

    @property
    def label(self) -> str:
        """The name of the layer."""
        return self.call.label


class Options:
    """The options that the passes share: the kind of weights, and which layers are left alone."""

    #: The kinds of weights, with the dtypes of the weights that they are made of.
    kinds: ClassVar[Mapping[str, tuple[torch.dtype, ...]]]

    def __init__(
        self,
        *,
        weights: str = "float32",
        activations: str = "dynamic",
        where: str = "*",
        keep: Sequence[str] = (),
        keep_first: int = 0,
        keep_last: int = 0,
        min_weights: int = 128 * 128,
        keep_originals: bool = False,
    ) -> None:
        self.weights, self.activations, self.where, self.keep = weights, activations, where, keep
        self.keep_first, self.keep_last = keep_first, keep_last
        self.min_weights, self.keep_originals = min_weights, keep_originals
        name = type(self).__name__
        names = () if isinstance(keep, str) else (*keep, where)
        strange = not names or any(type(each) is not str for each in names)
        if strange or any(type(each) is not int or each < 0 for each in (keep_first, keep_last)):
            found = f"where={where!r}, keep={keep!r}, keep_first={keep_first!r}, keep_last={keep_last!r}"
            raise PassOptionError(f"{name} takes a pattern as where, patterns as keep, counts from 0 on; not {found}")
        if weights not in self.kinds or activations not in ("dynamic", "static"):
            kinds, found = ", ".join(map(repr, self.kinds)), f"weights={weights!r}, activations={activations!r}"
            raise PassOptionError(f"{name} takes {kinds} as weights, 'dynamic' or 'static' as activations; not {found}")
        self.keep = tuple(keep)
        exact = weights == "float32"
        self.preserves_computation, self.reversible = exact, exact or self.keep_originals
        self.promised_sqnr = PROMISED_SQNR.get(weights)
        self.is_static = weights == "int8" and activations == "static"  # by ranges from data

    def given_to(self, index: GraphIndex, calls: Sequence[LinearCall | ConvolutionCall]) -> Iterator[dict[str, Any]]:
        """Yield what the options give the site of each layer: ``left_out``, the ``ends`` of its input, and ``rows``."""
        ranges: Mapping[int, Tensor] = {}
        rows: Mapping[int, int] = {}
        if self.is_static and calls:
            depths = {id(call.weight.tensor): _depth_of(call) for call in calls}
            ranges, rows = ranges_of(index.graph_module, depths)
        for place, call in enumerate(calls):
            left_out = self._left_out(call.label, place, len(calls) - 1 - place)
            weight = id(call.weight.tensor)
            yield {"left_out": left_out, "ends": ranges.get(weight), "rows": rows.get(weight, 0)}

    def _left_out(self, name: str, place: int, after: int) -> tuple[str, str] | None:
        """Return which option leaves a layer alone, as (reason code, predicate); None if none does."""
        if self.where != "*" and not fnmatchcase(name, self.where):
            return "filtered", f"does not match where={self.where!r}"
        pattern = next((each for each in self.keep if fnmatchcase(name, each)), None)
        if pattern is not None:
            return "kept", f"matches {pattern!r}, one of keep"
        if place < self.keep_first:
            return "kept", f"is among the first {self.keep_first}, which are kept"
        return ("kept", f"is among the last {self.keep_last}, which are kept") if after < self.keep_last else None

    def unfit(self, call: LinearCall | ConvolutionCall, ends: Tensor | None, rows: int) -> tuple[str, str] | None:
        """Return why a layer cannot have such a weight, as (reason code, predicate).

        Args:
            call: the layer.
            ends: the least and largest values of its input, where they are known.
            rows: how many rows of inputs they were taken from.
        """
        kind, taken, weight = self.weights, self.kinds[self.weights], call.weight.tensor
        if weight.device.type not in ("cpu", "meta"):
            return "not-on-cpu", f"is on {weight.device}; the operators run only on the CPU"
        if call.training:
            return "training", "is in train mode"
        if weight.dtype not in taken:
            return "unsupported-dtype", f"is {weight.dtype}; panels in {kind} are made of {', '.join(map(str, taken))}"
        if weight.numel() == 0:
            return "unsupported-call", "has an empty weight"
        if kind == "int8" and weight.numel() < self.min_weights:
            return "too-small", f"has {weight.numel()} weights, fewer than min_weights={self.min_weights}"
        if kind == "bfloat16" and weight.is_cpu and isa() in ISAS[: ISAS.index("avx512bf16")]:
            return "no-operators", "would be slower in bfloat16: this processor has no instructions for it"
        if kind != "float32" and not weight.is_meta:
            extremes = torch.stack(torch.aminmax(weight.detach()))  # without a copy of the magnitudes
            if not bool(extremes.isfinite().all()):
                return "out-of-range", f"has NaN or infinite values in `{call.weight.name}`"
        is_known = ends is not None and not ends.is_meta and bool(ends.isfinite().all())
        if self.is_static and (rows < FEWEST_ROWS or not is_known):
            return "no-range", f"was calibrated with {rows} rows, expected {FEWEST_ROWS} or more, all of finite numbers"
        return None

    def record(self, edit: Editor, call: LinearCall | ConvolutionCall, layer: str) -> Pieces:
        """Record how a checkpoint of the original becomes the weight of a layer; return where the original is kept."""
        is_int8, weight = self.weights == "int8", call.weight.name
        made = "linear:quantize" if is_int8 else "rounding:narrowed"
        edit.derived(
            Derived(
                function=f"fxopt_cpu.operators.{'rounding:static' if self.is_static else made}",
                inputs=(("weight", weight),),
                settings=(("transposed", call.transposed),),
                outputs=(f"{layer}.weight", f"{layer}.scale")[: 1 + is_int8],
                restore="fxopt_cpu.operators.rounding:lost",
            )
        )
        return {weight: Piece(f"{layer}.original_weight")} if self.keep_originals else {}

    def put_rounded(self, layer: PackedLayer, call: LinearCall | ConvolutionCall, ends: Tensor | None) -> None:
        """Give a layer the weight of a call in bfloat16 or int8, with what belongs to it; no inference tensors."""
        weight = call.weight.tensor
        with torch.inference_mode(False), torch.no_grad():
            plain = weight.clone() if weight.is_inference() else weight.detach()
            plain = plain.t() if call.transposed else plain
            if self.weights == "bfloat16":
                layer.weight = nn.Parameter(narrowed(plain).contiguous(), weight.requires_grad)
            else:
                if ends is not None:
                    # (out, in, height, width) -> (out * height * width, in): a factor belongs to a channel
                    layer.rounding = rounding(plain.movedim(1, -1).flatten(0, -2), ends, plain[0].numel())
                    plain = plain / layer.rounding[0].view(-1, *[1] * (plain.dim() - 2))
                layer.weight, layer.scale = quantize(plain)
        if self.keep_originals:
            layer.register_parameter("original_weight", parameter_of(weight))


def _depth_of(call: LinearCall | ConvolutionCall) -> tuple[int, int]:
    """Return how many elements or channels a layer's input has, and their dimension."""
    return (call.in_features, -1) if isinstance(call, LinearCall) else (call.in_channels, -1 - call.dims)
