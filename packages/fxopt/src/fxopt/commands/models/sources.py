"""SOURCE: an archive, a folder in Hugging Face format, or a factory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule

from fxopt.commands.checks import FLAG, archive_path, check_archive, check_sources, is_hub_name, source_path
from fxopt.commands.failures import CommandError, ExitCode, FileError, blaming
from fxopt.commands.models.factories import from_factory
from fxopt.commands.models.files import from_pickle, opened
from fxopt.commands.models.wanted import Wanted
from fxopt.drop_in.clients import varying_sizes
from fxopt.drop_in.stored_dtype import slow_dtype
from fxopt_capture import capture, load
from fxopt_core import CaptureError, Transformation, faithful_copy, type_text
from fxopt_tools import Inputs


@dataclass(frozen=True)
class Source:
    """A model, read from SOURCE.

    Attributes:
        text: SOURCE, as it was given.
        model: the model, or the graph module of an archive.
        inputs: the inputs that came with it.
        calls: calls of it that its tokenizer or processor has prepared.
        note: a pass to run first, which notes in the history what was done on reading.
    """

    text: str
    model: nn.Module
    inputs: Inputs | None = None
    calls: Sequence[Inputs] = ()
    note: Transformation | None = None


def read_source(
    text: str, *, run_pickled_code: bool = False, wanted: Wanted | None = None, pipeline: str | None = None
) -> Source:
    """Read SOURCE.

    Args:
        text: a path, the name of a model on the hub, or ``package.module:factory``.
        run_pickled_code: whether pickles may be opened.
        wanted: the dtype and device of the model; by default its own.
        pipeline: what will run on the model.

    Raises:
        CommandError: There is nothing of that name, or it holds no model.
    """
    check_sources(text)
    wanted = wanted or Wanted()
    calls: Sequence[Inputs] = ()
    note = None
    if not Path(text).exists() and not is_hub_name(text):
        model, inputs = from_factory(text)
    else:
        path, inputs = source_path(text), None
        if path.is_dir():
            with blaming(ExitCode.CAPTURE):
                model, calls = opened(path, wanted.dtype)
        else:
            model = read_file(path, run_pickled_code=run_pickled_code)
        if path.is_dir() and wanted.dtype is None and wanted.device is None and (note := slow_dtype(model, pipeline)):
            model.float()
            calls = [Wanted(torch.float32).moved(call) for call in calls]
    wanted.place(text, model)
    return Source(text, model, inputs and wanted.moved(inputs), [wanted.moved(call) for call in calls], note)


def read_archive(text: str, *, run_pickled_code: bool = False) -> GraphModule:
    """Read a file with a graph module.

    Raises:
        CommandError: There is none.
    """
    check_archive(text)
    model = read_file(archive_path(text), run_pickled_code=run_pickled_code)
    if not isinstance(model, GraphModule):
        raise FileError(f"{text} holds {type_text(model)}, expected a graph module, as `fxopt optimize` writes it")
    return model


def read_file(path: Path, *, run_pickled_code: bool) -> nn.Module:
    """Read an archive, or a pickled model where that is allowed.

    Raises:
        FileError: The file is not an archive, or holds pickles that may not be opened.
    """
    try:
        return load(path)
    except CaptureError as error:
        may_be_pickle = "not an archive" in str(error)
        if may_be_pickle and run_pickled_code:
            return from_pickle(path)
        hint = f". If torch.save wrote it, {FLAG} opens it, and runs the code in it" if may_be_pickle else ""
        raise FileError(f"{error}{hint}") from error


def graph_of(
    source: Source, inputs: Inputs, dynamic: Mapping[str, Sequence[int]] | None = None, *, compare: bool = True
) -> GraphModule:
    """Return a graph of a source, which is not changed itself.

    Args:
        source: the model.
        inputs: what it is captured with.
        dynamic: the dimensions that vary, by input; by default what `capture` chooses.
        compare: whether to compare graph and model on the inputs.

    Raises:
        CommandError: It cannot be captured, or does not take the inputs.
    """
    if isinstance(source.model, GraphModule):
        return faithful_copy(source.model)
    with blaming(ExitCode.CAPTURE):
        try:
            shapes = {name: dict.fromkeys(each, Dim.DYNAMIC) for name, each in (dynamic or {}).items()}
            chosen = shapes or (varying_sizes(inputs) if source.calls else None)
            return capture(source.model, inputs.args, inputs.kwargs, dynamic_shapes=chosen, compare=compare)
        except CaptureError as error:
            unseen = "`fxopt optimize --no-verify` accepts the graph anyway"
            raise CaptureError(str(error).replace("compare=False returns the graph anyway", unseen)) from error
        except RecursionError as error:
            raise CommandError(
                f"{source.text} is nested too deeply to be captured: {error}", ExitCode.CAPTURE
            ) from error
