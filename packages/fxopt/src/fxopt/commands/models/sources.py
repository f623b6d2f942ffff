"""SOURCE: an archive, a folder in Hugging Face format, or a factory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.export import Dim
from torch.fx import GraphModule

from fxopt.commands.checks import archive_path, check_archive, check_sources, is_hub_name, source_path
from fxopt.commands.failures import CommandError, ExitCode, FileError, blaming
from fxopt.commands.models.factories import from_factory
from fxopt.commands.models.files import opened
from fxopt.drop_in.clients import varying_sizes
from fxopt.drop_in.stored_dtype import in_float32, slow_dtype
from fxopt_capture import capture, load
from fxopt_core import CaptureError, Transformation, faithful_copy
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


def read_source(text: str, pipeline: str | None = None) -> Source:
    """Read SOURCE.

    Args:
        text: a path, the name of a model on the hub, or ``package.module:factory``.
        pipeline: what will run on the model.

    Raises:
        CommandError: There is nothing of that name, or it holds no model.
    """
    check_sources(text)
    if not Path(text).exists() and not is_hub_name(text):
        return Source(text, *from_factory(text))
    path = source_path(text)
    if not path.is_dir():
        return Source(text, read_file(path))
    with blaming(ExitCode.CAPTURE):
        model, calls = opened(path)
    note = slow_dtype(model, pipeline)
    if note is not None:
        model.float()
        calls = [in_float32(call) for call in calls]
    return Source(text, model, calls=calls, note=note)


def read_archive(text: str) -> GraphModule:
    """Read an archive.

    Raises:
        CommandError: There is none.
    """
    check_archive(text)
    return read_file(archive_path(text))


def read_file(path: Path) -> GraphModule:
    """Read an archive.

    Raises:
        FileError: The file is not an archive.
    """
    try:
        return load(path)
    except CaptureError as error:
        way = ". If torch.save wrote it, name a function that loads the model: package.module:factory"
        raise FileError(f"{error}{way if 'not an archive' in str(error) else ''}") from error


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
        if dynamic:
            message = f"{source.text} is already a graph, with the sizes of its capture; give --dynamic with the model"
            raise CommandError(message, ExitCode.USAGE)
        return faithful_copy(source.model)
    with blaming(ExitCode.CAPTURE):
        try:
            shapes = {name: dict.fromkeys(each, Dim.DYNAMIC) for name, each in (dynamic or {}).items()}
            chosen = shapes or (varying_sizes(inputs) if source.calls else None)
            return capture(source.model, inputs.args, inputs.kwargs, dynamic_shapes=chosen, compare=compare)
        except CaptureError as error:
            # The remedy in the message of `capture` is an argument in Python; here it is an option.
            unseen = "`fxopt optimize --no-verify` accepts the graph anyway"
            raise CaptureError(str(error).replace("compare=False returns the graph anyway", unseen)) from error
