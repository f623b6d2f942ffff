"""Ways to run a model for inference on the CPU, each ready to be called again and again with one input."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import fxopt
from benchmarks.peers import onnxruntime, openvino, optimum, torch_fuse
from benchmarks.suite import Absent, Task

Runner = Callable[[nn.Module, Tensor], Task]
"""Prepares a model for an input; the task computes the output."""
FOLDS = "fuse-batch-norm2d-in-conv2d,fuse-batch-norm1d-in-linear"
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def eager(model: nn.Module, x: Tensor) -> Task:
    """The model as it is."""
    return lambda: model(x)


def by_hand(model: nn.Module, x: Tensor) -> Task:
    """Batch norms folded as one does by hand: every norm into the layer that is registered before it."""
    folded = copy.deepcopy(model)
    place, layer = "", None
    for name, module in list(folded.named_modules()):
        if isinstance(module, nn.Conv2d | nn.Linear):
            place, layer = name, module
        elif isinstance(module, _NORMS) and layer is not None:
            folded.set_submodule(place, _fused(layer, module))
            # timm joins a norm with its activation; the activation stays.
            folded.set_submodule(name, getattr(module, "act", nn.Identity()))
            layer = None
    return lambda: folded(x)


def by_fxopt(model: nn.Module, x: Tensor) -> Task:
    """Captured, and batch norms folded."""
    folded = fxopt.registry().pipeline(FOLDS)(fxopt.capture(model, (x,)))
    return lambda: folded(x)


def by_fxopt_trace(model: nn.Module, x: Tensor) -> Task:
    """Traced by torch.fx, which checks no input, and batch norms folded."""
    folded = fxopt.registry().pipeline(FOLDS)(fxopt.infer_shapes(torch.fx.symbolic_trace(model), x))
    return lambda: folded(x)


def by_fxopt_channels_last(model: nn.Module, x: Tensor) -> Task:
    """The same, with weights and input in channels_last."""
    folded: Any = fxopt.registry().pipeline(FOLDS)(fxopt.capture(model, (x,)))
    folded = folded.to(memory_format=torch.channels_last)
    same = x.contiguous(memory_format=torch.channels_last)
    return lambda: folded(same)


def by_fxopt_cpu_inference(model: nn.Module, x: Tensor) -> Task:
    """The pipeline ``cpu-inference`` in the one line for users."""
    optimized = fxopt.optimize(model, (x,), pipeline="cpu-inference")
    return lambda: optimized(x)


def by_optimum(model: nn.Module, x: Tensor) -> Task:
    """Traced by torch.fx, and folded by optimum."""
    passes = optimum()
    if isinstance(passes, Absent):
        raise ModuleNotFoundError(passes.reason)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    folded = passes.FuseBatchNorm1dInLinear()(passes.FuseBatchNorm2dInConv2d()(traced))
    return lambda: folded(x)


def by_fuse(model: nn.Module, x: Tensor) -> Task:
    """``torch.fx.experimental.optimization.fuse``."""
    folded = torch_fuse().fuse(model)
    return lambda: folded(x)


def by_jit(model: nn.Module, x: Tensor) -> Task:
    """``torch.jit.optimize_for_inference`` of a frozen trace."""
    trace: Any = torch.jit.trace
    optimized = torch.jit.optimize_for_inference(torch.jit.freeze(trace(model, x)))
    return lambda: optimized(x)


def by_compile(model: nn.Module, x: Tensor) -> Task:
    """``torch.compile``."""
    compiled = torch.compile(model)
    return lambda: compiled(x)


def by_compile_freezing(model: nn.Module, x: Tensor) -> Task:
    """``torch.compile`` with weights frozen into the program, as its documentation advises for inference."""
    compiled = torch.compile(model, options={"freezing": True})
    return lambda: compiled(x)


def by_onnxruntime(model: nn.Module, x: Tensor) -> Task:
    """torch's ONNX export and onnxruntime, with torch's number of threads."""
    return onnxruntime_call(model, (x,))


def by_openvino(model: nn.Module, x: Tensor) -> Task:
    """torch's ONNX export and OpenVINO in float32, with torch's number of threads."""
    return openvino_call(model, (x,))


def onnxruntime_call(model: nn.Module, args: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """A function that computes the first output in onnxruntime."""
    session = onnx_session(model, args)
    inputs = {each.name: given.numpy() for each, given in zip(session.get_inputs(), args, strict=True)}
    return lambda: torch.from_numpy(session.run(None, inputs)[0])


def openvino_call(model: nn.Module, args: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """A function that computes the first output in OpenVINO."""
    request = openvino_request(model, args)
    inputs = [each.numpy() for each in args]
    return lambda: torch.from_numpy(request.infer(inputs, share_inputs=True)[0])


def openvino_request(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    precision: str = "f32",
    changed: Callable[[Any], Any] = lambda model: model,
) -> Any:
    """An OpenVINO request of a model at exactly the sizes of these inputs, with torch's number of threads.

    Args:
        model: the model.
        args: its inputs by position.
        kwargs: its inputs by name.
        precision: ``"f32"`` or ``"bf16"``: OpenVINO chooses bf16 by itself where the processor has it.
        changed: takes OpenVINO's model, and returns the one to compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = exported_onnx(model, Path(folder), args, kwargs)
        return openvino_model(path, precision, changed).create_infer_request()


