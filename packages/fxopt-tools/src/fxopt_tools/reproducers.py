"""Reproducers: the graph module, inputs and pipeline of a failure, in a file of ``torch.save``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path

import torch
from torch.fx import GraphModule

from fxopt_core import FxoptError, PreconditionError, install_pickling, instrumented, registry
from fxopt_rewrite import special_kind
from fxopt_tools.inputs import OneInput, read_inputs
from fxopt_tools.subjects import Pipeline, as_transformation
from fxopt_tools.verification.instrument import Verify


def write_reproducer(
    path: str | PathLike[str],
    graph_module: GraphModule,
    pipeline: Pipeline,
    inputs: OneInput | Sequence[OneInput] | None = None,
) -> Path:
    """Write ``(graph_module, inputs, pipeline)`` by ``torch.save``, weights included.

    A pipeline that failed has been rolled back, so the graph module is as it was before.

    Args:
        path: the file to write.
        graph_module: the graph module on which the pipeline fails.
        pipeline: the passes; stored as text if their families are registered, and pickled otherwise.
        inputs: inputs for `verify`, if the results are wrong.

    Returns:
        The path.

    Raises:
        PreconditionError: Something in it cannot be pickled, or the file cannot be written.
    """
    stored: Pipeline
    stored = transformation = as_transformation(pipeline)
    with suppress(FxoptError):  # of passes that are not registered
        stored = registry().pipeline_text(transformation)
    try:
        install_pickling(graph_module)  # torch's own pickles would hold code, and trace it again
        torch.save((graph_module, None if inputs is None else read_inputs(inputs), stored), path)
    except Exception as error:  # pickling can raise anything
        raise PreconditionError(
            f"the reproducer {path} cannot be written: {type(error).__name__}: {error}. Expected a folder that can be "
            "written, and a graph module, inputs and passes that can be pickled"
        ) from error
    return Path(path)


def reproduce(path: str | PathLike[str], *, pipeline: Pipeline | None = None) -> GraphModule:
    """Run the pipeline of a reproducer again; if the file has inputs, each pass is verified.

    The file is a pickle, which can run any code when it is read: open only files from people you trust.

    Args:
        path: a file that `write_reproducer` wrote.
        pipeline: a pipeline to run instead of the stored one, for example with the bug fixed.

    Returns:
        The transformed graph module.

    Raises:
        PassError: The pipeline fails, or the verification does (a `VerificationError`).
        PreconditionError: The file is not a reproducer.
    """
    if (kind := special_kind(path)) is not None:
        raise PreconditionError(f"{path} is {kind}, expected a file of write_reproducer")
    found = torch.load(path, weights_only=False)
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], GraphModule)):
        raise PreconditionError(f"{path} is not a reproducer, expected a file of write_reproducer")
    graph_module, inputs, stored = found
    with instrumented(*(() if inputs is None else (Verify(inputs),))):
        return as_transformation(stored if pipeline is None else pipeline)(graph_module)
