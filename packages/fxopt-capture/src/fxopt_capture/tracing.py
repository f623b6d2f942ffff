"""`symbolic_trace`, with the signature that users of ``transformers.utils.fx`` know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_capture.call.names import check_names
from fxopt_capture.capture import capture_call, check_model, read_call
from fxopt_capture.exporting.failure import described
from fxopt_capture.graph.keys import keep_keys
from fxopt_capture.huggingface.dummy_inputs import default_names, dummy_inputs
from fxopt_capture.huggingface.models import is_pretrained
from fxopt_capture.one_at_a_time import one_at_a_time
from fxopt_core import kept
from fxopt_core.errors import CaptureError

Examples = torch.Tensor | Sequence[object] | Mapping[str, object]


def symbolic_trace(
    model: nn.Module,
    input_names: Sequence[str] | None = None,
    disable_check: bool = False,
    example_inputs: Examples | None = None,
) -> GraphModule:
    """Capture a model; for a Hugging Face model, example inputs are made from its configuration if none are given.

    Args:
        model: the model. A plain module without example inputs is traced by ``torch.fx.symbolic_trace``, whose graph
            calls the model's own leaf modules, and which does not follow branches; the graph module has all keys of the
            model, even those that the graph does not read.
        input_names: the inputs of the graph, by the names that ``forward`` takes. None: for Hugging Face models the
            main input, with the attention mask for text; for others all of `example_inputs`.
        disable_check: leave out the comparison of model and graph on the example inputs.
        example_inputs: a tensor, positional arguments, or a mapping of keyword arguments.

    Returns:
        The graph module; batch and sequence length are dynamic. Decoders are called with ``use_cache=False``, unless
        `example_inputs` say otherwise.

    Raises:
        CaptureError: the model takes no such input, cannot be captured, or the graph computes something else.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    >>> symbolic_trace(model, example_inputs=torch.randn(2, 4))(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """
    check_model(model)
    if input_names is not None:
        check_names(model, input_names)
    with one_at_a_time():
        if example_inputs is None and not is_pretrained(model):
            return _trace_without_inputs(model, input_names)
        call = read_call(model, *_arguments(model, input_names, example_inputs), without_cache=True)
        return capture_call(model, call, None, compare=not disable_check)


def _arguments(
    model: nn.Module, names: Sequence[str] | None, examples: Examples | None
) -> tuple[Sequence[object], Mapping[str, object]]:
    """Return positional and keyword arguments to capture a model with."""
    if examples is None:
        return (), dummy_inputs(model, default_names(model) if names is None else names)
    if isinstance(examples, torch.Tensor):
        examples = (examples,)
    if isinstance(examples, Mapping):
        missing = [name for name in names or () if name not in examples]
        if missing:
            raise CaptureError(f"example_inputs lack {missing[0]!r}, which input_names asks for")
        return (), {name: examples[name] for name in (examples if names is None else names)}
    if names is None:
        return tuple(examples), {}
    if len(names) != len(examples):
        raise CaptureError(f"there are {len(names)} input_names and {len(examples)} example_inputs; give one for each")
    return (), dict(zip(names, examples, strict=True))


def _trace_without_inputs(model: nn.Module, names: Sequence[str] | None) -> GraphModule:
    if names is not None:
        raise CaptureError(f"input_names of {type(model).__name__} need example_inputs, as it is not of transformers")
    try:
        with kept(model):
            traced = torch.fx.symbolic_trace(model)
    except Exception as error:  # whatever the model does with a stand-in for a tensor
        raise CaptureError(
            f"{type(model).__name__} cannot be traced without inputs: {described(error)}. Give example_inputs, with "
            f"which the model is captured by torch.export"
        ) from error
    keep_keys(model, traced)
    return traced
