"""`load` and `save`: graph modules in fxopt's archives."""

from __future__ import annotations

from typing import IO

from torch.fx import GraphModule

from fxopt_capture.archive.container import Container, PathLike, checked_target, opened, write_archive
from fxopt_capture.archive.document import FILE, read_document, write_document
from fxopt_capture.one_at_a_time import one_at_a_time
from fxopt_core import check_graph_module, collector_paused
from fxopt_core.errors import CaptureError
from fxopt_rewrite import InexpressibleError, outside_inference_mode


def save(graph_module: GraphModule, path: PathLike | IO[bytes]) -> None:
    """Save a graph module with its history in one file, conventionally with the suffix ``.fxopt``.

    The file is a zip of JSON and safetensors, without paths and lines of the model's code. Nothing is exported or run.
    An existing file is replaced once the new one is complete. For a program that needs only torch, see `export`.

    Args:
        graph_module: the graph module, captured, loaded or traced.
        path: the file to write, by its path, or open for writing bytes.

    Raises:
        CaptureError: the file cannot be written, or the graph module holds something that cannot be saved: hooks,
            tensors that are not plain, or modules and functions that neither torch nor a plugin offers.

    >>> import io
    >>> import torch
    >>> from fxopt_capture import capture
    >>> file = io.BytesIO()
    >>> save(capture(torch.nn.Linear(4, 3), torch.zeros(2, 4)), file)
    >>> load(io.BytesIO(file.getvalue())).get_parameter("weight").shape
    torch.Size([3, 4])
    """
    check_graph_module(graph_module, "save")
    target = checked_target(path)
    try:
        entries = write_document(graph_module)
    except InexpressibleError as error:
        raise CaptureError(f"the graph module cannot be saved: {error}. Undo or change this") from error
    write_archive(target, entries)


def load(path: PathLike | IO[bytes]) -> GraphModule:
    """Load what `save` has written: the graph module, with its nodes, modules and history, which can be undone.

    The file may be untrusted: reading it runs no code from it, and neither does calling the result, which consists of
    operators that only compute. Tensors are mapped from the file copy-on-write: the file itself never changes, and may
    be replaced or deleted.

    Args:
        path: the file, by its path, or open for reading bytes.

    Raises:
        CaptureError: the file does not exist, is not an archive, is damaged, was written by a newer version, or holds
            something that needs trust, as a ``.pt2`` file of ``torch.export.save`` does.
    """
    with opened(path) as (name, file):
        container = Container(name, file)
        if FILE in container:
            # A trace elsewhere would record the arithmetic on sizes; weights are to be written and trained anywhere.
            with one_at_a_time(), collector_paused(), outside_inference_mode():
                return read_document(container)
        if not any(entry.endswith("/models/model.json") for entry in container):
            raise CaptureError(
                f"{name!r} is a zip file, but not an archive: it has no {FILE}, which fxopt_capture.save writes"
            )
        raise CaptureError(
            f"{name!r} is a program of torch.export, which may run code when torch reads it. If you trust it like a "
            f"program: torch.export.load({name!r}).module() is a graph module that passes rewrite"
        )
