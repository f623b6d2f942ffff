"""The inputs of a model: read from a file, returned by SOURCE, or random."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxopt.commands.checks import FLAG
from fxopt.commands.failures import FileError
from fxopt.commands.models.sources import Source, graph_of, read_source
from fxopt.commands.parameters import Job
from fxopt.commands.terminal import Step
from fxopt.optimization import default_pipeline
from fxopt_capture.archive.export import example_call
from fxopt_capture.call.guards import guards_of
from fxopt_capture.exporting.failure import first_line
from fxopt_capture.huggingface.dummy_inputs import default_names, dummy_inputs
from fxopt_core import CaptureError, PreconditionError, Transformation, iter_nodes, registry, type_text
from fxopt_rewrite import EmbeddingCall, GraphIndex, read_embedding, special_kind
from fxopt_tools import Inputs
from fxopt_tools.inputs import read_inputs

_GIVE = "give them by --inputs FILE"
_FORMS = "a tensor, a tuple of positional inputs, a dictionary of inputs by name, or a list of these for several calls"
_PICKLE = b"\x80"  # the first byte of files in torch's older format
_REACH = 200  # how many nodes to search for the embedding that an input indexes


def inputs_for(source: Source, file: str | None, *, run_pickled_code: bool = False) -> list[Inputs]:
    """Return the inputs of one or several calls.

    Args:
        source: the model.
        file: the file of ``--inputs``, or None.
        run_pickled_code: whether pickles may be opened.

    Raises:
        FileError: The file cannot be used, or none is given and the model does not say what it takes.
    """
    if file is not None:
        return read_file_of_inputs(Path(file), run_pickled_code=run_pickled_code)
    if source.inputs is not None or source.calls:
        return list(source.calls) if source.inputs is None else [source.inputs]
    try:
        if isinstance(source.model, GraphModule):
            return [drawn(source.model)]
        if hasattr(source.model, "config") and hasattr(source.model, "main_input_name"):
            return [Inputs(**dummy_inputs(source.model, default_names(source.model)))]
    except CaptureError as error:
        reason = str(error).partition(";")[0]
        raise FileError(f"no inputs for {source.text} can be generated: {reason}; {_GIVE}") from error
    raise FileError(
        f"{source.text} comes without inputs; let the factory return (model, args) or (model, args, kwargs), or {_GIVE}"
    )


def read_file_of_inputs(path: Path, *, run_pickled_code: bool = False) -> list[Inputs]:
    """Read inputs that ``torch.save`` or safetensors wrote.

    Raises:
        FileError: There is no such file, or it holds something else.
    """
    if kind := special_kind(path):
        raise FileError(f"{path} is {kind}; expected a file with {_FORMS}, written by torch.save")
    found = _safetensors(path) if path.suffix == ".safetensors" else _saved(path, run_pickled_code)
    try:
        return read_inputs(found)
    except PreconditionError as error:
        raise FileError(f"{path} holds {type_text(found)}; expected {_FORMS}") from error


def _saved(path: Path, run_pickled_code: bool) -> Any:
    if not zipfile.is_zipfile(path) and path.read_bytes()[:1] != _PICKLE:
        raise FileError(f"{path} was not written by torch.save; expected {_FORMS}, written by torch.save")
    try:
        return torch.load(path, weights_only=not run_pickled_code, map_location="cpu")
    except Exception as error:  # a damaged file, or a pickle, may lead to anything
        reason = first_line(error)
        if not run_pickled_code:
            reason += f" -- a file with anything but tensors, containers and numbers needs {FLAG}"
        raise FileError(f"{path} cannot be read as inputs: {type(error).__name__}: {reason}") from error


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(importlib.import_module("safetensors.torch").load_file(path))
    except Exception as error:  # its class is defined in an extension module
        raise FileError(f"{path} cannot be read as safetensors: {error}") from error


def drawn(graph_module: GraphModule) -> Inputs:
    """Return random inputs of the sizes and dtypes that a graph module says it takes, the same ones at each call.

    Indices of embeddings lie in their tables; other integers, masks among them, are 1. Inputs that the graph takes with
    certain values alone have these.

    Raises:
        CaptureError: The graph module does not say what it takes.
    """
    call = example_call(graph_module)
    generator = torch.Generator().manual_seed(0)
    leaves, spec = pytree.tree_flatten(dict(call.inputs))
    placeholders = [node for node in iter_nodes(graph_module.graph) if node.op == "placeholder"]
    nodes = placeholders if len(placeholders) == len(leaves) else [None] * len(leaves)
    index = GraphIndex(graph_module)
    values = [
        leaf if spec.value is not None else _draw(leaf, node, index, generator)
        for leaf, node, spec in zip(leaves, nodes, guards_of(graph_module).specs, strict=True)
    ]
    named: dict[str, Any] = pytree.tree_unflatten(values, spec)
    return Inputs(*[named.pop(name) for name in list(named)[: call.positional]], **named)


def _draw(leaf: object, node: Node | None, index: GraphIndex, generator: torch.Generator) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point() or leaf.is_complex():
        dtype = leaf.dtype if leaf.is_complex() else torch.float32
        values = torch.randn(leaf.shape, generator=generator, dtype=dtype)
    elif leaf.dtype is torch.bool:
        values = torch.ones(leaf.shape)  # a random mask may mask everything
    elif leaf.dtype is torch.uint8:
        values = torch.randint(256, leaf.shape, generator=generator)
    else:
        rows = None if node is None else min(_tables(node, index), default=None)
        values = torch.ones(leaf.shape) if rows is None else torch.randint(rows, leaf.shape, generator=generator)
    return values.to(dtype=leaf.dtype, device=leaf.device)


def _tables(node: Node, index: GraphIndex) -> Iterator[int]:
    """Yield the numbers of rows of the embeddings that a value, or what is computed from it, indexes."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < _REACH:
        value = waiting.pop()
        for user in value.users:
            call = read_embedding(index, user)
            if isinstance(call, EmbeddingCall) and call.input is value:
                yield len(call.weight.tensor)
            # Indices may be reshaped or shifted before they reach the table: first arguments are followed.
            elif user not in seen and user.args and user.args[0] is value:
                seen.add(user)
                waiting.append(user)


def prepared(step: Step, job: Job) -> tuple[Source, GraphModule, Transformation, list[Inputs]]:
    """Return a source, its graph, a pipeline, and inputs; the steps "reading" and "capturing" are announced.

    Without a text, the pipeline is the default one of the model.

    Raises:
        CommandError: There is no such source, file of inputs or pass, or the model cannot be captured.
    """
    # First of all, so that a misspelt pass is reported before the model is read.
    chosen = None if job.pipeline is None else registry().pipeline(job.pipeline)
    step("reading")
    source = read_source(job.source, job.pipeline)
    calls = inputs_for(source, job.inputs, run_pickled_code=job.run_pickled_code)
    step("capturing")
    graph_module = graph_of(source, calls[0], job.dynamic, compare=job.verify)
    return source, graph_module, chosen or registry().pipeline(default_pipeline(graph_module)), calls
