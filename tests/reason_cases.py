"""For every reason code: models on which a pass that fxopt ships refuses for it, and the remedy that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from reason_changes import (
    Change,
    double_bias,
    freeze_all,
    freeze_one,
    give_copy,
    hook,
    merge_adapter,
    nearly_no_variance,
    not_parametrized,
    nothing,
    parametrized,
    pruned,
    pruned_for_good,
    run_once,
    set_to,
    tie,
    unhook,
    untie,
    watch_gradient,
    weight_as_buffer,
    weight_as_parameter,
    weight_normed,
    without,
    without_reading,
    without_weight,
)
from reason_models import (
    Adapted,
    AddsZero,
    Apart,
    Attends,
    Biased,
    Branches,
    ByZero,
    CalledTwice,
    CappedAttention,
    Convolution,
    Decomposed,
    Dense,
    DenseOnRows,
    Floored,
    FunctionalPair,
    Grouped,
    Hidden,
    LazyNorm,
    NormTwice,
    OfShape,
    OneIsLazy,
    OneUnbiased,
    OverVolumes,
    Pair,
    ReadsBetween,
    ReturnsView,
    Rounding,
    ScaledBiased,
    ScaledWeight,
    SquarePair,
    StoredTransposed,
    StrideOfShape,
    Subclassed,
    Tiny,
    Transposed,
    Unread,
    WeightAsInput,
    WithoutStatistics,
    WritesBetween,
    WritesWeight,
    WrongSize,
)
from torch import nn

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import Transformation
from fxopt_cpu import FuseConvolutions, FuseLinears
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import (
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBatchNormInConvTranspose,
    MergeParallelConvolutions,
)
from fxopt_simplify import EliminateDeadCode, FuseScaledDotProductAttention, RemoveNoOps

FORMS = ("modules", "functions", "export")
MERGE, BIAS, DIVIDE = MergeLinears(), FuseBiasInLinear(), ChangeTrueDivToMulByInverse()
FOLD, FOLD_DENSE, FOLD_TRANSPOSED = FuseBatchNorm2dInConv2d(), FuseBatchNorm1dInLinear(), FuseBatchNormInConvTranspose()

INT8 = FuseLinears(weights="int8", min_weights=1)
INT8_BUT_ONE = FuseLinears(weights="int8", min_weights=1, keep_last=1)
PACK, PACK_DENSE = FuseConvolutions(), FuseLinears()

DECOMPOSED = "aten._native_batch_norm_legit_no_training.default"


@dataclass(frozen=True)
class Case:
    """A model, what is wrong with it, and what helps.

    Attributes:
        code: the reason for which a site is refused.
        by: the pass.
        model: makes the model; its attribute ``shape`` is that of its input.
        names: modules, parameters and nodes that the message has to name.
        spoil: does to the model in eval mode what the pass refuses for.
        mend: does to the spoilt model what the documents advise; None where nothing helps.
        form: the form of graph, of ``forms`` in the tests.
        mended_form: the form to capture the mended model in, if another one helps.
        mended_by: the pass with other options, if that helps.
        dtype: dtype of the input; integers give a shape.
        runs: whether the spoilt model can be run at all.
    """

    code: str
    by: Transformation
    model: Callable[[], Any]
    names: tuple[str, ...]
    spoil: Change = lambda model: None
    mend: Change | None = None
    form: str = "modules"
    mended_form: str | None = None
    mended_by: Transformation | None = None
    dtype: torch.dtype = torch.float32
    runs: bool = True

    def __str__(self) -> str:
        """Name the case in reports."""
        return f"{self.code}-{self.by.name}-{self.model.__name__}-{self.form}"


def _in_all_forms(*arguments: Any, **options: Any) -> Iterator[Case]:
    return (replace(Case(*arguments, **options), form=form) for form in FORMS)


_OF_MODULES = [
    Case("subclass", MERGE, Subclassed, ("k",), mend=nothing, mended_form="export"),
    Case("hooks", MERGE, Pair, ("k",), hook, unhook),
    Case("hooks", MERGE, Pair, ("k",), pruned, pruned_for_good),
    Case("hooks", BIAS, Biased, ("k",), hook, unhook),
    Case("hooks", MERGE, Pair, ("k", "weight"), watch_gradient, unhook),
    Case("hooks", MERGE, FunctionalPair, ("k.weight", "linear"), watch_gradient, unhook),
    Case("parametrized", MERGE, Pair, ("k",), parametrized, not_parametrized),
    Case("patched-forward", MERGE, Pair, ("k",), set_to("k.forward", torch.zeros_like), without("k.forward")),
    Case("extra-state", MERGE, Pair, ("k",), set_to("k.adapter", nn.Identity()), without("k.adapter")),
    Case("extra-state", MERGE, Pair, ("k",), set_to("k.scale", nn.Parameter(torch.ones(1))), without("k.scale")),
    Case("extra-state", FOLD, Convolution, ("conv",), set_to("conv.note", ["x", {}]), without("conv.note")),
    *_in_all_forms("adapter", MERGE, Adapted, ("k.base_layer", "lora_A"), mend=merge_adapter),
    Case("lazy", FOLD, LazyNorm, ("norm",), mend=run_once, runs=False),
    Case("lazy", MERGE, OneIsLazy, ("k",), mend=run_once, runs=False),
    Case("opaque-call", MERGE, Hidden, ("inner",), form="whole", mend=nothing, mended_form="export"),
    Case("shared-module", FOLD, NormTwice, ("norm", "norm_1"), mend=give_copy),
    Case("shared-module", MERGE, CalledTwice, ("k", "k_1"), mend=give_copy),
    Case("mixed-mode", MERGE, Pair, ("q", "k"), lambda m: m.k.train(), nn.Module.eval),
    Case("filtered", MergeLinears(where="q"), Pair, ("k",), mend=nothing, mended_by=MERGE),
    Case("group-too-small", MergeLinears(min_group=3), Pair, ("q", "k"), mend=nothing, mended_by=MERGE),
    *_in_all_forms("no-statistics", FOLD, WithoutStatistics, ("norm",)),
    *_in_all_forms("training", FOLD, Convolution, ("norm",), nn.Module.train, nn.Module.eval),
    Case("training", MERGE, OneUnbiased, ("q", "k"), nn.Module.train, nn.Module.eval),
]
_OF_TENSORS = [
    Case("not-a-parameter", MERGE, Pair, ("k", "weight"), weight_as_buffer, weight_as_parameter),
    Case("not-a-parameter", MERGE, FunctionalPair, ("k.weight", "linear"), weight_as_buffer, weight_as_parameter),
    Case("not-a-parameter", MERGE, Pair, ("k.weight",), weight_as_buffer, weight_as_parameter, form="export"),
    Case("tied-parameter", MERGE, SquarePair, ("k.weight", "q.weight"), tie, untie),
    Case("tied-parameter", BIAS, SquarePair, ("q.weight", "linear", "linear_1"), tie, untie, form="functions"),
    Case("computed-weight", MERGE, ScaledWeight, ("linear", "mul_1")),
    Case("computed-weight", MERGE, Pair, ("linear_1", "_weight_norm"), weight_normed, not_parametrized, form="export"),
    Case("computed-weight", BIAS, ScaledBiased, ("linear", "mul"), form="export"),
    Case("computed-weight", MERGE, WeightAsInput, ("linear", "x", "linear_1", "mul_1")),
    Case("transposed-weight", FOLD_DENSE, StoredTransposed, ("weight", "norm"), mend=set_to("transposed", False)),
    *_in_all_forms("mixed-requires-grad", MERGE, Pair, ("q", "k"), freeze_one, freeze_all),
    *_in_all_forms("mixed-requires-grad", FOLD, Convolution, ("conv.weight", "norm.weight"), freeze_one, freeze_all),
    Case("dtype-mismatch", MERGE, Pair, ("q", "k"), lambda m: m.k.double(), nn.Module.float, runs=False),
    Case(
        "dtype-mismatch",
        FOLD,
        Convolution,
        ("norm.weight", "conv"),
        lambda m: m.norm.double(),
        nn.Module.float,
        runs=False,
    ),
    Case("dtype-mismatch", BIAS, Biased, ("k",), double_bias, nn.Module.float, runs=False),
    Case("out-of-range", FOLD, Convolution, ("conv", "norm"), nearly_no_variance, nn.Module.float, dtype=torch.float16),
    Case(
        "size-mismatch",
        FOLD,
        WrongSize,
        ("norm.weight", "conv"),
        mend=set_to("norm", nn.BatchNorm2d(4).eval()),
        runs=False,
    ),
    *(
        Case("mutated", MERGE, WritesBetween, ("k", "x"), mend=set_to("in_place", False), form=form)
        for form in FORMS[:2]
    ),
    Case("mutated", MERGE, WritesWeight, ("k.weight",), mend=set_to("in_place", False), form="functions"),
]
_OF_VALUES = [
    *_in_all_forms("unlike-branches", MergeParallelConvolutions(), Branches, ("small", "large")),
    *_in_all_forms("several-users", FOLD, ReadsBetween, ("conv",), mend=without_reading),
    *_in_all_forms("not-adjacent", FOLD, Apart, ("norm", "conv"), mend=set_to("apart", False)),
    *_in_all_forms(
        "decomposed",
        FOLD,
        Decomposed,
        (DECOMPOSED,),
        mend=set_to("decomposed", False),
    ),
    *_in_all_forms("wrong-axis", FOLD_DENSE, DenseOnRows, ("dense", "norm")),
    Case("shape-unknown", FOLD_DENSE, Dense, ("dense", "norm"), form="unshaped", mend=nothing, mended_form="modules"),
    Case("shape-unknown", FOLD_DENSE, Dense, ("dense", "norm"), form="unshaped", mend=nothing, mended_form="export"),
    Case("shape-unknown", DIVIDE, Tiny, ("truediv", "x"), form="unshaped", mend=nothing, mended_form="modules"),
    Case("unsupported-call", FOLD_TRANSPOSED, Transposed, ("conv",), mend=set_to("sized", False)),
    Case("unsupported-call", FOLD, StrideOfShape, ("conv2d",), mend=set_to("computed", False), form="functions"),
]
_OF_QUOTIENTS = [
    *_in_all_forms("unsafe-constant", DIVIDE, ByZero, ("DIV",)),
    Case("unsafe-constant", DIVIDE, Tiny, ("truediv",), mend=nn.Module.float, dtype=torch.float16),
    *_in_all_forms("rounded-quotient", DIVIDE, Floored, ("floor", "DIV")),
    *_in_all_forms("rounding-mode", DIVIDE, Rounding, ("DIV",)),
    Case("shape-arithmetic", DIVIDE, OfShape, ("truediv",)),
]
_OF_OPERATORS = [
    Case("unsupported-dtype", PACK, Convolution, ("conv",), nn.Module.double, nn.Module.float, dtype=torch.float64),
    Case("unsupported-dtype", PACK_DENSE, Dense, ("dense",), nn.Module.half, nn.Module.float, dtype=torch.float16),
    Case("kept", INT8_BUT_ONE, Dense, ("dense",), mend=without_weight, mended_by=INT8),
    Case("too-small", FuseLinears(weights="int8"), Dense, ("dense",), mend=without_weight, mended_by=INT8),
    Case("padding-mode", PACK, Convolution, ("conv",), set_to("conv.padding_mode", "reflect")),
    *_in_all_forms("not-in-int8", FuseConvolutions(weights="int8"), Grouped, ("conv",)),
    *_in_all_forms("other-convolution", PACK, OverVolumes, ("conv",)),
]
_OF_NO_USE = [
    *_in_all_forms("returned", RemoveNoOps(), ReturnsView, ()),
    *_in_all_forms("signed-zero", RemoveNoOps(), AddsZero, ("add",), mend=set_to("adds", False)),
    Case("holds-weights", EliminateDeadCode(), Unread, ("fc",), mend=set_to("fc", nn.Identity())),
]
_OF_ATTENTION = [
    *_in_all_forms(
        "masked-rows",
        FuseScaledDotProductAttention(),
        Attends,
        (),
        mend=set_to("hidden", torch.finfo(torch.float32).min),
    ),
    *_in_all_forms("other-attention", FuseScaledDotProductAttention(), CappedAttention, ("tanh",)),
]
CASES = [*_OF_MODULES, *_OF_TENSORS, *_OF_VALUES, *_OF_QUOTIENTS, *_OF_OPERATORS, *_OF_NO_USE, *_OF_ATTENTION]