def openvino_model(path: Path, precision: str = "f32", changed: Callable[[Any], Any] = lambda model: model) -> Any:
    """OpenVINO's compiled model of a file, with torch's number of threads; see `openvino_request`."""
    openvino_module = openvino()
    if isinstance(openvino_module, Absent):
        raise ModuleNotFoundError(openvino_module.reason)
    core = openvino_module.Core()
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": precision}
    return core.compile_model(changed(core.read_model(path)), "CPU", settings)


def exported_onnx(
    model: nn.Module,
    folder: Path,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Path:
    """The file of torch's ONNX export, at exactly the sizes of these inputs except for those that may vary."""
    program: Any = torch.onnx.export(
        model, args, kwargs=dict(kwargs or {}), dynamo=True, verbose=False, dynamic_shapes=dynamic_shapes
    )
    path = folder / "model.onnx"
    program.save(path)
    return path


def onnx_session(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    changed: Callable[[Path], Path] = lambda path: path,
) -> Any:
    """An onnxruntime session of a model at exactly the sizes of these inputs, with torch's number of threads.

    Args:
        model: the model.
        args: its inputs by position.
        kwargs: its inputs by name.
        changed: takes the exported file, and returns the one to load.
    """
    with tempfile.TemporaryDirectory() as folder:
        return session_of(changed(exported_onnx(model, Path(folder), args, kwargs)))


def session_of(path: Path) -> Any:
    """An onnxruntime session of a file, with torch's number of threads."""
    runtime = onnxruntime()
    if isinstance(runtime, Absent):
        raise ModuleNotFoundError(runtime.reason)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


FOLDING: Mapping[str, Runner] = {
    "eager": eager,
    "eager, a copy": eager,
    "folded by hand": by_hand,
    "fxopt": by_fxopt,
    "fxopt, of a torch.fx trace": by_fxopt_trace,
    "optimum": by_optimum,
    "torch.fx fuse": by_fuse,
}
INFERENCE: Mapping[str, Runner] = {
    "eager": eager,
    "eager, a copy": eager,
    "folded by hand": by_hand,
    "fxopt, folded": by_fxopt,
    "fxopt, folded, channels_last": by_fxopt_channels_last,
    "fxopt, cpu-inference": by_fxopt_cpu_inference,
    "torch.jit": by_jit,
    "torch.compile": by_compile,
    "torch.compile, freezing": by_compile_freezing,
    "onnxruntime": by_onnxruntime,
    "OpenVINO": by_openvino,
}


def _fused(layer: nn.Conv2d | nn.Linear, norm: Any) -> nn.Module:
    if isinstance(layer, nn.Conv2d):
        return fuse_conv_bn_eval(layer, norm)
    return fuse_linear_bn_eval(layer, norm)
