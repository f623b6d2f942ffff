"""For every reason code: models on which a pass that fxopt ships refuses for it, and the remedy that helps."""

from __future__ import annotations

from collections.abc import Iterator
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
    without_weight,
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
        model: its name in `MODELS`.
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
    model: str
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
        return f"{self.code}-{self.by.name}-{self.model}-{self.form}"


def _in_all_forms(*arguments: Any, **options: Any) -> Iterator[Case]:
    return (replace(Case(*arguments, **options), form=form) for form in FORMS)


_OF_MODULES = [
    Case("subclass", MERGE, "one of a subclass", ("k",), mend=nothing, mended_form="export"),
    Case("hooks", MERGE, "pair", ("k",), hook, unhook),
    Case("hooks", MERGE, "pair", ("k",), pruned, pruned_for_good),
    Case("hooks", BIAS, "biased", ("k",), hook, unhook),
    Case("hooks", MERGE, "pair", ("k", "weight"), watch_gradient, unhook),
    Case("hooks", MERGE, "one as a function", ("k.weight", "linear"), watch_gradient, unhook),
    Case("parametrized", MERGE, "pair", ("k",), parametrized, not_parametrized),
    Case("patched-forward", MERGE, "pair", ("k",), set_to("k.forward", torch.zeros_like), without("k.forward")),
    Case("extra-state", MERGE, "pair", ("k",), set_to("k.adapter", nn.Identity()), without("k.adapter")),
    Case("extra-state", MERGE, "pair", ("k",), set_to("k.scale", nn.Parameter(torch.ones(1))), without("k.scale")),
    Case("extra-state", FOLD, "normed", ("conv",), set_to("conv.note", ["x", {}]), without("conv.note")),
    *_in_all_forms("adapter", MERGE, "one with an adapter", ("k.base_layer", "lora_A"), mend=merge_adapter),
    Case("lazy", FOLD, "lazy norm", ("norm",), mend=run_once, runs=False),
    Case("lazy", MERGE, "one is lazy", ("k",), mend=run_once, runs=False),
    Case("opaque-call", MERGE, "pair inside", ("inner",), form="whole", mend=nothing, mended_form="export"),
    Case("shared-module", FOLD, "norm twice", ("norm", "norm_1"), mend=give_copy),
    Case("group-too-small", MERGE, "one called twice", ("k",), mend=give_copy),
    Case("mixed-mode", MERGE, "pair", ("q", "k"), lambda m: m.k.train(), nn.Module.eval),
    Case("filtered", MergeLinears(where="q"), "pair", ("k",), mend=nothing, mended_by=MERGE),
    Case("group-too-small", MergeLinears(min_group=3), "pair", ("q", "k"), mend=nothing, mended_by=MERGE),
    *_in_all_forms("no-statistics", FOLD, "norm without statistics", ("norm",)),
    *_in_all_forms("training", FOLD, "normed", ("norm",), nn.Module.train, nn.Module.eval),
    Case("training", MERGE, "one without bias", ("q", "k"), nn.Module.train, nn.Module.eval),
]
_OF_TENSORS = [
    Case("not-a-parameter", MERGE, "pair", ("k", "weight"), weight_as_buffer, weight_as_parameter),
    Case("not-a-parameter", MERGE, "one as a function", ("k.weight", "linear"), weight_as_buffer, weight_as_parameter),
    Case("not-a-parameter", MERGE, "pair", ("k.weight",), weight_as_buffer, weight_as_parameter, form="export"),
    Case("tied-parameter", MERGE, "square pair", ("k.weight", "q.weight"), tie, untie),
    Case("tied-parameter", BIAS, "square pair", ("weight", "linear_1"), tie, untie, form="functions"),
    Case("computed-weight", MERGE, "one weight scaled", ("linear", "mul_1")),
    Case(
        "computed-weight", MERGE, "pair", ("linear_1", "_weight_norm"), weight_normed, not_parametrized, form="export"
    ),
    Case("computed-weight", BIAS, "the only weight scaled", ("linear", "mul"), form="export"),
    Case("computed-weight", MERGE, "weight as input", ("linear", "x", "linear_1", "mul_1")),
    Case("transposed-weight", FOLD_DENSE, "stored transposed", ("weight", "norm"), mend=set_to("transposed", False)),
    *_in_all_forms("mixed-requires-grad", MERGE, "pair", ("q", "k"), freeze_one, freeze_all),
    *_in_all_forms("mixed-requires-grad", FOLD, "normed", ("conv.weight", "norm.weight"), freeze_one, freeze_all),
    Case("dtype-mismatch", MERGE, "pair", ("q", "k"), lambda m: m.k.double(), nn.Module.float, runs=False),
    Case(
        "dtype-mismatch",
        FOLD,
        "normed",
        ("norm.weight", "conv"),
        lambda m: m.norm.double(),
        nn.Module.float,
        runs=False,
    ),
    Case("dtype-mismatch", BIAS, "biased", ("k",), double_bias, nn.Module.float, runs=False),
    Case("out-of-range", FOLD, "normed", ("conv", "norm"), nearly_no_variance, nn.Module.float, dtype=torch.float16),
    Case(
        "size-mismatch",
        FOLD,
        "norm of another size",
        ("norm.weight", "conv"),
        mend=set_to("norm", nn.BatchNorm2d(4).eval()),
        runs=False,
    ),
    *(
        Case("group-too-small", MERGE, "writes between", ("k", "x"), mend=set_to("in_place", False), form=form)
        for form in FORMS[:2]
    ),
    Case("mutated", MERGE, "writes a weight", ("k.weight",), mend=set_to("in_place", False), form="functions"),
]
_OF_VALUES = [
    *_in_all_forms("unlike-branches", MergeParallelConvolutions(), "unlike branches", ("small", "large")),
    *_in_all_forms("several-users", FOLD, "reads between", ("conv",), mend=set_to("reads_between", False)),
    *_in_all_forms("not-adjacent", FOLD, "dropout between", ("norm", "conv"), mend=set_to("apart", False)),
    *_in_all_forms("decomposed", FOLD, "decomposed", (DECOMPOSED,), mend=set_to("decomposed", False)),
    *_in_all_forms("wrong-axis", FOLD_DENSE, "dense on rows", ("dense", "norm")),
    Case("shape-unknown", FOLD_DENSE, "dense", ("dense", "norm"), form="unshaped", mend=nothing, mended_form="modules"),
    Case("shape-unknown", FOLD_DENSE, "dense", ("dense", "norm"), form="unshaped", mend=nothing, mended_form="export"),
    Case("shape-unknown", DIVIDE, "by 70000", ("truediv", "x"), form="unshaped", mend=nothing, mended_form="modules"),
    Case("unsupported-call", FOLD_TRANSPOSED, "transposed", ("conv",), mend=set_to("sized", False)),
    Case("unsupported-call", FOLD, "stride of a shape", ("conv2d",), mend=set_to("computed", False), form="functions"),
]
_OF_QUOTIENTS = [
    *_in_all_forms("unsafe-constant", DIVIDE, "by zero", ("DIV",)),
    Case("unsafe-constant", DIVIDE, "by 70000", ("truediv",), mend=nn.Module.float, dtype=torch.float16),
    *_in_all_forms("rounded-quotient", DIVIDE, "floored", ("floor", "DIV")),
    *_in_all_forms("rounding-mode", DIVIDE, "rounding", ("DIV",)),
    Case("shape-arithmetic", DIVIDE, "of a shape", ("truediv",)),
]
_OF_OPERATORS = [
    Case("unsupported-dtype", PACK, "normed", ("conv",), nn.Module.double, nn.Module.float, dtype=torch.float64),
    Case("unsupported-dtype", PACK_DENSE, "dense", ("dense",), nn.Module.half, nn.Module.float, dtype=torch.float16),
    Case("kept", INT8_BUT_ONE, "dense", ("dense",), mend=without_weight, mended_by=INT8),
    Case("too-small", FuseLinears(weights="int8"), "dense", ("dense",), mend=without_weight, mended_by=INT8),
    Case("padding-mode", PACK, "normed", ("conv",), set_to("conv.padding_mode", "reflect")),
    *_in_all_forms("not-in-int8", FuseConvolutions(weights="int8"), "groups", ("conv",)),
    *_in_all_forms("other-convolution", PACK, "volumes", ("conv",)),
]
_OF_NO_USE = [
    *_in_all_forms("returned", RemoveNoOps(), "returns a view", ()),
    Case("holds-weights", EliminateDeadCode(), "unread", ("fc",), mend=set_to("fc", nn.Identity())),
]
_OF_ATTENTION = [
    *_in_all_forms(
        "masked-rows",
        FuseScaledDotProductAttention(),
        "attends",
        (),
        mend=set_to("hidden", torch.finfo(torch.float32).min),
    ),
    *_in_all_forms("other-attention", FuseScaledDotProductAttention(), "attention over rows", ("softmax",)),
]
CASES = [*_OF_MODULES, *_OF_TENSORS, *_OF_VALUES, *_OF_QUOTIENTS, *_OF_OPERATORS, *_OF_NO_USE, *_OF_ATTENTION]
