"""Contenders that rewrite models: fxopt's passes, optimum's, torch's own fuse, and compilers of whole programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

import fxopt
from benchmarks.cases import NORMS, Case
from benchmarks.peers import onnxruntime, optimum, torch_fuse
from benchmarks.suite import Absent
from fxopt_capture import capture
from fxopt_core import history
from fxopt_rewrite import infer_shapes

Module = Callable[..., Any]
PASSES: Mapping[str, str] = {
    "batch norm into convolution": "FuseBatchNorm2dInConv2d",
    "batch norm into linear": "FuseBatchNorm1dInLinear",
    "merged linears": "MergeLinears",
    "bias in linear": "FuseBiasInLinear",
    "division": "ChangeTrueDivToMulByInverse",
}


@dataclass(frozen=True)
class Contender:
    """A contender that rewrites models.

    Attributes:
        name: its name in tables.
        rewrite: takes a model and its case, and returns the callable that replaces the model.
        applies: whether it can do anything with a case.
        undo: takes back its rewrite, for a case; None if it cannot.
    """

    name: str
    rewrite: Callable[[nn.Module, Case], Module]
    applies: Callable[[Case], bool] = lambda case: True
    undo: Callable[[GraphModule, Case], GraphModule] | None = None


def fxopt_traced(model: nn.Module, case: Case) -> Module:
    """A bare trace with shapes, rewritten by the pass of the case's family."""
    traced = infer_shapes(torch.fx.symbolic_trace(model), *case.example())
    rewritten: Module = _pass(case)(traced)
    return rewritten


def fxopt_captured(model: nn.Module, case: Case) -> Module:
    """A capture whose varying dimensions are dynamic, rewritten by the same pass."""
    captured = capture(model, case.example(), dynamic_shapes=dynamic_shapes(case))
    rewritten: Module = _pass(case)(captured)
    return rewritten


def fxopt_undo(graph_module: GraphModule, case: Case) -> GraphModule:
    """The pass reversed, by an equal object."""
    restored: GraphModule = _pass(case)(graph_module, reverse=True)
    return restored


def by_optimum(model: nn.Module, case: Case) -> Module:
    """torch's own trace, rewritten by optimum's pass of the same name."""
    rewritten: Module = getattr(optimum(), PASSES[case.family])()(torch.fx.symbolic_trace(model))
    return rewritten


def optimum_undo(graph_module: GraphModule, case: Case) -> GraphModule:
    """optimum's pass reversed, by an equal object."""
    restored: GraphModule = getattr(optimum(), PASSES[case.family])()(graph_module, reverse=True)
    return restored


def by_torch_fuse(model: nn.Module, case: Case) -> Module:
    """``torch.fx.experimental.optimization.fuse``."""
    fused: Module = torch_fuse().fuse(model)
    return fused


def by_jit(model: nn.Module, case: Case) -> Module:
    """``torch.jit.optimize_for_inference`` of a frozen trace."""
    trace: Any = torch.jit.trace
    traced = trace(model, case.example(), check_trace=False)
    optimized: Module = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
    return optimized


def by_inductor(model: nn.Module, case: Case) -> Module:
    """``torch.compile`` with weights frozen into the program."""
    torch.compiler.reset()
    compiled = torch.compile(model, dynamic=True, options={"freezing": True})

    def call(*inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            return compiled(*inputs)

    call(*case.example())
    return call


def by_onnxruntime(model: nn.Module, case: Case) -> Module:
    """torch's ONNX export, and onnxruntime with all of its optimizations."""
    example = case.example()
    program = torch.onnx.export(model, example, dynamo=True, dynamic_shapes=dynamic_shapes(case), verbose=False)
    if program is None:
        raise RuntimeError("the exporter returned nothing")
    options = onnxruntime().SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime().InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_inputs()]

    def call(*inputs: torch.Tensor) -> Any:
        found = session.run(None, dict(zip(names, (each.numpy() for each in inputs), strict=True)))
        return torch.from_numpy(found[0])

    return call


def dynamic_shapes(case: Case) -> Any:
    """The dynamic shapes for torch.export of the inputs of a case."""
    return tuple(dict.fromkeys(axes, torch.export.Dim.AUTO) for axes in case.varying())


def _pass(case: Case) -> Any:
    """fxopt's pass of a family, which has the name of optimum's."""
    return getattr(fxopt, PASSES[case.family])()


def is_norm(case: Case) -> bool:
    """Whether the case is one of batch norms."""
    return case.family in NORMS


def is_inference_in_float32(case: Case) -> bool:
    """Whether the case is one for compilers for inference, in a dtype that all of them take."""
    return not case.training and case.dtype is torch.float32


FXOPT = Contender("fxopt", fxopt_traced, undo=fxopt_undo)
FXOPT_CAPTURED = Contender("fxopt after `capture`", fxopt_captured, undo=fxopt_undo)
OPTIMUM = Contender("optimum", by_optimum, undo=optimum_undo)
FUSE = Contender("torch.fx fuse", by_torch_fuse, is_norm)
COMPILERS = (
    Contender("torch.jit", by_jit, is_inference_in_float32),
    Contender("torch.compile, freezing", by_inductor, is_inference_in_float32),
    Contender("onnxruntime", by_onnxruntime, is_inference_in_float32),
)


def missing(contender: Contender) -> Absent | None:
    """Return why a contender cannot take part, or None."""
    needs = {OPTIMUM.name: optimum, "onnxruntime": onnxruntime}
    found = needs[contender.name]() if contender.name in needs else None
    return found if isinstance(found, Absent) else None


def rewrote(result: GraphModule, case: Case) -> bool:
    """Whether a result differs from the model: a model left alone computes the same, and gains nothing."""
    records = history(result)
    if records:  # fxopt says so
        return any(record.rewrites for record in records)
    return bool(result.code != torch.fx.symbolic_trace(case.build()).code)
