"""The operations of linear layers, convolutions, batch norms and divisions, with the names of their parameters."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

aten = torch.ops.aten

NORMS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
    nn.SyncBatchNorm: (),
}

LINEAR = ("input", "weight", "bias")
CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
CONV_TRANSPOSE = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
CONVOLUTION = (*CONV[:6], "transposed", "output_padding", "groups")
BATCH_NORM = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
F_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")

LINEAR_TARGETS: dict[Any, tuple[str, ...]] = {F.linear: LINEAR, aten.linear.default: LINEAR}
ADDMM = ("bias", "input", "weight")
ADDMM_KEYWORDS = {"input": "bias", "self": "bias", "mat1": "input", "mat2": "weight"}
PRODUCT = ("input", "weight")
PRODUCT_KEYWORDS = {"self": "input", "other": "weight", "mat2": "weight"}
TRANSPOSED_TARGETS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((torch.addmm, aten.addmm.default), ADDMM),
    **dict.fromkeys((operator.matmul, torch.matmul, torch.mm, aten.matmul.default, aten.mm.default), PRODUCT),
}
TRANSPOSED_METHODS = {"addmm": ADDMM, "matmul": PRODUCT, "mm": PRODUCT, "__matmul__": PRODUCT}
CONV_TARGETS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d), CONV),
    **{getattr(getattr(aten, f"conv{d}d"), form): CONV for d in (1, 2, 3) for form in ("default", "padding")},
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), CONV_TRANSPOSE),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), CONV_TRANSPOSE),
    aten.conv_transpose1d.default: CONV_TRANSPOSE,
    aten.conv_transpose2d.input: CONV_TRANSPOSE,
    aten.conv_transpose3d.input: CONV_TRANSPOSE,
    torch.convolution: CONVOLUTION,
    aten.convolution.default: CONVOLUTION,
}
BATCH_NORM_TARGETS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: F_BATCH_NORM,
    torch.batch_norm: BATCH_NORM,
    aten.batch_norm.default: BATCH_NORM,
}
DECOMPOSED_BATCH_NORMS: frozenset[Any] = frozenset(
    (
        *(getattr(aten._native_batch_norm_legit, form) for form in ("default", "no_stats")),
        aten._native_batch_norm_legit_no_training.default,
        aten._native_batch_norm_legit_functional.default,
        aten._batch_norm_no_update.default,
        aten._batch_norm_with_update.default,
        aten._batch_norm_with_update_functional.default,
        *(getattr(aten, f"{kind}_batch_norm").default for kind in ("native", "cudnn", "miopen")),
    )
)
LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
RMS_NORM = ("input", "normalized_shape", "weight", "eps")
LAYER_NORM_TARGETS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm, aten.layer_norm.default), LAYER_NORM),
    **dict.fromkeys((F.rms_norm, torch.rms_norm, aten.rms_norm.default), RMS_NORM),
}
DECOMPOSED_LAYER_NORMS: frozenset[Any] = frozenset(
    (aten.native_layer_norm.default, aten._fused_rms_norm.default, torch.native_layer_norm)
)
PRODUCTS: dict[Any, Any] = {
    operator.truediv: operator.mul,
    operator.itruediv: operator.imul,
    torch.div: torch.mul,
    torch.divide: torch.multiply,
    torch.true_divide: torch.mul,
    **{
        getattr(packet, form): getattr(product, form.removesuffix("_mode"))
        for packets, product in (
            ((aten.div, aten.divide, aten.true_divide), aten.mul),
            ((aten.div_, aten.divide_, aten.true_divide_), aten.mul_),
        )
        for packet in packets
        for form in ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode")
        if hasattr(packet, form)
    },
}
METHOD_PRODUCTS = {
    "div": "mul",
    "divide": "multiply",
    "true_divide": "mul",
    "div_": "mul_",
    "divide_": "multiply_",
    "true_divide_": "mul_",
    "__truediv__": "__mul__",
    "__itruediv__": "__imul__",
}
SYNONYMS: dict[str, str] = {
    synonym: name
    for name, *synonyms in map(
        str.split,
        (
            "abs absolute",
            "acos arccos",
            "acosh arccosh",
            "asin arcsin",
            "asinh arcsinh",
            "atan arctan",
            "atan2 arctan2",
            "atanh arctanh",
            "bitwise_and __and__",
            "bitwise_or __or__",
            "bitwise_xor __xor__",
            "bitwise_left_shift __lshift__",
            "bitwise_right_shift __rshift__",
            "cat concat concatenate",
            "clamp clip",
            "div divide true_divide",
            "ge greater_equal",
            "gt greater",
            "inverse linalg_inv",
            "le less_equal",
            "lt less",
            "matmul linalg_matmul",
            "movedim moveaxis",
            "mul multiply",
            "ne not_equal",
            "neg negative",
            "outer ger",
            "sigmoid special_expit",
            "sub subtract",
            "transpose swapaxes swapdims",
            "trunc fix",
        ),
    )
    for synonym in synonyms
}
"""Names of operators to the name of the one that they are another name of."""

OPERATORS: dict[str, str] = {
    **{name: name for name in ("abs", "add", "eq", "ge", "gt", "le", "lt", "matmul", "mul", "ne", "neg", "pow", "sub")},
    "and_": "bitwise_and",
    "floordiv": "floor_divide",
    "inv": "bitwise_not",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "mod": "remainder",
    "or_": "bitwise_or",
    "pos": "positive",
    "rshift": "bitwise_right_shift",
    "truediv": "div",
    "xor": "bitwise_xor",
}
"""Functions of ``operator`` to the names of torch's operators that do the same for tensors."""

INPLACE_OPERATORS: dict[Any, str] = {
    operator.iadd: "add",
    operator.isub: "sub",
    operator.imul: "mul",
    operator.itruediv: "div",
}
"""Functions of ``operator`` that write tensors in place to the names of torch's operators."""

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardswish: "hardswish",
    nn.LogSigmoid: "log_sigmoid",
    nn.Mish: "mish",
    nn.ReLU: "relu",
    nn.SELU: "selu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
}
"""Modules without settings to the operators that they are."""

MODIFIERS: dict[str, object] = {"alpha": 1, "rounding_mode": None}
"""Keywords that make another operation of one, unless they have this value."""

OPERANDS = ("input", "other")
OPERAND_KEYWORDS = {"self": "input", "exponent": "other", "mat2": "other"}

TRAINING_FLAG: dict[Any, tuple[int, str]] = {
    aten.batch_norm.default: (5, "training"),
    aten.dropout.default: (2, "train"),
    aten.dropout_.default: (2, "train"),
    aten.feature_dropout.default: (2, "train"),
    aten.alpha_dropout.default: (2, "train"),
}


def says_training(node: Node) -> bool:
    """Return whether an ATen operator is told by an argument of its own to train."""
    if node.op != "call_function" or node.target not in TRAINING_FLAG:
        return False
    place, name = TRAINING_FLAG[node.target]
    return bool(node.args[place] if len(node.args) > place else node.kwargs.get(name, False))
