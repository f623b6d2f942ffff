"""`optimize`: capture, transform, verify in one call."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from fxopt.drop_in.clients import ClientT, is_client, noted_calls, with_models_replaced
from fxopt.drop_in.stored_dtype import computed_in_float32, narrows, slow_dtype
from fxopt.guarded_graphs import GuardedGraphs, accepts
from fxopt_capture import capture
from fxopt_capture.capture import read_call
from fxopt_capture.one_at_a_time import one_at_a_time
from fxopt_core import (
    PreconditionError,
    Transformation,
    compose,
    faithful_copy,
    registry,
    type_text,
)
from fxopt_cpu import calibrated
from fxopt_rewrite import infer_shapes, tensor_facts
from fxopt_tools import Inputs, verify as verify_outputs
from fxopt_tools.inputs import OneInput, read_inputs
from fxopt_tools.subjects import as_transformation

__all__ = ["default_pipeline", "optimize"]


@overload
def optimize(
    model: ClientT,
    *,
    pipeline: str | Transformation | None = None,
    calibrate: Callable[[Any], object] | None = None,
    verify: bool = True,
    sqnr: float | None = None,
) -> ClientT: ...
@overload
def optimize(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    pipeline: str | Transformation | None = None,
    dynamic_shapes: Any = None,
    calibrate: Callable[[Any], object] | None = None,
    verify: bool = True,
    sqnr: float | None = None,
) -> GraphModule: ...
@overload
def optimize(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    also: Sequence[OneInput],
    pipeline: str | Transformation | None = None,
    dynamic_shapes: Any = None,
    calibrate: Callable[[Any], object] | None = None,
    verify: bool = True,
    sqnr: float | None = None,
) -> GuardedGraphs: ...
def optimize(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    also: Sequence[OneInput] | None = None,
    pipeline: str | Transformation | None = None,
    dynamic_shapes: Any = None,
    calibrate: Callable[[Any], object] | None = None,
    verify: bool = True,
    sqnr: float | None = None,
) -> Any:
    """Capture a model, run a pipeline on it, and check the result against the model.

    A `SentenceTransformer`, `SparseEncoder`, `CrossEncoder` or pipeline of transformers comes back as a copy whose
    transformer is the optimized graph; its own tokenizer or processor makes the example inputs.

    Args:
        model: the model, which is not changed; of a graph module, a faithful copy is transformed. Models in float16 and
            bfloat16 are computed in float32 by ``cpu-inference`` on processors without instructions for these, and by
            the pipelines with bfloat16 or int8 weights; inputs and results keep their dtypes.
        args: example inputs by position, with a batch of at least 2 if the batch size is to stay dynamic.
        kwargs: example inputs by name.
        also: further example inputs, each a tensor, a tuple of positional inputs, a mapping of keyword inputs, or
            `Inputs`, on which the model takes other paths: sizes on which it branches, a mask that is given or not.
            Each that no earlier graph takes gets a graph of its own. Of a mapping `dynamic_shapes`, each takes the
            names that are among its inputs.
        pipeline: pipeline text, the name of a pipeline or of a pass, or a pass; by default `default_pipeline` of the
            model.
        dynamic_shapes: which sizes may vary, as `capture` takes it: those of images, say.
        calibrate: a function that calls its argument, a stand-in for the model, with typical inputs: ``lambda model:
            model.encode(texts)``. A pipeline with static ranges, such as ``cpu-inference-int8-static``, takes
            them from these calls; without it, from the example inputs. Layers that had fewer than 512 rows in all
            round their inputs at each call instead. The model is restored afterwards.
        verify: whether to compare the captured graph and the result with the model on the example inputs; a pass that
            approximates is held to the signal-to-noise ratio that it promises.
        sqnr: the least signal-to-noise ratio in dB, in place of that promise and of the tolerances.

    Returns:
        The transformed graph module; `history` says what was done and refused, and `undo` undoes it. With `also`,
        `GuardedGraphs` of one or several.

    Raises:
        CaptureError: The model cannot be captured.
        PreconditionError: Options do not fit, such as dynamic_shapes for a graph module, or there is no model to
            replace in what was given.
        PipelineSyntaxError: The text of the pipeline cannot be read.
        UnknownPassError: No installed family offers a pass of that name.
        PassError: A pass failed.
        VerificationError: The result differs from the model.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> graph_module = optimize(model, (torch.randn(2, 3, 8, 8),))
    >>> [type(module).__name__ for module in graph_module.modules() if module._parameters]
    ['PackedConv2d']
    """
    if isinstance(model, str | os.PathLike):
        raise PreconditionError(
            f"optimize is given {os.fspath(model)!r}, expected a model: load it, with SentenceTransformer(...) or "
            f"as its library does; or, in a shell, fxopt optimize {shlex.quote(str(model))} -o OUT"
        )
    if not isinstance(args, Sequence):
        raise PreconditionError(f"args is {type_text(args)}, expected a tuple of inputs: write optimize(model, (x,))")
    if dynamic_shapes is not None and isinstance(model, GraphModule):
        raise PreconditionError(
            "dynamic_shapes is given with a graph module, whose sizes are those that it was captured with: give it to "
            "capture, or give optimize the model"
        )
    if also is not None and (isinstance(model, GraphModule) or is_client(model)):
        raise PreconditionError(
            f"also is given with {type_text(model)}, expected a model that capture takes: a graph module holds one "
            "path through its model; for a drop-in, optimize the model in it, fxopt.optimize(model, kwargs=one, "
            "also=[other])"
        )
    transformation = None if pipeline is None else as_transformation(pipeline)

    def transformed(
        model: nn.Module, example: Inputs, noted: Sequence[Inputs], shapes: Any, first: Transformation | None
    ) -> GraphModule:
        if isinstance(model, GraphModule):
            graph_module = _with_shapes(faithful_copy(model), example)
        else:
            graph_module = capture(model, example.args, example.kwargs, dynamic_shapes=shapes, compare=verify)
        if also is not None:
            # The graph would refuse calls that take another way through the model.
            noted = [call for call in noted if accepts(graph_module, call)] or [example]
        chosen = transformation or registry().pipeline(default_pipeline(graph_module))
        with calibrated(graph_module, [(call.args, call.kwargs) for call in noted]):
            return (chosen if first is None else compose(first, chosen))(graph_module)

    def verified(model: nn.Module, graph_module: GraphModule, calls: Sequence[Inputs]) -> GraphModule:
        # A graph module may be given without an example; then there is nothing to call it with.
        if verify and (calls[-1].args or calls[-1].kwargs):
            verify_outputs(model, graph_module, calls, sqnr=sqnr).raise_if_failed()
        return graph_module

    def optimized(
        model: nn.Module, calls: Sequence[Inputs], noted: Sequence[Inputs], shapes: Any, first: Transformation | None
    ) -> GraphModule:
        return verified(model, transformed(model, calls[0], noted, shapes, first), calls)

    with one_at_a_time():  # to the end: verifying calls the model, which a capture in another thread changes meanwhile
        if not is_client(model):
            calls = [Inputs(*args, **(kwargs or {})), *(read_inputs([*also]) if also else ())]
            noted = calls if calibrate is None else noted_calls(model, calibrate)
            # A forward of the object's own would still be that of the model in a copy.
            named = "cpu-inference" if pipeline is None else str(pipeline)
            fits = default_pipeline(model) == "cpu-inference" and "forward" not in vars(model)
            computes = named.startswith("cpu-inference") or narrows(transformation)
            first = slow_dtype(model, transformation) if fits and computes else None
            if first is not None:
                model = computed_in_float32(model, getattr(torch, first.stored), calls)
            ways: list[tuple[GraphModule, list[Inputs]]] = []
            for call, shapes in zip(calls, _shapes_of(model, calls, dynamic_shapes), strict=True):
                taken = next((own for graph_module, own in ways if accepts(graph_module, call)), None)
                if taken is None:
                    ways.append((transformed(model, call, noted, shapes, first), [call]))
                else:
                    taken.append(call)
            made = ways[0][0] if also is None else GuardedGraphs(graph_module for graph_module, _ in ways)
            for graph_module, own in ways:
                verified(model, graph_module, own)
            return made
        if args or kwargs or dynamic_shapes is not None:
            raise PreconditionError(
                f"a {type(model).__name__} makes its example inputs itself: leave out args, kwargs and dynamic_shapes"
            )
        return with_models_replaced(model, optimized, transformation, calibrate)


def _shapes_of(model: nn.Module, calls: Sequence[Inputs], dynamic_shapes: Any) -> list[Any]:
    """Return the dynamic shapes of each call: of a mapping, those of the inputs that it has and others lack."""
    if not isinstance(dynamic_shapes, Mapping) or len(calls) == 1:
        return [dynamic_shapes] * len(calls)
    names = [read_call(model, call.args, call.kwargs).form.inputs for call in calls]
    return [
        {
            name: shape
            for name, shape in dynamic_shapes.items()
            # A name that no call has goes to all of them, so that `capture` refuses the misspelt name.
            if name in own or not any(name in each for each in names)
        }
        for own in names
    ]


def _with_shapes(graph_module: GraphModule, example: Inputs) -> GraphModule:
    """Note the shapes of values in a bare trace, for inputs like the example's of any sizes that its graph takes."""
    inputs = graph_module.graph.find_nodes(op="placeholder")
    if not (example.args or example.kwargs) or any(tensor_facts(node) is not None for node in inputs):
        return graph_module
    # With duck shapes, sizes that happen to be equal in the example would be one symbol, and equal in every call.
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))

    def free(tensor: Tensor) -> Tensor:
        sizes: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
        return mode.from_tensor(tensor, symbolic_context=sizes)

    args, kwargs = pytree.tree_map_only(Tensor, free, (example.args, dict(example.kwargs)))
    with suppress(PreconditionError):  # then its passes refuse with `shape-unknown`
        infer_shapes(graph_module, *args, **kwargs)
    return graph_module


def default_pipeline(model: nn.Module) -> str:
    """Return the pipeline that makes a model fastest without approximating.

    It is ``cpu-inference`` for a model in eval mode with parameters and buffers on a CPU, ``inference`` for others.

    >>> default_pipeline(nn.Linear(2, 2).eval()), default_pipeline(nn.Linear(2, 2, device="meta").eval())
    ('cpu-inference', 'inference')
    """
    tensors = (*model.parameters(), *model.buffers())
    return "cpu-inference" if not model.training and all(tensor.is_cpu for tensor in tensors) else "inference"


def named_pipelines(model: nn.Module) -> tuple[str, ...]:
    """Return the named pipelines for inference that fit a model's device and mode, those that approximate last.

    >>> named_pipelines(nn.Linear(2, 2).eval())
    ('inference', 'cpu-inference', 'cpu-inference-bf16', 'cpu-inference-int8')
    """
    if default_pipeline(model) == "inference":
        return ("inference",)
    return "inference", "cpu-inference", "cpu-inference-bf16", "cpu-inference-int8"
