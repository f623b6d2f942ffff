"""Models and pipelines in the forms that callers give, converted to graph modules and passes."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_core import PreconditionError, Transformation, check_is_transformation, registry, type_text

#: A pass, a composition, or the text of a pipeline.
Pipeline: TypeAlias = "Transformation | str"


def as_graph_module(model: object, who: str) -> GraphModule:
    """Return a graph module unchanged, and any other model traced; `who` names the caller in messages.

    Raises:
        PreconditionError: The model is not a module, or cannot be traced.
    """
    if isinstance(model, GraphModule):
        return model
    if not isinstance(model, nn.Module):
        raise PreconditionError(
            f"{who} is given {type_text(model)} as model, expected a torch.fx.GraphModule or a torch.nn.Module"
        )
    try:
        return torch.fx.symbolic_trace(model)
    except Exception as error:  # running a model on proxies can raise anything
        raise PreconditionError(
            f"{who} is given {type_text(model)} that torch.fx.symbolic_trace cannot trace: "
            f"{type(error).__name__}: {error}. Expected a graph module: capture the model first, by "
            "torch.export.export(model, args).module() or fxopt_capture.capture(model, args)"
        ) from error


def as_transformation(pipeline: Pipeline) -> Transformation:
    """Return a pass unchanged, and the text of a pipeline as the composition that it describes.

    Raises:
        PreconditionError: The pipeline is neither.
        PipelineSyntaxError: The text cannot be read.
        RegistryError: The text names a pass that no installed family offers.
    """
    if isinstance(pipeline, str):
        return registry().pipeline(pipeline)
    check_is_transformation(pipeline, "the pipeline")
    return pipeline
