"""`load` and `save`: graph modules in ``.pt2`` archives, as ``torch.export`` reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxopt_capture.archive.call import call_to_save, guards_in, guards_to_state
from fxopt_capture.archive.container import PathLike
from fxopt_capture.archive.document import FILE, read_document, write_document
from fxopt_capture.archive.export import export_graph
from fxopt_capture.archive.raising import raise_program
from fxopt_capture.archive.reading import read_archive
from fxopt_capture.archive.writing import checked_target, write_archive
from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.guards import InputGuards
from fxopt_capture.export.failure import first_line
from fxopt_capture.export.modes import captured_mode
from fxopt_capture.one_at_a_time import one_at_a_time
from fxopt_core.errors import CaptureError, FxoptError
from fxopt_core.graph import check_graph_module
from fxopt_core.ledger.marks import META_KEY
from fxopt_core.ledger.records import LEDGER_VERSION, Ledger
from fxopt_core.naming import type_text
from fxopt_core.values.forms import InexpressibleError


@one_at_a_time()  # making a module of a program traces it
def load(path: PathLike | IO[bytes], *, ledger: bool = True, trusted: bool = False) -> GraphModule:
    """Load a ``.pt2`` archive as a graph module on which all passes work.

    An archive of `save` gives back the graph module that was saved: its nodes with their names, its modules, and its
    history, so that what was done can be undone. Any other archive of ``torch.export.save`` gives what `capture` would
    have made of the model: layers are modules again and ``state_dict`` keys are the model's. The model's source is not
    needed. The result is called as the program is, and by name; inputs that the program refuses are a `CaptureError`.

    The file may come from anyone: reading it runs no code of it, and neither does calling the result, which consists of
    operators of torch that compute.

    Args:
        path: the file, by its path, or open for reading bytes.
        ledger: whether to read what `save` has added to the program. Without it, the program is read as any other: no
            history, no undo, and operators where the graph had functions of its own.
        trusted: whether ``torch.export.load`` may read the file as it is, with pickles, operators of any library and
            expressions that it evaluates. That can run any code: only for a file that you trust like a program.

    Raises:
        CaptureError: there is no such file, it is no archive, a newer torch wrote it, it holds something that needs
            trust, or what `save` has added does not belong to the program or is malformed.

    >>> import tempfile
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    >>> program = torch.export.export(model, (torch.zeros(2, 4),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.export.save(program, f"{folder}/model.pt2")
    ...     graph_module = load(f"{folder}/model.pt2")
    >>> graph_module.get_submodule("0"), list(graph_module.state_dict())
    (Linear(in_features=4, out_features=3, bias=True), ['0.weight', '0.bias'])
    """
    archive = read_archive(path, FILE, trusted=trusted)
    try:
        if archive.document is None or not ledger:
            return raise_program(archive.program)
        return read_document(archive.document, archive.program, archive.name)
    except FxoptError:
        raise
    except Exception as error:  # whatever a damaged program leads to
        what = f"{type(error).__name__}: {first_line(error)}"
        raise CaptureError(
            f"no graph can be made of the program in {archive.name!r}, damaged as it is: {what}"
        ) from error


def save(
    graph_module: GraphModule,
    path: PathLike | IO[bytes],
    args: Sequence[object] | torch.Tensor | None = None,
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: Any = None,
    ledger: bool = True,
) -> None:
    """Save a graph module as a ``.pt2`` archive, which ``torch.export.load`` reads without fxopt.

    The program has the graph module's ``state_dict`` keys, dynamic sizes and guards. With it, in an extra file of JSON,
    are the graph's own nodes and modules and its ledger, so that `load` gives back the graph module itself.

    The program is called with the arguments that have no default by position and the others by name, unless `args` and
    `kwargs` say otherwise. It is written beside `path` first: if anything fails, a file that was there is still there.

    Args:
        graph_module: the graph module, captured, loaded, exported by torch or traced.
        path: the file to write, by its path, or open for writing bytes.
        args: positional example inputs. Needed, like `kwargs`, where the graph does not know the shapes of its inputs.
        kwargs: example inputs by name.
        dynamic_shapes: which sizes vary, as in ``torch.export.export``, by name of the input. None: those that vary in
            the graph module; for one that was traced without shapes, the first of each tensor.
        ledger: whether to add the graph and its ledger. Without, the archive holds the program alone.

    Raises:
        CaptureError: the file cannot be written, ``torch.export`` refuses the graph or the inputs, or the ledger is to
            be saved and the graph has something in it that cannot be: hooks, or modules and functions that neither
            torch has nor a plugin offers.
    """
    check_graph_module(graph_module, "save")
    target = checked_target(path)
    with one_at_a_time():
        call, form = call_to_save(graph_module, _positional(args), _by_name(kwargs), dynamic_shapes)
        guards = guards_to_state(graph_module, call) if dynamic_shapes is None else InputGuards([], [])
        program = export_graph(graph_module, call, guards)
        extra = _extra_files(graph_module, program, form, dynamic_shapes is not None) if ledger else {}
        write_archive(program, target, extra)


def _positional(args: object) -> tuple[object, ...] | None:
    if isinstance(args, torch.Tensor) or args is None:
        return None if args is None else (args,)
    if isinstance(args, Mapping | str) or not isinstance(args, Sequence):
        raise CaptureError(f"args is {type_text(args)}; give a tensor, or a tuple of the positional inputs")
    return tuple(args)


def _by_name(kwargs: object) -> Mapping[str, object] | None:
    if kwargs is None or isinstance(kwargs, Mapping):
        return kwargs
    raise CaptureError(f"kwargs is {type_text(kwargs)}; give a dictionary from names of inputs to their values")


def _extra_files(graph_module: GraphModule, program: ExportedProgram, form: CallForm, narrowed: bool) -> dict[str, str]:
    try:
        guards = guards_in(graph_module)
        mode = captured_mode(graph_module) if guards is None else guards.mode
        return {FILE: write_document(graph_module, program, form, mode, narrowed=narrowed)}
    except InexpressibleError as error:
        if not _has_history(graph_module):
            return {}  # the program says all that there is to say
        raise CaptureError(
            f"the graph module cannot be saved with its ledger: {error}. Undo what was done or change that, or save it "
            f"with ledger=False, after which nothing can be undone"
        ) from error


def _has_history(graph_module: GraphModule) -> bool:
    ledger = graph_module.meta.get(META_KEY)
    return isinstance(ledger, Ledger) and (ledger.version > LEDGER_VERSION or bool(ledger.records))
